"""The examples run, in a small size, on every engine and four ranks."""

import pytest

from tests.jobs import LIMIT, Job

PART = "examples"
pytestmark = pytest.mark.timeout(LIMIT)

#: example -> what it prints at the end
WANTED = {
    "bytes_lm": ("bits per byte", "def __init__(self"),
    "custom_rules": ("losses under the LayoutMap", "feedforward_up/kernel"),
    "finetune_lora": ("on the new digits", "(frozen)"),
}


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
@pytest.mark.parametrize("name", list(WANTED))
def test_example(name: str, backend: str, jobs: dict[str, Job]) -> None:
    printed = str(jobs[backend].case(PART, name))
    assert all(text in printed for text in WANTED[name]), printed
