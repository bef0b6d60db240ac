"""What products with a split weight send."""

from __future__ import annotations

import pytest

import keras_flow as kf
from tests.explainer.small import dense, explained, sent

pytestmark = pytest.mark.usefixtures("described")


def test_one_axis_for_rows_and_weights_gathers_the_weights() -> None:
    placement = kf.Placement(range(4), axis_names=("data",))
    explanation = explained(lambda: dense(64, 64), {"kernel": {"data": kf.sbp.split(0)}}, placement=placement)
    assert ("forward", "all_gather", "m/d0", "kernel", 64 * 64 * 4 * 3 // 4) in sent(explanation)
