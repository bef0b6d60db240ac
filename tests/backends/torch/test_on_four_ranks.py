"""What the parity grid does not show of torch, on four processes in one job."""

import pytest

from tests.backends.torch import registry
from tests.jobs import LIMIT, Job

PART = "engine"
pytestmark = pytest.mark.timeout(LIMIT)


@pytest.mark.parametrize("name", list(registry.load()))
def test_check(name: str, jobs: dict[str, Job]) -> None:
    assert jobs["torch"].case(PART, name) == "ok"
