"""A verification is sorted and judged."""

from __future__ import annotations

import pytest

from keras_flow.errors import FlowError
from keras_flow.verify.verification import ComparedNumber, Verification


def test_worst_first_and_no_number_is_worst() -> None:
    shares = (0.5, float("nan"), 2.0)
    rows = [ComparedNumber("4 rows", "training", "gradient", f"v{share}", share, share) for share in shares]
    result = Verification.of("m", "d", "jax", 1e-4, rows)
    assert [row.name for row in result.rows] == ["vnan", "v2.0", "v0.5"]
    assert not result.ok
    with pytest.raises(FlowError, match=r"2 of 3 comparisons are over the tolerance of 0\.0001"):
        result.raise_if_wrong()
