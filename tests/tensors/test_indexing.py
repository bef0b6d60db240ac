"""x[key] and x[key] = value, in every layout."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow import sbp
from tests.tensors.checking import ALONE, LINE, MESH, spread
from tests.tensors.engines import on_engines, on_numpy

PARTS = (sbp.broadcast, sbp.partial_sum, sbp.split(0), sbp.split(1))
#: slices from 0 end where a rank's part does, for a dim that two axes split
KEYS = (
    *(np.s_[1], np.s_[-1, 3], np.s_[1:4], np.s_[::2, 1:9:3], np.s_[:, ::-1], np.s_[4:1:-2, None, ...], np.s_[3:3]),
    *(np.s_[:3], np.s_[-3:, :6], np.s_[0:9, -100:100]),
)


@on_engines
def test_read_and_written() -> None:
    value = np.arange(60, dtype="float32").reshape(5, 12)
    pairs = list(itertools.product(PARTS, repeat=2))
    if keras.backend.backend() != "numpy":  # JAX compiles each primitive anew for each rank's device
        pairs = pairs[6:7] if keras.backend.backend() == "jax" else pairs[6::9]
    for nd_sbp in pairs:
        for key in KEYS:
            x = kf.tensor(value, placement=MESH, sbp=nd_sbp)
            assert np.array_equal(x[key].numpy(), value[key]), (nd_sbp, key)
            if None in (key if isinstance(key, tuple) else ()):
                continue
            changed = value.copy()
            changed[key] = -1
            x[key] = -1
            assert x.sbp == nd_sbp and np.array_equal(x.numpy(), changed), (nd_sbp, key)
            changed[key] = new = np.arange(value[key].size, dtype="float32").reshape(value[key].shape) + 100
            rows = {1: "S(0),S(0)", 2: "S(0),S(1)"}.get(new.ndim, "B,B")
            x[key] = kf.tensor(new, placement=MESH, sbp=rows)
            assert np.array_equal(x.numpy(), changed), (nd_sbp, key)


@on_engines
def test_a_dim_that_two_axes_split_is_cut_where_an_outer_part_ends() -> None:
    value = np.arange(8, dtype="int32")
    for length, key in ((5, np.s_[-3:]), (4, np.s_[-3:3]), (8, np.s_[:6]), (8, np.s_[:4]), (8, np.s_[2:6])):
        x = kf.tensor(value[:length], placement=MESH, sbp="S(0),S(0)")
        assert x[key].numpy().tolist() == value[:length][key].tolist(), key
        changed = value[:length].copy()
        changed[key] += 10
        x[key] = x[key].to_global(sbp="S(0),S(0)") + 10
        assert x.numpy().tolist() == changed.tolist(), key


@on_numpy
def test_indices_that_are_refused() -> None:
    x = kf.ones(4, 6, placement=MESH, sbp="S(0),S(1)")
    mask = np.array([True, False, True, False])
    for key in (True, np.True_, (0, False), [1, 2], mask, x > 0, (x > 0, 1), 1.5):
        for call in (lambda key=key: x[key], lambda key=key: x.__setitem__(key, 1.0)):
            with pytest.raises(kf.FlowError, match=r"(?s)an index.*kf\.ops\.take.*kf\.ops\.where") as error:
                call()
            assert "whole number" in str(error.value)
    for call in (lambda: x[..., ...], lambda: x.__setitem__((..., 0, ...), 1.0)):
        with pytest.raises(IndexError, match=r"one \.\.\. at most"):
            call()


@on_engines
def test_an_index_out_of_range() -> None:
    x = kf.arange(6, placement=MESH, sbp="S(0),B")
    with pytest.raises(IndexError):
        x[6]


@on_numpy
def test_values_that_are_assigned() -> None:
    row = kf.full((1, 6), 3.0, placement=MESH, sbp="S(1),B")
    for value in (np.full((1, 1, 6), 3.0), np.full(6, 3.0), [[3.0]], row):
        x = kf.ones(4, 6, placement=MESH, sbp="S(0),S(1)")
        x[1] = value
        assert x.numpy().sum(1).tolist() == [6, 18, 6, 6]
    for shape in ((2, 6), (3,), (6, 1)):
        with pytest.raises(kf.FlowError, match=rf"a value of shape \({shape[0]}.* for a place of shape \(6,\)"):
            x[1] = np.ones(shape)


@on_numpy
def test_a_tensor_without_dims_is_assigned_to() -> None:
    for key in ((), Ellipsis):
        x = kf.tensor(np.float32(3), placement=LINE, sbp="B")
        x[key] = 7
        assert x.numpy() == 7


@pytest.mark.parametrize("layout", ["B,B", "S(0),B", "P,S(1)"])
@on_numpy
def test_writing_changes_no_tensor_that_was_derived_before(layout: str) -> None:
    value = np.arange(12, dtype="float32").reshape(4, 3)
    writes = (
        lambda x: x.__setitem__(0, 7.0),
        lambda x: kf.ops.scatter_update(x, np.array([[1, 2]], "int32"), np.array([5.0], "float32")),
        lambda x: kf.ops.slice_update(x, (1, 0), np.ones((2, 2), "float32")),
    )
    for write in writes:
        x = spread(value, layout)
        shards = kf.to_global(dict(x._shards), MESH, layout)
        derived = x.to_global(ALONE, "B"), kf.ops.reshape(x, (2, 6)), x[:], shards
        write(x)
        for tensor in derived:
            assert np.array_equal(tensor.numpy().ravel(), value.ravel())


@on_numpy
def test_a_result_that_numpy_gives_read_only_can_be_written() -> None:
    value = np.arange(12, dtype="float32").reshape(4, 3)
    x = spread(value, "B,B")
    diagonal = kf.ops.diagonal(x)
    diagonal[0] = 9.0
    assert diagonal.numpy().tolist() == [9, 4, 8] and np.array_equal(x.numpy(), value)
