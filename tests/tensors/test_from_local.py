"""Global tensors from the shards of ranks, and back."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.backends.active import tensor_engine
from keras_flow.layout import Layout
from keras_flow.tensors.ranks import local_ranks
from tests.tensors.checking import LINE, MESH, close, shards_of
from tests.tensors.engines import on_engines, on_numpy

VALUE = np.arange(60, dtype="float32").reshape(5, 12)


def given(shards: dict[int, Any]) -> Any:
    """What a program gives: a dict where its process has several ranks, else its rank's shard."""
    here = local_ranks()
    return {rank: shards[rank] for rank in here} if len(here) > 1 else shards[here[0]]


def on_device(array: np.ndarray, rank: int) -> Any:
    """The engine's own array; None for a rank of another process."""
    return tensor_engine().put(array, rank) if rank in local_ranks() else None


@pytest.mark.parametrize("nd_sbp", ["S(0),S(1)", "B,S(0)", "P,B"])
@on_engines
def test_shards_and_back(nd_sbp: str) -> None:
    layout = Layout(MESH, nd_sbp, VALUE.shape)
    shards = shards_of(layout, VALUE, np.random.default_rng(2))
    x = kf.to_global(given({rank: on_device(np.array(shard), rank) for rank, shard in shards.items()}), MESH, nd_sbp)
    assert x.layout == layout
    assert close(x.numpy(), VALUE)
    for rank in local_ranks():
        assert np.array_equal(tensor_engine().as_numpy(x.to_local(rank)), shards[rank])


@on_engines
def test_a_rank_outside_the_placement_has_no_elements() -> None:
    x = kf.tensor(VALUE, placement=kf.Placement([0]), sbp="B")
    for rank in local_ranks():
        shape = tensor_engine().as_numpy(x.to_local(rank)).shape
        assert shape == ((0, 0) if rank else VALUE.shape)


@on_engines
def test_shards_that_do_not_fit_each_other() -> None:
    shapes = {rank: on_device(np.zeros((2 + rank, 3), "float32"), rank) for rank in range(4)}
    with pytest.raises(kf.FlowError, match=r"rank \d has a shard"):
        kf.to_global(given(shapes), MESH, "S(0),B")
    dtypes = {rank: on_device(np.zeros(2, "float32" if rank else "int32"), rank) for rank in range(4)}
    with pytest.raises(kf.FlowError, match="int32 on rank 0"):
        kf.to_global(given(dtypes), MESH, "B,B")


@on_engines
def test_shards_that_keras_trains() -> None:
    variable = keras.Variable(np.ones(2, "float32"))
    x = kf.to_global(given(dict.fromkeys(range(4), variable)), LINE, "S(0)")
    assert x.numpy().tolist() == [1] * 8
    # a shard is a constant: what is computed of it is on no tape of the engine
    assert not any(getattr(shard, "requires_grad", False) for shard in x._shards.values())


@on_numpy
def test_shards_of_64_bits_become_32() -> None:
    values = ((np.ones(2), "float32"), (np.arange(2), "int32"), ([1.0, 2.0], "float32"), (np.float64(3), "float32"))
    for value, dtype in values:
        assert kf.to_global(dict.fromkeys(range(4), value), LINE, "B").dtype == dtype
