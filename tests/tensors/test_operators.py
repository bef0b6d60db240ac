"""Python's operators and protocols on global tensors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import keras_flow as kf
from tests.tensors.checking import MESH
from tests.tensors.engines import on_engines


def six() -> kf.GlobalTensor:
    return kf.arange(6, placement=MESH, sbp="S(0),B")


@on_engines
def test_length_and_iteration() -> None:
    assert len(six()) == 6 and [int(element) for element in six()] == list(range(6))


@on_engines
def test_numbers_and_arrays_beside_a_tensor() -> None:
    assert np.allclose((2.5 * six() - np.float32(1)).numpy(), 2.5 * np.arange(6) - 1)
    assert np.array_equal((np.ones(6, "int32") + six()).numpy(), np.arange(6) + 1)


@on_engines
def test_dtypes_of_results() -> None:
    half = kf.tensor(np.asarray([1, 2], "float16"), placement=MESH, sbp="S(0),B")
    assert (half * 3.0).dtype == "float16"  # a number of Python has no dtype, one of numpy has
    assert np.allclose((half * np.float32(1e5)).numpy(), [1e5, 2e5])
    assert (six() + np.int64(1)).dtype == "int32" and (six() + np.float64(1)).dtype == "float32"
    assert (six() + kf.ones(6, placement=MESH, sbp="B,B", dtype="float16")).dtype == "float16"


@on_engines
def test_an_element_is_an_index() -> None:
    x = six()
    assert list(range(x[3])) == [0, 1, 2] and x[x[2]].numpy() == 2


@on_engines
def test_membership_inversion_rounding_format_transposition() -> None:
    x = six()
    assert 5 in x and 6 not in x
    assert (~(x > 2)).numpy().tolist() == [True] * 3 + [False] * 3
    assert f"{round(x[1] / 3, 1):.2f}" == "0.30"
    assert kf.ones(2, 3, placement=MESH, sbp="S(0),B").T.shape == (3, 2)


@on_engines
def test_truth_and_comparison() -> None:
    x = six()
    assert bool(kf.ops.all(x < 6)) and float(kf.ops.sum(x)) == 15.0
    assert np.array_equal((x == 3).numpy(), np.arange(6) == 3)


@on_engines
def test_two_placements_are_refused() -> None:
    small = kf.tensor(np.zeros(6, "float32"), placement=kf.Placement([0, 1]), sbp="S(0)")
    with pytest.raises(kf.FlowError, match="two placements"):
        small + kf.tensor(np.zeros(6, "float32"), placement=MESH, sbp="B,B")


@on_engines
def test_no_pickle() -> None:
    with pytest.raises(TypeError, match="numpy"):
        pickle.dumps(six())
