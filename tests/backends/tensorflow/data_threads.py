"""Threads that read data while the main thread traces or runs a step."""

import threading

import keras
import numpy as np
from keras import ops

import keras_flow as kf


def layers_that_a_reading_thread_calls() -> None:
    """A thread that reads data calls a layer of the scope while a step is being traced: it is in no step."""
    rows = np.random.RandomState(0).randn(13, 4).astype("float32")
    values: list = []

    def call() -> None:
        try:
            values.append(ops.convert_to_numpy(features(rows)))
        except Exception as error:
            values.append(error)

    class CalledBeside(keras.layers.Layer):
        """As its model is traced, another thread calls `features`."""

        def call(self, inputs):
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(60)
            return inputs

    with kf.DataParallel().scope():
        features = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh")])
        expected = features.predict(rows, verbose=0)
        model = keras.Sequential([keras.Input((4,)), CalledBeside(), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        del values[:]
        model.fit(rows, expected, batch_size=13, verbose=0)
    assert values
    for value in values:
        if isinstance(value, Exception):
            raise value
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6)


PROGRAMS = {layers_that_a_reading_thread_calls.__name__: layers_that_a_reading_thread_calls}
