"""A file in which Keras wrote `jit_compile=True` for "auto" is trained on engines that do not compile."""

from __future__ import annotations

import os
import tempfile


def trained_inside_and_outside_of_a_scope() -> None:
    """The file is loaded under the distribution, and before it; both models are trained under it."""
    import keras
    import numpy as np

    import keras_flow as kf

    keras.utils.set_random_seed(3)  # ranks that are processes write equal files
    x = np.ones((8, 8), "float32")
    plain = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    plain.compile("sgd", "mse", jit_compile=True)
    distribution = kf.DataParallel()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"{kf.env.process_index()}.keras")
        plain.save(path)
        outside = keras.saving.load_model(path)
        with distribution.scope():
            inside = keras.saving.load_model(path)
            losses = [model.fit(x, x[:, :4], verbose=0).history["loss"][0] for model in (inside, outside)]
    assert np.isclose(*losses), losses
    assert outside.jit_compile is False
