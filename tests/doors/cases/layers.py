"""Doors of `keras.layers.Layer`, opened on the layers of a model that trains."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np

from tests.doors.cases.registry import door, values, weights
from tests.doors.stage import Stage


@door("Layer.get_weights", "Layer.set_weights")
def set_weights(s: Stage) -> Any:
    s.model.set_weights([value * 0.5 for value in s.model.get_weights()])
    s.model.get_layer("h").set_weights([value + 1 for value in s.model.get_layer("h").get_weights()])
    return s.model.predict(s.x, verbose=0), s.model.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"]


@door(
    "Layer.variables",
    "Layer.weights",
    "Layer.trainable_variables",
    "Layer.trainable_weights",
    "Layer.non_trainable_variables",
    "Layer.non_trainable_weights",
)
def variables(s: Stage) -> Any:
    model = s.model
    kinds = (model.variables, model.weights, model.trainable_variables, model.trainable_weights)
    kinds = (*kinds, model.non_trainable_variables, model.non_trainable_weights)
    return [values(kind) for kind in kinds], [np.asarray(v.numpy()) for v in model.weights]


@door("Layer.metrics_variables")
def metrics_variables(s: Stage) -> Any:
    s.model.fit(s.x, s.y, batch_size=len(s.x), verbose=0)  # `evaluate` by one process alone leaves them as they were
    return values(s.model.metrics_variables)


@door("Layer.trainable")
def trainable(s: Stage) -> Any:
    s.model.get_layer("h").trainable = False
    s.model.compile(keras.optimizers.SGD(0.1), "mse")
    loss = s.model.fit(s.x, s.y, batch_size=len(s.x), epochs=2, verbose=0).history["loss"]
    return loss, weights(s.model)


@door("Layer.symbolic_call")
def symbolic_call(s: Stage) -> Any:
    layer, given = s.model.get_layer("h"), keras.KerasTensor((None, 6))
    found = [each.symbolic_call(given) for each in (s.model, layer)]
    return [(each.shape, each.dtype) for each in found], keras.ops.convert_to_numpy(layer(s.x))


@door("Layer.call", "Layer.compute_output_shape", "Layer.compute_output_spec")
def call(s: Stage) -> Any:
    outputs = s.model(s.x)
    in_training = s.model(s.x, training=True)
    spec = s.model.compute_output_spec(keras.KerasTensor((None, 6)))
    return (
        keras.ops.convert_to_numpy(outputs),
        keras.ops.convert_to_numpy(in_training),
        spec.shape,
        s.model.compute_output_shape((None, 6)),
        keras.ops.convert_to_numpy(s.model.get_layer("h").call(s.x)),
        keras.ops.convert_to_numpy(s.model.get_layer("h")(s.x[:1])),
    )


class Counts(keras.layers.Layer):
    """A layer with state of its own, an added loss and a seed generator."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")
        self.extra = self.add_variable((2,), initializer="ones", trainable=False, name="extra")

    def call(self, x: Any) -> Any:
        self.seen.assign(self.seen + keras.ops.sum(x))
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x * self.scale


def _counts(s: Stage) -> dict[str, Any]:
    layer = Counts(name="counts")
    # `h`: the rules of the layouts match it
    layers = [keras.layers.Input((6,)), layer, keras.layers.Dense(8, "tanh", name="h"), keras.layers.Dense(3, name="o")]
    model = s.build(layers)
    return {"model": model, "layer": layer}


@door("Layer.add_loss", "Layer.add_weight", "Layer.add_variable", "Layer.losses", "Layer.build", make=_counts)
def own_state(s: Stage) -> Any:
    model = s.extra["model"]
    loss = model.fit(s.x, s.y, batch_size=len(s.x), epochs=2, verbose=0).history["loss"]
    trained = weights(model)
    model(s.x)  # the losses after `fit` are those of its trace, which TensorFlow has no numbers of
    return loss, trained, [float(value) for value in model.losses]


@door("Layer.metrics", make=lambda s: {"metric": keras.metrics.Mean(name="size")})
def metrics(s: Stage) -> Any:
    s.extra["metric"].update_state(s.x)
    s.model.evaluate(s.x, s.y, verbose=0)
    return float(s.extra["metric"].result()), [metric.name for metric in s.model.metrics]


@door(
    "Layer.get_config", "Layer.from_config", "Layer.get_build_config", "Layer.build_from_config", "Layer.count_params"
)
def from_config(s: Stage) -> Any:
    again = type(s.model).from_config(s.model.get_config())
    again.build_from_config(s.model.get_build_config())
    again.set_weights(s.model.get_weights())
    return again.predict(s.x, verbose=0), again.count_params()


@door("Layer.save_own_variables", "Layer.load_own_variables")
def own_variables(s: Stage) -> Any:
    store: dict[str, Any] = {}
    s.model.get_layer("h").save_own_variables(store)
    kept = {name: np.asarray(value) for name, value in store.items()}
    s.model.get_layer("h").set_weights([value * 0 for value in s.model.get_layer("h").get_weights()])
    s.model.get_layer("h").load_own_variables(kept)
    return sorted(kept.items()), s.model.predict(s.x, verbose=0)


@door(
    "Layer.dtype",
    "Layer.dtype_policy",
    "Layer.compute_dtype",
    "Layer.variable_dtype",
    "Layer.input_dtype",
    "Layer.input_spec",
    "Layer.path",
    "Layer.supports_masking",
    "Layer.input",
    "Layer.output",
    "Layer.compute_mask",
)
def said_of_it(s: Stage) -> Any:
    layer = s.model.get_layer("h")
    names = ("dtype", "compute_dtype", "variable_dtype", "input_dtype", "supports_masking")
    inner = keras.Model(s.model.inputs, layer.output)
    return (
        [str(getattr(layer, name)) for name in names],
        layer.dtype_policy.name,
        layer.path,
        [(spec.min_ndim, spec.axes) for spec in keras.tree.flatten(layer.input_spec)],
        layer.input.shape,
        layer.compute_mask(s.x, None),
        keras.ops.convert_to_numpy(inner(s.x)),
    )


@door("Layer.quantize", "Layer.quantization_mode", "Layer.quantized_build", "Layer.quantized_call")
def quantize(s: Stage) -> Any:
    s.model.quantize("int8")
    return s.model.get_layer("h").quantization_mode, s.model.predict(s.x, verbose=0)


@door("Layer.quantize, float8")
def quantize_float8(s: Stage) -> Any:
    s.model.quantize("float8")
    s.model.compile(keras.optimizers.SGD(0.1), "mse")
    loss = s.model.fit(s.x, s.y, batch_size=len(s.x), epochs=3, shuffle=False, verbose=0).history["loss"]
    return loss, values(s.model.non_trainable_variables)


def _rematerialized(s: Stage) -> dict[str, Any]:
    # TensorFlow's own fails on one device (`custom_gradient` takes no keywords in a graph): the same without it there
    is_plain = keras.backend.backend() == "tensorflow" and s.distribution is None
    with contextlib.nullcontext() if is_plain else keras.RematScope(mode="full"):
        layers = [keras.layers.Input((6,)), keras.layers.Dense(8, "tanh", name="h"), keras.layers.Dense(3, name="o")]
    return {"model": s.build(layers)}


@door("Layer.rematerialized_call", make=_rematerialized)
def rematerialized_call(s: Stage) -> Any:
    model = s.extra["model"]
    return model.fit(s.x, s.y, batch_size=len(s.x), epochs=2, verbose=0).history["loss"], weights(model)
