"""An explanation as JSON."""

from __future__ import annotations

import json

import pytest

from tests.explainer.small import COLUMN, dense, explained

pytestmark = pytest.mark.usefixtures("described")


def test_values_as_json() -> None:
    explanation = explained(lambda: dense(64, 128), {"d1/kernel": COLUMN})
    values = json.loads(json.dumps(explanation.as_json()))
    assert values["received"] == explanation.received
    assert values["memory"]["0"]["peak"] == explanation.memory[0].peak
    assert {"path", "bytes", "source"} <= set(values["variables"][0])
