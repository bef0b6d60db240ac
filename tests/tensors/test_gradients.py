"""`kf.value_and_grad`, and what an explanation says of its gradients."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest

import keras_flow as kf
from keras_flow import sbp
from tests.tensors.checking import MESH, close
from tests.tensors.engines import on_engines, on_numpy, on_torch


def squares(w: kf.GlobalTensor) -> kf.GlobalTensor:
    """The sum of squares; the gradient of `w` passes through another layout."""
    return kf.ops.sum(kf.ops.square(w.to_global(grad_sbp="S(1),B")))


@on_engines
def test_a_layout_for_the_gradient() -> None:
    x = kf.randn(8, 4, placement=MESH, sbp="S(0),S(1)", seed=1)
    value, gradient = kf.value_and_grad(squares)(x)
    assert gradient.sbp == x.sbp
    assert close(gradient.numpy(), 2 * x.numpy())
    assert close(value.numpy(), np.sum(x.numpy() ** 2))


@on_engines
def test_functions_that_are_refused() -> None:
    x = kf.randn(8, 4, placement=MESH, sbp="S(0),S(1)", seed=1)
    nested = lambda w: kf.value_and_grad(squares)(w)[0]  # noqa: E731
    writes = lambda w: w.__setitem__(0, 1.0) or squares(w)  # noqa: E731
    for wrong in (nested, writes, lambda w: w):
        with pytest.raises(kf.FlowError):
            kf.value_and_grad(wrong)(x)
    with pytest.raises(kf.FlowError, match="argument 1"):
        kf.value_and_grad(lambda a: a, argnums=1)(x)


@on_engines
def test_a_tensor_that_is_given_twice() -> None:
    x = kf.tensor(np.asarray([1, 2, 3], "float32"), placement=MESH, sbp="S(0),B")
    _, (first, second) = kf.value_and_grad(lambda a, b: kf.ops.sum(a * b * b))(x, x)
    assert first.numpy().tolist() == [1, 4, 9]
    assert second.numpy().tolist() == [2, 8, 18]


@on_engines
def test_a_tensor_of_the_program_beside_the_arguments() -> None:
    x = kf.tensor(np.asarray([1, 2, 3], "float32"), placement=MESH, sbp="S(0),B")
    assert kf.value_and_grad(lambda a: kf.ops.sum(a * x))(x)[1].numpy().tolist() == [1, 2, 3]


@on_engines
def test_the_explanation_of_gradients() -> None:
    v = kf.randn(8, 6, placement=MESH, sbp="S(0),B", seed=1)
    w = kf.randn(6, 4, placement=MESH, sbp="B,S(1)", seed=2)
    differentiated = kf.value_and_grad(lambda v, w: kf.ops.sum(kf.ops.square(kf.ops.matmul(v, w))))
    explained = kf.explain(differentiated, v, w)
    unreduced = [sbp.text(line.unreduced.nd_sbp) for line in explained.gradients if line.unreduced is not None]
    assert unreduced == ["S(0),P", "P,S(1)"]
    # the value of 4 bytes is summed by one rank and sent back to the others
    assert (explained.bytes, explained.gradient_bytes) == (2 * 3 * 4, 4 * (48 * 2 + 24 * 2))
    assert explained.outputs[0].layout == differentiated(v, w)[0].layout
    assert [line.returned for line in explained.gradients] == [tensor.layout for tensor in differentiated(v, w)[1]]


@on_torch
def test_where_autograd_is_off() -> None:
    x = kf.tensor(np.asarray([1, 2, 3], "float32"), placement=MESH, sbp="S(0),B")
    with sys.modules["torch"].no_grad():
        assert kf.value_and_grad(lambda a: kf.ops.sum(a * a))(x)[1].numpy().tolist() == [2, 4, 6]


@on_numpy
def test_a_gradient_of_zeros_is_made_in_parts() -> None:
    used, unused = (kf.ones(size, placement=MESH, sbp="S(0),S(0)") for size in (4, 2**20))
    tracemalloc.start()
    _, (_, gradient) = kf.value_and_grad(lambda a, b: kf.ops.sum(a))(used, unused)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert gradient.sbp == unused.sbp and not gradient.numpy().any()
    assert peak < 8 * 2**20  # four shards of 1 MiB; the whole, of 64 bits, is 8
