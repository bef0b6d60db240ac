"""A global tensor's own methods: layout changes, text."""

from __future__ import annotations

import numpy as np
import pytest

import keras_flow as kf
from tests.tensors.checking import MESH
from tests.tensors.engines import on_engines


@on_engines
def test_its_text() -> None:
    x = kf.arange(6, placement=MESH, sbp="S(0),B")
    text = repr(x)
    assert "S(0),B" in text and f"rank {kf.env.local_ranks()[0]}" in text


@on_engines
def test_its_own_layout_gives_the_same_object() -> None:
    x = kf.arange(6, placement=MESH, sbp="S(0),B")
    assert x.to_global(sbp="S(0),B") is x


@on_engines
def test_another_placement() -> None:
    x = kf.arange(6, placement=MESH, sbp="S(0),B")
    assert np.array_equal(x.to_global(kf.Placement([3, 1, 0]), sbp="S(0)").numpy(), np.arange(6))


@on_engines
def test_layouts_that_do_not_fit_the_tensor() -> None:
    x = kf.arange(6, placement=MESH, sbp="S(0),B")
    with pytest.raises(kf.FlowError, match="split"):
        x.to_global(sbp="S(1),B")
    with pytest.raises(kf.FlowError, match="2 axes"):
        x.to_global(sbp="B")
    with pytest.raises(kf.FlowError, match=r"ranks \[4\]"):
        x.to_global(kf.Placement([0, 4]), sbp="B")
