"""Parameter servers: handwritten digits (scikit-learn's), trained by workers that need not wait for each other.

    keras-flow launch --servers 1 --workers 2 examples/older_worlds/parameter_server.py

KERAS_BACKEND is tensorflow or torch. This program runs in the chief; the servers hold the variables.
"""

import sys

import keras
from keras import layers
from sklearn.datasets import load_digits

import keras_flow as kf


def main(epochs=20):
    # was: tf.distribute.ParameterServerStrategy(resolver), and a ClusterCoordinator around a loop
    servers = kf.ParameterServer(mode="async", staleness=2)

    digits = load_digits()
    x, y = digits.data.astype("float32") / 16.0, digits.target
    keras.utils.set_random_seed(0)
    with servers.scope():
        model = keras.Sequential([layers.Input((64,)), layers.Dense(64, "relu"), layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy"])
    model.fit(x[:1437], y[:1437], batch_size=64, epochs=epochs, verbose=0)

    counted = servers.statistics
    print(f"{counted.updates} updates, at most {counted.staleness} late, batches of the workers {counted.of_worker}")
    print(f"accuracy {model.evaluate(x[1437:], y[1437:], verbose=0)[1]:.3f}")


if __name__ == "__main__":
    main(*([4] if "--small" in sys.argv else []))
