"""Without an active distribution of ours, and under one of Keras's own, Keras does what it does without keras_flow."""

from __future__ import annotations

import pytest

from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(200)

#: prints digests of everything a program may see; run with and without the hooks
STOCK = """
import hashlib
import keras, numpy as np

def digest(*values):
    text = hashlib.sha256()
    for value in values:
        text.update(np.ascontiguousarray(value).tobytes())
    return text.hexdigest()[:16]

def program(name, distribution=None):
    keras.utils.clear_session()  # takes the distribution away too
    keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(5)
    random = np.random.default_rng(1)
    x, y = random.standard_normal((48, 8)).astype("float32"), random.integers(0, 4, 48)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, kernel_initializer="orthogonal"),
        keras.layers.BatchNormalization(), keras.layers.Dropout(.3), keras.layers.Dense(4, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_split=1/3).history
    print(name, digest(*history.values()), digest(*model.get_weights()), digest(model.predict(x, verbose=0)),
        digest(model.evaluate(x, y, batch_size=16, verbose=0), model.train_on_batch(x[:16], y[:16])),
        digest(model.predict_on_batch(x[:16])), type(model.train_function).__name__,
        sorted({len(v.value.sharding.device_set) for v in model.variables}))

program("alone")
program("under Keras's own DataParallel", keras.distribution.DataParallel())
program("afterwards")
"""

HOOKED = """
import keras_flow as kf
kf.init(4)
import keras
import numpy as np
dist = kf.ModelParallel(kf.Placement(range(4), axis_names=("model",)), rules={"kernel": "S(1)"})
with dist.scope():
    other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    other.compile("sgd", "mse")
    other.fit(np.ones((6, 8)), np.ones((6, 4)), batch_size=5, verbose=0)
"""

THREADS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "NPROC": "8"}


@sampling.one_in(2)
def test_bit_equal_to_a_process_without_keras_flow() -> None:
    def run(program: str) -> list[str]:
        code, out, err = programs.finish(programs.start(["-c", program], "jax", **THREADS), 180)
        assert code == 0, err
        return out.splitlines()

    stock = run(STOCK)
    assert len(stock) == 3
    assert stock[1].endswith("[4]"), "Keras's DataParallel is at work"
    assert run(HOOKED + STOCK) == stock
