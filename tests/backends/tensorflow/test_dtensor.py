"""What the parity grid does not show of the TensorFlow backend, in one process with its own virtual devices."""

import pytest

from tests.jobs import LIMIT, Job

pytest.importorskip("tensorflow")
PART = "engine"
pytestmark = pytest.mark.timeout(LIMIT)


NAMES = ("created_sharded", "steps", "layouts", "any_order_of_ranks", "operations", "mirrored")
UNSPLIT = (
    "split_classes",
    "sorted_features",
    "experts",
    "convolutions",
    "windows",
    "whole_on_every_rank",
    "on_one_device",
    "made_of_others",
    "shuffled_features",
    "counted_categories",
    "grouped_attention",
    "replicas_draw",
    "failed_steps",
    "called_after_build",
)


@pytest.mark.parametrize("name", [*NAMES, *UNSPLIT])
def test_program(name: str, jobs: dict[str, Job]) -> None:
    assert jobs["tensorflow"].case(PART, name) == "ok"
