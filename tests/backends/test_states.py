"""State that a step assigns is equal on all ranks, or an error says on which it is not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.backends import states


def _model() -> keras.Model:
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.1)]
    return keras.Sequential([keras.Input((4,)), *layers])


@pytest.mark.usefixtures("four_ranks")
def test_ranks_that_differ_are_named() -> None:
    keras.utils.clear_session()
    with kf.DataParallel(kf.Placement([0, 1, 2, 3])).scope():
        model = _model()
    names = [variable.path.rpartition("/")[2] for variable, _ in states.assigned_by_calls(model)]
    assert names == ["moving_mean", "moving_variance", "seed_generator_state"]
    states.compare(model, lambda variable: dict.fromkeys(range(4), np.zeros(2)))
    with pytest.raises(kf.FlowError) as raised:
        states.compare(model, lambda variable: {rank: np.full(2, rank // 3) for rank in range(4)})
    text = str(raised.value)
    assert "layer 'norm' (BatchNormalization) assigned 'sequential/norm/moving_mean' in a step" in text
    assert "one on ranks 0, 1, 2, another on rank 3, and 2 more variables differ" in text
    assert "(`class Own(keras.layers.BatchNormalization): pass`)" in text


def _mirrored_faults() -> list[str]:
    from keras_flow.backends.row_wise import row_interaction

    class Largest(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.largest = self.add_weight(name="largest", initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            self.largest.assign(keras.ops.max(x))
            return x

    x, found = np.arange(32, dtype="float32").reshape(8, 4), []

    def said(model: keras.Model) -> None:
        model.compile(keras.optimizers.SGD(0.01), "mse")
        try:
            model.fit(x, x[:, :3], batch_size=8, verbose=0)
            found.append("")
        except kf.FlowError as error:
            found.append(str(error))

    with kf.DataParallel(strategy="mirrored").scope():
        said(_model())
        quantized = _model()
        quantized.layers[0].quantize("float8")
        said(quantized)
        own = _model()
        own.layers[0].activation = lambda value: value
        said(own)
        with mock.patch.object(row_interaction, "_of_changes", lambda _: None):
            believed = _model()
            believed.layers[0].quantize("float8")
            said(believed)
        with mock.patch.object(row_interaction, "_of_itself", lambda _: None):
            said(keras.Sequential([keras.Input((4,)), Largest(), keras.layers.Dense(3)]))
    return found


def test_replicas_of_tensorflow(on_ranks: Any) -> None:
    """`strategy="mirrored"` refuses what mixes rows; a layer that is wrongly believed not to is found by its state."""
    right, quantized, own, believed, assigned = on_ranks("tensorflow")(_mirrored_faults)
    assert right == ""
    assert "is quantized to float8, which scales by the largest element of all rows" in quantized
    assert "has a custom activation function, which may mix rows" in own
    assert "inputs_amax_history' in a step, and the ranks hold different values" in believed
    assert "/largest' in a step, and the ranks hold different values" in assigned
