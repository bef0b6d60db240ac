"""Names of variables in checkpoints: by path and slot, for every optimizer of Keras."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.checkpoint import names, saving
from keras_flow.errors import FlowError

pytestmark = pytest.mark.usefixtures("four_ranks")

#: bases, and those that are made of others
_BASES = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}
OPTIMIZERS = sorted(
    {name for name, each in vars(keras.optimizers).items() if inspect.isclass(each) and name not in _BASES}
)


def _model(optimizer: Any, names_of: tuple[str, ...] = ("one", "two")) -> keras.Model:
    layers = [keras.layers.Dense(4, name=name) for name in names_of]
    model = keras.Sequential([keras.layers.Input((4,)), *layers], name="net")
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_slot_of_every_optimizer_has_the_path_of_its_variable(name: str) -> None:
    model = _model(getattr(keras.optimizers, name)())
    found = names.named(model)
    assert len(found) == len(model.variables) + len(model.optimizer.variables)
    weights = {variable.path: tuple(variable.shape) for variable in model.trainable_variables}
    slots = [each for each in found if "@" in each and not each.startswith("@")]
    assert {each.partition("@")[0] for each in slots} <= set(weights)
    # what is left has no shape of a weight: counts, rates, products of these
    assert all(variable.shape == () for each, variable in found.items() if each.startswith("@"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
    ],
)
def test_averages_accumulators_and_inner_optimizers(make: Any) -> None:
    found = names.named(_model(make()))
    assert sum(name.startswith("net/one/kernel@") for name in found) >= 2
    assert len(set(found)) == len(found)


def test_an_optimizer_that_a_step_builds_with_a_part_of_the_weights(tmp_path: Any) -> None:
    """As a GAN's second one is: before its first step it has nothing, and is loaded into one that is not built."""
    model, other = _model("sgd"), keras.optimizers.Adam()
    model.of_generator = other
    kf.checkpoint.save(tmp_path, model, step=1)
    assert not other.built and saving.step_of(model) == 0
    other.build(model.layers[1].trainable_variables)
    for variable in other.variables:
        variable.assign(variable + 3)
    assert saving.step_of(model) == 3
    kf.checkpoint.save(tmp_path, model, step=2)

    def loaded(step: int) -> Any:
        found = _model("sgd")
        found.of_generator = keras.optimizers.Adam()
        kf.checkpoint.load(tmp_path, found, step=step)
        return found.of_generator

    assert not loaded(1).built
    for found, value in zip(loaded(2).variables, other.variables, strict=True):
        np.testing.assert_array_equal(found, value)


def test_two_paths_that_keras_writes_alike() -> None:
    """`a_b/c` and `a/b_c`: Keras's own names of their slots are equal."""

    class Own(keras.layers.Layer):
        def __init__(self, name: str, weight: str):
            super().__init__(name=name)
            self.weight = weight

        def build(self, shape: Any) -> None:
            self.c = self.add_weight(shape=(4,), name=self.weight)

        def call(self, x: Any) -> Any:
            return x * self.c

    model = keras.Sequential([keras.layers.Input((4,)), Own("a_b", "c"), Own("a", "b_c")], name="net")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    found = names.named(model)
    for path, variable in zip(("a_b/c", "a/b_c"), model.trainable_variables, strict=True):
        slot = found[f"net/{path}@momentum"]
        index = model.optimizer._get_variable_index(variable)
        assert slot is model.optimizer.momentums[index]


def test_layers_that_keras_numbers_otherwise_are_found_in_their_order() -> None:
    there = ["dense/kernel", "dense_1/kernel", "out/kernel"]
    assert names.matched(["dense_1/kernel", "dense_2/kernel", "out/kernel"], there) == {
        "dense_1/kernel": "dense/kernel",  # and not the equal name, which is another layer
        "dense_2/kernel": "dense_1/kernel",
        "out/kernel": "out/kernel",
    }
    assert names.matched(["dense/kernel"], there) == {"dense/kernel": "dense/kernel"}


def test_another_model_is_refused_by_names_and_shapes_and_nothing_changes(tmp_path: Any) -> None:
    kf.checkpoint.save(tmp_path, _model("adam"), step=1)
    other = _model("adam", ("one", "twp"))
    before = [np.asarray(variable) for variable in other.variables]
    with pytest.raises(FlowError) as caught:
        kf.checkpoint.load(tmp_path, other)
    assert "'net/twp/kernel' is not in the checkpoint (nearest: 'net/two/kernel'" in str(caught.value)
    assert "rename=" in str(caught.value)
    for variable, value in zip(other.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    kf.checkpoint.load(tmp_path, other, rename={"net/two": "net/twp"})
    np.testing.assert_array_equal(other.layers[1].kernel, kf.checkpoint.read_tensor(tmp_path, "net/two/kernel"))


def test_what_fits_is_loaded_and_the_rest_named(tmp_path: Any) -> None:
    kf.checkpoint.save(tmp_path, _model("adam"), step=1)
    loaded = kf.checkpoint.load(tmp_path, other := _model("adam", ("one", "three")), strict=False)
    np.testing.assert_array_equal(other.layers[0].kernel, kf.checkpoint.read_tensor(tmp_path, "net/one/kernel"))
    assert any("'net/three/kernel' is not in the checkpoint" in text for text in loaded.left_out)


def test_the_integers_of_quantized_weights_are_no_weights(tmp_path: Any) -> None:
    kf.checkpoint.save(tmp_path, _model("sgd"), step=1)
    quantized = _model("sgd")
    for layer in quantized.layers:
        layer.quantize("int8")
    before = np.asarray(quantized.layers[0]._kernel)
    left_out = kf.checkpoint.load(tmp_path, quantized, strict=False).left_out
    assert any(
        "'net/one/kernel' is int8, and float32 in the checkpoint: `quantize` it after" in each for each in left_out
    )
    np.testing.assert_array_equal(quantized.layers[0]._kernel, before)
    kf.checkpoint.save(tmp_path, quantized, step=2)
    with pytest.raises(FlowError, match="is float32, and int8 in the checkpoint: `quantize` the model before"):
        kf.checkpoint.load(tmp_path, _model("sgd"))


def test_a_models_own_name_before_all_names_may_be_missing() -> None:
    there = ["net/up/kernel", "net/up/kernel@momentum", "net/down/kernel", "@optimizer/iteration"]
    mine = [name.removeprefix("net/") for name in there]
    assert names.matched(mine, there) == dict(zip(mine, there, strict=True))
    assert names.matched(there, mine) == dict(zip(there, mine, strict=True))
    assert names.matched(["up/kernel"], ["up/bias"]) == {}
