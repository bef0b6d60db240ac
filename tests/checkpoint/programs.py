"""Programs of the tests of checkpoints. They run on every rank of an engine."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import keras_flow as kf

ROWS, BATCH = 38, 5  # the last batch has 3 rows
LAYOUTS = ("dp4", "2x2", "1x4", "4x1", "one")
#: those of the matrix: 2 ranks, weights and slots that are split further, 3 of 4, and splits that do not divide
MATRIX = ("dp2", "1x2", "2x2", "dp4z3", "1x3", "dp3", "one")
#: sources of data, and whether an engine has them
SOURCES = ("arrays", "dataset", "tf.data", "loader", "generator")


def distribution(layout: str) -> Any:
    """The distribution of a name; of one rank where it is `one`, with split slots where it ends with `z2`.

    Draws are those of stock Keras, as in all tests, or by logical index, as users have them, where it ends with `!`.
    """
    random = "logical" if layout.endswith("!") else None
    layout, _, stage = layout.rstrip("!").partition("z")
    zero = {"zero": int(stage or 0), "zero_min_size": 1, "random": random}
    if layout.startswith("dp"):
        return kf.DataParallel(kf.Placement(range(int(layout[2:]))), **zero)
    if layout == "one":
        return kf.DataParallel(kf.Placement([0]), random=random)
    shape = [int(length) for length in layout.split("x")]
    mesh = kf.Placement(np.arange(np.prod(shape)).reshape(shape), axis_names=("data", "model"))
    rules = {"up/kernel": {"model": "S(1)"}, "up/bias": {"model": "S(0)"}, "down/kernel": {"model": "S(0)"}}
    return kf.ModelParallel(mesh, rules=rules, batch_axes="data", **zero)


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


class StatefulDataset(keras.utils.PyDataset):
    """Batches that a generator of its own draws, from one to the next; it counts what was read.

    Args:
        batches: how many an epoch has; None: there is no end.
    """

    def __init__(self, batches: int | None = 8) -> None:
        super().__init__()
        self.batches = batches
        self.generator = np.random.default_rng(5)
        self.read: list[int] = []

    @property
    def num_batches(self) -> int | None:
        """As Keras wants it."""
        return self.batches

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.read.append(index)
        return self.generator.normal(size=(BATCH, 6)).astype("float32") + index, self.generator.integers(0, 3, BATCH)

    def get_state(self) -> dict[str, Any]:
        """What the next batch follows from."""
        return self.generator.bit_generator.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.generator.bit_generator.state = state


class ChangedAtTheEnd(StatefulDataset):
    """Batches without an end, whose generator is drawn from at the end of an epoch."""

    def on_epoch_end(self) -> None:
        self.generator.random()


def _Iterable() -> Any:
    """Return a dataset of torch that does not say how many batches it has."""
    import torch

    class Iterable(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            x, y = _arrays()
            return ((x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, ROWS, BATCH))

    return Iterable()


def source(kind: str) -> dict[str, Any]:
    """What `fit` gets."""
    x, y = _arrays()
    kind, _, steps = kind.partition(" by ")  # so many steps are an epoch, and a pass is longer
    if steps:
        return {**source(kind), "steps_per_epoch": int(steps)}
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    if kind == "dataset":
        return {"x": _Dataset(), "shuffle": True}
    if "tf.data" in kind:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=3).batch(BATCH)
        return {"x": data.filter(lambda x, y: True) if "unknown" in kind else data}
    if kind == "iterable loader":
        import torch

        return {"x": torch.utils.data.DataLoader(_Iterable(), batch_size=None)}
    if kind == "dataset with state":
        return {"x": StatefulDataset()}
    if kind == "endless dataset with state":
        return {"x": StatefulDataset(None), "steps_per_epoch": 7}
    if kind == "endless dataset that its end of an epoch changes":
        return {"x": ChangedAtTheEnd(None), "steps_per_epoch": 7}
    if "loader" in kind:
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(7)  # which Keras does where torch is its engine
        data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        class_of = StatefulDataLoader if kind.startswith("stateful") else torch.utils.data.DataLoader
        own = torch.Generator().manual_seed(3) if "own generator" in kind else None
        return {"x": class_of(data, BATCH, shuffle=True, generator=own)}
    if kind.startswith("grain"):
        return _grain(kind, x, y)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        generator = np.random.default_rng(4)
        while True:
            rows = generator.integers(0, ROWS, BATCH)
            yield x[rows], y[rows]

    return {"x": batches(), "steps_per_epoch": 7}


def _grain(kind: str, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    import grain

    rows = list(zip(x, y, strict=True))
    if kind == "grain loader":
        sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=3, num_epochs=1)
        operations = [grain.transforms.Batch(BATCH)]
        return {"x": grain.DataLoader(data_source=rows, sampler=sampler, operations=operations, worker_count=0)}
    data = grain.MapDataset.source(rows).shuffle(seed=3)
    if kind == "grain":
        return {"x": data.batch(BATCH)}
    return {"x": data.repeat().to_iter_dataset().batch(BATCH), "steps_per_epoch": 7}


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
    folder: str,
    layout: str,
    kind: str = "arrays",
    stop: int | None = None,
    save_freq: Any = 3,
    epochs: int = 3,
    patience: int = 100,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train, going on from the checkpoints of a folder; weights, logs and counts, or nothing where it was stopped."""
    keras.utils.set_random_seed(7)
    model, settings = make(layout), dict(settings or {})
    model.steps_per_execution = settings.pop("steps_per_execution", 1)
    callback = kf.callbacks.Checkpoint(folder, save_freq=save_freq, save_on_signal=())
    counter = Counter()
    early = keras.callbacks.EarlyStopping("loss", patience=patience, restore_best_weights=patience < 100)
    if patience < 100:
        early.min_delta = 0.5  # nothing is better than the first epoch
    callbacks = [callback, counter, early, Stop(stop, callback)]
    try:
        history = model.fit(**source(kind), epochs=epochs, callbacks=callbacks, verbose=0, **settings)
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


def trained_and_said(*arguments: Any) -> str:
    """Train as `trained` does; what process 0 tells the user where it goes on."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trained(*arguments)
    return "".join(line for line in said.getvalue().splitlines() if line.startswith("keras_flow: "))


def saved(folder: str, layout: str, optimizer: str = "Adam") -> dict[str, np.ndarray]:
    """Train a little and save; the values of all variables."""
    keras.utils.set_random_seed(7)
    model = make(layout, keras.optimizers.get(optimizer))
    x, y = _arrays()
    model.fit(x[:32], y[:32], batch_size=8, verbose=0)
    kf.checkpoint.save(folder, model, step=4)
    return values(model)


def saved_in_a_thread(folder: str, layout: str) -> tuple[dict[str, np.ndarray], int]:
    """What a model had when it was saved by a thread, which began to write after more steps; and the bytes copied."""
    from threading import Event
    from unittest.mock import patch

    from keras_flow.checkpoint import parts, saving

    model = make(layout, keras.optimizers.get("Adam"))
    model.fit(**source("arrays"), verbose=0)
    expected = {name: np.array(value) for name, value in values(model).items()}
    go_on, copied, write, frozen = Event(), [], saving._Writing.write, parts.frozen

    def late(work: Any) -> None:
        assert go_on.wait(60)
        write(work)

    def counted(*args: Any) -> Any:
        found = frozen(*args)
        copied.append(len(found[1]))
        return found

    with patch.object(saving._Writing, "write", late), patch.object(parts, "frozen", counted):
        writing = kf.checkpoint.save(folder, model, asynchronous=True)
        model.fit(**source("arrays"), verbose=0)
        model.set_weights([value + 1 for value in model.get_weights()])
        go_on.set()
        writing.wait()
    return expected, copied[0]


class Dtypes(keras.layers.Layer):
    """A layer with a state of each dtype, of which engines hold some in others."""

    names = ("int64", "uint16", "uint32", "float64", "int8", "bfloat16")

    def build(self, shape: Any) -> None:
        """Make them."""
        settings = {"shape": (8,), "initializer": "ones", "trainable": False}
        self.states = [self.add_weight(name=name, dtype=name, **settings) for name in self.names]

    def call(self, x: Any) -> Any:
        """Leave it as it is."""
        return x


def of_all_dtypes(folder: str, asynchronous: bool) -> dict[str, list[float]]:
    """Save states of all dtypes and load them into others; what these are then."""
    with distribution("dp4").scope():
        model = keras.Sequential([keras.layers.Input((6,)), Dtypes(name="states")], name="net")
    kf.checkpoint.save(folder, model, step=1, asynchronous=asynchronous).wait()
    for variable in model.variables:
        variable.assign(variable * 0)
    kf.checkpoint.load(folder, model)
    return {variable.name: np.asarray(variable).astype(float).tolist() for variable in model.variables}


def of_what_torch_holds_whole(folder: str, zero: int) -> dict[str, np.ndarray]:
    """Save a quantized layer and statistics, for which there are rules or `zero=`; their values."""
    mesh = kf.Placement([range(4)], axis_names=("data", "model"))
    rules = {"down/kernel$": "B,S(0)", "scaled/(mean|variance)": "B,S(0)"}
    splits = kf.ModelParallel(mesh, rules=rules, batch_axes="data")
    further = kf.DataParallel(zero=3, zero_min_size=1)
    keras.utils.set_random_seed(7)
    with (further if zero else splits).scope():
        inputs = keras.Input((8,))
        scaled = keras.layers.Normalization(name="scaled")
        model = keras.Model(inputs, keras.layers.Dense(4, name="down")(scaled(inputs)))
        scaled.adapt(np.random.default_rng(1).normal(size=(32, 8)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that cannot be quantized
            model.quantize("int8")
    kf.checkpoint.save(folder, model, step=1)
    from keras_flow.backends.active import backend

    for variable in model.variables:  # a layout is a promise
        layout = kf.layout_of(variable).layout
        held = {rank: piece.shape for rank, piece in backend().shards(variable).items()}
        assert held == {rank: layout.local_shape(rank) for rank in held}, (variable.path, layout, held)
    return values(model)


def loaded(folder: str, layout: str, optimizer: str = "Adam") -> tuple[dict[str, np.ndarray], int]:
    """Load into another model, of other values; the values of all variables, and the bytes that were read."""
    keras.utils.set_random_seed(8)
    model = make(layout, keras.optimizers.get(optimizer))
    found = kf.checkpoint.load(folder, model)
    return values(model), found.bytes_read


def read_and_needed(folder: str, layout: str) -> tuple[int, int]:
    """Load without hashes; the bytes that this process read, and those of the different parts that its ranks hold.

    A process of torch whose rank is outside of the placement computes the same alone, with a copy of the whole.
    """
    from keras_flow.backends.active import backend
    from keras_flow.checkpoint import manifest, names
    from keras_flow.current.variable_layout import keras_layout

    model = make(layout, keras.optimizers.get("Adam"))
    read = kf.checkpoint.load(folder, model, check=False).bytes_read
    needed, here = 0, backend().world()
    for variable in names.named(model).values():
        placed, size = keras_layout(variable), manifest.numpy_dtype(names.dtype_of(variable)).itemsize
        ranks = [rank for rank in here.local_ranks if placed is not None and rank in placed.layout.placement.ranks]
        if placed is None or not ranks:
            needed += int(np.prod(variable.shape)) * size
            continue
        parts = {str(placed.layout.local_slices(rank)): placed.layout.local_shape(rank) for rank in ranks}
        needed += sum(int(np.prod(shape)) for shape in parts.values()) * size
    return read, needed


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
