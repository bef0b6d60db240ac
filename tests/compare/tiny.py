"""A program for `keras-flow compare` that trains in a moment; its distributions() seed faults."""

import keras
import numpy as np

import keras_flow as kf


def build_model():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="hidden"),
            keras.layers.Dense(3, name="logits"),
        ],
        name="tiny",
    )
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return model


def load_data():
    random = np.random.default_rng(0)
    x = random.standard_normal((50, 6)).astype("float32")
    return x, (x[:, 0] > 0).astype("int32") + (x[:, 1] > 0)


def rules():
    return {"hidden/kernel": {"model": kf.sbp.split(1)}, "logits/kernel": {"model": kf.sbp.split(0)}}


class Scaled(kf.DataParallel):
    """Breaks the numbers: makes the learning rate one percent larger."""

    def enter(self):
        super().enter()
        keras.optimizers.SGD.learning_rate = property(lambda self: 0.101)


def distributions():
    return {
        "dp3": lambda: kf.DataParallel(kf.Placement([0, 1], axis_names=("data",))),  # uses fewer than it names
        "scaled": lambda: Scaled(kf.Placement([0, 1], axis_names=("data",))),
    }
