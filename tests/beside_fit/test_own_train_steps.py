"""A `train_step` of one's own on TensorFlow, whose optimizer gets variables that are not the model's, or no Keras's."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.beside_fit.test_own_updates import OPTIMIZERS
from tests.beside_fit.test_stateless_apply import scope_of

#: variable -> the dim that a mesh with the axis `model` splits
RULES = {"kernel": 0}


def _model(scale: Any, loops: bool) -> Any:
    """Return a model whose step also trains a vector that Keras does not track.

    Args:
        scale: the vector.
        loops: DTensor cannot partition the step, by an operation before the update.
    """
    import keras
    import tensorflow as tf

    class Scaled(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="scaled")
            self.first, self.last = keras.layers.Dense(4), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.last(self.first(x) * scale)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                outputs = self(x, training=True)
                if loops:
                    outputs = tf.while_loop(lambda i, _: i < 2, lambda i, out: (i + 1, out * 0.9), (0, outputs))[1]
                loss = self.compute_loss(x, y, outputs)
            trained = [*self.trainable_variables, scale]
            self.optimizer.apply(tape.gradient(loss, trained), trained)
            return {"error": loss}

    return Scaled()


def _trained(scope: Callable[[], Any], name: str, make_scale: Callable[..., Any], loops: bool, eager: bool) -> list:
    """Return losses, weights and slots of two fits, between which all weights are set."""
    import keras

    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 4)).astype("float32")
    keras.utils.set_random_seed(1)
    losses = []
    with scope():
        scale = make_scale(np.array([1.0, 2.0, 0.5, 1.5], "float32"))
        model = _model(scale, loops)
        model.compile(OPTIMIZERS[name](keras.optimizers), lambda y, p: keras.ops.mean((y - p) ** 2), run_eagerly=eager)
        for _ in range(2):
            losses += model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0).history["error"]
            for variable in (*model.weights, *model.optimizer.variables):
                if "float" in variable.dtype:
                    variable.assign(np.asarray(variable) * 0.9)
    slots = model.optimizer.variables
    return [losses, *model.get_weights(), np.array(keras.ops.convert_to_numpy(scale)), *map(np.array, slots)]


def on_rank(kind: str, loops: bool, eager: bool) -> list[str]:
    """Return `differences` of this module as a rank imports it: a class that is sent has no file, so is no user's."""
    from tests.beside_fit import test_own_train_steps

    return test_own_train_steps.differences(kind, loops, eager)


def differences(kind: str, loops: bool, eager: bool) -> list[str]:
    """Return what differs from one device.

    Args:
        kind: of the vector: of "keras" or of "tensorflow".
        loops: whether DTensor cannot partition the step.
        eager: whether steps are run eagerly.
    """
    import keras
    import tensorflow as tf

    def make_scale(value: np.ndarray) -> Any:
        return tf.Variable(value) if kind == "tensorflow" else keras.Variable(value, name="scale")

    warnings.simplefilter("ignore")  # of steps that one device runs
    found = []
    for name in OPTIMIZERS:
        train = functools.partial(_trained, name=name, make_scale=make_scale, loops=loops, eager=eager)
        expected = train(contextlib.nullcontext)
        for layout, zero in (("2x2", 0), ("dp", 1)):
            values = train(functools.partial(scope_of, layout, zero, RULES))
            off = max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(expected, values, strict=True))
            if not off <= 5e-6:
                found.append(f"{name}, {layout}, zero={zero}: {off:.2g}")
    return found


@pytest.mark.parametrize(
    ("kind", "loops", "eager"),
    [("tensorflow", False, False), ("tensorflow", True, False), ("tensorflow", False, True), ("keras", True, False)],
)
def test_an_optimizer_gets_variables_that_are_not_the_models(
    kind: str, loops: bool, eager: bool, on_ranks: Any
) -> None:
    assert on_ranks("tensorflow")(on_rank, kind, loops, eager) == []


def refused_by_name() -> str:
    """Return what a strict distribution says of eager steps that one device would run."""
    import keras
    import tensorflow as tf

    import keras_flow as kf

    scale = tf.Variable([2.0], name="scale")
    x = np.ones((4, 1), "float32")
    with kf.ModelParallel(kf.Placement(range(4), axis_names=("data",)), rules={}, strict=True).scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.scale = scale
        model.compile("sgd", "mse", run_eagerly=True)
    try:
        model.fit(x, x, verbose=0)
    except kf.FlowError as error:
        return str(error)
    raise AssertionError("a strict distribution let one device run a step")


def test_a_strict_distribution_refuses_eager_steps_with_a_tf_variable(on_ranks: Any) -> None:
    said = on_ranks("tensorflow")(refused_by_name)
    assert "run_eagerly=True, and the model has a tf.Variable 'scale:0', which each rank would change" in said
    assert "or a keras.Variable" in said
