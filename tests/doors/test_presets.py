"""Presets of KerasHub, fine-tuned: one device's numbers under every layout, on every engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.doors import presets
from tests.ranks import Pool


@pytest.mark.full
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("layout", presets.LAYOUTS)
@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_every_combination(engine: str, layout: str, on_ranks: Callable[..., Pool]) -> None:
    cases = [case for case in presets.cases() if case.layout == layout]
    assert on_ranks(engine)(presets.deviations, cases, timeout=1200.0) == {}
