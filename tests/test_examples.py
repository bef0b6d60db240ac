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


def explained() -> dict[str, int]:
    """Explain every example that defines a model, as its first lines say; how many collectives a step has."""
    from pathlib import Path

    from keras_flow.explainer.explain_file import explain_file

    files = [path for path in sorted(Path("examples").glob("*.py")) if "def build_model" in path.read_text()]
    layouts = {"pipeline": "pp2xdp2"}
    found = {path.stem: explain_file(path, layouts.get(path.stem, "2x2"), 64, None) for path in files}
    return {name: len(explanation.collectives) for name, explanation in found.items()}


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_every_example_is_explained(backend: str, on_ranks) -> None:
    found = on_ranks(backend)(explained)
    assert set(found) >= {"bytes_lm", "custom_rules", "digits", "finetune_lora", "pipeline"}
    assert all(found.values()), found
