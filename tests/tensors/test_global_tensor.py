"""A global tensor's own methods: layout changes, text."""

from __future__ import annotations

import numpy as np
import pytest

import keras_flow as kf
from tests.tensors.checking import LINE, MESH
from tests.tensors.engines import on_engines, on_numpy


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


@on_engines
def test_ranks_without_a_type_are_those_of_the_job() -> None:
    value = np.arange(16, dtype="float32").reshape(4, 4)
    typed = kf.Placement(range(4), type="cpu")
    for one, other in ((LINE, typed), (typed, LINE)):
        x, y = kf.tensor(value, placement=one, sbp="S(0)"), kf.tensor(value, placement=other, sbp="S(1)")
        assert np.array_equal(kf.ops.add(x, y).numpy(), value + value)
        assert np.array_equal(kf.ops.matmul(x, y).numpy(), value @ value)
    turned = kf.tensor(value, placement=kf.Placement([3, 2, 1, 0]), sbp="B")
    with pytest.raises(kf.FlowError, match="on two placements"):
        kf.ops.add(kf.tensor(value, placement=LINE, sbp="B"), turned)


@on_numpy
def test_a_rank_outside_holds_no_number_and_shards_of_the_host_are_copied() -> None:
    assert kf.tensor(1.0, placement=kf.Placement([0, 1]), sbp="B").to_local(rank=3).shape == (0,)
    value = np.zeros(2, "float32")
    x = kf.to_global(dict.fromkeys(range(4), value), LINE, "S(0)")
    value[:] = 5
    assert not x.numpy().any()
