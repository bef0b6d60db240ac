"""Variables that share an array train on several devices, where JAX would end the process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ranks import Pool

ROWS = 13


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(ROWS, 5)).astype("float32"), rng.normal(size=(ROWS, 2)).astype("float32")


def _model(hidden: Any, **options: Any) -> Any:
    import keras

    model = keras.Sequential([keras.Input((5,)), hidden, keras.layers.Dense(2, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.05, **options), "mse")
    return model


def _trained(model: Any, again: str) -> list[np.ndarray]:
    """Weights after two trainings; the averages that the first one leaves are the weights'."""
    x, y = _data()
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    if again == "copied":  # one device raises here, where both are one array
        for variable in model.trainable_variables:
            variable.assign(np.array(variable))
    if again == "predict":  # whose state has the weights, and not the averages
        model.predict(x, verbose=0)
        model.evaluate(x, y, verbose=0)
    if again == "fit":
        model.fit(x, y, batch_size=ROWS, verbose=0)
    else:
        model.train_on_batch(x, y)
        model.optimizer.finalize_variable_values(model.trainable_variables)
    return [np.array(variable) for variable in model.trainable_variables]


def _after_ema() -> list[list[np.ndarray]]:
    import keras

    import keras_flow as kf

    def trained(again: str) -> list[np.ndarray]:
        hidden = keras.layers.Dense(3, "tanh", kernel_initializer="ones")
        return _trained(_model(hidden, use_ema=True, ema_momentum=0.5), again)

    found = [trained("copied")]
    for again in ("fit", "train_on_batch", "predict"):
        with kf.DataParallel().scope():
            found.append(trained(again))
    return found


def _before_the_scope() -> list[list[np.ndarray]]:
    """A model that EMA has left so on one device, which a distribution lays over the ranks afterwards."""
    import keras

    import keras_flow as kf

    x, y = _data()
    found = []
    for is_distributed in (False, True):
        model = _model(keras.layers.Dense(3, "tanh", kernel_initializer="ones"), use_ema=True, ema_momentum=0.5)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        if is_distributed:
            with kf.DataParallel().scope():
                model.train_on_batch(x, y)
        else:
            for variable in model.trainable_variables:
                variable.assign(np.array(variable))
            model.train_on_batch(x, y)
        found.append([np.array(variable) for variable in model.trainable_variables])
    return found


def _of_one_array() -> list[list[np.ndarray]]:
    """A layer with two weights that were made of one array."""
    import jax.numpy as jnp
    import keras

    import keras_flow as kf

    class Twice(keras.layers.Layer):
        def __init__(self, share: bool):
            super().__init__()
            values = [jnp.ones((5,)) * 0.5] * 2 if share else [np.full((5,), 0.5, "float32")] * 2
            self.gain, self.shift = (keras.Variable(value, dtype="float32") for value in values)

        def call(self, inputs: Any) -> Any:
            return inputs * self.gain + self.shift

    x, y = _data()
    found = []
    model = _model(Twice(share=False))
    model.train_on_batch(x, y)
    found.append([np.array(variable) for variable in model.trainable_variables])
    with kf.DataParallel().scope():
        model = _model(Twice(share=True))
        model.train_on_batch(x, y)
    found.append([np.array(variable) for variable in model.trainable_variables])
    return found


def _are_equal(found: list[list[np.ndarray]]) -> bool:
    pairs = [pair for other in found[1:] for pair in zip(found[0], other, strict=True)]
    return bool(pairs) and all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)


def test_training_goes_on_after_a_fit_with_averages(on_ranks: Callable[..., Pool]) -> None:
    assert _are_equal(on_ranks("jax")(_after_ema))


def test_a_model_that_averages_were_given_to_before_the_scope(on_ranks: Callable[..., Pool]) -> None:
    assert _are_equal(on_ranks("jax")(_before_the_scope))


def test_two_weights_made_of_one_array(on_ranks: Callable[..., Pool]) -> None:
    assert _are_equal(on_ranks("jax")(_of_one_array))


def _keeps_values() -> bool:
    import keras

    import keras_flow as kf

    with kf.DataParallel().scope():
        model = _model(keras.layers.Dense(4))
        model.compile("sgd", "mse", run_eagerly=True)
    before = weakref.ref(model.layers[0].kernel._value)
    model.fit(*_data(), batch_size=ROWS, verbose=0)
    gc.collect()
    return before() is not None


def test_a_loop_that_ended_keeps_no_values(on_ranks: Any) -> None:
    """Eager steps donate nothing, so that what is remembered of the weights before the loop would stay."""
    assert not on_ranks("jax")(_keeps_values)


def _after_failures() -> list[float]:
    import contextlib

    import keras

    import keras_flow as kf

    x, y = _data()
    found = []
    with kf.DataParallel().scope():
        model = _model(keras.layers.Dense(3))
        model.train_on_batch(x, y)
        for number, act in enumerate((lambda: model.predict(x[:, :4]), lambda: model.evaluate(x[:, :4], y))):
            model.set_weights([np.full(weight.shape, 7.0 + number) for weight in model.get_weights()])
            with contextlib.suppress(ValueError):
                act()
                raise AssertionError("wrong data were accepted")
            found += [float(value) for weight in model.get_weights() for value in (weight.min(), weight.max())]
    return found


def test_a_loop_that_fails_leaves_the_weights_that_it_began_with(on_ranks: Callable[..., Pool]) -> None:
    assert on_ranks("jax")(_after_failures) == [7.0] * 8 + [8.0] * 8
