"""Tensors from values, ranges and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow import philox
from tests.tensors.checking import LINE, MESH
from tests.tensors.engines import on_engines, on_every_engine, on_numpy

#: normal numbers of one seed with more than 32 bits, to their last bit
DRAWN = (
    "0x1.49e6180000000p-2",
    "-0x1.c62e660000000p+0",
    "-0x1.e481a80000000p-3",
    "-0x1.40feb00000000p-2",
    "-0x1.1dc2860000000p+0",
    "0x1.64c8960000000p-4",
)
DRAWS: dict[str, Callable[[str], kf.GlobalTensor]] = {
    "rand": lambda layout: kf.rand(5, 7, placement=MESH, sbp=layout, seed=11),
    "randn": lambda layout: kf.randn(5, 7, placement=MESH, sbp=layout, seed=11),
    "randint": lambda layout: kf.randint(-3, 90, (5, 7), placement=MESH, sbp=layout, seed=11),
}


@on_every_engine
def test_draws_are_equal_on_all_engines() -> None:
    values = kf.randn(6, placement=MESH, sbp="S(0),B", seed=2**40 + 1).numpy()
    assert tuple(float.hex(float(value)) for value in values) == DRAWN


@pytest.mark.parametrize("name", DRAWS)
@on_engines
def test_draws_are_equal_in_all_layouts(name: str) -> None:
    expected = DRAWS[name]("B,B").numpy()
    for layout in ("S(0),S(1)", "S(1),B", "P,S(0)"):
        assert np.array_equal(DRAWS[name](layout).numpy(), expected), layout


@on_engines
def test_a_seed_generator_gives_other_numbers_each_time() -> None:
    seeds = keras.random.SeedGenerator(5)
    first, second = (kf.rand(4, placement=MESH, sbp="B,B", seed=seeds).numpy() for _ in range(2))
    assert not np.array_equal(first, second)


@on_engines
def test_a_draw_without_a_seed_takes_one_number_of_pythons() -> None:
    """However many ranks the process drives: layers that are made after it draw alike on every engine."""
    random.seed(3)
    random.getrandbits(63)
    expected = random.random()
    random.seed(3)
    kf.rand(4, placement=MESH, sbp="B,B")
    assert random.random() == expected


@on_engines
def test_without_a_seed_that_of_keras_decides() -> None:
    drawn = []
    for seed in (3, 3, 4):
        keras.utils.set_random_seed(seed)
        drawn.append(kf.rand(4, placement=MESH, sbp="B,B").numpy())
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@on_numpy
def test_uniform_numbers_stay_below_one(dtype: str) -> None:
    uniform = philox.uniform
    drawn = kf.rand(1000, placement=MESH, sbp="S(0),B", seed=3, dtype=dtype).numpy().astype("float64")
    plain = kf.tensor(uniform(3, 0, np.arange(1000)), placement=MESH, sbp="B,B", dtype=dtype).numpy()
    assert np.array_equal(np.minimum(plain.astype("float64"), drawn.max()), drawn)
    philox.uniform = lambda seed, stream, indices: np.full(indices.shape, 1 - 2.0**-53)
    try:
        assert (kf.rand(4, placement=MESH, sbp="S(0),B", seed=3, dtype=dtype).numpy() < 1).all()
    finally:
        philox.uniform = uniform


@on_engines
def test_a_range() -> None:
    x = kf.arange(6, placement=MESH, sbp="S(0),B")
    assert x.numpy().tolist() == [0, 1, 2, 3, 4, 5] and x.dtype == "int32"
    with pytest.raises(kf.FlowError, match="steps of 0"):
        kf.arange(0, 4, 0, placement=LINE, sbp="B")


@on_engines
def test_one_value_everywhere() -> None:
    x = kf.full((2, 3), 7, placement=MESH, sbp="P,S(1)")
    assert np.array_equal(x.numpy(), np.full((2, 3), 7))


@on_engines
def test_no_rows() -> None:
    assert kf.zeros(0, 3, placement=MESH, sbp="S(0),S(1)").numpy().shape == (0, 3)


@on_engines
def test_a_placement_of_ranks_that_there_are_not() -> None:
    with pytest.raises(kf.FlowError, match=r"ranks \[9\]"):
        kf.zeros(3, placement=kf.Placement([0, 9]), sbp="B")


@on_numpy
def test_dtypes_are_named_as_keras_does() -> None:
    for dtype, name in ((np.float16, "float16"), (np.dtype("int32"), "int32"), (float, "float32"), (bool, "bool")):
        tensors = (
            kf.tensor([1, 0], placement=LINE, sbp="S(0)", dtype=dtype),
            kf.zeros(3, placement=LINE, sbp="B", dtype=dtype),
            kf.full((2,), 1, placement=LINE, sbp="B", dtype=dtype),
            kf.arange(2, placement=LINE, sbp="B", dtype=dtype),
        )
        assert [tensor.dtype for tensor in tensors] == [name] * 4
        assert [tensor.numpy().dtype for tensor in tensors] == [np.dtype(name)] * 4
    for wrong in ("foo", "string", [1]):
        with pytest.raises(kf.FlowError, match="is no dtype of numbers"):
            kf.zeros(3, placement=LINE, sbp="B", dtype=wrong)
