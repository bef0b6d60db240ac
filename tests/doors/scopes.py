"""Scopes inside each other: of ours, of `keras.distribution`, of a strategy of `tf.distribute`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

import keras_flow as kf

X, Y = np.linspace(-1, 1, 48, dtype="float32").reshape(8, 6), np.ones((8, 4), "float32")


def _model() -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, name="hidden")])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def _losses(model: keras.Model) -> list[float]:
    return model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]


def refusal(call: Callable[[], Any]) -> str:
    """The text of the FlowError that a call raises."""
    try:
        call()
    except kf.FlowError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def _by_rows_and_columns() -> kf.ModelParallel:
    ranks = np.arange(kf.env.get_world_size()).reshape(-1, 2)
    rules = {"hidden/kernel": {"model": kf.sbp.split(1)}}
    return kf.ModelParallel(kf.Placement(ranks, axis_names=("data", "model")), batch_axes="data", rules=rules)


def ours_in_ours() -> None:
    """The inner one holds, the outer one again after it, also where the inner one raised."""
    expected = _losses(_model())
    outer, inner = kf.DataParallel(), _by_rows_and_columns()
    with outer.scope():
        first = _model()
        with inner.scope():
            second = _model()
            losses = _losses(second)
            assert "S(1)" in str(kf.layout_of(second.get_layer("hidden").kernel))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        np.testing.assert_allclose(_losses(first), expected, rtol=1e-5)
        assert keras.distribution.distribution() is outer
        try:
            with inner.scope():
                raise ZeroDivisionError
        except ZeroDivisionError:
            assert keras.distribution.distribution() is outer
    assert keras.distribution.distribution() is None


def keras_in_ours() -> str:
    """A model that lies as ours says, used in a scope of Keras's own: what is said."""
    stock = _stock()
    with kf.DataParallel().scope():
        model = _model()
        _losses(model)
        with stock:
            text = refusal(lambda: _losses(model))
        return text


def _stock() -> AbstractContextManager[Any]:
    from keras.src.distribution import distribution_lib  # its base class, which needs no device of an engine

    class Stock(distribution_lib.Distribution):
        """A distribution that is not ours."""

    ranks = kf.env.get_world_size()
    mesh = keras.distribution.DeviceMesh((ranks,), ("batch",), [f"cpu:{rank}" for rank in range(ranks)])
    return Stock(mesh, "batch").scope()


def ours_in_keras() -> None:
    """Ours inside a scope of Keras's own: ours holds."""
    expected = _losses(_model())
    with _stock(), _by_rows_and_columns().scope():
        np.testing.assert_allclose(_losses(_model()), expected, rtol=1e-5)


def strategies() -> list[str]:
    """A strategy of `tf.distribute` in ours, a model made in one, and ours in a strategy: what is said."""
    import tensorflow as tf

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    expected = _losses(_model())
    with strategy.scope():
        made_inside = _model()
        ours_inside = refusal(lambda: kf.DataParallel().scope().__enter__())

    def enter() -> None:
        with strategy.scope():
            _losses(_model())

    with kf.DataParallel().scope():
        said = [refusal(enter), refusal(lambda: _losses(made_inside)), ours_inside]
        np.testing.assert_allclose(_losses(_model()), expected, rtol=1e-5)  # the scope is as it was
    with kf.DataParallel(strategy="mirrored").scope():
        np.testing.assert_allclose(_losses(_model()), expected, rtol=1e-5)
        said.append(refusal(enter))
    return said
