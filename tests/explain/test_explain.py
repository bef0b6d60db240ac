"""What explain says of layouts, memory, collectives and slow layouts; models are only described, no device computes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping

import keras
import pytest
from keras import layers

import keras_flow as kf
from keras_flow.distributions.dry_run import dry_run
from keras_flow.explainer.explanation import Explanation
from tests.explain import models

MODEL = kf.Placement(range(4), axis_names=("model",))


@pytest.fixture(autouse=True)
def described(four_ranks: None) -> Iterator[None]:
    with dry_run(64):
        yield


def dense(*units: int, inputs: int = 64) -> keras.Model:
    """Dense layers d0, d1 ..."""
    parts = [layers.Dense(count, name=f"d{number}") for number, count in enumerate(units)]
    model = keras.Sequential([layers.Input((inputs,)), *parts], name="m")
    model.compile("adam", "mse")
    return model


def explained(
    build: object, rules: Mapping[str, object], batch_size: int = 32, placement: kf.Placement = MODEL
) -> Explanation:
    distribution = kf.ModelParallel(placement, rules=rules)  # type: ignore[arg-type]
    with distribution.scope():
        model = build()  # type: ignore[operator]
    return distribution.explain(model, batch_size)


def sent(found: Explanation) -> list[tuple[str, str, str, str, int]]:
    return [(one.phase, one.kind, one.path, one.tensor, one.received) for one in found.collectives]


COLUMN, ROW = {"model": kf.sbp.split(1)}, {"model": kf.sbp.split(0)}


# ---- what it says


def test_a_column_and_row_pair() -> None:
    found = explained(lambda: dense(64, 128, 64), {"d1/kernel": COLUMN, "d1/bias": ROW, "d2/kernel": ROW})
    size = 32 * 64 * 4
    assert sent(found) == [
        ("forward", "all_reduce", "m/d2", "output", 2 * size * 3 // 4),
        ("backward", "all_reduce", "m/d1", "input gradient", 2 * size * 3 // 4),
    ]
    assert [(one.path, one.axis, one.ranks) for one in found.repeated] == [("m/d0", "model", 4)]
    assert not found.warnings


def test_layouts_rules_and_bytes_of_variables() -> None:
    found = explained(lambda: dense(64, 128), {"d1/kernel": COLUMN})
    kernel = next(row for row in found.variables if row.path == "m/d1/kernel")
    assert (kernel.shape, kernel.layout, kernel.source) == ((64, 128), "S(1)", "rule 'd1/kernel'")
    assert kernel.bytes == 64 * 32 * 4
    assert next(row for row in found.variables if row.path == "m/d0/bias").source == "default"


def test_memory_of_a_rank() -> None:
    found = explained(lambda: dense(64, 128), {"d1/kernel": COLUMN})
    weights = 4 * (64 * 64 + 64 + 64 * 32 + 128)
    memory = found.memory[3]
    assert (memory.weights, memory.gradients, memory.slots) == (weights, weights, 2 * weights)
    assert memory.activations == 4 * 32 * (64 + 32)
    assert any("estimate" in note for note in found.notes)


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
    found = explained(build, rules)
    assert [row[4] for row in sent(found)] == [row[4] for row in sent(explained(lambda: dense(64, 128, 64), rules))]
    assert any("Block has no graph" in note for note in found.notes)


def test_a_model_inside_a_model() -> None:
    def build() -> keras.Model:
        inner = keras.Sequential([layers.Input((64,)), layers.Dense(128, name="up"), layers.Dense(64, name="down")])
        model = keras.Sequential([layers.Input((64,)), layers.Dense(64, name="stem"), inner, layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    found = explained(build, {"up/kernel": COLUMN, "up/bias": ROW, "down/kernel": ROW})
    assert [row[:2] for row in sent(found)] == [("forward", "all_reduce"), ("backward", "all_reduce")]


def test_a_layout_of_activations() -> None:
    distribution = kf.ModelParallel(MODEL, activations={"d0": {"model": kf.sbp.split(0)}})
    with distribution.scope():
        model = dense(64, 8)
    (gather, *_) = [one for one in distribution.explain(model, 32).collectives if one.path == "m/d0"]
    assert (gather.kind, gather.phase, gather.tensor) == ("all_gather", "backward", "output gradient")


def test_one_axis_for_rows_and_weights_gathers_the_weights() -> None:
    placement = kf.Placement(range(4), axis_names=("data",))
    found = explained(lambda: dense(64, 64), {"kernel": {"data": kf.sbp.split(0)}}, placement=placement)
    assert ("forward", "all_gather", "m/d0", "kernel", 64 * 64 * 4 * 3 // 4) in sent(found)


def test_values_as_json() -> None:
    found = explained(lambda: dense(64, 128), {"d1/kernel": COLUMN})
    values = json.loads(json.dumps(found.as_json()))
    assert values["received"] == found.received
    assert values["memory"]["0"]["peak"] == found.memory[0].peak
    assert {"path", "bytes", "source"} <= set(values["variables"][0])


def test_text_names_layers_and_bytes() -> None:
    text = str(explained(lambda: dense(64, 128, 64), {"d1/kernel": COLUMN, "d1/bias": ROW, "d2/kernel": ROW}))
    assert "collectives of a step: 2, 24.58 kB received by each rank" in text
    assert "forward   all_reduce  model=4  12.29 kB  m/d2   output" in text


# ---- slow layouts


def kinds(found: Explanation) -> list[str]:
    return [one.kind for one in found.warnings]


def test_rows_without_columns_and_what_is_suggested() -> None:
    rules = {"kernel": ROW}
    found = explained(lambda: dense(64, 128, 64, 128, 64), rules)
    assert kinds(found) == ["unpaired"] * 5
    assert "its kernel is split on the summed dim and its input is whole" in found.warnings[0].text
    cured = explained(lambda: dense(64, 128, 64, 128, 64), {**spelled(found), **rules})
    assert kinds(cured) == []
    assert cured.received < found.received


def test_columns_after_columns_and_what_is_suggested() -> None:
    rules = {"kernel": COLUMN, "bias": ROW}
    found = explained(lambda: dense(64, 128, 64), rules)
    assert kinds(found) == ["unpaired", "unpaired"]
    assert "its input is gathered" in found.warnings[0].text
    assert kinds(explained(lambda: dense(64, 128, 64), {**spelled(found), **rules})) == []


def test_a_good_pair_stays() -> None:
    rules = {"d0/kernel": COLUMN, "d0/bias": ROW, "d1/kernel": ROW, "d2/kernel": ROW}
    found = explained(lambda: dense(128, 64, 64), rules)
    assert kinds(found) == ["unpaired"]
    assert not {"m/d0/kernel", "m/d1/kernel"} & set(found.suggested_rules)
    assert kinds(explained(lambda: dense(128, 64, 64), {**spelled(found), **rules})) == []


def spelled(found: Explanation) -> dict[str, object]:
    return {
        f"{path}$": {axis: kf.sbp.split(dim) for axis, dim in splits.items()}
        for path, splits in found.suggested_rules.items()
    }


def test_heads_that_do_not_divide() -> None:
    def build() -> keras.Model:
        x = layers.Input((16, 32))
        return keras.Model(x, layers.MultiHeadAttention(6, 8, name="attention")(x, x))

    with pytest.warns(kf.FlowWarning):
        found = explained(build, {"query/kernel": COLUMN})
    (advice,) = found.warnings
    assert (advice.kind, advice.paths) == ("heads", ("attention",))
    assert "6 query heads do not divide" in advice.text
    assert "Axes of 1, 2, 3, 6 ranks divide" in advice.text


def test_an_embedding_on_every_rank() -> None:
    def build() -> keras.Model:
        return keras.Sequential([layers.Input((8,)), layers.Embedding(1000, 64, name="table"), layers.Dense(8)])

    found = explained(build, {})
    (advice,) = found.warnings
    assert advice.kind == "embedding"
    assert "the table [1000, 64] is whole on each of the 4 ranks of axis 'model'" in advice.text
    assert kinds(explained(build, {"table": {"model": kf.sbp.split(1)}})) == []


def test_a_batch_that_does_not_divide() -> None:
    distribution = kf.DataParallel(kf.Placement(range(4), axis_names=("data",)))
    with distribution.scope():
        model = dense(8)
    (advice,) = distribution.explain(model, 30).warnings
    assert advice.kind == "batch"
    assert "30 rows does not divide by 4 data ranks" in advice.text
    assert advice.text.endswith("The next batch size that divides is 32")


@pytest.mark.parametrize("name", list(models.MODELS))
@pytest.mark.parametrize("layout", models.LAYOUTS)
def test_the_models_of_the_comparison_have_no_slow_layers(name: str, layout: str) -> None:
    distribution = models.distribution(name, layout)
    with distribution.scope():
        model = models.compiled(name)
    assert [one for one in distribution.explain(model, models.BATCH).warnings if one.kind != "embedding"] == []


# ---- size and time


def test_weights_of_100_gigabytes_are_not_made() -> None:
    def build() -> keras.Model:
        return dense(*[40_000] * 17, inputs=40_000)

    found = explained(build, {"kernel": COLUMN}, placement=kf.Placement(range(64), axis_names=("model",)))
    assert sum(row.bytes for row in found.variables) * 64 > 100e9
    assert found.memory[0].weights == sum(row.bytes for row in found.variables)


def test_a_thousand_variables_in_a_second() -> None:
    rules = {"d.*[02468]/kernel": COLUMN, "d.*[02468]/bias": ROW, "d.*[13579]/kernel": ROW}
    distribution = kf.ModelParallel(MODEL, rules=rules)
    with distribution.scope():
        model = dense(*[64] * 500)
    began = time.process_time()
    found = distribution.explain(model, 32)
    assert time.process_time() - began < 1
    assert (len(found.variables), len(found.collectives)) == (1000, 499)


# ---- bad input


def test_a_model_that_is_not_built() -> None:
    distribution = kf.DataParallel(kf.Placement(range(4)))
    with pytest.raises(kf.FlowError, match=r"model 'm' is not built.*call model.build\(\(None, \.\.\.\)\)"):
        distribution.explain(keras.Sequential([layers.Dense(4)], name="m"), 32)


@pytest.mark.parametrize("batch_size", [0, 2.5, True, None])
def test_a_batch_size_that_is_none(batch_size: object) -> None:
    distribution = kf.DataParallel(kf.Placement(range(4)))
    with pytest.raises(kf.FlowError, match=r"legal is a whole number of at least 1"):
        distribution.explain(dense(4), batch_size)  # type: ignore[arg-type]
