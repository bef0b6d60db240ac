"""Programs of the tests of checkpoints. They run on every rank of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import keras_flow as kf

ROWS, BATCH = 38, 5  # the last batch has 3 rows
LAYOUTS = ("dp4", "2x2", "1x4", "4x1", "one")
#: sources of data, and whether an engine has them
SOURCES = ("arrays", "dataset", "tf.data", "loader", "generator")


def distribution(layout: str) -> Any:
    """The distribution of a name; of one rank where it is `one`."""
    if layout == "dp4":
        return kf.DataParallel()
    if layout == "one":
        return kf.DataParallel(kf.Placement([0]))
    shape = [int(length) for length in layout.split("x")]
    mesh = kf.Placement(np.arange(4).reshape(shape), axis_names=("data", "model"))
    rules = {"up/kernel": {"model": "S(1)"}, "up/bias": {"model": "S(0)"}, "down/kernel": {"model": "S(0)"}}
    return kf.ModelParallel(mesh, rules=rules, batch_axes="data")


def make(layout: str, optimizer: Any = None, units: int = 8) -> keras.Model:
    """A compiled model under a distribution: split layers, dropout, batch statistics."""
    with distribution(layout).scope():
        model = keras.Sequential(
            [
                keras.layers.Input((6,)),
                keras.layers.Dense(units, activation="relu", name="up"),
                keras.layers.Dropout(0.3, name="drop"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dense(3, name="down"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def _arrays() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(ROWS, 6)).astype("float32"), generator.integers(0, 3, ROWS)


class _Dataset(keras.utils.PyDataset):
    """Batches with noise from NumPy's generator, in an order that it changes itself after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = _arrays()
        self.turns = 0

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        x = self.x[rows]
        return x + np.random.normal(size=x.shape).astype("float32") + self.turns, self.y[rows]

    def on_epoch_end(self) -> None:
        self.turns += 1


def source(kind: str) -> dict[str, Any]:
    """What `fit` gets."""
    x, y = _arrays()
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    if kind == "dataset":
        return {"x": _Dataset()}
    if kind == "tf.data":
        import tensorflow as tf

        return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH)}
    if kind == "loader":
        import torch

        torch.manual_seed(7)  # which Keras does where torch is its engine
        data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        return {"x": torch.utils.data.DataLoader(data, BATCH, shuffle=True)}

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        generator = np.random.default_rng(4)
        while True:
            rows = generator.integers(0, ROWS, BATCH)
            yield x[rows], y[rows]

    return {"x": batches(), "steps_per_epoch": 7}


class Stop(keras.callbacks.Callback):
    """Ends the program after some batches, in the middle of everything.

    Args:
        after: so many batches; -2 means after the last batch of the second epoch, saved as on a signal.
        checkpoint: saves then.
    """

    def __init__(self, after: int | None, checkpoint: kf.callbacks.Checkpoint):
        super().__init__()
        self._left, self._checkpoint = after, checkpoint

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The job is asked to end in the last batch of an epoch."""
        if self._left is not None and self._left + epoch == -1:
            self._checkpoint.save_now()
            raise KeyboardInterrupt

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count batches."""
        if self._left is not None and self._left > 0:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt


class Counter(keras.callbacks.Callback):
    """Counts batches, as callbacks of users do."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        self.batches += 1


def trained(
    folder: str, layout: str, kind: str = "arrays", stop: int | None = None, save_freq: Any = 3, epochs: int = 3
) -> dict[str, Any]:
    """Train, going on from the checkpoints of a folder; weights, logs and counts, or nothing where it was stopped."""
    keras.utils.set_random_seed(7)
    model = make(layout)
    callback = kf.callbacks.Checkpoint(folder, save_freq=save_freq, save_on_signal=())
    counter = Counter()
    early = keras.callbacks.EarlyStopping("loss", patience=100)
    callbacks = [callback, counter, early, Stop(stop, callback)]
    try:
        history = model.fit(**source(kind), epochs=epochs, callbacks=callbacks, verbose=0)
    except KeyboardInterrupt:
        callback.on_train_end()
        return {}
    return {
        "epochs": history.epoch,
        "logs": {name: [float(value) for value in values] for name, values in history.history.items()},
        "weights": [np.asarray(variable).tobytes() for variable in model.variables],
        "updates": int(np.asarray(model.optimizer.iterations)),
        "batches": counter.batches,
        "best": float(early.best),
    }


def saved(folder: str, layout: str, optimizer: str = "Adam") -> dict[str, np.ndarray]:
    """Train a little and save; the values of all variables."""
    keras.utils.set_random_seed(7)
    model = make(layout, keras.optimizers.get(optimizer))
    x, y = _arrays()
    model.fit(x[:32], y[:32], batch_size=8, verbose=0)
    kf.checkpoint.save(folder, model, step=4)
    return values(model)


def loaded(folder: str, layout: str, optimizer: str = "Adam") -> tuple[dict[str, np.ndarray], int]:
    """Load into another model, of other values; the values of all variables, and the bytes that were read."""
    keras.utils.set_random_seed(8)
    model = make(layout, keras.optimizers.get(optimizer))
    found = kf.checkpoint.load(folder, model)
    return values(model), found.bytes_read


def values(model: keras.Model) -> dict[str, np.ndarray]:
    """Name in checkpoints -> logical value."""
    from keras_flow.checkpoint import names

    return {name: np.asarray(variable) for name, variable in names.named(model).items()}


def saved_by_keras(folder: str, layout: str) -> None:
    """Train as `saved` does, and write the model's files as Keras does."""
    keras.utils.set_random_seed(7)
    model = make(layout, keras.optimizers.get("Adam"))
    x, y = _arrays()
    model.fit(x[:32], y[:32], batch_size=8, verbose=0)
    model.save(f"{folder}/m.keras")
    model.save_weights(f"{folder}/m.weights.h5")
    model.save_weights(f"{folder}/m.weights.json", max_shard_size=0.1)


def loaded_weights(path: str, layout: str) -> tuple[dict[str, np.ndarray], Any]:
    """Load weights into another model, of other values; its weights, and what was said."""
    from keras_flow.checkpoint import names

    keras.utils.set_random_seed(8)
    model = make(layout, keras.optimizers.get("Adam"))
    said = kf.checkpoint.load_weights(path, model)
    return {name: np.asarray(variable) for name, variable in names.weights_of(model).items()}, said


def bytes_held_and_read(path: str, layout: str) -> tuple[int, int]:
    """Bytes of the weights that this rank holds, and that it read."""
    from keras_flow.backends.active import backend
    from keras_flow.checkpoint import names

    model = make(layout)
    said = kf.checkpoint.load_weights(path, model)
    held = [next(iter(backend().shards(each).values())) for each in names.weights_of(model).values()]
    return sum(each.nbytes for each in held), said.bytes_read


def exchanged(folder: str, out: str, format: str, back: str) -> None:
    """Export a checkpoint and import what was written, in process 0."""
    if kf.env.is_main_process():
        kf.checkpoint.export(folder, out, format)
        kf.checkpoint.import_(out, back, step=7, allow_pickle=format == "dcp")
    from keras_flow import comm

    comm.barrier()


def error_of_loading(path: str, rename: dict[str, str] | None) -> str:
    """The message of an error, the same on all ranks."""
    try:
        kf.checkpoint.load_weights(path, make("dp4"), rename=rename)
    except kf.FlowError as error:
        return str(error)
    return ""
