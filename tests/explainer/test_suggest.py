"""Rules that explain suggests, and that they cure what it warns of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

import keras_flow as kf
from tests.explainer.small import COLUMN, ROW, dense, explained, kinds, spelled

pytestmark = pytest.mark.usefixtures("described")


def _cured_by(explanation: Any, rules: Mapping[str, Any]) -> dict[str, Any]:
    """The suggested rules before those of `rules` that are still used: one that is not would be an error."""
    suggested = spelled(explanation)
    left = [row.path for row in explanation.variables if not any(re.search(rule, row.path) for rule in suggested)]
    return {**suggested, **{rule: to for rule, to in rules.items() if any(re.search(rule, path) for path in left)}}


def test_rows_without_columns_and_what_is_suggested() -> None:
    rules = {"kernel": ROW}
    explanation = explained(lambda: dense(64, 128, 64, 128, 64), rules)
    assert kinds(explanation) == ["unpaired"] * 5
    assert "its kernel is split on the summed dim and its input is whole" in explanation.warnings[0].text
    cured = explained(lambda: dense(64, 128, 64, 128, 64), _cured_by(explanation, rules))
    assert kinds(cured) == []
    assert cured.received < explanation.received


def test_columns_after_columns_and_what_is_suggested() -> None:
    rules = {"kernel": COLUMN, "bias": ROW}
    explanation = explained(lambda: dense(64, 128, 64), rules)
    assert kinds(explanation) == ["unpaired", "unpaired"]
    assert "its input is gathered" in explanation.warnings[0].text
    assert kinds(explained(lambda: dense(64, 128, 64), _cured_by(explanation, rules))) == []


def test_a_good_pair_stays() -> None:
    rules = {"d0/kernel": COLUMN, "d0/bias": ROW, "d1/kernel": ROW, "d2/kernel": ROW}
    explanation = explained(lambda: dense(128, 64, 64), rules)
    assert kinds(explanation) == ["unpaired"]
    assert not {"m/d0/kernel", "m/d1/kernel"} & set(explanation.suggested_rules)
    assert kinds(explained(lambda: dense(128, 64, 64), _cured_by(explanation, rules))) == []


def test_a_split_over_another_axis_stays() -> None:
    square = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    rules = {"kernel": {"data": kf.sbp.split(1), **ROW}}
    explanation = explained(lambda: dense(64, 128, 64), rules, placement=square)
    assert "unpaired" in kinds(explanation)
    suggested = explanation.suggested_rules
    assert suggested
    assert all(splits["data"] == 1 for path, splits in suggested.items() if path.endswith("kernel"))
    cured = explained(lambda: dense(64, 128, 64), _cured_by(explanation, rules), placement=square)
    assert "unpaired" not in kinds(cured)
