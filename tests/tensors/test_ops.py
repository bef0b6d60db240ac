"""Every operator on global tensors in random layouts: value, dtype and gradients are those of one device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops, tree

import keras_flow as kf
from keras_flow import sbp
from keras_flow.backends.active import tensor_engine
from keras_flow.tensors.ranks import local_ranks
from tests import sampling
from tests.tensors.cases import CASES, EVERY_NAME, Case
from tests.tensors.checking import LINE, MESH, arguments_of, close, spread
from tests.tensors.engines import ENGINES, on_engines, on_engines_alone, on_numpy

LAYOUTS = ("B,B", "S(0),S(1)", "S(1),S(0)", "S(1),B", "P,S(0)")
#: of how many cases an engine runs one a day; JAX compiles each primitive anew for each rank's device
EVERY = {"jax": 16, "tensorflow": 8, "torch": 8}


def random_layout(shape: tuple[int, ...], dtype: Any, chooser: random.Random) -> tuple[Any, Any]:
    """A layout on the 2x2 mesh; partial sums of floats only."""
    parts = [sbp.broadcast, *(sbp.split(dim) for dim in range(len(shape)))]
    if np.issubdtype(dtype, np.floating):
        parts.append(sbp.partial_sum)
    return chooser.choice(parts), chooser.choice(parts)


def check_operator(case: Case, seed: int) -> None:
    """Run a case with random layouts, and take its gradients."""
    chooser = random.Random(seed)
    args, kwargs = arguments_of(case)
    function, operator = getattr(ops, case.name), getattr(kf.ops, case.name)
    wanted = [ops.convert_to_numpy(value) for value in tree.flatten(function(*args, **kwargs))]
    layouts: list[str] = []

    def spread_randomly(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        chosen = random_layout(leaf.shape, leaf.dtype, chooser)
        layouts.append(sbp.text(chosen))
        return kf.tensor(leaf, placement=MESH, sbp=chosen)

    given = tree.map_structure(spread_randomly, (args, kwargs))
    results = tree.flatten(operator(*given[0], **given[1]))
    for result, value in zip(results, wanted, strict=True):
        dtypes = {keras.backend.standardize_dtype(shard.dtype) for shard in result._shards.values()}
        assert dtypes <= {result.dtype}, layouts
        assert close(result.numpy(), value, result.dtype), layouts
    # numpy's gradients are differences, which half precision would round away
    rounds = keras.backend.backend() == "numpy" and any(result.dtype.endswith("float16") for result in results)
    if case.smooth and not rounds:
        weights = [np.cos(np.arange(value.size, dtype="float32")).reshape(value.shape) for value in wanted]
        leaves = [leaf for leaf in tree.flatten(given) if is_float(leaf)]
        _, gradients = kf.value_and_grad(weighted(operator, given, weights))(*leaves)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        reference = reference_gradients(function, args, kwargs, weights)
        for leaf, gradient, value in zip(leaves, gradients, reference, strict=True):
            whole = tuple(sbp.broadcast if part == sbp.partial_sum else part for part in leaf.sbp)
            assert gradient.sbp == whole, layouts
            assert close(gradient.numpy(), value), (layouts, leaf.shape)


def weighted(operator: Any, structure: Any, weights: Sequence[np.ndarray]) -> Callable[..., Any]:
    """The weighted sum of an operator's results, as a function of the float tensors in `structure`."""

    def loss(*tensors: Any) -> Any:
        filled = with_leaves(structure, is_float, tensors)
        total: Any = 0.0
        for result, weight in zip(tree.flatten(operator(*filled[0], **filled[1])), weights, strict=True):
            if result.dtype.startswith("float"):
                total = total + kf.ops.sum(kf.ops.cast(result, "float32") * weight)
        return total

    return loss


def with_leaves(structure: Any, chosen: Callable[[Any], bool], values: Any) -> Any:
    """The structure with other values for the leaves that are chosen, in the order of `tree.flatten`."""
    rest = iter(values)
    return tree.pack_sequence_as(structure, [next(rest) if chosen(leaf) else leaf for leaf in tree.flatten(structure)])


def is_float(leaf: Any) -> bool:
    """Whether it is a global tensor of floats."""
    return isinstance(leaf, kf.GlobalTensor) and leaf.dtype.startswith("float")


def is_float_array(leaf: Any) -> bool:
    """Whether it is an array of floats."""
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"


def reference_gradients(function: Any, args: list, kwargs: dict, weights: Sequence[np.ndarray]) -> list[np.ndarray]:
    """By the engine, on one device."""
    flat = [leaf for leaf in tree.flatten((args, kwargs)) if is_float_array(leaf)]
    exact = "float64" if keras.backend.backend() == "numpy" else "float32"  # numpy's are differences

    def run(*values: Any) -> list[Any]:
        filled = with_leaves((args, kwargs), is_float_array, values)
        total: Any = 0.0
        for result, weight in zip(tree.flatten(function(*filled[0], **filled[1])), weights, strict=True):
            if "float" in str(result.dtype):
                total = total + ops.sum(ops.cast(result, exact) * ops.convert_to_tensor(weight))
        return [total]

    rank, engine = local_ranks()[0], tensor_engine()
    _, pullback = engine.vjp(run, [engine.put(value, rank) for value in flat])
    return [engine.as_numpy(value) for value in pullback(engine.put(np.ones((), "float32"), rank))]


@pytest.mark.parametrize("seed", sampling.some(range(3), every=3))
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{number}-{CASES[number].name}")
@on_numpy
def test_operator_and_gradients(number: int, seed: int) -> None:
    check_operator(CASES[number], 1000 * seed + number)


@pytest.mark.parametrize(
    ("backend", "number"),
    [
        pytest.param(
            backend,
            number,
            id=f"{backend}-{number}-{CASES[number].name}",
            marks=sampling.one_in(EVERY[backend]),
        )
        for backend, number in itertools.product(ENGINES, range(len(CASES)))
    ],
)
def test_operator_and_gradients_on_an_engine(backend: str, number: int, on_ranks) -> None:
    on_ranks(backend)(check_operator, CASES[number], number)


@pytest.mark.parametrize("number", range(len(EVERY_NAME)), ids=lambda number: f"{number}-{EVERY_NAME[number].name}")
@on_numpy
def test_value_of_the_other_names(number: int) -> None:
    """In a handful of layouts, other ones for a second tensor."""
    case = EVERY_NAME[number]
    results = tree.flatten(getattr(ops, case.name)(**case.tensors, **case.options))
    wanted = [ops.convert_to_numpy(value) for value in results]
    for place_of_first, layout in enumerate(LAYOUTS):
        given = {}
        for place, (name, value) in enumerate(case.tensors.items()):
            chosen = LAYOUTS[(place_of_first + 2 * place) % len(LAYOUTS)] if value.ndim == 2 else "S(0),B"
            given[name] = spread(value, chosen if value.dtype.kind == "f" else chosen.replace("P", "B"))
        for result, value in zip(
            tree.flatten(getattr(kf.ops, case.name)(**given, **case.options)), wanted, strict=True
        ):
            assert close(result.numpy(), value) or np.array_equal(result.numpy(), value, equal_nan=True), layout


@on_numpy
def test_lists_stand_for_arrays() -> None:
    x = kf.arange(6, placement=MESH, sbp="S(0),B")
    assert kf.ops.add(x, [1, 2, 3, 4, 5, 6]).numpy().tolist() == [1, 3, 5, 7, 9, 11]
    assert kf.ops.where([True, False] * 3, x, [9] * 6).numpy().tolist() == [0, 9, 2, 9, 4, 9]


@on_numpy
def test_spaces_in_the_text_of_an_einsum() -> None:
    a = np.arange(16.0, dtype="float32").reshape(4, 4)
    x = kf.tensor(a, placement=LINE, sbp="S(0)")
    assert np.array_equal(kf.ops.einsum("ik, kj -> ij", x, x).numpy(), a @ a)


@on_numpy
def test_results_whose_shape_depends_on_values_are_refused() -> None:
    x = kf.tensor(np.array([0, 1, 1, 3], "int32"), placement=LINE, sbp="B")
    for call, advice in (
        (lambda: kf.ops.bincount(x, minlength=5), "one_hot"),
        (lambda: kf.ops.nonzero(x), r"x\.numpy\(\)"),
        (lambda: kf.ops.where(x > 1), "x1 and x2"),
    ):
        with pytest.raises(kf.FlowError, match=rf"(?s)depends on the values.*{advice}"):
            call()


@on_engines
def test_maximum_of_partial_sums() -> None:
    value = np.arange(60, dtype="float32").reshape(5, 12)
    x = kf.tensor(value, placement=MESH, sbp="S(1),P")
    assert np.allclose(kf.ops.max(x, axis=1).numpy(), value.max(1))


@on_engines
def test_a_sum_that_keeps_all_dims() -> None:
    x = kf.arange(6, placement=MESH, sbp="S(0),B")
    assert kf.ops.sum(x, keepdims=True).numpy().tolist() == [15]


@on_numpy
def test_without_a_global_tensor_there_is_nothing_to_do() -> None:
    with pytest.raises(kf.FlowError, match="no global tensor"):
        kf.ops.add(1, 2)


@on_engines_alone
def test_what_an_engine_or_keras_holds_is_refused_beside_global_tensors() -> None:
    x = kf.arange(4, placement=LINE, sbp="S(0)")
    for other in (ops.convert_to_tensor(1.0), keras.Variable(1.0)):
        with pytest.raises(kf.FlowError, match=r"kf\.ops\.stack.*kf\.to_global.*kf\.global_tensor"):
            kf.ops.stack([kf.ops.sum(x), other])


@on_numpy
def test_numbers_of_a_list_beside_partial_sums_count_once() -> None:
    total = kf.ops.sum(kf.arange(4, placement=LINE, sbp="S(0)"))
    assert kf.ops.stack([total, np.int32(1), 2]).numpy().tolist() == [6, 1, 2]


@on_numpy
def test_partial_sums_divided_by_zero_are_infinite() -> None:
    """The parts would be 1/0 and 0/0, whose sum is nan."""
    x = kf.tensor(np.array([1.0, -2.0], "float32"), placement=LINE, sbp="P")
    for zero in (0, kf.zeros(2, placement=LINE, sbp="B")):
        assert kf.ops.divide(x, zero).numpy().tolist() == [np.inf, -np.inf]
    assert (x / 2).sbp == (sbp.partial_sum,)


@on_engines
def test_arrays_that_are_no_tensors() -> None:
    value = np.arange(24, dtype="float32").reshape(4, 6)
    x = kf.tensor(value, placement=LINE, sbp="S(0)")
    counts = np.array([2, 0, 1, 1])
    assert np.array_equal(kf.ops.repeat(x, counts, axis=0).numpy(), value.repeat(counts, 0))
    assert np.array_equal(kf.ops.transpose(x, np.array([1, 0])).numpy(), value.T)
    assert np.array_equal(kf.ops.reshape(x, np.array([6, 4])).numpy(), value.reshape(6, 4))
    assert np.array_equal(kf.ops.sum(x, axis=np.array([1])).numpy(), value.sum(1))


@on_engines
def test_what_a_layout_tells_without_computing() -> None:
    x = kf.ones(4, 6, placement=LINE, sbp="S(0)")
    assert kf.ops.shape(x) == (4, 6) and kf.ops.ndim(x) == 2 and kf.ops.size(x) == 24
    assert kf.ops.dtype(x) == "float32" and np.array_equal(kf.ops.convert_to_numpy(x), np.ones((4, 6)))


@on_numpy
def test_an_axis_out_of_range() -> None:
    x = kf.ones(4, 6, placement=LINE, sbp="S(1)")
    for axis in (2, 3, -3):
        with pytest.raises(kf.FlowError, match=rf"axis {axis} of a tensor of 2 dims: -2 to 1 are legal"):
            kf.ops.rms_normalization(x, axis=axis)
