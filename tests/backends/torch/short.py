"""Checks of short calls of layers against Keras's whole ones: run on four processes, for `test_on_four_ranks`."""

from __future__ import annotations

import contextlib
import functools
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.backends.torch.registry import check, error_of, rank

#: the layers are many: some in each check
_PARTS = 8


@contextlib.contextmanager
def _shortened() -> Iterator[list[str]]:
    """All layers within layers are called as in a step; the names of those that went the short way."""
    import keras
    from keras.src.backend.common import global_state

    from keras_flow.backends.torch import short_calls

    short: list[str] = []
    original, went = keras.Layer.__call__, short_calls._call

    def counted(layer: Any, *args: Any) -> object:
        short.append(layer.name)
        return went(layer, *args)

    def called(layer: Any, *args: Any, **kwargs: Any) -> object:
        if global_state.get_global_attribute("current_call_ctx") is None or keras.backend.is_keras_tensor(args[0]):
            return original(layer, *args, **kwargs)
        return short_calls.call(original, layer, args, kwargs)

    with unittest.mock.patch.object(keras.Layer, "__call__", called):
        with unittest.mock.patch.object(short_calls, "_call", counted):
            yield short


def _twice(program: Callable[[], Any]) -> tuple[Any, Any, list[str]]:
    """What a program returns by whole calls, by short ones, and which layers these were of."""
    import keras

    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    whole = program()
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    with _shortened() as short:
        return whole, program(), short


def _layers_have_the_bits_of_whole_calls(part: int) -> None:
    """Layers that the sweep knows: outputs and gradients, in training and not, when it is called again."""
    import keras

    from tests.sweep.cases import layers
    from tests.sweep.program import _data, _model

    if rank():  # no rank asks another
        return

    def program(piece: Any) -> Callable[[], list[np.ndarray]]:
        def run() -> list[np.ndarray]:
            found = []
            model = _model([piece])
            x, _ = _data([piece], 6)
            for training in (True, True, False, None):
                output = model(x, training=training)
                model.zero_grad()
                (output.sum() + sum(model.losses)).backward()
                gradients = [variable.value.grad for variable in model.trainable_variables]
                found.append(keras.ops.convert_to_numpy(output))
                found += [gradient.numpy().copy() for gradient in gradients if gradient is not None]
            return [*found, *model.get_weights()]

        return run

    called: set[str] = set()
    pieces = [piece for piece in layers.PIECES if piece.metric is None and piece.optimizer is None][part::_PARTS]
    for piece in pieces:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, found, short = _twice(program(piece))
        assert len(whole) == len(found), piece.name
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(whole, found, strict=True)), piece.name
        called |= {piece.name} if set(short) - {"branch0_in", "branch0_out", "flatten"} else set()
    # recurrent layers and layers around a layer have a `__call__` of their own, or pass what is no tensor
    assert len(called) > 0.6 * len(pieces), sorted({piece.name for piece in pieces} - called)


for _part in range(_PARTS):
    check(
        functools.partial(_layers_have_the_bits_of_whole_calls, _part), f"layers_have_the_bits_of_whole_calls_{_part}"
    )


@check
def what_only_whole_calls_do_is_done() -> None:
    """Masks, losses of activations, hooks of torch, other shapes, mixed precision, names, and layers around layers."""
    import keras
    import torch

    class Notes(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.dense = keras.layers.Dense(3, activity_regularizer="l2")
            self.drop = keras.layers.Dropout(0.5)
            self.dense.build(shape)

        def call(self, x: Any, training: bool | None = None) -> Any:
            self.seen = [*getattr(self, "seen", []), training]
            return self.drop(self.dense(x), training=not training)  # what it says holds for its own layers

    def masks() -> list[Any]:
        tokens = keras.Input((5,), dtype="int32")
        x = keras.layers.Embedding(7, 4, mask_zero=True)(tokens)
        x = keras.layers.LayerNormalization()(x)
        x = keras.layers.MultiHeadAttention(2, 2)(x, x)
        x = keras.layers.GlobalAveragePooling1D()(keras.layers.Add()([x, x]))
        model = keras.Model(tokens, x)
        rows = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 0, 0]])
        return [keras.ops.convert_to_numpy(model(rows * times)) for times in (1, 1, 0, 1)]

    def own() -> list[Any]:
        heard: list[str] = []
        inputs = keras.Input((4,))
        layer = Notes()
        model = keras.Model(inputs, layer(inputs))
        found: list[Any] = []
        for rows, training in ((2, True), (2, True), (3, True), (2, None), (2, False)):
            found.append(keras.ops.convert_to_numpy(model(np.ones((rows, 4), "float32"), training=training)))
            found += [loss.item() for loss in model.losses]
        handle = layer.dense.register_forward_hook(lambda *_: heard.append("dense"))
        model(np.ones((2, 4), "float32"))
        handle.remove()
        model(np.ones((2, 4), "float32"))
        layer.dense.activity_regularizer = None
        model(np.ones((2, 4), "float32"))
        return [*found, heard, layer.seen, len(model.losses)]

    def mixed() -> list[Any]:
        inputs = keras.Input((4,))
        x = keras.layers.Dense(4, dtype="mixed_bfloat16", name="half")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.ReLU()(x)))
        found = []
        for _ in range(3):
            found.append(keras.ops.convert_to_numpy(model(np.ones((2, 4), "float32"))))
        model.get_layer("half").dtype_policy = keras.DTypePolicy("float32")
        return [*found, keras.ops.convert_to_numpy(model(np.ones((2, 4), "float32")))]

    def errors() -> list[Any]:
        class Fails(keras.layers.Layer):
            fails = False

            def call(self, x: Any, training: bool | None = None) -> Any:
                if self.fails:
                    raise ValueError("today")
                return x

        layer = Fails()
        model = keras.Sequential([keras.Input((4,)), layer])
        model(torch.ones(2, 4), training=True)
        layer.fails = True
        return [error_of(lambda: model(torch.ones(2, 4), training=True)) for _ in range(2)]

    def explicit_masks() -> list[Any]:
        class Inner(keras.layers.Layer):
            def build(self, shape: Any) -> None:
                self.norm, self.pool = keras.layers.BatchNormalization(), keras.layers.GlobalAveragePooling1D()
                self.first, self.second = (keras.layers.LSTM(3, return_sequences=True) for _ in range(2))
                self.norm.build(shape)
                self.first.build(shape)
                self.second.build((*shape[:-1], 3))

            def call(self, x: Any) -> Any:
                mask = keras.ops.cast(x[..., 0] < 5, "bool")
                runs = self.second(self.first(x, mask=mask))
                return keras.ops.concatenate([self.pool(self.norm(x, mask=mask)), self.pool(runs)], -1)

        inputs = keras.Input((4, 2))
        model = keras.Model(inputs, Inner()(inputs))
        x = np.arange(16, dtype="float32").reshape(2, 4, 2)
        return [keras.ops.convert_to_numpy(model(x)) for _ in range(3)]

    def changed() -> list[Any]:
        """What is changed on a layer after it was called."""
        inputs = keras.Input((4,))
        found: list[Any] = []

        def seen(change: Callable[[Any], None], x: Any = None, **options: Any) -> None:
            layer = keras.layers.Dense(4, activation="relu", **options)
            model = keras.Model(
                inputs, keras.layers.GlobalAveragePooling1D()(keras.layers.Reshape((2, 2))(layer(inputs)))
            )
            x = np.ones((2, 4), "float32")
            for _ in range(2):
                model(x)
            change(layer)
            found.append(error_of(lambda: found.append(keras.ops.convert_to_numpy(model(x)))).partition("\n")[0])
            found.append(error_of(lambda: found.append(str(layer(x).dtype))).partition("\n")[0])

        def forward(layer: Any) -> None:
            whole = layer.forward
            layer.forward = lambda *args, **kwargs: whole(*args, **kwargs) * 0

        def anew(layer: Any) -> None:
            layer.built = False

        seen(forward)
        seen(anew)
        seen(lambda layer: setattr(layer, "input_spec", keras.InputSpec(ndim=4)))
        seen(lambda layer: setattr(layer, "autocast", False), dtype="mixed_bfloat16")
        seen(
            lambda layer: setattr(layer, "dtype_policy", "mixed_bfloat16"), dtype=keras.dtype_policies.DTypePolicyMap()
        )
        seen(lambda layer: setattr(layer, "compute_mask", lambda inputs, mask: mask))
        return found

    def causes() -> list[Any]:
        class Fails(keras.layers.Layer):
            fails = False

            def call(self, x: Any) -> Any:
                if self.fails:
                    raise ValueError("today") from KeyError("why")
                return x

        layer = Fails()
        model = keras.Sequential([keras.Input((4,)), layer])
        model(torch.ones(2, 4))
        layer.fails = True
        keras.config.disable_traceback_filtering()
        try:
            model(torch.ones(2, 4))
        except ValueError as error:
            return [repr(error), repr(error.__cause__)]
        finally:
            keras.config.enable_traceback_filtering()
        return []

    for program, least in (
        (masks, 0),
        (own, 4),
        (mixed, 3),
        (explicit_masks, 0),
        (changed, 6),
        (causes, 1),
        (errors, 2),
    ):
        whole, found, short = _twice(program)
        assert len(short) >= least, (program.__name__, short)
        assert str(whole) == str(found), (program.__name__, whole, found)
    assert "Arguments received by Fails.call()" in str(found), found
