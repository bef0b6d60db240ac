"""A model with weights of over 1 MB, saved and loaded under a layout: for `test_weights_files`."""

from __future__ import annotations

import os
import tempfile

import numpy as np


def build():
    import keras

    dense = keras.layers.Dense
    model = keras.Sequential([keras.layers.Input((600,)), dense(800, name="up"), dense(600, name="down")])
    model.compile("adam", "mse")
    return model


def main() -> dict[str, object]:
    """Whether what was loaded is what was saved, and how many parts were read from mapped files."""
    import keras

    import keras_flow as kf
    from keras_flow.backends.files import weights_files

    folder = tempfile.gettempdir()  # the pool's: a rank that is done must not remove what others still read
    parts = []
    blocks = weights_files.blocks

    def counted(*arguments):
        parts.append(1)
        return blocks(*arguments)

    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    rules = {"up/kernel": {"model": kf.sbp.split(1)}, "down/kernel": {"model": kf.sbp.split(0)}}
    keras.utils.set_random_seed(3)
    weights_files.blocks = counted
    try:
        with kf.ModelParallel(mesh, rules=rules).scope():
            model = build()
            model.train_on_batch(np.ones((8, 600), "float32"), np.ones((8, 600), "float32"))
            model.save(os.path.join(folder, "m.keras"))
            model.save_weights(os.path.join(folder, "m.weights.h5"))
            other = build()
            other.load_weights(os.path.join(folder, "m.weights.h5"), skip_mismatch=False)
            whole = keras.models.load_model(os.path.join(folder, "m.keras"))
            expected = [keras.ops.convert_to_numpy(one) for one in (*model.weights, *model.optimizer.variables)]
            weights = [keras.ops.convert_to_numpy(one) for one in other.weights]
            loaded = [keras.ops.convert_to_numpy(one) for one in (*whole.weights, *whole.optimizer.variables)]
    finally:
        weights_files.blocks = blocks
    same = all(np.array_equal(one, two) for one, two in zip(expected, weights, strict=False))
    return {"weights": same, "model": all(map(np.array_equal, expected, loaded)), "parts": len(parts)}
