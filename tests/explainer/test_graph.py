"""The calls of models with a graph, without one, and inside each other."""

from __future__ import annotations

import keras
import pytest
from keras import layers

from tests.explainer.small import COLUMN, ROW, dense, explained, sent

pytestmark = pytest.mark.usefixtures("described")


@pytest.mark.filterwarnings("ignore:.build... was called on layer:UserWarning")  # as for any subclass without one
def test_a_model_without_a_graph_says_the_same() -> None:
    class Block(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="m")
            self.parts = [layers.Dense(count, name=f"d{number}") for number, count in enumerate((64, 128, 64))]

        def call(self, x: object) -> object:
            for part in self.parts:
                x = keras.ops.relu(part(x))
            return x

    def build() -> keras.Model:
        model = Block()
        model.build((None, 64))
        return model

    rules = {"d1/kernel": COLUMN, "d1/bias": ROW, "d2/kernel": ROW}
    explanation = explained(build, rules)
    assert [row[4] for row in sent(explanation)] == [
        row[4] for row in sent(explained(lambda: dense(64, 128, 64), rules))
    ]
    assert any("Block has no graph" in note for note in explanation.notes)


def test_a_model_inside_a_model() -> None:
    def build() -> keras.Model:
        inner = keras.Sequential([layers.Input((64,)), layers.Dense(128, name="up"), layers.Dense(64, name="down")])
        model = keras.Sequential([layers.Input((64,)), layers.Dense(64, name="stem"), inner, layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    explanation = explained(build, {"up/kernel": COLUMN, "up/bias": ROW, "down/kernel": ROW})
    assert [row[:2] for row in sent(explanation)] == [("forward", "all_reduce"), ("backward", "all_reduce")]
