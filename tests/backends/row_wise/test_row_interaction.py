"""Do rows interact? Answered from a layer's structure, without an engine that trains."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import keras
import numpy as np
import pytest

from keras_flow.backends.row_wise import looks, row_interaction, row_sums

pytestmark = pytest.mark.usefixtures("four_ranks")
layers = keras.layers
ROW_BY_ROW: dict[str, Callable[[], keras.Layer]] = {
    "flip": lambda: layers.RandomFlip(),
    "crop": lambda: layers.RandomCrop(4, 4),
    "alpha dropout": lambda: layers.AlphaDropout(0.5),
    "softmax": lambda: layers.Activation("softmax"),
    "classes": lambda: layers.CategoryEncoding(4, output_mode="one_hot"),
}
KIND: dict[str, tuple[Callable[[], keras.Layer], str]] = {
    "one mask that looks like a row": (lambda: layers.AlphaDropout(0.5, noise_shape=(1, 8)), "unknown"),
    "two draws that look like rows": (lambda: layers.RandomGaussianBlur(), "unknown"),
    "the user's": (lambda: layers.Lambda(lambda x: x), "own code"),
    "normalization over rows": (lambda: layers.LayerNormalization(axis=0), "along rows"),
    "softmax of a vector of rows": (lambda: called(layers.Activation("softmax")), "along rows"),
    "attention between rows": (lambda: attention(attention_axes=(0,)), "along rows"),
    "attention between rows, from the last dim": (lambda: attention(attention_axes=(-4,)), "along rows"),
    "groups of rows": (lambda: of_eight(layers.GroupNormalization(2, axis=-2)), "along rows"),
    "a regularizer of one's own": (lambda: dense(activity_regularizer=lambda x: keras.ops.max(x)), "unknown"),
    "a constant with rows": (lambda: of_constant(keras.ops.ones((8, 4))), "shape"),
    "a constant of rows": (lambda: of_constant(keras.ops.ones((8,))), "shape"),
}


def called(layer: keras.Layer, *shape: int) -> keras.Layer:
    """The layer, called on a batch of rows of this shape."""
    layer(keras.Input(shape))
    return layer


def attention(**options: object) -> keras.Layer:
    layer = layers.MultiHeadAttention(2, 4, **options)  # type: ignore[arg-type]
    x = keras.Input((4, 4, 8))
    layer(x, x)
    return layer


def of_eight(layer: keras.Layer) -> keras.Layer:
    layer(keras.Input((4,), batch_size=8))
    return layer


def of_constant(constant: object) -> keras.Layer:
    x = keras.Input((4,), batch_size=8)
    return keras.Model(x, layers.Add()([x, constant]))


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_row_by_row(name: str) -> None:
    assert row_interaction.of_layer(called(ROW_BY_ROW[name](), 8, 8, 3)) is None


@pytest.mark.parametrize("name", KIND)
def test_rows_that_may_interact(name: str) -> None:
    make, kind = KIND[name]
    interaction = row_interaction.of_layer(make())
    assert interaction is not None and interaction.kind == kind


def test_a_vector_of_classes_is_one_sample() -> None:
    """Keras counts the classes of all rows where the rows have no dim of their own."""
    counts = called(layers.CategoryEncoding(4, output_mode="count"), 3)
    assert row_interaction.of_layer(counts) is None
    of_all = called(layers.CategoryEncoding(4, output_mode="count"))
    interaction = row_interaction.of_layer(of_all)
    assert interaction is not None and "vector for one sample" in interaction.text


def _own(call: Callable) -> Callable:
    """Another function with the name and the module of Keras's."""
    return functools.wraps(call)(lambda *args, **kwargs: call(*args, **kwargs))


def _quantized_by_columns() -> keras.layers.Dense:
    from keras.src.quantizers import AbsMaxQuantizer, quantization_config

    layer = dense()
    layer.quantize(config=quantization_config.Int8QuantizationConfig(activation_quantizer=AbsMaxQuantizer(axis=0)))
    return layer


def dense(**options: object) -> keras.layers.Dense:
    return called(layers.Dense(4, **options), 8)  # type: ignore[return-value]


def _changed(change: Callable[[keras.Layer], object]) -> Callable[[], keras.Layer]:
    def make() -> keras.Layer:
        layer = dense(activation="relu")
        assert row_interaction.of_layer(layer) is None
        change(layer)
        return layer

    return make


def _of_class(layer: keras.Layer) -> None:
    kind = type(layer)
    layer.__class__ = type("Dense", (kind,), {"call": _own(kind.call), "__module__": "mine"})  # type: ignore[attr-defined]


CHANGED: dict[str, tuple[Callable[[], keras.Layer], str, str]] = {
    "float8": (_changed(lambda x: x.quantize("float8")), "quantization", "'dense' is quantized to float8"),
    "its policy": (lambda: dense(dtype="float8_from_float32"), "quantization", "quantized to float8"),
    "a quantizer by columns": (_quantized_by_columns, "quantization", "a quantizer of its own"),
    "another call": (_changed(lambda x: setattr(x, "call", _own(x.call))), "own code", "the method 'call'"),
    "a graph's other call": (lambda: _patched_graph(), "own code", "the method 'call'"),
    "another method": (
        _changed(lambda x: x.__dict__.update(_int8_call=types.MethodType(_own(type(x)._int8_call), x))),
        "own code",
        "the method '_int8_call'",
    ),
    "another class": (_changed(_of_class), "own code", "a custom layer (Dense)"),
    "a wrapped activation": (
        _changed(lambda x: setattr(x, "activation", _own(keras.activations.relu))),
        "function",
        "a custom activation function",
    ),
    "an operation": (_changed(lambda x: setattr(x, "activation", keras.ops.cumsum)), "function", "custom activation"),
    "state": (
        _changed(lambda x: (x._tracker.unlock(), x.add_weight(shape=(4,), name="ema", trainable=False))),
        "state",
        "has state (dense/ema)",
    ),
    "a regularizer": (
        _changed(lambda x: setattr(x, "activity_regularizer", keras.regularizers.L2())),
        "added loss",
        "an activity regularizer",
    ),
    "attention, inside": (
        lambda: _quantized_inside(),
        "quantization",
        "is quantized to float8",
    ),
}


def _patched_graph() -> keras.Layer:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    assert row_interaction.of_layer(model) is None
    model.call = _own(model.call)
    return model


def _quantized_inside() -> keras.Layer:
    layer = layers.MultiHeadAttention(2, 4)
    x = keras.Input((5, 8))
    layer(x, x)
    assert row_interaction.of_layer(layer) is None
    layer._value_dense.quantize("float8")
    return layer


@pytest.mark.parametrize("name", CHANGED)
def test_a_layer_is_looked_at_again_when_it_has_changed(name: str) -> None:
    keras.utils.clear_session()
    make, kind, text = CHANGED[name]
    interaction = row_interaction.of_layer(make())
    assert interaction is not None and interaction.kind == kind
    assert text in interaction.text


@pytest.mark.parametrize("mode", ["int8", "int4", "lora"])
def test_what_stays_row_by_row(mode: str) -> None:
    layer = dense(activation="relu")
    layer.enable_lora(2) if mode == "lora" else layer.quantize(mode)
    assert row_interaction.of_layer(layer) is None


def test_a_model_is_looked_at_again() -> None:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(2)])
    assert row_interaction.of_model(model) is None
    model.layers[1].quantize("float8")
    assert row_interaction.of_model(model) is not None
    model.layers[1].dtype_policy = keras.DTypePolicy("float32")  # its variables are still there
    interaction = row_interaction.of_model(model)
    assert interaction is not None and interaction.kind == "state"


def test_a_patched_class_is_found() -> None:
    layer = dense()
    model = keras.Sequential([keras.Input((8,)), layer])
    assert row_interaction.of_model(model) is None
    with mock.patch.object(layers.Dense, "call", _own(layers.Dense.call)):
        assert row_interaction.of_layer(layer) is not None
    with mock.patch.object(layers.Dense, "_float8_call", _own(layers.Dense._float8_call)):
        interaction = row_interaction.of_model(model)  # as the next loop begins
        assert interaction is not None and "'_float8_call'" in interaction.text
    assert row_interaction.of_model(model) is None


def test_a_call_decides_by_its_rank() -> None:
    """The same layer acts row by row on tokens, and along the rows on vectors."""
    layer = layers.Softmax(axis=-2)
    tokens, vectors = np.ones((6, 5, 4), "float32"), np.ones((6, 4), "float32")
    layer(tokens)
    called_with = [
        row_interaction.of_call(called(layers.LayerNormalization(axis=-1), 5, 4), (x,), {}) for x in (tokens,)
    ]
    assert called_with == [None]
    interaction = row_interaction.of_call(layer, (vectors,), {})
    assert interaction is not None and interaction.kind == "along rows"
    flip = called(layers.RandomFlip(), 8, 8, 3)
    assert row_interaction.of_call(flip, (np.ones((6, 8, 8, 3)),), {}) is None
    image = row_interaction.of_call(flip, (np.ones((8, 8, 3)),), {})
    assert image is not None and "takes a tensor of 3 dims for one sample" in image.text


def test_a_step_that_is_set_on_a_model_is_its_own() -> None:
    """It sees logical tensors, as that of a class does: what its layers do alone matters."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = dense()

    model = Own()
    assert row_interaction.of_model(model) is not None
    model.train_step = lambda data: {}  # type: ignore[method-assign]
    assert row_interaction.of_model(model) is None


def test_a_mask_of_queries_and_keys_has_no_rows() -> None:
    """Its dims may be as long as the batch; a mask with rows, a constant mask and one of another axis are known."""
    layer, x = layers.MultiHeadAttention(2, 4), np.ones((4, 4, 8), "float32")
    layer.build(x.shape, x.shape)
    interaction = row_interaction.of_call(layer, (x, x), {"attention_mask": np.ones((4, 4), bool)})
    assert interaction is not None and interaction.kind == "shape" and "'attention_mask'" in interaction.text
    assert row_interaction.of_call(layer, (x, x), {"attention_mask": np.ones((4, 4, 4), bool)}) is None
    assert row_interaction.of_layer(attention(attention_axes=(1,))) is None
    inputs = keras.Input((4, 8))
    masked = keras.Model(inputs, layer(inputs, inputs, attention_mask=np.ones((4, 4), bool)))
    assert row_interaction.of_layer(masked) is None


def test_losses_and_metrics_are_looked_at() -> None:
    """Their `call`, their function and their class may be another's."""
    loss, metric = keras.losses.MeanSquaredError(), keras.metrics.MeanSquaredError()
    assert row_sums.of_loss(loss, 2) is None and row_sums.of_metric(metric, 2) is None
    loss.fn = _own(loss.fn)
    metric._fn = _own(metric._fn)
    assert row_sums.of_loss(loss, 2) is not None and row_sums.of_metric(metric, 2) is not None
    loss, metric = keras.losses.Huber(), keras.metrics.AUC()
    loss.call = _own(loss.call)
    metric.update_state = _own(metric.update_state)
    assert row_sums.of_loss(loss, 2) is not None and row_sums.of_metric(metric, 2) is not None
    with mock.patch.object(keras.losses.Hinge, "call", _own(keras.losses.Hinge.call)):
        assert row_sums.of_loss(keras.losses.Hinge(), 2) is not None
    assert row_sums.of_loss(keras.losses.Hinge(), 2) is None


def test_functions_and_names_are_judged_as_their_classes() -> None:
    """By the axis that a function has without being told; the mean of a loss is a metric of rows if the loss is."""
    for given, kind in (("circle", "unknown"), ("dice", "along rows"), ("tversky", "along rows"), ("mse", "")):
        function = keras.losses.get(given)
        for loss in (function, keras.losses.MeanSquaredError.__mro__[1](function)):
            interaction = row_sums.of_loss(loss, 2)
            assert (interaction.kind if interaction else "") == kind, (given, interaction)
        interaction = row_sums.of_metric(keras.metrics.MeanMetricWrapper(function), 2)
        assert (interaction.kind if interaction else "") == kind, (given, interaction)
    for function in (keras.metrics.sparse_categorical_accuracy, keras.metrics.log_cosh):
        assert row_sums.of_metric(keras.metrics.MeanMetricWrapper(function), 2) is None
    dice = keras.losses.Dice(axis=(1, 2))
    assert row_sums.of_loss(dice, 3) is None and row_sums.of_loss(keras.losses.Dice(axis=(0, 1)), 3) is not None
    own = _own(keras.losses.mean_squared_error)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    for is_built in (False, True):
        model.compile("sgd", "dice", metrics=["accuracy", keras.losses.circle], weighted_metrics=[own, "mae"])
        if is_built:
            model._compile_loss.build(*[keras.KerasTensor((4, 3))] * 2)
            model._compile_metrics.build(*[keras.KerasTensor((4, 3))] * 2)
        assert [each.kind for each in row_sums.of_compiled(model, "loss", 2)] == ["along rows"]
        assert [each.kind for each in row_sums.of_compiled(model, "metric", 2)] == ["unknown", "own code"]


def test_metrics_that_have_a_name_add_up_rows() -> None:
    """All that `compile` may be given by name, since Keras alone makes objects of names."""
    made = [name for name in vars(keras.metrics) if name not in ("Mean", "Metric", "Sum")]
    assert {name for name in made if isinstance(getattr(keras.metrics, name), type)} == row_sums._METRICS


@dataclass
class Scaled:
    """Callable, and without a hash, as a dataclass is."""

    factor: float = 2.0

    def __call__(self, *values):
        return self.factor * values[-1]


def test_functions_without_a_hash() -> None:
    interaction = row_interaction.of_layer(dense(activation=Scaled()))
    assert interaction is not None and interaction.kind == "function"
    interaction = row_sums.of_loss(Scaled(), 2)
    assert interaction is not None and interaction.kind == "own code"
    assert row_sums.of_loss(keras.losses.mean_squared_error, 2) is None


def test_what_a_loop_sets_is_neither_looked_at_nor_kept() -> None:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
    assert row_interaction.of_model(model) is None
    model.__dict__.update(training=True, _eval_epoch_iterator=Scaled(), train_function=None)
    data = weakref.ref(model.__dict__["_eval_epoch_iterator"])
    assert row_interaction.of_model(model) is None
    first = looks.last(model)
    model.__dict__.update(training=False, train_function=Scaled())
    del model.__dict__["_eval_epoch_iterator"]
    assert row_interaction.of_model(model) is None
    assert looks.last(model) is first, "judged once"
    gc.collect()
    assert data() is None, "data of a loop that has ended"
    model.__dict__["call"] = _own(model.call)  # where the iterator was
    assert row_interaction.of_model(model) is not None
