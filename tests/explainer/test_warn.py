"""Layouts that are legal and slow are warned of, and others are not."""

from __future__ import annotations

import keras
import pytest
from keras import layers

import keras_flow as kf
from tests.explainer import models
from tests.explainer.small import COLUMN, ROW, dense, explained, kinds

pytestmark = pytest.mark.usefixtures("described")


def test_heads_that_do_not_divide() -> None:
    def build() -> keras.Model:
        x = layers.Input((16, 32))
        return keras.Model(x, layers.MultiHeadAttention(6, 8, name="attention")(x, x))

    with pytest.warns(kf.FlowWarning):
        explanation = explained(build, {"query/kernel": COLUMN})
    idle, advice = explanation.warnings
    assert idle.text == "no weight is split over axis 'model': its 4 ranks hold and compute the same"
    assert (advice.kind, advice.paths) == ("heads", ("attention",))
    assert "6 query heads do not divide" in advice.text
    assert "Axes of 1, 2, 3, 6 ranks divide" in advice.text


def test_what_is_said_of_several_layers_is_said_once() -> None:
    explanation = explained(lambda: dense(64, 64, 64, 64), {"kernel": COLUMN, "bias": ROW})
    assert kinds(explanation) == ["unpaired"] * 3
    amounts = [advice.text.partition("(")[2].partition(" received")[0] for advice in explanation.warnings]
    assert amounts[0] == amounts[1] == amounts[2]
    lines = [line for line in str(explanation).splitlines() if line.startswith("slow: ")]
    assert [line.partition(": its")[0] for line in lines] == ["slow: m/d1 and 2 more, each"]
    lines = [line for line in explanation.text(all_rows=True).splitlines() if line.startswith("slow: ")]
    assert [line.partition(": its")[0] for line in lines] == ["slow: m/d1", "slow: m/d2", "slow: m/d3"]


def test_an_embedding_on_every_rank() -> None:
    def build() -> keras.Model:
        return keras.Sequential([layers.Input((8,)), layers.Embedding(1000, 64, name="table"), layers.Dense(8)])

    explanation = explained(build, {})
    idle, advice = explanation.warnings
    assert (idle.kind, advice.kind) == ("idle", "embedding")
    assert "the table [1000, 64] is whole on each of the 4 ranks of axis 'model'" in advice.text
    assert kinds(explained(build, {"table": {"model": kf.sbp.split(1)}})) == []


def test_layers_that_a_pattern_leaves_out() -> None:
    def left_out(rules: dict[str, object]) -> list[tuple[str, ...]]:
        warnings = explained(lambda: dense(*[64] * 12), rules).warnings
        return [advice.paths for advice in warnings if advice.kind == "left out"]

    # one digit: d10 and d11 are none of these
    assert left_out({"/d[0-9]/kernel": COLUMN}) == [("m/d10/kernel", "m/d11/kernel")]
    assert left_out({"kernel": COLUMN}) == []
    assert left_out({"/d[0-6]/kernel": COLUMN}) == []  # half of them


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
    assert [advice for advice in distribution.explain(model, models.BATCH).warnings if advice.kind != "embedding"] == []
