"""The models, rules and layouts on which explain is compared with what the engines do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras
import numpy as np
from keras import layers

import keras_flow as kf

BATCH = 32
LAYOUTS = ("dp4", "dp4z1", "dp4z2", "dp4z3", "tp4", "2x2", "2x2z1", "2x2z2", "2x2z3")


def mlp(width: int = 96) -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(width, activation="relu", name="stem"),
            layers.Dense(8 * width // 3, activation="relu", name="up"),
            layers.Dense(width, name="down"),
            layers.Dense(16, name="logits"),
        ],
        name="mlp",
    )


def cnn(side: int = 16) -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((side, side, 4)),
            layers.Conv2D(8, 3, padding="same", activation="relu", name="stem"),
            layers.Conv2D(32, 3, padding="same", use_bias=False, name="up"),
            layers.BatchNormalization(name="norm"),
            layers.ReLU(),
            layers.Conv2D(8, 3, padding="same", name="down"),
            layers.MaxPooling2D(4),
            layers.Flatten(),
            layers.Dense(16, name="logits"),
        ],
        name="cnn",
    )


def transformer(length: int = 16, width: int = 32) -> keras.Model:
    tokens = layers.Input((length,), dtype="int32")
    x = layers.Embedding(64, width, name="embedding")(tokens)
    normed = layers.LayerNormalization(name="norm1")(x)
    x = x + layers.MultiHeadAttention(4, width // 4, name="attention")(normed, normed)
    normed = layers.LayerNormalization(name="norm2")(x)
    x = x + layers.Dense(width, name="down")(layers.Dense(4 * width, activation="gelu", name="up")(normed))
    x = layers.Dense(64, name="logits")(x)
    return keras.Model(tokens, x, name="transformer")


def shared(width: int = 96) -> keras.Model:
    """A layer that is called three times, with an activation between."""
    x = inputs = layers.Input((64,))
    x = layers.Dense(width, activation="relu", name="stem")(x)
    again = layers.Dense(width, activation="tanh", name="again")
    x = layers.Dense(16, name="logits")(again(again(again(x))))
    return keras.Model(inputs, x, name="shared")


RULES: Mapping[str, Mapping[str, int]] = {
    "mlp": {"up/kernel": 1, "up/bias": 0, "down/kernel": 0},
    "shared": {"logits/kernel": 1},
    "cnn": {"up/kernel": 3, "norm/": 0, "down/kernel": 2},
    "transformer": {
        "attention/(query|key|value)/kernel": 1,
        "attention/(query|key|value)/bias": 0,
        "attention/attention_output/kernel": 0,
        "up/kernel": 1,
        "up/bias": 0,
        "down/kernel": 0,
    },
}
MODELS: Mapping[str, Callable[..., keras.Model]] = {
    "mlp": mlp,
    "shared": shared,
    "cnn": cnn,
    "transformer": transformer,
}
#: the same with hundreds of megabytes, of weights (mlp) or of activations
LARGE: Mapping[str, Callable[[], keras.Model]] = {
    "mlp": lambda: mlp(1272),
    "shared": lambda: shared(1272),
    "cnn": lambda: cnn(64),
    "transformer": lambda: transformer(128, 128),
}
LARGE_BATCH = 128


def data(model: keras.Model, rows: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    """One batch of so many rows."""
    random = np.random.default_rng(0)
    shape = (rows, *model.input_shape[1:])
    if model.name == "transformer":
        return random.integers(0, 64, shape), random.integers(0, 64, shape)
    return random.standard_normal(shape).astype("float32"), random.integers(0, 16, rows)


def distribution(name: str, layout: str) -> kf.DataParallel | kf.ModelParallel:
    """The distribution of a layout, with the rules of a model."""
    layout, _, stage = layout.partition("z")
    zero = int(stage or 0)
    if layout == "dp4":
        return kf.DataParallel(kf.Placement(range(4), axis_names=("data",)), zero=zero, zero_min_size=64)
    placement = (
        kf.Placement(range(4), axis_names=("model",))
        if layout == "tp4"
        else kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    )
    return kf.ModelParallel(
        placement,
        rules={pattern: {"model": kf.sbp.split(dim)} for pattern, dim in RULES[name].items()},
        zero=zero,
        zero_min_size=64,
    )


def compiled(name: str, sizes: Mapping[str, Callable[..., keras.Model]] = MODELS) -> keras.Model:
    """A built and compiled model."""
    model = sizes[name]()
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
