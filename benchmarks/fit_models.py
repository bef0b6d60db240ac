"""The models of `benchmarks/fit.py`: three families of about 0.1, 1 and 10 million parameters.

Each has a pair of wide layers, split by columns and then by rows under tensor parallelism (Shoeybi et al., 2019,
"Megatron-LM"). `Parts` lets the same code build the part of one rank, for the loops that are written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

#: family -> width for each size, in millions of parameters
WIDTHS = {
    "mlp": {0.1: 96, 1: 336, 10: 1100},
    "cnn": {0.1: 36, 1: 116, 10: 372},
    "transformer": {0.1: 72, 1: 268, 10: 892},
}
BATCH = {"mlp": 128, "cnn": 32, "transformer": 32}
FEATURES, CLASSES, SIDE, CHANNELS, LENGTH, VOCABULARY, HEADS = 256, 16, 16, 8, 16, 256, 4

#: family -> pattern of a variable's path -> the dim that is split over the model axis
RULES = {
    "mlp": {"up/kernel": 1, "up/bias": 0, "down/kernel": 0},
    "cnn": {"up/kernel": 3, "norm/": 0, "down/kernel": 2},
    "transformer": {
        "attention/(query|key|value)/kernel": 1,
        "attention/attention_output/kernel": 0,
        "up/kernel": 1,
        "up/bias": 0,
        "down/kernel": 0,
    },
}


@dataclass(frozen=True)
class Parts:
    """Which part of the wide layers a model holds: all, or those of one rank between `enter` and `leave`.

    `norm` makes the CNN's normalization.
    """

    number: int = 1
    enter: Callable[[Any], Any] = lambda x: x
    leave: Callable[[Any], Any] = lambda x: x
    norm: Callable[..., Any] = layers.BatchNormalization


def build(family: str, size: float, parts: Parts | None = None) -> keras.Model:
    """A compiled model."""
    keras.utils.set_random_seed(0)
    parts = parts or Parts()
    made = {"mlp": _mlp, "cnn": _cnn, "transformer": _transformer}[family](WIDTHS[family][size], parts)
    made.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def data(family: str, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows for so many steps."""
    random, rows = np.random.default_rng(0), steps * BATCH[family]
    if family == "transformer":
        tokens = random.integers(0, VOCABULARY, (rows, LENGTH + 1)).astype("int32")
        return tokens[:, :-1], tokens[:, 1:]
    shape = (FEATURES,) if family == "mlp" else (SIDE, SIDE, CHANNELS)
    return random.standard_normal((rows, *shape)).astype("float32"), random.integers(0, CLASSES, rows).astype("int32")


def _mlp(width: int, parts: Parts) -> keras.Model:
    inputs = layers.Input((FEATURES,))
    x = layers.Dense(width, activation="relu", name="stem")(inputs)
    wide = layers.Dense(4 * width // parts.number, activation="relu", name="up")(parts.enter(x))
    x = keras.ops.relu(parts.leave(layers.Dense(width, use_bias=False, name="down")(wide)))
    return keras.Model(inputs, layers.Dense(CLASSES, name="logits")(x))


def _cnn(width: int, parts: Parts) -> keras.Model:
    inputs = layers.Input((SIDE, SIDE, CHANNELS))
    x = layers.Conv2D(width, 3, padding="same", activation="relu", name="stem")(inputs)
    x = layers.MaxPooling2D(4)(x)
    wide = layers.Conv2D(4 * width // parts.number, 3, padding="same", use_bias=False, name="up")(parts.enter(x))
    wide = layers.ReLU()(parts.norm(name="norm")(wide))
    x = parts.leave(layers.Conv2D(width, 3, padding="same", use_bias=False, name="down")(wide))
    x = layers.GlobalAveragePooling2D()(keras.ops.relu(x))
    return keras.Model(inputs, layers.Dense(CLASSES, name="logits")(x))


def _transformer(width: int, parts: Parts) -> keras.Model:
    tokens = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, width, name="embedding")(tokens)
    seen = parts.enter(layers.LayerNormalization(name="norm1")(x))
    attention = layers.MultiHeadAttention(HEADS // parts.number, width // HEADS, use_bias=False, name="attention")
    x = x + parts.leave(attention(seen, seen, use_causal_mask=True))
    seen = parts.enter(layers.LayerNormalization(name="norm2")(x))
    wide = layers.Dense(4 * width // parts.number, activation="gelu", name="up")(seen)
    x = x + parts.leave(layers.Dense(width, use_bias=False, name="down")(wide))
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="logits")(x))
