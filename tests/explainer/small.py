"""Small dense models, and what `dist.explain` says of them; models are only described, no device computes."""

from __future__ import annotations

from collections.abc import Mapping

import keras
from keras import layers

import keras_flow as kf
from keras_flow.explainer.explanation import Explanation

MODEL = kf.Placement(range(4), axis_names=("model",))
COLUMN, ROW = {"model": kf.sbp.split(1)}, {"model": kf.sbp.split(0)}


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


def sent(explanation: Explanation) -> list[tuple[str, str, str, str, int]]:
    return [(each.phase, each.kind, each.path, each.tensor, each.received) for each in explanation.collectives]


def kinds(explanation: Explanation) -> list[str]:
    return [advice.kind for advice in explanation.warnings]


def spelled(explanation: Explanation) -> dict[str, object]:
    return {
        f"{path}$": {axis: kf.sbp.split(dim) for axis, dim in splits.items()}
        for path, splits in explanation.suggested_rules.items()
    }
