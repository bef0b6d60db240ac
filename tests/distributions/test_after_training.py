"""What people do with a trained model gives one device's results: copies, files, sub-models, wrappers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)


def used(layout: str, folder: str) -> None:
    """On each rank: use a trained model in many ways."""
    import copy
    import os
    import pickle

    import keras
    import numpy as np

    import keras_flow as kf

    layers = keras.layers
    random = np.random.default_rng(0)
    x, y = random.normal(size=(16, 6)).astype("float32"), random.integers(0, 4, 16)
    square = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    split = {"h/kernel$": {"model": kf.sbp.split(1)}}
    distribution = kf.DataParallel() if layout == "1x4" else kf.ModelParallel(square, rules=split)

    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [layers.Input((6,)), layers.Dense(16, activation="tanh", name="h"), layers.Dense(4, name="o")]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def check(model: keras.Model, expected: np.ndarray, rows: int = 16) -> None:
        np.testing.assert_allclose(model.predict(x[:rows], verbose=0), expected[:rows], atol=1e-6)

    with distribution.scope():
        model = build()
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        hidden = np.tanh(x @ np.asarray(model.layers[0].kernel) + np.asarray(model.layers[0].bias))
        expected = hidden @ np.asarray(model.layers[1].kernel) + np.asarray(model.layers[1].bias)
        check(model, expected)
        check(model, expected, rows=1)
        check(copy.deepcopy(model), expected)
        check(pickle.loads(pickle.dumps(model)), expected)
        for other in (keras.Sequential.from_config(model.get_config()), keras.models.clone_model(model)):
            other.set_weights(model.get_weights())
            check(other, expected)
        check(keras.Model(model.inputs, model.layers[0].output), hidden)
        features = keras.Model(model.inputs, [layer.output for layer in model.layers])(x)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(features[0]), hidden, atol=1e-6)
        path = os.path.join(folder, layout)
        model.save(path + ".keras")
        check(keras.models.load_model(path + ".keras"), expected)
        for ending, sizes in ((".weights.h5", {}), (".weights.json", {"max_shard_size": 0.0003})):
            model.save_weights(path + ending, **sizes)
            other = build()
            other.load_weights(path + ending)
            check(other, expected)


@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_copies_files_and_sub_models(on_ranks: Callable, engine: str, tmp_path: Path) -> None:
    for layout in ("1x4", "2x2"):
        on_ranks(engine)(used, layout, str(tmp_path))
