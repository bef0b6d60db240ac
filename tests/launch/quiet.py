"""A right run: what it prints is all that its job may show (`test_quiet.py`)."""

import sys

import keras
import numpy as np

import keras_flow as kf


def main() -> None:
    """Train a small model under a hybrid layout, and print on both streams."""
    keras.utils.set_random_seed(0)
    kf.init()
    ranks = np.arange(kf.env.get_world_size()).reshape(2, -1)
    mesh = kf.Placement(ranks, ("data", "model"))
    rules = {"up/kernel": {"model": kf.sbp.split(1)}, "down/kernel": {"model": kf.sbp.split(0)}}
    with kf.ModelParallel(mesh, rules=rules).scope():
        tokens = keras.Input((6,), dtype="int32")
        x = keras.layers.Embedding(16, 8)(tokens)
        x = x + keras.layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
        x = keras.layers.Dense(8, name="down")(keras.layers.Dense(16, "gelu", name="up")(x))
        outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(keras.layers.BatchNormalization()(x)))
        model = keras.Model(tokens, outputs)
        model.compile("adam", "mse")
        x, y = np.arange(60).reshape(10, 6) % 16, np.ones((10, 1))
        model.fit(x, y, batch_size=4, verbose=0)
        model.evaluate(x, y, batch_size=4, verbose=0)
    if kf.env.is_main_process():
        print("trained")
        print("and said so", file=sys.stderr)


if __name__ == "__main__":
    main()
