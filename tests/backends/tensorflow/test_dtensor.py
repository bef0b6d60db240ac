"""What the parity grid does not show of the TensorFlow backend, in one process with its own virtual devices."""

import pytest

from tests.jobs import LIMIT, Job

pytest.importorskip("tensorflow")
PART = "engine"
pytestmark = pytest.mark.timeout(LIMIT)


@pytest.mark.parametrize("name", ["created_sharded", "steps", "layouts", "operations", "mirrored"])
def test_program(name: str, jobs: dict[str, Job]) -> None:
    assert jobs["tensorflow"].case(PART, name) == "ok"
