"""Handwritten digits (scikit-learn's, real data, no download): a small CNN, data-, tensor- or hybrid-parallel.

    python examples/digits.py                          # one device
    keras-flow launch --devices 4 examples/digits.py   # the hybrid layout of main()
    keras-flow compare examples/digits.py              # every backend, every layout

KERAS_BACKEND chooses the engine: jax, tensorflow or torch.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_flow as kf


def load_data():
    """1,437 rows to train on and 360 to validate, images of 8 x 8 in [0, 1]."""
    digits = load_digits()
    x = (digits.images[..., None] / 16.0).astype("float32")
    y = digits.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return x[:1437], y[:1437], x[1437:], y[1437:]


def build_model():
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False, name="conv"),
            layers.BatchNormalization(momentum=0.9, name="norm"),
            layers.ReLU(),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu", name="hidden"),
            layers.Dense(10, name="logits"),
        ],
        name="digits",
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def rules():
    """A column and row pair: one all-reduce for the two dense layers."""
    return {
        "hidden/kernel": {"model": kf.sbp.split(1)},
        "hidden/bias": {"model": kf.sbp.split(0)},
        "logits/kernel": {"model": kf.sbp.split(0)},
    }


def main():
    x, y, x_val, y_val = load_data()
    keras.utils.set_random_seed(0)
    if kf.env.get_world_size() == 4:
        mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        distribution = kf.ModelParallel(mesh, rules=rules())
    else:
        distribution = kf.DataParallel()
    with distribution.scope():
        model = build_model()
        model.summary()
        model.fit(x, y, batch_size=64, epochs=3, validation_data=(x_val, y_val), verbose=2)
        loss, accuracy = model.evaluate(x_val, y_val, verbose=0)
    if kf.env.is_main_process():
        print(f"{keras.backend.backend()}, {kf.env.get_world_size()} ranks: loss {loss:.4f}, accuracy {accuracy:.4f}")
        for variable in model.trainable_variables:
            print(f"  {variable.path}: {kf.layout_of(variable)}")


if __name__ == "__main__":
    kf.run(main)
