"""Global tensors from the engine's own distributed arrays and Keras's variables, and back."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow import sbp
from keras_flow.errors import FlowError
from tests.tensors.checking import MESH
from tests.tensors.engines import on_engines, on_engines_alone, on_jax, on_tensorflow


@on_engines_alone
def test_the_engine_s_own_array_and_back_without_a_copy() -> None:
    x = kf.randn(8, 4, placement=MESH, sbp="S(0),S(1)", seed=1)
    back = kf.global_tensor(x.to_engine())
    assert back.layout == x.layout
    assert np.array_equal(back.numpy(), x.numpy())
    assert [address(value) for value in back._shards.values()] == [address(x._shards[rank]) for rank in back._shards]


def address(value: Any) -> int:
    """Where an engine's array begins in memory."""
    if keras.backend.backend() == "jax":
        return value.unsafe_buffer_pointer()
    if keras.backend.backend() == "torch":
        return value.data_ptr()
    return np.frombuffer(memoryview(value), "uint8").__array_interface__["data"][0]


@on_jax
def test_an_array_that_is_split_by_the_inner_axis_of_its_mesh_first() -> None:
    import jax

    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("a", "b"))
    value = np.arange(8, dtype="float32")
    array = jax.device_put(value, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("b", "a"))))
    assert np.array_equal(kf.global_tensor(array).numpy(), value)


@on_tensorflow
def test_a_variable_of_a_strategy_is_drawn() -> None:
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).scope():
        variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    picture = kf.visualize(variable)
    head, *ranks = str(picture).splitlines()
    assert head.startswith("Layout(B of [2, 2] on Placement([0, 1, 2]")
    assert ranks == [f"  rank {rank}: [0:2, 0:2]" for rank in range(3)]
    assert picture.svg.startswith("<svg")
    assert np.asarray(kf.global_tensor(variable).to_local(rank=2)).tolist() == [[1.0, 2.0], [3.0, 4.0]]


@on_engines
def test_a_tensor_that_is_not_distributed_is_drawn_on_its_rank() -> None:
    own = kf.env.local_ranks()[0]
    for value in (keras.ops.ones((4, 2)), keras.Variable(np.ones((4, 2), "float32"))):
        assert str(kf.visualize(value)).splitlines()[1:] == [f"  rank {own}: [0:4, 0:2]"]
    with pytest.raises(FlowError, match="Keras variables and tensors of the engine; got str"):
        kf.visualize("x")


@on_engines_alone
def test_a_variable_under_a_scope() -> None:
    distribution = kf.ModelParallel(
        kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model")), rules={"kernel": {"model": sbp.split(1)}}
    )
    with distribution.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6)])
    kernel = kf.global_tensor(model.weights[0])
    assert sbp.text(kernel.sbp) == "B,S(1)" and kernel.shape == (4, 6)
    assert np.array_equal(kernel.numpy(), keras.ops.convert_to_numpy(model.weights[0]))
    assert not any(getattr(shard, "requires_grad", False) for shard in kernel._shards.values())


@on_engines_alone
def test_variables_that_ranks_hold_whole() -> None:
    """Counters, weights under data parallelism, integers of a quantized layer: on torch they are plain tensors."""
    with kf.DataParallel(kf.Placement([0, 2, 3])).scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6)])
        model.quantize("int8")
    variables = [kf.global_tensor(variable) for variable in model.layers[0].weights]
    assert {(str(value.placement.ranks), sbp.text(value.sbp)) for value in variables} == {("(0, 2, 3)", "B")}
    for value, variable in zip(variables, model.layers[0].weights, strict=True):
        assert not any(getattr(shard, "requires_grad", False) for shard in value._shards.values())
        assert np.array_equal(value.numpy(), keras.ops.convert_to_numpy(variable))
    assert "int8" in {value.dtype for value in variables}


@on_engines
def test_its_text_on_the_first_process() -> None:
    x = kf.randn(8, 4, placement=MESH, sbp="S(0),S(1)", seed=1)
    if kf.env.process_index() == 0:  # printing is no collective: the others do not take part
        assert "sbp=(S(0),S(1))" in repr(x)
