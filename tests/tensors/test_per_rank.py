"""Operators whose work on a rank differs from what Keras computes: take, squeeze, one_hot, convolutions of groups."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_flow as kf
from keras_flow.signatures import OperatorCall
from keras_flow.tensors import per_rank
from tests.tensors.checking import MESH, close, spread
from tests.tensors.engines import on_numpy


@pytest.mark.parametrize("layout", ["B,B", "S(0),B", "S(0),S(0)", "S(1),S(0)", "P,S(0)", "P,P"])
@on_numpy
def test_take(layout: str) -> None:
    value = np.arange(48, dtype="float32").reshape(8, 6)
    x = spread(value, layout)
    choices = ((0, 0), (-1, 0), (np.int32(3), 1), ([1, 2], 0), ([[1, -2], [3, 0]], 1), ([1, 40, -48], None), (-3, None))
    for indices, axis in choices:
        assert np.array_equal(kf.ops.take(x, indices, axis=axis).numpy(), np.take(value, indices, axis=axis)), indices
    rows = spread(np.array([1, -2, 7, 0]), "S(0),B")
    assert np.array_equal(kf.ops.take(x, rows, axis=0).numpy(), value[[1, -2, 7, 0]])
    for outside in (8, -9):
        with pytest.raises(IndexError):
            kf.ops.take(x, outside, axis=0)


@on_numpy
def test_take_with_small_unsigned_indices() -> None:
    many = spread(np.arange(600, dtype="float32"), "S(0),S(0)")
    assert kf.ops.take(many, spread(np.array([3, 255], "uint8"), "B,B"), axis=0).numpy().tolist() == [3, 255]


@pytest.mark.parametrize("layout", ["S(1),B", "S(1),S(0)", "S(0),S(2)", "S(1),S(1)", "P,S(0)"])
@on_numpy
def test_squeeze_of_a_split_dim(layout: str) -> None:
    value = np.arange(8, dtype="float32").reshape(2, 1, 4)
    for axis in (None, 1, (1,), -2):
        assert np.array_equal(kf.ops.squeeze(spread(value, layout), axis).numpy(), value[:, 0])


@on_numpy
def test_squeeze_keeps_dims_that_are_one_on_a_rank_only() -> None:
    value = np.arange(16, dtype="float32").reshape(2, 4, 2, 1)
    assert np.array_equal(kf.ops.squeeze(spread(value, "S(3),B")).numpy(), value[..., 0])
    assert kf.ops.squeeze(spread(np.zeros((1, 1), "float32"), "S(1),S(0)")).numpy().shape == ()
    square = np.arange(4, dtype="float32").reshape(2, 2)
    assert np.array_equal(kf.ops.squeeze(spread(square, "S(1),S(0)")).numpy(), square)


@on_numpy
def test_bitwise_operators_of_other_shapes() -> None:
    row, column = np.array([1, 2, 3, 7], "int32"), np.array([[1], [6], [4], [5]], "int32")
    for x, y in ((row, column), (column, row), (row, row[None])):
        for name, wanted in (("bitwise_and", x & y), ("bitwise_xor", x ^ y), ("left_shift", x << y)):
            result = getattr(kf.ops, name)(spread(x, "S(0),B"), spread(y, "B,S(0)"))
            assert np.array_equal(result.numpy(), wanted), name


@on_numpy
def test_convolutions_of_groups() -> None:
    random = np.random.default_rng(1)
    x, kernel = (random.normal(size=shape).astype("float32") for shape in ((4, 5, 5, 8), (2, 2, 1, 16)))
    wanted = ops.conv(x, kernel)
    assert kf.explain(kf.ops.conv, spread(x, "S(0),S(3)"), spread(kernel, "B,S(3)")).bytes == 0
    for layout in ("B,B", "S(3),S(3)", "S(3),B", "P,S(0)"):
        for kernel_layout in ("B,B", "S(3),B", "B,S(2)", "S(3),P"):
            result = kf.ops.conv(spread(x, layout), spread(kernel, kernel_layout))
            assert close(result.numpy(), wanted), (layout, kernel_layout)


@on_numpy
def test_the_default_data_format_is_heeded() -> None:
    random = np.random.default_rng(1)
    x, kernel = (random.normal(size=shape).astype("float32") for shape in ((4, 8, 8), (3, 8, 4)))
    keras.config.set_image_data_format("channels_first")
    try:
        wanted = ops.max_pool(x, 3, strides=1)
        for layout in ("S(1),S(2)", "S(2),S(2)"):
            assert close(kf.ops.max_pool(spread(x, layout), 3, strides=1).numpy(), wanted), layout
            result = kf.ops.conv(spread(x, layout), spread(kernel, "S(1),B"))
            assert close(result.numpy(), ops.conv(x, kernel)), layout
    finally:
        keras.config.set_image_data_format("channels_last")


@on_numpy
def test_stacks_of_rows() -> None:
    value = np.arange(6, dtype="float32")
    for first_layout, second_layout in (("B,B", "S(0),S(0)"), ("P,S(0)", "S(0),B")):
        for name in ("hstack", "vstack"):
            for shape in ((6,), (2, 3), (1, 2, 3)):
                pair = value.reshape(shape), -value.reshape(shape)
                result = getattr(kf.ops, name)([spread(pair[0], first_layout), spread(pair[1], second_layout)])
                assert np.array_equal(result.numpy(), getattr(np, name)(pair)), (name, shape)


@on_numpy
def test_one_hot_along_any_dim() -> None:
    value = np.array([[0, 4, 2], [1, 1, 3]], "int32")
    wanted = np.eye(5, dtype="float32")[value]
    for layout in ("B,B", "S(0),S(1)", "S(1),P"):
        for axis in range(-3, 3):
            result = kf.ops.one_hot(spread(value, layout), 5, axis=axis)
            assert np.array_equal(result.numpy(), np.moveaxis(wanted, -1, axis)), (layout, axis)
    for axis in (-4, 3):
        with pytest.raises(ValueError, match="axis"):
            kf.ops.one_hot(spread(value, "B,B"), 5, axis=axis)


@on_numpy
def test_one_hot_of_small_unsigned_indices() -> None:
    value = np.array([0, 44, 255], "uint8")
    wanted = np.eye(600, dtype="float32")[value]
    assert np.array_equal(kf.ops.one_hot(spread(value, "B,B"), 600).numpy(), wanted)
    call = OperatorCall("one_hot", ((3,),), ((3, 600),), {"num_classes": 600})
    whole, split = kf.Layout(MESH, "B,B", (3,)), kf.Layout(MESH, "S(1),S(1)", (3, 600))
    shards = [per_rank._one_hot(call, [whole], [split], rank, keras.ops.convert_to_tensor(value)) for rank in range(4)]
    assert np.array_equal(np.concatenate([keras.ops.convert_to_numpy(shard) for shard in shards], 1), wanted)


def test_the_entries_of_a_rank_are_those_that_numpy_finds_in_its_block() -> None:
    """Of every slice; of rows that nobody counts one by one too."""

    def entries(length: int, key: slice) -> list[tuple[slice, int, int] | None]:
        layout = kf.Layout(kf.Placement(range(3)), "S(0)", (length,))
        call = OperatorCall("getitem", ((length,),), ((len(range(*key.indices(length))),),), {"key": (key,)})
        found = [per_rank._local_entries(call, layout, rank) for rank in range(3)]
        return [None if each is None else each[0] for each in found]

    value, bounds, ends = np.arange(7), [slice(0, 3), slice(3, 5), slice(5, 7)], (None, *range(-8, 9))
    for key in (slice(*each) for each in itertools.product(ends, ends, (None, 1, 2, 3, 9, -1, -2, -5))):
        result = np.full(len(value[key]), -1)
        for block, found in zip(bounds, entries(7, key), strict=True):
            if found is not None:
                local, place, count = found
                assert count > 0
                result[place : place + count] = value[block][local]
        assert np.array_equal(result, value[key]), key
    assert entries(3 * 10**15, slice(1, -1, 2))[1] == (slice(1, 10**15, 2), 5 * 10**14, 5 * 10**14)
