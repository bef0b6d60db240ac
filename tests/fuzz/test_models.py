"""Random models under random layouts have the numbers of one device, a few of them on each engine."""

from __future__ import annotations

import pytest

from tests.fuzz.few_models import SEEDS
from tests.fuzz.models import RANKS
from tests.jobs import LIMIT, Job

pytestmark = pytest.mark.timeout(3 * LIMIT)

PART = "models"


@pytest.mark.parametrize("backend", RANKS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_is_right(backend: str, seed: str, jobs: dict[str, Job]) -> None:
    line: dict = jobs[backend].case(PART, seed)  # type: ignore[assignment]
    assert line["state"] == "right", line
