"""An explanation as text."""

from __future__ import annotations

import pytest

from tests.explainer.small import COLUMN, ROW, dense, explained

pytestmark = pytest.mark.usefixtures("described")


def test_text_names_layers_and_bytes() -> None:
    text = str(explained(lambda: dense(64, 128, 64), {"d1/kernel": COLUMN, "d1/bias": ROW, "d2/kernel": ROW}))
    assert "collectives of a step: 2, 24.58 kB received by each rank" in text
    assert "forward   all_reduce  model=4  12.29 kB  m/d2   output" in text
