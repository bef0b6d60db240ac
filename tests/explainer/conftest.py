"""Models of these tests are only described: 64 logical ranks, no values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keras_flow.distributions.dry_run import dry_run


@pytest.fixture
def described(four_ranks: None) -> Iterator[None]:
    with dry_run(64):
        yield
