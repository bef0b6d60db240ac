"""`kf.explain` of operators and functions of global tensors."""

from __future__ import annotations

import pytest

import keras_flow as kf
from tests.tensors.checking import MESH
from tests.tensors.engines import on_engines


@on_engines
def test_the_operator_is_named() -> None:
    x = kf.arange(6, placement=MESH, sbp="S(0),B")
    assert "matmul" in str(kf.explain(kf.ops.matmul, x[None], x[:, None]))


@on_engines
def test_the_gradient_of_an_operator() -> None:
    v = kf.randn(8, 6, placement=MESH, sbp="S(0),B", seed=1)
    w = kf.randn(6, 4, placement=MESH, sbp="B,S(1)", seed=2)
    text = str(kf.explain(kf.ops.matmul, v, w))
    assert "of [6, 4] comes as (P,S(1)), is laid as (B,S(1)), 192 bytes" in text


@on_engines
def test_what_has_no_layouts_to_explain() -> None:
    half = kf.ones(2, placement=MESH, sbp="S(0),B")
    with pytest.raises(kf.FlowError, match="layouts only"):
        kf.explain(kf.value_and_grad(lambda a: kf.ops.sum(a) * float(a[0])), half)
    with pytest.raises(kf.FlowError, match=r"kf\.ops"):
        kf.explain(len, half)
