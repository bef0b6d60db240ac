"""A chief's program, started by `keras-flow launch --servers 2 --workers 2`: prints a JSON line of what it found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil

import keras_flow as kf
from keras_flow.backends.mail import frames
from keras_flow.checkpoint import manifest

ROWS, BATCH, EPOCHS = 61, 13, 3
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, 5)).astype("float32")
Y = (X @ _random.normal(size=(5, 3))).astype("float32")


def processes(job: str, index: int) -> list[psutil.Process]:
    """The process of a role, where it lives."""
    found = []
    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # one that has ended meanwhile
            config = process.environ().get("TF_CONFIG", "")
            if config and json.loads(config)["task"] == {"type": job, "index": index}:
                found.append(process)
    return found


def kill(job: str, index: int) -> int:
    """End a process of the job, as the system might; how many there were."""
    found = processes(job, index)
    for process in found:
        process.send_signal(signal.SIGKILL)
    return len(found)


class Killing(keras.callbacks.Callback):
    """Kills a process after some batches."""

    def __init__(self, job: str, batch: int):
        super().__init__()
        self.job, self.left = job, batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count down."""
        self.left -= 1
        if self.left == 0:
            self.act()

    def act(self) -> None:
        """End the process."""
        kill(self.job, 1)


class Stopping(Killing):
    """Stops a process after some batches, and lets it go on after some seconds; None: never."""

    def __init__(self, job: str, batch: int, seconds: float | None):
        super().__init__(job, batch)
        self.seconds, self.begun = seconds, 0.0

    def act(self) -> None:
        """Stop it."""
        (process,) = processes(self.job, 1)
        process.send_signal(signal.SIGSTOP)
        self.begun = time.monotonic()
        if self.seconds is not None:
            # not a thread: TensorFlow holds Python's lock while it waits for the worker that is stopped
            subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; kill -CONT {process.pid}"])

    def on_train_end(self, logs: Any = None) -> None:
        """How long the training went on."""
        self.begun = time.monotonic() - self.begun


class Counting(keras.callbacks.Callback):
    """Counts batches, those of this job apart: a checkpoint gives back what a callback has counted."""

    batches, of_this_job = 0, [0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        self.batches += 1
        self.of_this_job[0] += 1


def trained(distribution: Any, optimizer: Any, *callbacks: Any, dropout: float = 0.3) -> dict[str, Any]:
    """A model after some epochs, its logs and predictions."""
    keras.utils.set_random_seed(1)
    with distribution.scope():
        layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(dropout), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile(optimizer(), "mse", metrics=["mae"])
    data = {"validation_data": (X[:7], Y[:7]), "batch_size": BATCH, "shuffle": False, "verbose": 0}
    logs = model.fit(X, Y, epochs=EPOCHS, callbacks=list(callbacks), **data).history
    return {"model": model, "logs": logs, "values": [*_losses(logs), *model.get_weights(), model.predict(X, verbose=0)]}


def _losses(logs: dict[str, list[float]]) -> list[list[float]]:
    """What one device logs, too: no counts."""
    return [values for name, values in logs.items() if not name.startswith("server_")]


def off(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of logs, weights and predictions, relative to the largest value."""
    pairs = zip(one["values"], other["values"], strict=True)
    return max(float(np.abs(np.subtract(a, b)).max() / max(1.0, np.abs(a).max())) for a, b in pairs)


def _sgd() -> Any:
    return keras.optimizers.SGD(0.1)


def _adamw() -> Any:
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


_OPTIMIZERS = {
    "sgd": _sgd,
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
}


def numbers() -> dict[str, Any]:
    """sync, and async one batch after the other, beside one device; where variables are; a model that was saved."""
    one, sync = kf.DataParallel(kf.Placement([0])), kf.ParameterServer("sync", servers=2)
    found: dict[str, Any] = {name: off(trained(one, make), trained(sync, make)) for name, make in _OPTIMIZERS.items()}
    free = kf.ParameterServer("async", staleness=0)
    for name in ("staleness=0", "staleness=0, another model"):
        found[name] = off(trained(one, _sgd), trained(free, _sgd))
    model = trained(sync, _OPTIMIZERS["adam"])["model"]
    held = [*model.trainable_variables, *(slot for slot in model.optimizer.variables if len(slot.shape))]
    found["servers"] = sorted({_server(each) for each in held})
    path = sys.argv[2] + "/model.keras"
    model.save(path)
    pairs = zip(model.get_weights(), keras.models.load_model(path).get_weights(), strict=True)
    found["saved"] = max(float(np.abs(one - other).max()) for one, other in pairs)
    found["few rows"] = _few_rows(sync, kf.ParameterServer("async"), one)
    return found


def _server(variable: Any) -> str:
    """Which server has a variable, as its engine says it."""
    value = variable.value
    if keras.config.backend() == "torch":
        return f"job:ps {value.place.servers[0]}"
    return f"{value.device.split('/')[1]} {value.device.split('task:')[1][0]}"


def _few_rows(*distributions: Any) -> list[float]:
    """One batch of one row, for two workers."""
    losses = []
    for each in distributions:
        keras.utils.set_random_seed(1)
        with each.scope():
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
            model.compile("sgd", "mse")
        losses.append(float(model.fit(X[:1], Y[:1], verbose=0).history["loss"][0]))
    return losses


def steps() -> dict[str, Any]:
    """Steps after a change of the optimizer, after failures, and with a loss scale that moves on meanwhile."""
    one, sync = kf.DataParallel(kf.Placement([0])), kf.ParameterServer("sync", servers=2)
    return {
        "other settings": _apart(*(_with_other_settings(each) for each in (one, sync))),
        "settings that a callback changes": _apart(*(_with_other_settings(each, True) for each in (one, sync))),
        "on another distribution and back": _apart(*(_back(each, one) for each in (one, sync))),
        "after failures": _apart(*(_after_failures(each) for each in (one, sync))),
        "scaled": _apart(*(_scaled(each) for each in (one, kf.ParameterServer("async", staleness=4)))),
    }


def _small(distribution: Any, optimizer: Any, layer: Any, loss: Any = "mse") -> Any:
    keras.utils.set_random_seed(1)
    with distribution.scope():
        model = keras.Sequential([keras.Input((5,)), layer()])
        model.compile(optimizer, loss)
    return model


class _ChangesMomentum(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.momentum = 0.9 - 0.6 * epoch


def _back(distribution: Any, other: Any) -> Any:
    """A model that is trained on another distribution meanwhile."""
    model = _small(distribution, keras.optimizers.SGD(0.05, momentum=0.9), lambda: keras.layers.Dense(3))
    for each in (distribution, other, distribution):
        each.apply(model)
        with each.scope():
            model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


def _with_other_settings(distribution: Any, by_callback: bool = False) -> Any:
    """A model whose optimizer has another momentum from its second `fit`, or epoch, on."""
    model = _small(distribution, keras.optimizers.SGD(0.05, momentum=0.9), lambda: keras.layers.Dense(3))
    if by_callback:
        model.run_eagerly = True  # a graph keeps the momentum that it was traced with
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[_ChangesMomentum()])
        return model
    for momentum in (0.9, 0.3):
        model.optimizer.momentum = momentum
        model.compile(model.optimizer, "mse")
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


class _EvaluatesWhatFails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        fails(lambda: self.model.evaluate(BAD, BAD, verbose=0))


def fails(call: Any) -> None:
    """Call what fails on every engine."""
    try:
        call()
    except Exception:
        return
    raise AssertionError("a number beyond the table was looked up")


GOOD, BAD = np.zeros((12, 5), "int32"), np.int32([[0] * 5] * 11 + [[9] * 5])


def _after_failures(distribution: Any) -> Any:
    """A model some of whose steps failed on a worker: nothing of them is in the steps that follow."""
    model = _small(distribution, keras.optimizers.SGD(0.05), lambda: keras.layers.Embedding(3, 1))
    callbacks = []
    if isinstance(distribution, kf.ParameterServer):
        fails(lambda: model.fit(BAD, BAD, verbose=0))
        callbacks.append(_EvaluatesWhatFails())
    model.fit(GOOD, GOOD + 1, batch_size=4, verbose=0, shuffle=False, callbacks=callbacks)
    return model


def _mean(y: Any, outputs: Any) -> Any:
    return keras.ops.mean(outputs, -1)  # its gradient is that of any weights, late or not


def _scaled(distribution: Any) -> Any:
    """A model whose loss scale is another one for every batch that is on its way."""
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0, dynamic_growth_steps=1
    )
    model = _small(distribution, optimizer, lambda: keras.layers.Dense(1), _mean)
    model.fit(X, Y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
    return model


TOKENS = _random.integers(0, 41, (ROWS, 3))  # rows of the table are used several times in a batch


def _embedded(distribution: Any, optimizer: Any, table: bool, dtype: str) -> dict[str, Any]:
    """A model with a table of 41 rows, or with the product that an Embedding stands for, without a sparse gradient."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(dtype)
    with distribution.scope():
        inputs = keras.Input((3,), dtype="int32")
        rows = np.linspace(-1, 1, 164).reshape(41, 4)
        if table:
            found = keras.layers.Embedding(41, 4, embeddings_initializer=keras.initializers.Constant(rows))(inputs)
        else:
            one_hot = keras.layers.CategoryEncoding(41, output_mode="one_hot")(keras.ops.reshape(inputs, (-1, 3, 1)))
            kernel = keras.initializers.Constant(rows)
            found = keras.layers.Dense(4, use_bias=False, kernel_initializer=kernel)(one_hot)
        model = keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(keras.layers.Flatten()(found)))
        model.compile(optimizer(), "mse")
    keras.config.set_dtype_policy("float32")
    logs = model.fit(TOKENS, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    return {"model": model, "values": [*_losses(logs), *model.get_weights(), model.predict(TOKENS, verbose=0)]}


def tables() -> dict[str, Any]:
    """An Embedding in parts beside the product that it stands for; the bytes of a step."""
    from benchmarks.parameter_server import moved

    parts = kf.ParameterServer(partition=2)
    pair = [_embedded(kf.DataParallel(kf.Placement([0])), _OPTIMIZERS["adam"], False, "float32")]
    pair.append(_embedded(parts, _OPTIMIZERS["adam"], True, "float32"))
    layout = kf.layout_of(pair[1]["model"].layers[1].embeddings)
    # messages of torch are counted by `bytes_of_tables`
    sizes = [] if keras.config.backend() == "torch" else [(1000, 1), (200_000, 1), (200_000, 2)]
    return {
        "off": off(*pair),
        "layout": [str(layout), list(layout.layout.placement.ranks)],
        "sent": [moved(rows, 32, partition)["sent"] for rows, partition in sizes],
    }


class _Counting:
    """A connection that notes in a file how many bytes it is given to send."""

    def __init__(self, connection: Any, file: Any):
        self._connection, self._file = connection, file

    def sendall(self, data: Any) -> None:
        """Note the bytes first: who reads them may look into the file at once."""
        self._file.write(f"{memoryview(data).nbytes}\n")
        self._file.flush()
        self._connection.sendall(data)


def bytes_of_tables() -> dict[str, Any]:
    """Of torch: the bytes that all processes of the job send in a step which reads 32 rows of a table."""
    from benchmarks.parameter_server import moved

    folder, write = Path(sys.argv[2]), frames.write
    file = (folder / f"bytes-{os.getpid()}").open("w")
    # in workers and servers too, which the test starts with this program
    frames.write = lambda connection, told, value: write(_Counting(connection, file), told, value)

    def count() -> int:
        return sum(int(line) for each in folder.glob("bytes-*") for line in each.read_text().splitlines())

    return {"sent": [moved(rows, 32, parts, count)["sent"] for rows, parts in ((1000, 1), (200_000, 1), (200_000, 2))]}


def more_tables() -> dict[str, Any]:
    """An Embedding, whole and in parts, with more optimizers and dtypes, and its checkpoints."""
    one, whole, parts = kf.DataParallel(kf.Placement([0])), kf.ParameterServer(), kf.ParameterServer(partition=2)
    free = kf.ParameterServer("async", staleness=0, partition="min_size:64B")
    found: dict[str, Any] = {}
    # of Lamb an update is by the norms of all rows; AdamW lets weights decay, with biases left out
    more = {"lamb": lambda: keras.optimizers.Lamb(0.01), "adamw": _adamw}
    # biases are of one part, whose update Nadam makes beside those that the chief joins
    for name, make in {**_OPTIMIZERS, **more}.items():
        product = _embedded(one, make, False, "float32")
        found[name] = [off(product, _embedded(each, make, True, "float32")) for each in (whole, parts, free)]
    product = _embedded(one, _sgd, True, "mixed_bfloat16")
    found["bfloat16"] = [off(product, _embedded(each, _sgd, True, "mixed_bfloat16")) for each in (whole, parts, free)]
    found["rounded"] = off(product, _embedded(one, _sgd, True, "float32"))
    model = _embedded(parts, _OPTIMIZERS["adam"], True, "float32")["model"]
    kf.checkpoint.save(sys.argv[2] + "/parts", model)
    for name, other in (("parts to one", one), ("parts to whole", whole)):
        loaded = _embedded(other, _OPTIMIZERS["adam"], True, "float32")["model"]
        kf.checkpoint.load(sys.argv[2] + "/parts", loaded)
        found[name] = _apart(model, loaded)
        kf.checkpoint.save(sys.argv[2] + "/" + name, loaded)
        kf.checkpoint.load(sys.argv[2] + "/" + name, model)
        found[name] += _apart(model, loaded)
    model.save(sys.argv[2] + "/parts.keras")
    found["saved"] = _apart(model, keras.models.load_model(sys.argv[2] + "/parts.keras"))
    return found


def _apart(one: Any, other: Any) -> float:
    """The largest difference of weights and slots."""
    pairs = zip(one.variables + one.optimizer.variables, other.variables + other.optimizer.variables, strict=True)
    return max(float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs)


def lost_worker() -> dict[str, Any]:
    """async: a worker is killed; every batch is applied once."""
    distribution = kf.ParameterServer("async", staleness=2)
    model = trained(distribution, _sgd, Killing("worker", 6), dropout=0.0)["model"]
    counted = distribution.statistics
    return {
        "updates": counted.updates,
        "dropped": counted.dropped,
        "staleness": counted.staleness,
        "of_worker": dict(counted.of_worker),
        "iterations": int(model.optimizer.iterations.numpy()),
        "finite": bool(np.isfinite(model.get_weights()[0]).all()),
    }


#: batches of a worker that may come back when it was killed already
_ON_THEIR_WAY = 4


def workers_lost_at_any_moment() -> dict[str, Any]:
    """async: workers that serve are killed at 20 moments, and started again; every batch is applied once."""
    waits = np.random.default_rng(int(os.environ["SEED"])).uniform(0.0, 0.3, size=20)
    over, killed = threading.Event(), [0, 0]
    distribution = kf.ParameterServer("async", staleness=2)
    counted = distribution.statistics

    def kill_all() -> None:
        seen = [0, 0]
        for number, wait in enumerate(waits):
            worker = number % 2
            # since it was started again: one that imports its modules loses nothing when it is killed
            while counted.of_worker[worker] <= seen[worker]:
                time.sleep(0.01)
            time.sleep(wait)
            killed[worker] += kill("worker", worker)
            seen[worker] = counted.of_worker[worker] + _ON_THEIR_WAY
        over.set()

    with distribution.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    batches = 0
    threading.Thread(target=kill_all, daemon=True).start()
    while not over.is_set():
        model.fit(X, Y, batch_size=BATCH, verbose=0)
        batches += 5
    iterations = int(model.optimizer.iterations.numpy())
    return {"batches": batches, "updates": counted.updates, "iterations": iterations, "killed": killed}


def stopped_worker() -> dict[str, Any]:
    """A worker is stopped for two seconds, and goes on: sync has the numbers of one device, async counts right."""
    sync, free = kf.ParameterServer("sync"), kf.ParameterServer("async", staleness=2)
    stopping = Stopping("worker", 6, 2.0)
    one = trained(kf.DataParallel(kf.Placement([0])), _sgd)
    found = {"off": off(one, trained(sync, _sgd, stopping)), "seconds": stopping.begun}
    run = trained(free, _sgd, Stopping("worker", 6, 2.0), dropout=0.0)
    counted = [free.statistics.updates, free.statistics.dropped, int(run["model"].optimizer.iterations.numpy())]
    return {**found, "counted": counted, "staleness": free.statistics.staleness, "logs": _counts(run)}


def _counts(run: dict[str, Any]) -> dict[str, list[float]]:
    return {name: values for name, values in run["logs"].items() if name.startswith("server_")}


def hung_worker() -> dict[str, Any]:
    """A worker is stopped, and stays so; then in another training."""
    one = trained(kf.DataParallel(kf.Placement([0])), _sgd)
    found: dict[str, Any] = {"off": off(one, trained(kf.ParameterServer("sync"), _sgd, Stopping("worker", 6, None)))}
    processes("worker", 1)[0].send_signal(signal.SIGCONT)
    free = kf.ParameterServer("async", staleness=2)
    run = trained(free, _sgd, Stopping("worker", 6, None), dropout=0.0)
    found["counted"] = [free.statistics.updates, int(run["model"].optimizer.iterations.numpy())]
    return {**found, "logs": _counts(run), "staleness": free.statistics.staleness, "repeated": free.statistics.repeated}


def hung_workers() -> dict[str, Any]:
    """All workers are stopped, and stay so."""

    class StoppingAll(Stopping):
        def act(self) -> None:
            """Stop them."""
            for process in [*processes(self.job, 0), *processes(self.job, 1)]:
                process.send_signal(signal.SIGSTOP)

    trained(kf.ParameterServer("sync"), _sgd, StoppingAll("worker", 6, None))
    return {}


def lost_worker_sync() -> dict[str, Any]:
    """sync: a worker is killed, and the numbers stay those of one device."""
    distribution = kf.ParameterServer("sync")
    one = trained(kf.DataParallel(kf.Placement([0])), _sgd)
    return {"off": off(one, trained(distribution, _sgd, Killing("worker", 6)))}


def own_status() -> dict[str, Any]:
    """A worker is killed; the program leaves with a status of its own."""
    trained(kf.ParameterServer("sync"), _sgd, Killing("worker", 6))
    sys.exit(3)


def by_hand() -> dict[str, Any]:
    """A job whose processes the test starts."""
    return {"off": off(trained(kf.DataParallel(kf.Placement([0])), _sgd), trained(kf.ParameterServer(), _sgd))}


def lost_server() -> dict[str, Any]:
    """A server is killed."""
    trained(kf.ParameterServer("sync"), _sgd, Killing("ps", 4))
    return {}


def lost_server_and_a_checkpoint() -> dict[str, Any]:
    """A server is killed in the second epoch; a second job goes on, and ends as one device does."""
    folder = Path(sys.argv[2]) / "checkpoints"
    is_first = not folder.exists()
    callbacks = [kf.callbacks.Checkpoint(folder, save_freq=2), *([Killing("ps", 8)] if is_first else [])]
    counting = Counting()
    served = trained(kf.ParameterServer("sync"), _sgd, *callbacks, counting)
    one = trained(kf.DataParallel(kf.Placement([0])), _sgd)
    iterations = int(served["model"].optimizer.iterations.numpy())
    batches = {"batches": counting.batches, "of this job": counting.of_this_job[0]}
    return {"off": off(one, served), "iterations": iterations, **batches}


def saved_amid_batches() -> dict[str, Any]:
    """async: the batches that a checkpoint counts, and the updates that are in it."""
    folder = Path(sys.argv[2]) / "amid"
    trained(kf.ParameterServer("async"), _sgd, kf.callbacks.Checkpoint(folder, save_freq=3, keep=9))
    found = [(step, manifest.read(folder, step)[1]) for step in manifest.steps(folder)]
    return {"steps": [[step, each.training["batches"]] for step, each in found]}


def saves_when_asked() -> dict[str, Any]:
    """Trains until it is asked to end."""
    model = trained(kf.ParameterServer("sync"), _sgd)["model"]
    print("TRAINS", flush=True)
    model.fit(X, Y, epochs=10_000, verbose=0, callbacks=[kf.callbacks.Checkpoint(Path(sys.argv[2]) / "asked")])
    return {}


if __name__ == "__main__":
    print("FOUND " + json.dumps(globals()[sys.argv[1]]()))
