"""A verification is sorted and judged."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
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


def test_where_all_is_right_the_worst_of_each_quantity_is_shown() -> None:
    rows = [
        ComparedNumber("8 rows", "training", quantity, f"m/{at}", 1e-9 * at, 0.1 * at)
        for quantity in ("gradient", "update")
        for at in range(1, 5)
    ]
    text = str(Verification.of("m", "dp2", "jax", 1e-6, rows))
    assert text.count("m/4") == 2 and "m/3" not in text
    assert "and 6 more, each closer than its quantity's here" in text
    wrong = [*rows, ComparedNumber("8 rows", "training", "loss", "loss", 1.0, 2.0)]
    text = str(Verification.of("m", "dp2", "jax", 1e-6, wrong))
    assert text.count("m/") == 8 and "more" not in text


def _compared(value: object, actual: object, tolerance: float = 1e-4) -> list[ComparedNumber]:
    from keras_flow.verify.run import _compared

    of = ("inference", "output", "output 0")
    one, other = ({of: (np.asarray(each, "float64"), 0.0)} for each in (value, actual))
    return list(_compared("4 rows", one, other, tolerance))


def test_equal_infinities_are_equal() -> None:
    inf, nan = float("inf"), float("nan")
    assert [row.share for row in _compared([1.0, inf, -inf, nan], [1.0, inf, -inf, nan])] == [0.0]
    for wrong in ([1.0, -inf], [1.0, 2.0], [1.0, nan]):
        (row,) = _compared([1.0, inf], wrong)
        assert not row.share <= 1


def test_a_tolerance_of_nothing() -> None:
    assert [row.share for row in _compared([1.0, 2.0], [1.0, 2.5], 0.0)] == [float("inf")]
    assert [row.share for row in _compared([1.0, 2.0], [1.0, 2.0], 0.0)] == [0.0]


def test_variables_of_one_path_have_names_of_their_own() -> None:
    from keras_flow.verify.measure import _names

    variables = [SimpleNamespace(path=path) for path in ("a/kernel", "b/kernel", "a/kernel")]
    assert _names(variables) == ["a/kernel", "b/kernel", "a/kernel (2)"]  # type: ignore[arg-type]
