"""Checks of weights gathered ahead of their use (`zero=3`): run on four processes, for `test_on_four_ranks`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from tests.backends.torch.registry import check

STEPS = 6


def _branching() -> Any:
    """A model that takes another way in some steps, so that what was expected to be gathered next is not."""
    import keras

    class Branching(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = keras.layers.Dense(12, "tanh"), keras.layers.Dense(12, "tanh")
            self.both, self.out, self.calls = keras.layers.Dense(12, "tanh"), keras.layers.Dense(4), 0

        def call(self, x: Any) -> Any:
            order = [self.first, self.second, self.both]
            if self.calls % 3 == 2:
                order = [self.both, self.first, self.both]
            for layer in order:
                x = layer(x)
            return self.out(x)

        def train_step(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().train_step(*args, **kwargs)

    keras.utils.set_random_seed(2)
    model = Branching()
    model.compile(keras.optimizers.SGD(0.3, momentum=0.9), "mse")
    return model


def _trained(model: Any) -> list[np.ndarray]:
    x = np.random.default_rng(0).normal(size=(8, 12)).astype("float32")
    for _ in range(STEPS):
        model.train_on_batch(x, x[:, :4])
    return [np.asarray(value) for value in model.get_weights()]


@check
def a_step_that_goes_another_way_gathers_what_it_needs() -> None:
    import keras_flow as kf

    distribution = kf.DataParallel(zero=3, zero_min_size=1)
    with distribution.scope():
        model = _branching()
    found = _trained(model)
    for one, several in zip(_trained(_branching()), found, strict=True):
        np.testing.assert_allclose(several, one, atol=2e-6)


@check
def a_weight_is_on_its_way_while_the_layer_before_it_computes() -> None:
    """From the second step on, the order is known; a step begins as many gathers, and none in vain."""
    import keras
    import torch

    import keras_flow as kf
    from keras_flow.backends.torch import slot_parts

    events = ""
    begin, wait, multiply = slot_parts.PartsGather._send, slot_parts.PartsGather.wait, torch.matmul

    def begun(self: Any, *args: Any) -> None:
        nonlocal events
        events += "g"
        begin(self, *args)

    def arrived(self: Any) -> Any:
        nonlocal events
        events += "w"
        return wait(self)

    def multiplied(*args: Any, **kwargs: Any) -> Any:
        nonlocal events
        events += "*"
        return multiply(*args, **kwargs)

    with kf.DataParallel(zero=3, zero_min_size=1).scope():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, use_bias=False) for _ in range(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.ones((8, 8), "float32")
    steps = []
    with (
        mock.patch.object(slot_parts.PartsGather, "_send", begun),
        mock.patch.object(slot_parts.PartsGather, "wait", arrived),
        mock.patch.object(torch, "matmul", multiplied),
    ):
        for _ in range(3):
            events = ""
            model.train_on_batch(x, x)
            steps.append(events)
    # three layers forward; backward all but the first again, since nobody asks for the gradient of its inputs
    assert steps[0].endswith("gw*gw*gw*gwgw") and steps[1:] == ["gwg*wg*wg*wgw"] * 2, steps


@check
def frozen_weights_are_not_kept_whole_either() -> None:
    """The gradient by a frozen layer's inputs needs its weight: it is gathered again, and not kept until then."""
    import keras

    import keras_flow as kf
    from keras_flow.backends.torch import gathered_weights

    kept, keep = [], gathered_weights.Gathered.keep

    def noted(self: Any, tensor: Any) -> Any:
        found = keep(self, tensor)
        kept.append(isinstance(found, gathered_weights._Again))
        return found

    def trained(trainable: bool) -> tuple[list[np.ndarray], int]:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, use_bias=False) for _ in range(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        layers[1].trainable = trainable
        model.compile(keras.optimizers.SGD(0.1), "mse")
        kept.clear()
        model.train_on_batch(np.ones((8, 8), "float32"), np.ones((8, 8), "float32"))
        return [np.asarray(value) for value in model.get_weights()], sum(kept)

    one, _ = trained(False)
    with kf.DataParallel(zero=3, zero_min_size=1).scope(), mock.patch.object(gathered_weights.Gathered, "keep", noted):
        several, frozen = trained(False)
        assert frozen == trained(True)[1] > 0, frozen
    for value, expected in zip(several, one, strict=True):
        np.testing.assert_allclose(value, expected, atol=2e-6)
