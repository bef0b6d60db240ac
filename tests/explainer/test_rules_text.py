"""`--suggest` prints a whole `rules()`: pasted as it is, it passes the check and cures what explain warns of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import pytest
from keras import layers

import keras_flow as kf
from keras_flow.explainer.explanation import Explanation
from keras_flow.explainer.rules_text import patterns, rules_file
from tests.explainer.small import COLUMN, MODEL, ROW, dense, explained, kinds

pytestmark = pytest.mark.usefixtures("described")

#: both Dense layers of a block by columns
OWN = {
    "attention/(query|key|value)/kernel": COLUMN,
    "attention/(query|key|value)/bias": ROW,
    "attention/attention_output/kernel": ROW,
    "up/kernel": COLUMN,
    "up/bias": ROW,
    "down/kernel": COLUMN,
    "down/bias": "S(0)",
    "logits/kernel": COLUMN,
}


def transformer() -> keras.Model:
    tokens = layers.Input((16,), dtype="int32")
    x = layers.Embedding(64, 32, name="tokens")(tokens)
    for number in range(2):
        seen = layers.LayerNormalization(name=f"block{number}_norm")(x)
        x = x + layers.MultiHeadAttention(4, 8, dropout=0.1, name=f"block{number}_attention")(seen, seen)
        wide = layers.Dense(128, "gelu", name=f"block{number}_up")(x)
        x = x + layers.Dense(32, name=f"block{number}_down")(wide)
    model = keras.Model(tokens, layers.Dense(64, name="logits")(x), name="small")
    model.compile("adam", "mse")
    return model


def pasted(text: str) -> Mapping[str, Any]:
    program: dict[str, Any] = {}
    exec(text, program)
    return program["rules"]()


def layouts(explanation: Explanation) -> dict[str, str]:
    return {row.path: row.layout for row in explanation.variables if "seed_generator" not in row.path}


def test_the_printed_rules_of_a_transformer_pass_the_check_and_cure() -> None:
    before = explained(transformer, OWN)
    assert [advice.paths for advice in before.warnings if advice.kind == "unpaired"] == [
        ("block0_down",),
        ("block1_down",),
    ]
    text = rules_file(before)
    rules = pasted(text)
    assert list(rules) == [
        r"block\d+_down/kernel$",
        r"block\d+_down/bias$",
        *(rule for rule in OWN if not rule.startswith("down")),
    ]
    assert '# replaced by those above: r"down/kernel", r"down/bias"\n' in text
    after = explained(transformer, rules)  # which raises where a rule is never used
    assert "unpaired" not in kinds(after)
    assert after.received < before.received
    changed = {path: layout for path, layout in layouts(after).items() if layouts(before)[path] != layout}
    assert changed == {
        "block0_down/kernel": "S(0)",
        "block0_down/bias": "B",
        "block1_down/kernel": "S(0)",
        "block1_down/bias": "B",
    }


@pytest.mark.parametrize(
    "own",
    [
        {"kernel": COLUMN, "bias": ROW},
        {"kernel": ROW},
        {"d0/kernel": ROW, "d1/kernel": COLUMN, "d[23]/kernel": ROW},
        {r"d\d/kernel$": {"model": kf.sbp.split(1)}},
        {'"?d0/kernel': ROW, "kernel": COLUMN},
    ],
)
@pytest.mark.filterwarnings("ignore::keras_flow.errors.LayoutFallback")  # 66 does not divide
@pytest.mark.parametrize("units", [(128, 64, 128, 64), (128, 64, 66, 64)])
def test_printed_rules_pass_the_check(own: dict[str, object], units: tuple[int, ...]) -> None:
    def build() -> keras.Model:
        return dense(*units)

    before = explained(build, own)
    assert "unpaired" in kinds(before)
    after = explained(build, pasted(rules_file(before)))
    assert "unpaired" not in kinds(after)


def test_rules_of_a_layout_map() -> None:
    mesh = keras.distribution.DeviceMesh((4,), ["model"], [f"cpu:{rank}" for rank in range(4)])
    rules = keras.distribution.LayoutMap(mesh)
    rules["m/d0/kernel"] = (None, "model")
    rules[".*d1/kernel"] = (None, "model")
    distribution = kf.ModelParallel(MODEL, rules=rules)
    with distribution.scope():
        model = dense(128, 64)
    text = rules_file(distribution.explain(model, 32))
    printed = pasted(text)
    assert list(printed) == ["m/d0/bias$", "m/d1/kernel$", "^(?:m/d0/kernel)$"]
    assert "unpaired" not in kinds(explained(lambda: dense(128, 64), printed))


def test_numbers_that_tell_rules_apart_stay() -> None:
    column, row = {"model": 1}, {"model": 0}
    alike = {f"b{block}/dense_{number}/kernel": (column, row)[number] for block in range(3) for number in range(2)}
    assert patterns(alike, alike) == {r"b\d+/dense_0/kernel$": column, r"b\d+/dense_1/kernel$": row}
    # a layer whose path ends alike is not to get the rule
    assert patterns({"d0/kernel": row}, ["d0/kernel", "bd0/kernel"]) == {"^d0/kernel$": row}
    assert patterns({"d0/kernel": row}, ["d0/kernel", "d10/kernel"]) == {"d0/kernel$": row}
    # all that a pattern matches is taken by it, so it is no pattern of others
    assert patterns({"a1/d1": row, "a1/d2": row, "a2/d1": column}, ["a1/d1", "a1/d2", "a2/d1"]) == {
        r"a1/d\d+$": row,
        r"a2/d1$": column,
    }
