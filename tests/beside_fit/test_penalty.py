"""WGAN-GP trained by `fit`: a gradient by the inputs within the loss of a `train_step` of one's own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.beside_fit.penalty import MODELS

ENGINES = ("jax", "tensorflow", "torch")


def _failures(names: list[str], layouts: list[str]) -> list[str]:
    import functools
    import warnings

    from tests.beside_fit import models, penalty

    warnings.simplefilter("ignore")  # what DTensor cannot split is said
    return penalty.failures(names, {layout: functools.partial(models.SCOPES[layout], 4) for layout in layouts})


@pytest.mark.parametrize(("engine", "layout"), [("jax", "2x2"), ("tensorflow", "data"), ("torch", "2x2")])
def test_it_trains_as_on_one_device(engine: str, layout: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_failures, ["dense"], [layout]) == []


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_layout(engine: str, name: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_failures, [name], ["data", "1x2", "2x2"]) == []
