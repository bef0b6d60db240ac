"""Rules to begin with: attention by heads, pairs by columns and rows, and what has no partner whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers

from keras_flow.distributions.first_rules import first_rules

pytestmark = pytest.mark.usefixtures("four_ranks")


class Block(layers.Layer):
    """As people write it, with all layers in `__init__`."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.attention = layers.MultiHeadAttention(4, 8, name="attention")
        self.up = layers.Dense(64, "relu", name="up")
        self.down = layers.Dense(32, name="down")
        self.norm = layers.LayerNormalization(name="norm")

    def call(self, x: object) -> object:
        x = self.norm(x + self.attention(x, x))
        return x + self.down(self.up(x))


def test_each_block_alike() -> None:
    inputs = keras.Input((10, 32))
    model = keras.Model(inputs, layers.Dense(5, name="head")(Block(name="block1")(Block(name="block0")(inputs))))
    rules = first_rules(model)
    expected = {
        "attention/query/kernel": 1,
        "attention/query/bias": 0,
        "attention/key/kernel": 1,
        "attention/key/bias": 0,
        "attention/value/kernel": 1,
        "attention/value/bias": 0,
        "attention/attention_output/kernel": 0,
        "up/kernel": 1,
        "up/bias": 0,
        "down/kernel": 0,
    }
    assert rules == {f"block{n}/{path}": {"model": dim} for n in (0, 1) for path, dim in expected.items()}


class Gated(layers.Layer):
    """SwiGLU, whose first layers have one shape."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.gate, self.up = (layers.Dense(64, use_bias=False, name=name) for name in ("gate", "up"))
        self.down = layers.Dense(32, use_bias=False, name="down")

    def call(self, x: object) -> object:
        return self.down(keras.ops.silu(self.gate(x)) * self.up(x))


def test_a_gate_goes_with_the_layer_beside_it() -> None:
    inputs = keras.Input((10, 32))
    model = keras.Model(inputs, layers.Dense(5, name="head")(Gated(name="ff")(inputs)))
    assert first_rules(model) == {f"ff/{n}/kernel": {"model": dim} for n, dim in (("gate", 1), ("up", 1), ("down", 0))}


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: [_dense("a", 8), layers.ReLU(), _dense("b", 4)], ["a/kernel", "a/bias", "b/kernel"]),
        (lambda: [_dense("a", 8), layers.LayerNormalization(), _dense("b", 4)], []),
        (lambda: [_dense("a", 7), _dense("b", 4)], []),  # 7 units for two ranks
        (lambda: [_dense("a", 8, use_bias=False), _dense("b", 4)], ["a/kernel", "b/kernel"]),
        (lambda: [_dense("a", 8)], []),
    ],
)
def test_pairs(make: Callable[[], list[layers.Layer]], names: list[str]) -> None:
    model = keras.Sequential([keras.Input((6,)), *make()], name="m")
    assert [path.removeprefix("m/") for path in first_rules(model)] == names


def _dense(name: str, units: int, **settings: Any) -> layers.Layer:
    return layers.Dense(units, name=name, **settings)
