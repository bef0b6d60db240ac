"""Common models have the numbers of one device: a few on each engine, the page of all of them, and their measure."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models import page
from tests.sampling import each_on_one

#: quick on all engines, right in float32 there, and split by the map that KerasHub ships
TASKS = (("LlamaBackbone", "2x2"),)


def result(name: str, layout: str) -> dict:
    from tests.models import worker  # its Keras is that of the ranks

    return worker.result(name, layout, {})


@pytest.mark.parametrize(("backend", "task"), each_on_one(("jax", "tensorflow", "torch"), TASKS))
def test_a_common_model_is_right(backend: str, task: tuple[str, str], on_ranks) -> None:
    line = on_ranks(backend)(result, *task)
    assert line["state"] == "right", line


def test_a_wrong_update_is_seen() -> None:
    from tests.models.program import Numbers, compare

    expected = Numbers({"a": np.array([1.0, 2.0]), "b": np.array([0.0, 1e-9])}, {"loss 0": (np.array(3.0), 1e-5)})
    near = Numbers({"a": np.array([1.0, 2.0001]), "b": np.array([1e-9, 0.0])}, {"loss 0": (np.array(3.00001), 1e-5)})
    assert compare(expected, near) == {}
    doubled = Numbers({"a": np.array([1.0, 2.001]), "b": near.updates["b"]}, {"loss 0": (np.array(3.001), 1e-5)})
    assert list(compare(expected, doubled)) == ["loss 0", "update a"]
    assert compare(expected, Numbers()) == {"loss 0": float("inf"), "update a": float("inf"), "update b": float("inf")}


def test_the_page_has_states_and_reasons() -> None:
    whole = "ComputedWhole: conv: torch's distributed tensors cannot compute it split"
    lines = {
        "jax": {("ViT", "dp4"): {"state": "right", "notes": []}, ("ViT", "2x2"): {"state": "right", "notes": [whole]}},
        "torch": {("ViT", "dp4"): {"state": "refused", "error": "layer 'x' cannot; leave it"}},
    }
    text = page.text(lines)
    assert "| ViT | native / fallback [1] / – | – | refused [2] / – / – |" in text
    assert "1. computed whole: torch's distributed tensors cannot compute it split" in text
    assert "2. layer 'x' cannot; leave it" in text
