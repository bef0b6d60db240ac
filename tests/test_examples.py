"""The examples run, in a small size, on every engine and four ranks."""

import pytest

from tests import small_examples
from tests.sampling import each_on_one

#: example -> what it prints at the end
WANTED = {
    "bytes_lm": ("bits per byte", "def __init__(self"),
    "custom_rules": ("losses under the LayoutMap", "feedforward_up/kernel"),
    "finetune_lora": ("on the new digits", "(frozen)"),
    "pipeline": ("sends in a step", "validation accuracy"),
}


@pytest.mark.parametrize(("backend", "name"), each_on_one(("jax", "tensorflow", "torch"), list(WANTED)))
def test_example(name: str, backend: str, on_ranks) -> None:
    printed = on_ranks(backend)(small_examples.run, name)
    assert all(text in printed for text in WANTED[name]), printed
