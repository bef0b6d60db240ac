"""Checks of models whose rows interact somewhere: only what mixes rows is computed in the consistent view."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import numpy as np

from tests.backends.torch.registry import check
from tests.backends.torch.rows import CLASSES, Numbers, gathered, off


@check
def layers_around_one_that_mixes_rows_compute_own_rows() -> None:
    """In functional models and in subclassed ones; rows travel where they are mixed alone."""
    import keras

    import keras_flow as kf
    from keras_flow.backends.torch.rows import consistent_calls
    from tests.explainer.counting.torch import watching

    class Centred(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x - keras.ops.mean(x, axis=0, keepdims=True)

    class Written(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.before = keras.layers.Dense(16, "relu", name="before")
            self.mixes, self.after = Centred(), keras.layers.Dense(CLASSES, name="after")

        def call(self, x: Any) -> Any:
            return self.after(self.mixes(self.before(x)))

    def functional() -> Any:
        inputs = keras.Input((6,))
        hidden = Centred()(keras.layers.Dense(16, "relu", name="before")(inputs))
        return keras.Model(inputs, keras.layers.Dense(CLASSES, name="after")(hidden))

    x = np.random.default_rng(0).standard_normal((8, 6)).astype("float32")
    y = np.random.default_rng(1).standard_normal((8, CLASSES)).astype("float32")

    def trained(make: Any) -> tuple[Numbers, Any]:
        keras.utils.set_random_seed(1)
        model = make()
        model.build((None, 6))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        losses = [model.train_on_batch(x, y)[0] for _ in range(3)]
        return {"losses": np.asarray(losses), **dict(enumerate(model.get_weights()))}, model

    for make in (Written, functional):
        wanted, _ = trained(make)
        original, by_rows = consistent_calls.call, []

        def noted(call: Any, step: Any, layer: Any, *args: Any, by_rows: Any = by_rows, run: Any = original) -> Any:
            by_rows.append(layer.name)
            return run(call, step, layer, *args)

        with kf.DataParallel().scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore", kf.FlowWarning)
            with mock.patch.object(consistent_calls, "call", noted):
                found, model = trained(make)
                assert not off(wanted, found), (make, off(wanted, found))
            with watching() as counted:
                model.train_on_batch(x, y)
        assert by_rows == ["before", "after"] * 3, by_rows
        # the inputs of the layer that mixes [8, 16], and the gradient of its outputs; loss and metrics take own rows
        assert [each["elements"] for each in gathered(counted)] == [8 * 16, 8 * 16], counted
