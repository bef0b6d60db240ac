"""The calls of models with a graph, without one, and inside each other."""

from __future__ import annotations

import keras
import pytest
from keras import layers

import keras_flow as kf
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
    assert any("Block has a call() of its own" in note for note in explanation.notes)


def test_a_model_inside_a_model() -> None:
    def build() -> keras.Model:
        inner = keras.Sequential([layers.Input((64,)), layers.Dense(128, name="up"), layers.Dense(64, name="down")])
        model = keras.Sequential([layers.Input((64,)), layers.Dense(64, name="stem"), inner, layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    explanation = explained(build, {"up/kernel": COLUMN, "up/bias": ROW, "down/kernel": ROW})
    assert [row[:2] for row in sent(explanation)] == [("forward", "all_reduce"), ("backward", "all_reduce")]


@pytest.mark.parametrize("adds_dim", [False, True])
def test_positions_without_rows_in_a_custom_layer(adds_dim: bool) -> None:
    """Each rank adds them to its own rows, so their gradient is summed as that of a bias; nothing is gathered."""

    class Embed(layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="embed")
            self.tokens = layers.Embedding(16, 32, name="tokens")
            self.positions = layers.Embedding(20, 32, name="positions")

        def call(self, x: object) -> object:
            positions = self.positions(keras.ops.arange(20))
            return self.tokens(x) + (keras.ops.expand_dims(positions, 0) if adds_dim else positions)

    def build() -> keras.Model:
        inputs = keras.Input((20,), dtype="int32")
        x = layers.Dense(2, name="out")(layers.GlobalAveragePooling1D()(Embed()(inputs)))
        model = keras.Model(inputs, x, name="m")
        model.compile("sgd", "mse")
        return model

    explanation = explained(build, {"out/kernel": COLUMN}, placement=kf.Placement([[0, 1]], ("model", "data")))
    rows = [(each.kind, each.path, each.tensor, each.received) for each in explanation.collectives]
    assert ("all_reduce", "embed/positions", "embeddings gradient", 20 * 32 * 4) in rows
    assert ("all_reduce", "embed/tokens", "embeddings gradient", 16 * 32 * 4) in rows
    assert not [row for row in rows if row[0] != "all_reduce"]
    assert not explanation.repeated


def test_attention_is_read_by_the_names_of_its_arguments() -> None:
    """A mask sorts before query and value, and its length is none of the keys'."""

    def build(masked: bool) -> keras.Model:
        ids = layers.Input((16,), dtype="int32")
        x = layers.Embedding(32, 64, mask_zero=masked, name="tokens")(ids)
        y = layers.MultiHeadAttention(8, 8, name="attention")(query=x, value=x)
        model = keras.Model(ids, layers.Dense(4, name="head")(y), name="m")
        model.compile("sgd", "mse")
        return model

    rules = {"(query|key|value)/kernel": COLUMN, "attention_output/kernel": ROW}
    plain, masked = (explained(lambda is_masked=each: build(is_masked), rules) for each in (False, True))
    assert sent(plain) == sent(masked)
    assert plain.memory[0].activations == masked.memory[0].activations


@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask:UserWarning")
def test_a_model_inside_a_model_behind_a_mask() -> None:
    def build() -> keras.Model:
        ids = layers.Input((16,), dtype="int32")
        x = layers.Embedding(32, 64, mask_zero=True)(ids)
        inner = keras.Sequential([layers.Input((16, 64)), layers.Dense(128, name="up"), layers.Dense(64, name="down")])
        model = keras.Model(ids, layers.Dense(4, name="head")(inner(x)), name="m")
        model.compile("sgd", "mse")
        return model

    explanation = explained(build, {"up/kernel": COLUMN, "up/bias": ROW, "down/kernel": ROW})
    assert [row[:2] for row in sent(explanation)] == [("forward", "all_reduce"), ("backward", "all_reduce")]


def test_a_table_that_also_makes_the_logits() -> None:
    def build() -> keras.Model:
        ids = layers.Input((16,), dtype="int32")
        tokens = layers.ReversibleEmbedding(32, 64, name="tokens")
        x = layers.Dense(64, name="middle")(tokens(ids))
        model = keras.Model(ids, tokens(x, reverse=True), name="m")
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    # rows of the table are columns of the logits, each of which needs all of a vector
    by_rows = sent(explained(build, {"tokens/embeddings": ROW}))
    assert ("backward", "all_reduce", "tokens", "input gradient") in [row[:4] for row in by_rows]
    # columns are what is summed over: a sum of logits [32, 16, 32], 16 KiB for each row of the table
    by_columns = [row for row in sent(explained(build, {"tokens/embeddings": COLUMN})) if row[0] == "forward"]
    assert [row[1:4] for row in by_columns].count(("all_reduce", "tokens", "output")) == 1


@pytest.mark.filterwarnings("ignore:.build... was called on layer:UserWarning")
def test_a_model_without_a_graph_by_rows() -> None:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="m")
            self.head = layers.Dense(4, name="head")

        def call(self, x: object) -> object:
            return self.head(x)

    def build() -> keras.Model:
        model = Net()
        model.compile("sgd", "mse", metrics=["mae"])
        model.build((None, 8))
        return model

    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    assert explained(build, {"head/kernel": COLUMN}, placement=placement).received > 0


@pytest.mark.filterwarnings("ignore:.build... was called on layer:UserWarning")
def test_a_model_without_a_graph_is_asked_as_fit_calls_it() -> None:
    """In training, and of whole numbers where it takes no others."""

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="m")
            self.norm, self.head = layers.BatchNormalization(name="norm"), layers.Dense(4, name="head")

        def build(self, shape: tuple[int, ...]) -> None:
            self.table = self.add_weight(shape=(10, 8), name="table")
            self.norm.build((None, 8))
            self.head.build((None, 8))
            self.built = True

        def call(self, ids: object, training: bool = False) -> object:
            rows = keras.ops.take(self.table, ids, axis=0)
            return self.head(self.norm(keras.ops.sum(rows, axis=1), training=training))

    def build() -> keras.Model:
        model = Net()
        model.build((None, 2))
        model.compile("sgd", "mse")
        return model

    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    found = sent(explained(build, {"head/kernel": COLUMN}, placement=placement))
    assert {row[0] for row in found if row[3] == "statistics"} == {"forward", "backward"}


@pytest.mark.parametrize(("training", "phases"), [(None, {"forward", "backward"}), (False, set())])
def test_statistics_are_sent_where_they_are_taken(training: bool | None, phases: set[str]) -> None:
    def build() -> keras.Model:
        inputs = layers.Input((8,))
        outputs = layers.BatchNormalization(name="norm")(inputs, training=training)
        model = keras.Model(inputs, layers.Dense(4, name="head")(outputs), name="m")
        model.compile("sgd", "mse")
        return model

    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    found = sent(explained(build, {"head/kernel": COLUMN}, placement=placement))
    assert {row[0] for row in found if row[3] == "statistics"} <= phases
    assert bool(phases) == any(row[3] == "statistics" for row in found)
