"""Horovod's example for Keras, with one import line changed, and digits (scikit-learn's) in place of MNIST.

    keras-flow launch --nproc_per_node 2 examples/older_worlds/horovod_digits.py

KERAS_BACKEND chooses the engine. Each process is a rank: `batch_size` is its own, and it shuffles for itself.
"""

import math
import sys

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import keras_flow.hvd as hvd  # was: import horovod.keras as hvd


def main(whole_epochs=12.0):
    # Horovod: initialize Horovod.
    hvd.init()

    batch_size = 128
    num_classes = 10

    # Horovod: adjust number of epochs based on number of processes.
    epochs = math.ceil(whole_epochs / hvd.size())

    digits = load_digits()
    x = (digits.images[..., None] / 16.0).astype("float32")
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], digits.target[order]
    x_train, y_train, x_test, y_test = x[:1437], y[:1437], x[1437:], y[1437:]

    # convert class vectors to binary class matrices
    y_train = keras.utils.to_categorical(y_train, num_classes)
    y_test = keras.utils.to_categorical(y_test, num_classes)

    model = keras.Sequential()
    model.add(layers.Input((8, 8, 1)))
    model.add(layers.Conv2D(32, kernel_size=(3, 3), activation="relu"))
    model.add(layers.Conv2D(64, (3, 3), activation="relu"))
    model.add(layers.MaxPooling2D(pool_size=(2, 2)))
    model.add(layers.Dropout(0.25))
    model.add(layers.Flatten())
    model.add(layers.Dense(128, activation="relu"))
    model.add(layers.Dropout(0.5))
    model.add(layers.Dense(num_classes, activation="softmax"))

    # Horovod: adjust learning rate based on number of processes.
    opt = keras.optimizers.Adadelta(1.0 * hvd.size())

    # Horovod: add Horovod Distributed Optimizer.
    opt = hvd.DistributedOptimizer(opt)

    model.compile(loss="categorical_crossentropy", optimizer=opt, metrics=["accuracy"])

    callbacks = [
        # Horovod: broadcast initial variable states from rank 0 to all other processes.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Horovod: average metrics among processes at the end of every epoch.
        hvd.callbacks.MetricAverageCallback(),
    ]

    model.fit(
        x_train,
        y_train,
        batch_size=batch_size,
        callbacks=callbacks,
        epochs=epochs,
        # Horovod: print on rank 0 alone.
        verbose=2 if hvd.rank() == 0 else 0,
        validation_data=(x_test, y_test),
    )
    score = model.evaluate(x_test, y_test, verbose=0)
    if hvd.rank() == 0:
        print(f"Test loss {score[0]:.4f}, accuracy {score[1]:.4f}")
    return model


if __name__ == "__main__":
    main(*([6.0] if "--small" in sys.argv else []))
