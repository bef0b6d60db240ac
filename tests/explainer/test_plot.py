"""What a notebook shows of a model: its picture, its explanation, its verification, its tensors; on every engine."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from keras_flow.backends.engines import that_train
from tests import sampling

pytestmark = pytest.mark.timeout(200)


def pictures(folder: str) -> dict[str, str]:
    """On every rank: train a model with a branch under a hybrid layout, and draw all of it."""
    import keras
    import numpy as np

    import keras_flow as kf

    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    rules = {"up/kernel": {"model": "S(1)"}, "down/kernel": {"model": "S(0)"}}
    distribution = kf.ModelParallel(mesh, rules=rules)
    keras.utils.set_random_seed(0)
    with distribution.scope():
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(16, "relu", name="up")(inputs)
        added = keras.layers.Add(name="sum")([inputs, keras.layers.Dense(8, name="down")(hidden)])
        model = keras.Model(inputs, keras.layers.Dense(2, name="head")(added), name="branched")
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    drawing = kf.plot_layout(model, distribution, 16, to_file=f"{folder}/{kf.env.process_index()}.svg")
    kernel = model.get_layer("up").kernel
    return {
        "model": drawing.svg,
        "words": repr(drawing),
        "explanation": distribution.explain(model, 16)._repr_html_(),
        "verification": distribution.verify(model, x, x[:, :2])._repr_html_(),
        "variable": kf.visualize(kernel).svg,
        "engine's tensor": kf.visualize(kernel.value).svg,
        "global tensor": kf.ones((4, 6), placement=mesh, sbp="S(0),P")._repr_html_() or "",
    }


@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_what_a_notebook_shows(on_ranks, backend: str, tmp_path: Path) -> None:
    shown = on_ranks(backend)(pictures, str(tmp_path))
    texts = {}
    for name, html in shown.items():
        if name != "words":
            assert not re.search(r"<script|https?://(?!www.w3.org/2000/svg)", html), name
            page = ElementTree.fromstring(f"<div>{html}</div>")
            texts[name] = [element.text or "" for element in page.iter() if element.text]
    assert {"up", "down", "sum", "head", "kernel: B,S(1)", "kernel: B,S(0)"} <= set(texts["model"])
    assert any("forward: all_reduce over model" in text for text in texts["model"]), "the pair's one collective"
    assert any(re.match(r"\[16, 16\] \S+,S\(1\)", text) for text in texts["model"]), "the split tensor between them"
    assert "variables" in texts["explanation"] and "memory of a rank" in texts["explanation"]
    assert "up/kernel" in texts["explanation"]
    assert "✓ the numbers of one device" in texts["verification"]
    assert {"0, 2", "1, 3"} <= set(texts["variable"])
    assert {"0, 2", "1, 3"} <= set(texts["engine's tensor"])
    assert {"0 + 1", "2 + 3"} <= set(texts["global tensor"])
    assert (tmp_path / "0.svg").read_text() == shown["model"]
    assert shown["words"].startswith("branched on data=2, model=2")
