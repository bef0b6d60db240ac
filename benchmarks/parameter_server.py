"""Steps of training with parameter servers: synchronous and asynchronous, without and with a slow worker.

    python -m benchmarks.parameter_server [--workers 1 2 4] [--seconds 8] [--rows 1000000]

TensorFlow, or torch where KERAS_BACKEND says so. For each number of workers one job of a chief, a server and workers
trains an MLP of 0.2 million parameters by turns: `mode="sync"`, `mode="async"`, and on TensorFlow a loop of its own
ClusterCoordinator around the same layers, written by hand, which is asynchronous. Then the same with worker 0 stopped
by signals for half of the time. Printed: batches in a second, and those of the other workers in units of what they
compute without a slow one.

Then the bytes of a step with an Embedding, as the loopback device counts them: run nothing else on this machine, or
give the benchmark a network of its own by `unshare --net --map-root-user sh -c "ip link set lo up; python -m ..."`.
`--workers` without a number: these bytes alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import psutil

import keras_flow as kf

BATCH, FEATURES, WIDTH, CLASSES = 64, 64, 384, 10
#: seconds for which a slow worker is stopped, and then let go on
_STOPPED = 0.05


def _model(distribution: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    with distribution.scope():
        hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(CLASSES)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(count, FEATURES)).astype("float32"), random.integers(0, CLASSES, count)


class _Clock(keras.callbacks.Callback):
    """Ends a `fit` after some seconds, of which the first batches do not count."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.batches, self.begun = seconds, 0, 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count a batch."""
        if batch == 10:
            self.begun = time.perf_counter()
        self.batches = batch - 10
        if batch > 10 and time.perf_counter() - self.begun > self.seconds:
            self.model.stop_training = True
            self.seconds = time.perf_counter() - self.begun


def _by_fit(distribution: Any, seconds: float) -> dict[str, Any]:
    """Batches in a second under stock `fit`, and how many of them each worker computed."""
    model, clock = _model(distribution), _Clock(seconds)
    x, y = _rows(BATCH * 64)
    before = Counter() if distribution.mode == "sync" else Counter(distribution.statistics.of_worker)

    def endless() -> Any:
        while True:
            for begin in range(0, len(x), BATCH):
                yield x[begin : begin + BATCH], y[begin : begin + BATCH]

    model.fit(endless(), steps_per_epoch=10**6, verbose=0, callbacks=[clock])
    after = Counter() if distribution.mode == "sync" else Counter(distribution.statistics.of_worker)
    return {"rate": clock.batches / clock.seconds, "of_worker": dict(after - before)}


def _by_hand(distribution: Any, seconds: float) -> dict[str, Any]:
    """The same layers in a loop of ClusterCoordinator, as TensorFlow's guide writes it."""
    import tensorflow as tf

    coordinator = distribution._servers._coordinator
    with coordinator.strategy.scope():
        shapes = [(FEATURES, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES)]
        kernels = [tf.Variable(tf.random.normal(shape, stddev=0.05)) for shape in shapes]
        biases = [tf.Variable(tf.zeros(shape[1:])) for shape in shapes]
    x, y = _rows(BATCH * 64)

    @tf.function
    def step(begin: tf.Tensor) -> tf.Tensor:
        rows, targets = tf.constant(x)[begin : begin + BATCH], tf.constant(y)[begin : begin + BATCH]
        with tf.GradientTape() as tape:
            for kernel, bias in zip(kernels[:-1], biases[:-1], strict=True):
                rows = tf.nn.relu(rows @ kernel + bias)
            logits = rows @ kernels[-1] + biases[-1]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
            loss = tf.reduce_mean(losses)
        for variable, gradient in zip([*kernels, *biases], tape.gradient(loss, [*kernels, *biases]), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    sent: deque[Any] = deque()
    begun, number = 0.0, 0
    while not begun or time.perf_counter() - begun < seconds:
        sent.append(coordinator.schedule(step, args=(tf.constant(number * BATCH % len(x)),)))
        if len(sent) > distribution.workers:  # as many on their way as the other way has
            sent.popleft().fetch()
            number += 1
        if number == 10 and not begun:
            begun = time.perf_counter()
    coordinator.join()
    return {"rate": (number - 10) / (time.perf_counter() - begun), "of_worker": {}}


@contextmanager
def _slow_worker() -> Any:
    """Inside, worker 0 is stopped for half of the time."""
    found = [each for each in psutil.Process(os.getppid()).children() if _task(each) == ("worker", 0)]
    number, pause = found[0].pid, f"sleep {_STOPPED}"
    # not a thread: TensorFlow holds Python's lock while it waits for the worker that is stopped
    loop = f"while {pause}; do kill -STOP {number}; {pause}; kill -CONT {number}; done"
    shell = subprocess.Popen(["sh", "-c", loop])
    try:
        yield
    finally:
        shell.kill()
        shell.wait()
        found[0].resume()


def _task(process: psutil.Process) -> tuple[str, int] | None:
    config = json.loads(process.environ().get("TF_CONFIG") or "{}").get("task")
    return None if config is None else (config["type"], config["index"])


def rates(seconds: float, rounds: int) -> dict[str, Any]:
    """In a chief: batches in a second of each way, without and with a slow worker, by turns."""
    sync, free = kf.ParameterServer("sync"), kf.ParameterServer("async")
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "sync": lambda: _by_fit(sync, seconds),
        "async": lambda: _by_fit(free, seconds),
    }
    if keras.config.backend() == "tensorflow":
        ways["by hand"] = lambda: _by_hand(free, seconds)
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            found.setdefault(name, []).append(way())
            if free.workers > 1:
                with _slow_worker():
                    found.setdefault(f"{name}, slow", []).append(way())
    return found


def _over_loopback() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def moved(
    rows: int, batch: int, partition: str | int = "auto", count: Callable[[], int] = _over_loopback
) -> dict[str, float]:
    """In a chief: bytes that are sent, as something counts them, in a step that reads so many rows of a table."""
    keras.utils.set_random_seed(0)
    with kf.ParameterServer("sync", partition=partition).scope():
        table = keras.layers.Embedding(rows, 4)
        model = keras.Sequential(
            [keras.Input((1,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    tokens = np.linspace(0, rows - 1, batch).astype("int32")[:, None]  # each row once
    targets = np.ones((batch, 1), "float32")
    steps = 4
    for _ in range(2):
        model.train_on_batch(tokens, targets)
    before = count()
    for _ in range(steps):
        model.train_on_batch(tokens, targets)
    sent = (count() - before) / steps
    return {"table": 16.0 * rows, "rows": 16.0 * batch, "sent": sent}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each way, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the Embedding's table")
    options = parser.parse_args()
    print("workers  way        batches/s  with a slow worker   the others compute, of what they did")
    for workers in options.workers:
        found = kf.run(rates, servers=1, workers=workers, args=(options.seconds, options.rounds))
        for name in (name for name in found if not name.endswith(", slow")):
            alone, slow = found[name], found.get(f"{name}, slow", [])
            line = f"{workers:7}  {name:9} {statistics.median(each['rate'] for each in alone):9.1f}"
            if slow:
                line += f"  {statistics.median(each['rate'] for each in slow):9.1f}"
            if slow and name == "async":
                ratio = statistics.median(map(_of_others, alone)) / statistics.median(map(_of_others, slow))
                line += f"          lose a factor of {ratio:.2f}"
            print(line, flush=True)
    said = kf.run(moved, servers=1, workers=1, args=(options.rows, 32))
    print(
        f"a step that reads 32 rows of an Embedding of {options.rows:,}: {said['sent'] / 1e6:.3f} MB are sent; the "
        f"table has {said['table'] / 1e6:.1f} MB, the rows {said['rows'] / 1e6:.6f} MB"
    )


def _of_others(found: dict[str, Any]) -> float:
    """Batches in a second of one worker that is not slowed down."""
    counts = {int(worker): count for worker, count in found["of_worker"].items()}
    others = [count for worker, count in counts.items() if worker]
    return found["rate"] * sum(others) / sum(counts.values()) / len(others)


if __name__ == "__main__":
    main()
