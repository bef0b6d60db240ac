"""Operators that are computed from others along split dims: statistics, norms, softmax, cross-entropies."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_flow as kf
from keras_flow.tensors.dispatch import DECOMPOSITIONS
from tests.tensors.checking import LINE, MESH, close, spread
from tests.tensors.engines import on_engines, on_engines_alone, on_numpy


def test_a_decomposition_has_the_name_of_an_operator() -> None:
    assert set(DECOMPOSITIONS) <= set(dir(ops))


@pytest.mark.parametrize("epsilon", [None, 0.0, 1e-5])
@pytest.mark.parametrize("name", ["layer_normalization", "rms_normalization"])
@on_numpy
def test_normalization_over_a_split_dim_has_the_default_epsilon(name: str, epsilon: float | None) -> None:
    small = (np.arange(8000).reshape(2, 4000) / 4e6).astype("float32")
    result = getattr(kf.ops, name)(spread(small, "S(1),S(1)"), epsilon=epsilon)
    assert close(result.numpy(), getattr(ops, name)(small, epsilon=epsilon))


@pytest.mark.parametrize("name", ["layer_normalization", "rms_normalization"])
@on_numpy
def test_normalization_of_half_precision_over_a_split_dim(name: str) -> None:
    large = np.linspace(1, 300, 8000).astype("float16").reshape(2, 4000)
    for scales in ((), (np.linspace(1, 2, 4000).astype("float32"),)):
        result = getattr(kf.ops, name)(spread(large, "S(1),S(1)"), *scales, epsilon=1e-5)
        assert result.dtype == "float16"
        assert close(result.numpy(), getattr(ops, name)(large, *scales, epsilon=1e-5), "float16")


@pytest.mark.parametrize("name", ["mean", "var", "std"])
@on_numpy
def test_statistics_over_a_split_dim_are_computed_in_float32(name: str) -> None:
    large = np.linspace(1, 300, 8000).astype("float16").reshape(2, 4000)
    result = getattr(kf.ops, name)(spread(large, "S(1),S(1)"), axis=1)
    assert result.dtype == "float16"
    assert close(result.numpy(), getattr(np, name)(large.astype("float64"), axis=1), "float16")


@on_numpy
def test_summands_of_half_precision_are_rounded_once() -> None:
    value = np.zeros(4096, "float32")
    value[[0, 1, -1]] = 256, 1, -256  # the mean of the first half is rounded to that of 256 alone
    x = kf.tensor(value * 4096, placement=LINE, sbp="S(0)", dtype="bfloat16")
    assert kf.ops.mean(x).item() == 1
    close_to_zero = kf.tensor(np.array([1000.25, -1000], "float32"), placement=kf.Placement([0, 1]), sbp="S(0)")
    assert kf.ops.cast(kf.ops.sum(close_to_zero), "bfloat16").item() == 0.25


@on_numpy
def test_complex_numbers_along_a_split_dim() -> None:
    value = np.tile(np.array([3 + 4j, 0], "complex64"), 2048)
    for name in ("norm", "var", "std"):
        found = getattr(kf.ops, name)(kf.tensor(value, placement=LINE, sbp="S(0)"))
        assert np.allclose(found.numpy(), getattr(ops, name)(value)), name


@on_engines_alone
def test_the_loss_of_classes_that_are_impossible() -> None:
    scores = np.zeros((2, 4000), "float32")
    scores[:, 5] = -np.inf
    x = kf.tensor(scores, placement=LINE, sbp="S(1)")
    loss, gradient = kf.value_and_grad(
        lambda x: kf.ops.sum(kf.ops.sparse_categorical_crossentropy(np.array([1, 7]), x, from_logits=True))
    )(x)
    assert close(loss.numpy(), np.float32(2 * np.log(3999)))
    wanted = np.full((2, 4000), 1 / 3999, "float32")
    wanted[:, 5] = 0
    wanted[[0, 1], [1, 7]] -= 1
    assert close(gradient.numpy(), wanted)


@on_engines_alone
def test_equal_extremes_share_the_gradient() -> None:
    value = np.array([3, 3, 1, 3, -np.inf, 1, 1, 1], "float32")
    cases = (("max", {}, 1), ("amax", {}, 1), ("min", {}, -1), ("norm", {"ord": np.inf}, 1))
    # JAX compiles each primitive anew for each rank's device
    for name, options, sign in cases[: 1 if keras.backend.backend() == "jax" else 4]:
        given = np.maximum(value, -1) if name == "norm" else sign * value
        x = kf.tensor(given, placement=LINE, sbp="S(0)")
        found, gradient = kf.value_and_grad(functools.partial(getattr(kf.ops, name), **options))(x)
        assert found.item() == 3 * sign
        assert close(gradient.numpy(), (value == 3) / np.float32(3)), name


@on_engines_alone
def test_the_gradient_of_no_spread_and_no_length() -> None:
    zeros = kf.zeros(4096, placement=LINE, sbp="S(0)")
    for operator in (kf.ops.std, kf.ops.norm):
        assert not kf.value_and_grad(operator)(zeros)[1].numpy().any(), operator


@on_numpy
def test_moments_that_half_precision_cannot_express_are_its_largest_number() -> None:
    wide = (np.linspace(1, 300, 8000).reshape(2, 4000) * 100 - 15000).astype("float16")
    _, variance = kf.ops.moments(spread(wide, "S(1),S(1)"), axes=[1])
    assert variance.numpy().tolist() == [65504.0, 65504.0]


@on_numpy
def test_logsumexp_of_infinities_over_a_split_dim() -> None:
    value = np.full((3, 4000), -np.inf, "float32")
    value[1], value[2, 7] = np.inf, 0
    with np.errstate(divide="ignore"):
        assert kf.ops.logsumexp(spread(value, "S(1),S(1)"), axis=1).numpy().tolist() == [-np.inf, np.inf, 0]


@on_numpy
def test_targets_that_are_arrays_beside_split_classes() -> None:
    scores = np.random.default_rng(1).random((4, 4000)).astype("float32")
    split, classes = spread(scores, "S(0),S(1)"), np.array([7, 2, 3999, 0], "int32")
    one_hot = np.eye(4000, dtype="float32")[classes]
    for name, target in (("sparse_categorical_crossentropy", classes), ("categorical_crossentropy", one_hot)):
        wanted = getattr(ops, name)(target, scores, from_logits=True)
        assert close(getattr(kf.ops, name)(target, split, from_logits=True).numpy(), wanted), name


@on_numpy
def test_scale_and_offset_that_are_arrays_beside_split_features() -> None:
    values = np.random.default_rng(1).random((4, 4000)).astype("float32")
    gamma, beta = values[0], values[1]
    result = kf.ops.layer_normalization(spread(values, "S(0),S(1)"), gamma, beta)
    assert close(result.numpy(), ops.layer_normalization(values, gamma, beta))


@pytest.mark.parametrize("target_layout", ["B,B", "S(1),B", "P,S(2)"])
@pytest.mark.parametrize("layout", ["B,B", "S(0),S(1)", "S(2),S(1)", "P,S(0)"])
@on_numpy
def test_crossentropy_of_classes_along_any_dim(layout: str, target_layout: str) -> None:
    scores = np.random.default_rng(1).random((2, 4, 3)).astype("float32")
    target = np.random.default_rng(2).random((2, 4, 3)).astype("float32")
    for axis in range(-3, 3):
        result = kf.ops.categorical_crossentropy(spread(target, target_layout), spread(scores, layout), True, axis)
        assert close(result.numpy(), ops.categorical_crossentropy(target, scores, True, axis % 3)), axis


@on_numpy
def test_reductions_of_a_tensor_without_dims() -> None:
    x = kf.tensor(np.float32(3), placement=kf.Placement([0, 1, 2, 3]), sbp="P")
    for name in ("sum", "mean", "max", "min", "prod", "logsumexp"):
        for keepdims in (False, True):
            result = getattr(kf.ops, name)(x, keepdims=keepdims).numpy()
            assert result.shape == () and close(result, np.float32(3)), (name, keepdims)


@on_engines
def test_softmax_over_a_split_dim_sends_two_numbers_for_each_row() -> None:
    x = kf.rand(2, 4096, placement=MESH, sbp="B,S(1)", seed=1)
    assert kf.explain(kf.ops.softmax, x).bytes < 200
