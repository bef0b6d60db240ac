"""Copies of a weight that differ between processes are an error before the first step, on every engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import sampling
from tests.launch import programs

DIFFER = """
import keras
import numpy as np

import keras_flow as kf

x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
y = x[:, :1]


class Own(keras.initializers.Initializer):
    "Draws from numpy, so each process has numbers of its own."

    def __call__(self, shape, dtype=None):
        return keras.ops.convert_to_tensor(np.random.default_rng().normal(size=shape).astype("float32"))


def batches():
    while True:
        yield x[:16], y[:16]


def model_of(rate=0.1, initializer="glorot_uniform", inputs=True, optimizer=None):
    own = keras.layers.Dense(4, name="own", kernel_initializer=initializer)
    model = keras.Sequential([*([keras.Input((8,))] if inputs else []), own, keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(rate), "mse")
    return model


def refused(call, path):
    try:
        call()
    except kf.FlowError as error:
        assert path in str(error) and "which should be copies of one value" in str(error), error
    else:
        raise AssertionError(f"{path}: not refused")


def main():
    keras.utils.set_random_seed(0)
    mine = kf.env.process_index()
    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    split = {"own/kernel": {"model": kf.sbp.split(1)}}
    for distribution in (kf.DataParallel(), kf.ModelParallel(mesh, rules=split)):
        before, faster_before = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1 * (1 + mine))
        with distribution.scope():
            right, faster = model_of(), model_of(rate=0.1 * (1 + mine))
            drawn, late = model_of(initializer=Own()), model_of(initializer=Own(), inputs=False)
            outside, faster_outside = model_of(optimizer=before), model_of(optimizer=faster_before)
        outside.fit(x, y, verbose=0)
        if keras.config.backend() != "torch":  # which takes those of rank 0, and says so
            refused(lambda: faster_outside.fit(x, y, verbose=0), "learning_rate'")
        right.fit(x, y, verbose=0)
        kernel = right.get_weights()[0]
        right.layers[0].kernel.assign(kernel + mine)
        refused(lambda: right.fit(x, y, verbose=0), "own/kernel'")
        refused(lambda: right.evaluate(x, y, verbose=0), "own/kernel'")
        refused(lambda: faster.fit(x, y, verbose=0), "learning_rate'")
        refused(lambda: drawn.train_on_batch(x, y), "own/kernel'")
        refused(lambda: late.fit(batches(), steps_per_epoch=2, verbose=0), "own/kernel'")
        right.layers[0].kernel.assign(kernel)
        right.fit(x, y, verbose=0)
    if keras.config.backend() == "torch":  # elsewhere one rank of a stage has its weights, and gives them to the others
        with kf.PipelineParallel(kf.Placement([[0, 1], [2, 3]], axis_names=("pipe", "data"))).scope():
            staged = model_of()
        staged.fit(x, y, verbose=0)
        staged.layers[1].kernel.assign(np.full((4, 1), 1.0 + mine))
        refused(lambda: staged.fit(x, y, verbose=0), "/kernel'")
    if kf.env.is_main_process():
        print("all were told")


if __name__ == "__main__":
    kf.init()
    main()
"""


@pytest.mark.parametrize("backend", sampling.on_one(("jax", "tensorflow", "torch")))
def test_copies_that_differ_are_told(backend: str, tmp_path: Path) -> None:
    """Two processes on JAX and TensorFlow, so that both hold both halves of a split kernel; torch has four."""
    script = programs.write(tmp_path, DIFFER)
    processes = "4" if backend == "torch" else "2"
    command = ["-m", "keras_flow.launch", "--nproc_per_node", processes, "--devices", "4", str(script)]
    code, out, err = programs.finish(programs.start(command, backend), 200)
    assert code == 0, err[-3000:]
    assert "all were told" in out
