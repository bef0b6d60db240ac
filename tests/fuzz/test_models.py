"""Random models under random layouts have the numbers of one device, a few of them on each engine."""

from __future__ import annotations

import pytest

from tests.fuzz.models import RANKS
from tests.sampling import each_on_one

#: quick on all engines, and right in float32 there; more of them are a run of `tests/fuzz/models.py`
SEEDS = ("1/9", "p1/1")


def result(seed: str) -> dict:
    from tests.fuzz import models  # its Keras is that of the ranks

    return models.result(seed, ranks=4)


@pytest.mark.parametrize(("backend", "seed"), each_on_one(list(RANKS), SEEDS))
def test_a_random_model_is_right(backend: str, seed: str, on_ranks) -> None:
    line = on_ranks(backend)(result, seed)
    assert line["state"] == "right", line
