"""Random functional models: 3 to 12 layers with branches, shared layers, nested models, masks, frozen parts.

The same seed draws the same model, whatever the engine; `Drawn.text` lists its layers as a reader would write them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

_TOKENS = 12
_ACTIVATIONS = ("tanh", "gelu", "sigmoid", "silu", None)


class Centred(layers.Layer):
    """A layer of a user's own that mixes rows."""

    def call(self, inputs: Any) -> Any:
        return inputs - 0.5 * ops.mean(inputs, axis=0, keepdims=True)


class Noted(layers.Layer):
    """A layer of a user's own that adds a loss and keeps a running mean."""

    def build(self, input_shape: Any) -> None:
        self.mean = self.add_weight(shape=(input_shape[-1],), initializer="zeros", trainable=False, name="mean")
        self.gain = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="gain")

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.add_loss(0.01 * ops.mean(ops.square(inputs)))
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs, axis=0))
        return inputs * self.gain


@dataclass
class Drawn:
    """What was drawn.

    Attributes:
        seed: from which it was drawn.
        model: the model, not compiled.
        compile: options of `compile` but for the optimizer.
        x, y, sample_weight: arrays [rows, ...], a list of them for several inputs or outputs.
        text: a line for each layer.
    """

    seed: str
    model: keras.Model
    compile: dict[str, Any]
    x: Any
    y: Any
    sample_weight: Any
    text: list[str] = field(default_factory=list)


def is_for_a_pipeline(seed: str) -> bool:
    """Whether the model of a seed is for a pipeline: one in which no rows interact, but for losses."""
    return seed.startswith("p")


#: kinds of layers in which rows interact, which a pipeline refuses or is told of -> those drawn instead for one
_ROW_BY_ROW = {"batch": "norm", "centred": "dense", "noted": "dropout"}


class _Drawing:
    def __init__(self, drawn: random.Random, row_by_row: bool):
        self.drawn, self.row_by_row = drawn, row_by_row
        self.text: list[str] = []
        self.tensors: dict[str, list[Any]] = {"vector": [], "sequence": [], "image": []}
        #: layers that were used, by the features of their input, to be used again
        self.shared: dict[tuple[Any, ...], list[layers.Layer]] = {}
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"l{self.count}"

    def apply(self, layer: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        output = layer(*inputs, **options)
        names = ", ".join(_called(tensor) for tensor in inputs)
        kind = type(layer).__name__
        self.text.append(f"{_called(output)} = {kind} {getattr(layer, 'name', '')}({names}{', ' if options else ''}"
                         f"{', '.join(f'{key}={_called(value)}' for key, value in options.items())})")  # fmt: skip
        return output

    def pick(self, kind: str) -> Any:
        """A tensor that was made; the last ones more often."""
        found = self.tensors[kind]
        return found[max(self.drawn.randrange(len(found)), self.drawn.randrange(len(found)))]

    def step(self) -> None:
        """One more layer."""
        kind = self.drawn.choice([kind for kind, found in self.tensors.items() if found])
        {"vector": self._on_vector, "sequence": self._on_sequence, "image": self._on_image}[kind](self.pick(kind))

    def _again(self, x: Any) -> bool:
        """Use a layer once more."""
        found = self.shared.get(tuple(x.shape[1:]), [])
        if not found or self.drawn.random() > 0.15:
            return False
        layer = self.drawn.choice(found)
        self._keep(self.apply(layer, x))
        return True

    def _keep(self, output: Any) -> None:
        kind = {2: "vector", 3: "sequence", 4: "image"}[len(output.shape)]
        self.tensors[kind].append(output)

    def _on_vector(self, x: Any) -> None:
        drawn, name = self.drawn, self.name()
        if self._again(x):
            return
        features = x.shape[-1]
        kind = drawn.choice(
            "dense dense dense norm batch dropout add concatenate repeat reshape centred noted nested einsum".split()
        )
        kind = _ROW_BY_ROW.get(kind, kind) if self.row_by_row else kind
        others = [tensor for tensor in self.tensors["vector"] if tensor.shape == x.shape and tensor is not x]
        if kind in ("add", "concatenate") and others:
            merged = drawn.choice([layers.Add, layers.Multiply, layers.Average, layers.Concatenate])(name=name)
            self._keep(self.apply(merged, [x, drawn.choice(others)]))
            return
        if kind == "reshape" and features % 2 == 0:
            layer: Any = layers.Reshape((2, features // 2), name=name)
        elif kind == "nested":
            inner = keras.Input((features,))
            hidden = layers.Dense(6, activation="tanh", name=f"{name}_a")(inner)
            layer = keras.Model(inner, layers.Dense(features, name=f"{name}_b")(hidden) + inner, name=name)
        else:
            layer = {
                "norm": lambda: drawn.choice([layers.LayerNormalization, layers.RMSNormalization])(name=name),
                "batch": lambda: layers.BatchNormalization(momentum=0.8, name=name),
                "dropout": lambda: layers.Dropout(0.3, seed=drawn.randrange(99), name=name),
                "repeat": lambda: layers.RepeatVector(3, name=name),
                "centred": lambda: Centred(name=name),
                "noted": lambda: Noted(name=name),
                "einsum": lambda: layers.EinsumDense("bi,ij->bj", output_shape=drawn.choice([4, 6, 8]), name=name),
            }.get(kind, lambda: self._dense(name))()
        if drawn.random() < 0.5:
            self.shared.setdefault(tuple(x.shape[1:]), []).append(layer)
        self._keep(self.apply(layer, x))

    def _dense(self, name: str) -> layers.Layer:
        return layers.Dense(
            self.drawn.choice([3, 4, 6, 8]),
            activation=self.drawn.choice(_ACTIVATIONS),
            kernel_regularizer=self.drawn.choice([None, None, keras.regularizers.L2(0.01)]),
            name=name,
        )

    def _on_sequence(self, x: Any) -> None:
        drawn, name = self.drawn, self.name()
        if self._again(x):
            return
        kind = drawn.choice("lstm gru bidirectional attention conv norm dense pool flatten simple spaced".split())
        returns = drawn.random() < 0.5
        if kind == "attention":
            layer: Any = layers.MultiHeadAttention(2, 4, name=name)
            self._keep(self.apply(layer, x, x, use_causal_mask=returns))
            return
        layer = {
            "lstm": lambda: layers.LSTM(drawn.choice([4, 6]), return_sequences=returns, name=name),
            "gru": lambda: layers.GRU(drawn.choice([4, 6]), return_sequences=returns, name=name),
            "simple": lambda: layers.SimpleRNN(4, return_sequences=returns, go_backwards=returns, name=name),
            "bidirectional": lambda: layers.Bidirectional(layers.GRU(4, return_sequences=returns), name=name),
            "conv": lambda: layers.Conv1D(drawn.choice([4, 6]), 2, padding=drawn.choice(["same", "causal"]), name=name),
            "norm": lambda: layers.LayerNormalization(name=name),
            "dense": lambda: self._dense(name),
            "pool": lambda: drawn.choice([layers.GlobalAveragePooling1D, layers.GlobalMaxPooling1D])(name=name),
            "flatten": lambda: layers.Flatten(name=name),
            "spaced": lambda: layers.TimeDistributed(layers.Dense(4, activation="tanh"), name=name),
        }[kind]()
        self._keep(self.apply(layer, x))

    def _on_image(self, x: Any) -> None:
        drawn, name = self.drawn, self.name()
        if self._again(x):
            return
        channels = x.shape[-1]
        kind = drawn.choice("conv conv dilated grouped depthwise separable transposed batch group pool up flat".split())
        if kind == "batch" and self.row_by_row:
            kind = "group"
        if kind == "pool" and min(x.shape[1:3]) < 2:
            kind = "flat"
        if kind == "up" and max(x.shape[1:3]) > 6:
            kind = "group" if self.row_by_row else "batch"
        layer = {
            "conv": lambda: layers.Conv2D(
                drawn.choice([4, 6]),
                drawn.choice([1, 2, 3]),
                strides=drawn.choice([1, 2]),
                padding="same",
                activation=drawn.choice(_ACTIVATIONS),
                name=name,
            ),
            "dilated": lambda: layers.Conv2D(4, 2, padding="same", dilation_rate=2, name=name),
            "grouped": lambda: layers.Conv2D(4, 2, padding="same", groups=2 if channels % 2 == 0 else 1, name=name),
            "depthwise": lambda: layers.DepthwiseConv2D(
                2, padding="same", depth_multiplier=drawn.choice([1, 2]), name=name
            ),
            "separable": lambda: layers.SeparableConv2D(4, 2, padding="same", name=name),
            "transposed": lambda: layers.Conv2DTranspose(4, 2, padding="same", name=name),
            "batch": lambda: layers.BatchNormalization(momentum=0.8, name=name),
            "group": lambda: layers.GroupNormalization(groups=1, name=name),
            "pool": lambda: drawn.choice([layers.AveragePooling2D, layers.MaxPooling2D])(2, name=name),
            "up": lambda: layers.UpSampling2D(2, name=name),
            "flat": lambda: drawn.choice([layers.GlobalAveragePooling2D, layers.Flatten])(name=name),
        }[kind]()
        self._keep(self.apply(layer, x))

    def flat(self, x: Any) -> Any:
        """[rows, features] of any tensor."""
        if len(x.shape) == 2:
            return x
        kinds = {3: [layers.GlobalAveragePooling1D, layers.Flatten], 4: [layers.GlobalAveragePooling2D, layers.Flatten]}
        return self.apply(self.drawn.choice(kinds[len(x.shape)])(name=self.name()), x)


def _called(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_called, value))}]"
    return f"{value.name}{list(value.shape[1:])}" if hasattr(value, "shape") else str(value)


def draw(seed: str, rows: int) -> Drawn:
    """The model of a seed, and its data.

    Args:
        seed: decides on everything.
        rows: rows of the data.
    """
    drawn = random.Random(seed)
    drawing = _Drawing(drawn, is_for_a_pipeline(seed))
    numbers = np.random.default_rng(drawn.randrange(1 << 30))
    floatx = keras.config.floatx()
    inputs, x = [], []
    for place in range(drawn.choice([1, 1, 2, 3])):
        kind = drawn.choice(["vector", "tokens", "image", "sequence"])
        shape = {
            "vector": (drawn.choice([3, 4, 8]),),
            "tokens": (5,),
            "sequence": (4, drawn.choice([3, 4])),
            "image": (drawn.choice([4, 5]), 4, drawn.choice([2, 3, 4])),
        }[kind]
        tensor = keras.Input(shape, dtype="int32" if kind == "tokens" else None, name=f"x{place}")
        inputs.append(tensor)
        if kind == "tokens":
            length = numbers.integers(1, 6, (rows, 1))
            x.append(np.where(np.arange(5) < length, numbers.integers(1, _TOKENS, (rows, 5)), 0).astype("int32"))
            embedding = layers.Embedding(
                _TOKENS, drawn.choice([4, 6]), mask_zero=drawn.random() < 0.6, name=f"e{place}"
            )
            drawing._keep(drawing.apply(embedding, tensor))
        else:
            x.append(numbers.normal(size=(rows, *shape)).astype(floatx))
            drawing._keep(tensor)
    for _ in range(drawn.randint(3, 12)):
        drawing.step()
    leaves = [tensors[-1] for tensors in drawing.tensors.values() if tensors]
    outputs, losses, targets = [], [], []
    for place in range(drawn.choice([1, 1, 2, 3])):
        joined = [drawing.flat(drawn.choice(leaves))] if place else [drawing.flat(leaf) for leaf in leaves]
        # every input reaches the first output
        joined += [drawing.flat(tensor) for tensor in inputs if not place and tensor.dtype != "int32"]
        made = joined[0] if len(joined) == 1 else drawing.apply(layers.Concatenate(name=drawing.name()), joined)
        loss, units, target = _loss(drawn, numbers, rows, floatx)
        outputs.append(drawing.apply(layers.Dense(units, name=f"y{place}"), made))
        losses.append(loss)
        targets.append(target)
    model = keras.Model(inputs if len(inputs) > 1 else inputs[0], outputs if len(outputs) > 1 else outputs[0])
    for layer in model.layers:
        if layer.weights and drawn.random() < 0.1:
            layer.trainable = False
            drawing.text.append(f"{layer.name} is frozen")
    weight = [numbers.uniform(0.2, 2.0, rows).astype(floatx) for _ in outputs] if drawn.random() < 0.3 else None
    options: dict[str, Any] = {"loss": losses if len(losses) > 1 else losses[0]}
    if len(outputs) > 1 and drawn.random() < 0.5:
        options["loss_weights"] = [0.5 + place for place in range(len(outputs))]
    if drawn.random() < 0.5:
        options["metrics"] = ["mae"] if len(outputs) == 1 else [["mae"] for _ in outputs]
        options["metrics"] = options["metrics"] if _are_values(losses) else None
    single = len(outputs) == 1
    return Drawn(
        seed,
        model,
        options,
        x if len(x) > 1 else x[0],
        targets[0] if single else targets,
        weight[0] if weight and single else weight,
        drawing.text,
    )


def _are_values(losses: list[Any]) -> bool:
    return all(not isinstance(loss, keras.losses.SparseCategoricalCrossentropy) for loss in losses)


def _loss(drawn: random.Random, numbers: np.random.Generator, rows: int, floatx: str) -> tuple[Any, int, np.ndarray]:
    """A loss, the units of its output, and targets."""
    reduction = drawn.choice(["sum_over_batch_size", "sum_over_batch_size", "sum", "mean_with_sample_weight"])
    kind = drawn.choice(["squares", "classes", "binary", "huber", "cosine"])
    if kind == "classes":
        return (
            keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
            5,
            numbers.integers(0, 5, rows).astype("int32"),
        )
    if kind == "binary":
        target = numbers.integers(0, 2, (rows, 2)).astype(floatx)
        return keras.losses.BinaryCrossentropy(from_logits=True, reduction=reduction), 2, target
    loss = {
        "squares": keras.losses.MeanSquaredError,
        "huber": keras.losses.Huber,
        "cosine": keras.losses.CosineSimilarity,
    }[kind]
    return loss(reduction=reduction), 3, numbers.normal(size=(rows, 3)).astype(floatx)
