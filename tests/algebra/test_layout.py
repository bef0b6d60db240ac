"""Laws of layouts: what each rank holds, and that the shards are the tensor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_flow import FlowError, Layout, Placement, sbp
from keras_flow.layout import balanced, combine, itemsize
from keras_flow.sbp import PartialSum, Split


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """1 to 3 axes of 1 to 4 ranks in any order; 0 to 3 dims of 0 to 9 elements; every nd_sbp."""
    hierarchy = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    size = int(np.prod(hierarchy))
    ranks = draw(st.permutations(range(size)))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    parts = [sbp.broadcast, sbp.partial_sum, *(sbp.split(dim) for dim in range(-len(shape), len(shape)))]
    nd_sbp = tuple(draw(st.sampled_from(parts)) for _ in hierarchy)
    return Layout(Placement(np.asarray(ranks).reshape(hierarchy)), nd_sbp, shape)


def cut(value: np.ndarray, layout: Layout, random: np.random.Generator) -> dict[int, np.ndarray]:
    """Shards of a layout, cut axis by axis with numpy's own `array_split`; P axes get random summands."""
    pieces = [value]
    for size, part in zip(layout.placement.hierarchy, layout.nd_sbp, strict=True):
        pieces = [new for piece in pieces for new in _cut_once(piece, size, part, random)]
    return dict(zip(layout.placement.ranks, pieces, strict=True))


def _cut_once(piece: np.ndarray, size: int, part: sbp.Sbp, random: np.random.Generator) -> list[np.ndarray]:
    if isinstance(part, Split):
        return np.array_split(piece, size, axis=part.dim)
    if isinstance(part, PartialSum):
        summands = [random.integers(-99, 99, piece.shape) for _ in range(size - 1)]
        return [*summands, np.asarray(piece - sum(summands))]
    return [piece] * size


@settings(max_examples=400, deadline=None)
@given(layouts(), st.integers(0, 2**32 - 1))
def test_shards_combine_to_the_logical_tensor(layout: Layout, seed: int) -> None:
    random = np.random.default_rng(seed)
    value = random.integers(-99, 99, layout.shape)
    shards = cut(value, layout, random)
    for rank, shard in shards.items():
        assert shard.shape == layout.local_shape(rank)
        assert layout.local_bytes(rank, "int64") == shard.nbytes
        if not layout.has_partial:
            np.testing.assert_array_equal(shard, value[layout.local_slices(rank)])
    np.testing.assert_array_equal(combine(layout, shards), value)


def every_nd_sbp(axes: int, dims: int) -> Iterator[tuple[sbp.Sbp, ...]]:
    return product([sbp.broadcast, sbp.partial_sum, *(sbp.split(dim) for dim in range(dims))], repeat=axes)


@pytest.mark.parametrize("hierarchy", [(3,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (5, 7), (2, 1, 3)])
def test_every_nd_sbp_combines(hierarchy: tuple[int, ...], shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    value = random.integers(-99, 99, shape)
    ranks = np.arange(int(np.prod(hierarchy)))[::-1].reshape(hierarchy)
    for nd_sbp in every_nd_sbp(len(hierarchy), len(shape)):
        layout = Layout(Placement(ranks), nd_sbp, shape)
        np.testing.assert_array_equal(combine(layout, cut(value, layout, random)), value, err_msg=str(layout))


@given(layouts())
def test_holders_of_an_element(layout: Layout) -> None:
    """Each element lies on as many ranks as the axes that do not split have together."""
    counts = np.zeros(layout.shape, int)
    for rank in layout.placement.ranks:
        counts[layout.local_slices(rank)] += 1
    unsplit = [
        size
        for size, part in zip(layout.placement.hierarchy, layout.nd_sbp, strict=True)
        if not isinstance(part, Split)
    ]
    assert (counts == int(np.prod(unsplit))).all()


@given(layouts())
def test_dims_are_normalised(layout: Layout) -> None:
    assert all(0 <= part.dim < len(layout.shape) for part in layout.nd_sbp if isinstance(part, Split))
    again = Layout(layout.placement, layout.nd_sbp, layout.shape)
    assert again == layout
    assert hash(again) == hash(layout)
    negative = tuple(Split(part.dim - len(layout.shape)) if isinstance(part, Split) else part for part in layout.nd_sbp)
    assert Layout(layout.placement, negative, layout.shape) == layout


@given(layouts())
def test_divides_means_shards_of_one_shape(layout: Layout) -> None:
    shapes = {layout.local_shape(rank) for rank in layout.placement.ranks}
    assert not layout.divides or len(shapes) == 1
    if 0 not in layout.shape:
        assert layout.divides == (len(shapes) == 1)
    for dim in range(len(layout.shape)):
        sizes = [layout.placement.axis_size(axis) for axis in layout.axes_of_dim(dim)]
        assert layout.parts_of_dim(dim) == int(np.prod(sizes))


@given(st.integers(0, 100), st.integers(1, 12))
def test_balanced_rule(length: int, parts: int) -> None:
    blocks = [balanced(length, parts, index) for index in range(parts)]
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])], "without gaps, in order"
    assert blocks[-1][1] == length
    sizes = [stop - start for start, stop in blocks]
    assert sizes == [length // parts + 1] * (length % parts) + [length // parts] * (parts - length % parts)


@pytest.mark.parametrize(("a", "b"), list(product(range(2, 6), repeat=2)))
def test_nested_split_equals_flat_split_only_sometimes(a: int, b: int) -> None:
    """(S0,S0) on a x b equals S0 on a*b if and only if L mod ab is 0, 1 or ab-1."""
    nested, flat = Placement(np.arange(a * b).reshape(a, b)), Placement(range(a * b))
    for length in range(2 * a * b + 2):
        two, one = Layout(nested, "S(0),S(0)", (length,)), Layout(flat, "S(0)", (length,))
        equal = all(two.local_slices(rank) == one.local_slices(rank) for rank in range(a * b))
        assert equal == (length % (a * b) in (0, 1, a * b - 1)), length


def test_order_of_ranks_decides_who_holds_what() -> None:
    layout = Layout(Placement([2, 0, 1]), "S(0)", (4,))
    assert {rank: layout.local_slices(rank) for rank in range(3)} == {
        2: (slice(0, 2),),
        0: (slice(2, 3),),
        1: (slice(3, 4),),
    }


def test_by_axis_name() -> None:
    mesh = Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    layout = Layout(mesh, {"model": sbp.split(-1)}, (4, 6))
    assert layout.nd_sbp == (sbp.broadcast, sbp.split(1))
    assert (layout.axes_of_dim(0), layout.axes_of_dim(1)) == ((), ("model",))
    assert not layout.is_broadcast
    assert Layout(mesh, {}, (4, 6)).is_broadcast
    assert str(layout) == f"Layout(B,S(1) of [4, 6] on {mesh})"


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("float16", 2),
        ("float8_e4m3fn", 1),
        ("bool", 1),
        (np.float64, 8),
        (np.dtype("i2"), 2),
    ],
)
def test_bytes(dtype: object, count: int) -> None:
    assert itemsize(dtype) == count
    layout = Layout(Placement(range(2)), "S(0)", (5, 3))
    assert [layout.local_bytes(rank, dtype) for rank in range(2)] == [9 * count, 6 * count]
    assert Layout(Placement(range(2)), "B", ()).local_bytes(0, dtype) == count


@pytest.mark.parametrize(
    ("spec", "shape", "text"),
    [
        (
            "S(2)",
            (4, 6),
            "split(2) on axis 'rows' needs a dimension that the shape [4, 6] does not have: legal are dims 0 to 1 "
            "(from the end -2 to -1)",
        ),
        ("S(-3)", (4, 6), "split(-3) on axis 'rows'"),
        ("S(0)", (), "does not have: a scalar can only be broadcast"),
        ({"model": "B"}, (4,), "no axis 'model': the placement's axes are ['rows']"),
        ("B", (-1,), "a logical shape is a sequence of lengths from 0 up, got (-1,); for example (4, 6)"),
        ("B", (None, 3), "a logical shape is a sequence of lengths from 0 up, got (None, 3)"),
        ("B", 3, "a logical shape is a sequence of lengths from 0 up, got 3"),
    ],
)
def test_mistakes(spec: str, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(FlowError) as error:
        Layout(Placement([0, 1], axis_names=("rows",)), spec, shape)
    assert text in str(error.value)


def test_unknown_rank_dtype_and_shards() -> None:
    layout = Layout(Placement([0, 1]), "S(0)", (3,))
    with pytest.raises(FlowError, match=r"rank 2 is not in the placement of ranks \[0, 1\]"):
        layout.local_shape(2)
    with pytest.raises(FlowError, match="""'float31' is not a dtype: give its name, for example "float32" """.strip()):
        layout.local_bytes(0, "float31")
    with pytest.raises(FlowError, match=r"shard of rank 1: expected shape \[1\], found none"):
        combine(layout, {0: np.zeros(2)})
    with pytest.raises(FlowError, match=r"shard of rank 0: expected shape \[2\], found shape \[3\]"):
        combine(layout, {0: np.zeros(3), 1: np.zeros(1)})
