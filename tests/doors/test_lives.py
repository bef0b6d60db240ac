"""Some lives of a pipeline's model on each engine; more of them are a run of `tests/doors/lives.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

import pytest

from tests.doors import lives
from tests.ranks import Pool
from tests.sampling import each_on_one

ENGINES = ("jax", "tensorflow", "torch")
#: quick on all engines; with checkpoints (1/4) and clones (1/22) of models that draw
SEEDS = ("1/4", "1/10", "1/22")


def _result(seed: str) -> dict:
    from tests.doors import lives

    # the masks of micro-batches are those of one device by the logical index of rows alone
    with mock.patch.dict(os.environ, {"KERAS_FLOW_RANDOM": "logical"}):
        return lives.result(seed)


@pytest.mark.parametrize(("engine", "seed"), each_on_one(ENGINES, SEEDS))
def test_a_life_is_that_of_one_device(engine: str, seed: str, on_ranks: Callable[..., Pool]) -> None:
    line = on_ranks(engine)(_result, seed)
    assert line["state"] == "right", line


def test_all_acts_are_drawn() -> None:
    assert {act for number in range(60) for act in lives.acts_of(f"1/{number}")} == set(lives.ACTS)
