"""What the parity grid does not show of torch, on four processes."""

import pytest

from tests import sampling
from tests.backends.torch import registry

ENGINE = "torch"


def run(name: str) -> None:
    registry.load()[name]()


@pytest.mark.parametrize("name", sampling.some(list(registry.load()), every=5))
def test_check(name: str, on_ranks) -> None:
    on_ranks(ENGINE)(run, name)
