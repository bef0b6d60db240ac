"""KerasHub's `CausalLM.score` has the numbers of one device, and so have gradients by what its function is handed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import sampling
from tests.backends.test_generation import ENGINES, MODELS


def _deviations(name: str, **grid: Any) -> dict[str, str]:
    import warnings

    from tests.backends import scores

    warnings.simplefilter("ignore")  # of keys of a map that name no layer of this model
    return scores.deviations(name, **grid)


def _some() -> dict[str, str]:
    return _deviations("GPT2", layouts=("2x2",), contexts=(True,), rows=(5,), layers=1)


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_those_of_one_device(on_ranks: Callable, engine: str) -> None:
    assert on_ranks(engine).on_each(_some) == [{}] * (4 if engine == "torch" else 1)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_model(on_ranks: Callable, engine: str, name: str) -> None:
    assert on_ranks(engine).on_each(_deviations, name, timeout=550.0) == [{}] * (4 if engine == "torch" else 1)
