"""A program that is stopped, and started again, ends with the weights and logs of one that was not: bit by bit, or
within the grid's tolerances where it goes on under another layout, engine or number of ranks."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.backends.active import backend
from keras_flow.backends.rendezvous import agreement
from tests.checkpoint import programs
from tests.ranks import Pool

ENGINES = ("jax", "tensorflow", "torch")
#: layout, source of data, when it is stopped, and how often it saves
CASES = [
    ("2x2", "arrays", (11, 2), 3),
    ("dp4", "arrays by 3", (7,), 2),  # a pass is of three epochs, and is gone on with in the order that it had
    ("2x2", "unknown tf.data", (8, 10), 4),  # nobody knows that the eighth step was the last of its epoch
    ("2x2", "arrays", (-2,), "epoch"),
    ("dp4", "generator", (11,), 4),
    ("2x2", "tf.data", (10, 3), 2),
    ("dp4", "arrays by 3", (7,), "epoch"),
    ("dp4", "dataset by 3", (7,), 2),
    ("dp4", "unknown tf.data", (11, 9), 3),
    ("dp4", "arrays", (4, 9), 3),
    ("dp4", "dataset", (10,), 3),
    ("dp4", "loader", (13,), 4),
    ("dp4", "arrays", (12,), "epoch"),
    ("1x4", "arrays", (8, 8), 1),  # as the last batch of an epoch ends, before what comes at its end
]

#: data that say where they are, and a DataLoader with a generator of its own
SOURCES = (
    "dataset with state",
    "grain",
    "stateful loader",
    "endless dataset with state",
    "endless grain",
    "grain loader",
    "stateful loader, own generator",
    "loader, own generator",
)


#: of these, what is run each day on every engine
_DAILY = 4


@pytest.mark.parametrize(
    ("layout", "kind", "stops", "save_freq"),
    [*CASES[:_DAILY], *(pytest.param(*case, marks=pytest.mark.full) for case in CASES[_DAILY:])],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_stopped_program_ends_as_an_undisturbed_one(
    engine: str,
    layout: str,
    kind: str,
    stops: tuple[int, ...],
    save_freq: object,
    on_ranks: Callable[..., Pool],
    tmp_path: Path,
) -> None:
    pool = on_ranks(engine)
    expected = pool(programs.trained, str(tmp_path / "undisturbed"), layout, kind, None, save_freq)
    for stop in stops:
        assert pool(programs.trained, str(tmp_path / "stopped"), layout, kind, stop, save_freq) == {}
    assert pool(programs.trained, str(tmp_path / "stopped"), layout, kind, None, save_freq) == expected


def _near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Counts are equal, logs and weights within the tolerances of the parity grid."""
    for name in ("epochs", "updates", "batches"):
        assert found[name] == expected[name], name
    for name, values in expected["logs"].items():
        np.testing.assert_allclose(found["logs"][name], values, rtol=1e-5, atol=1e-7, err_msg=name)
    for value, right in zip(found["weights"], expected["weights"], strict=True):
        if len(right) > 16:  # else the state of a seed generator, whose dtype is the engine's
            value, right = np.frombuffer(value, "float32"), np.frombuffer(right, "float32")
            assert np.abs(value - right).max() <= 1e-4 * max(1.0, np.abs(right).max())


@pytest.mark.parametrize(
    "layouts", [("2x2", "dp4z3"), pytest.param(("1x4", "dp2", "2x2z3", "4x1"), marks=pytest.mark.full)], ids=str
)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_middle_of_an_epoch_goes_on_under_another_layout(
    engine: str, layouts: tuple[str, ...], on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    """Rows in the order that they had, the same masks, and the metrics of the epoch's first half."""
    pool = on_ranks(engine)
    expected = pool(programs.trained, str(tmp_path / "undisturbed"), "dp4")
    assert pool(programs.trained, str(tmp_path / "stopped"), "dp4", "arrays", 7) == {}
    for layout in layouts:
        shutil.copytree(tmp_path / "stopped", tmp_path / layout)
        _near(pool(programs.trained, str(tmp_path / layout), layout), expected)


@pytest.mark.parametrize(
    ("engine", "other", "kind"),
    [
        ("torch", "jax", "arrays"),
        *(
            pytest.param(engine, other, kind, marks=pytest.mark.full)
            for engine in ENGINES
            for other in ENGINES
            for kind in ("arrays", "dataset with state")
            if engine != other and (engine, other, kind) != ("torch", "jax", "arrays")
        ),
    ],
)
def test_the_middle_of_an_epoch_goes_on_on_another_engine(
    engine: str, other: str, kind: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    """`random="logical"`, the default of users, has one order of rows and one mask on every engine."""
    pool = on_ranks(engine)
    expected = pool(programs.trained, str(tmp_path / "undisturbed"), "dp4!", kind)
    assert pool(programs.trained, str(tmp_path / "stopped"), "dp4!", kind, 7) == {}
    _near(on_ranks(other)(programs.trained, str(tmp_path / "stopped"), "2x2!", kind), expected)


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_the_middle_of_an_epoch_goes_on_in_two_processes(
    engine: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    expected = on_ranks(engine)(programs.trained, str(tmp_path / "undisturbed"), "dp4!")
    assert on_ranks(engine)(programs.trained, str(tmp_path / "stopped"), "dp4!", "arrays", 7) == {}
    fewer = Pool(engine, tmp_path / "pool", ranks=2, processes=2)
    try:
        _near(fewer(programs.trained, str(tmp_path / "stopped"), "dp2!"), expected)
    finally:
        fewer.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "settings", "stop"),
    [
        *(pytest.param(engine, {"initial_epoch": 1}, 12, id=f"{engine}-initial epoch") for engine in ENGINES),
        # Keras's trainer of torch takes one step at a time
        *(
            pytest.param(engine, {"steps_per_execution": 3}, 3, id=f"{engine}-steps per execution")
            for engine in ENGINES
            if engine != "torch"
        ),
    ],
)
def test_epochs_that_begin_late_and_steps_that_do_not_divide_them(
    engine: str, settings: dict[str, int], stop: int, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    """A source that draws at random is passed over from the first epoch that there was; 8 batches are 3 steps."""
    pool, kind = on_ranks(engine), "arrays" if "steps_per_execution" in settings else "generator"
    arguments = ("dp4", kind, None, 3, 3, 100, settings)
    expected = pool(programs.trained, str(tmp_path / "undisturbed"), *arguments)
    assert pool(programs.trained, str(tmp_path / "stopped"), *arguments[:2], stop, *arguments[3:]) == {}
    assert pool(programs.trained, str(tmp_path / "stopped"), *arguments) == expected


@pytest.mark.full
def test_a_loader_without_a_length(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    pool, arguments = on_ranks("torch"), ("dp4", "iterable loader")
    expected = pool(programs.trained, str(tmp_path / "undisturbed"), *arguments, None, 4)
    for stop in (8, 10):
        assert pool(programs.trained, str(tmp_path / "stopped"), *arguments, stop, 4) == {}
    assert pool(programs.trained, str(tmp_path / "stopped"), *arguments, None, 4) == expected


@pytest.mark.parametrize("kind", [*SOURCES[:2], *(pytest.param(kind, marks=pytest.mark.full) for kind in SOURCES[2:])])
@pytest.mark.parametrize("engine", ENGINES)
def test_data_that_say_where_they_are_go_on_there(
    engine: str, kind: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = on_ranks(engine)
    expected = pool(programs.trained, str(tmp_path / "undisturbed"), "dp4", kind, None, 3)
    for stop in (5, 6, 7):  # in the first epoch, after what was saved there, and in the third
        assert pool(programs.trained, str(tmp_path / "stopped"), "dp4", kind, stop, 3) == {}
    assert pool(programs.trained, str(tmp_path / "stopped"), "dp4", kind, None, 3) == expected


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.full)])
def test_what_the_end_of_an_epoch_changes_in_data_is_kept(
    engine: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    """TensorFlow reads ahead: there no one knows which batches come before the end of an epoch."""
    pool, arguments = on_ranks(engine), ("dp4", "endless dataset that its end of an epoch changes")
    expected = pool(programs.trained, str(tmp_path / "undisturbed"), *arguments, None, "epoch")
    for stop in (9, 8):
        assert pool(programs.trained, str(tmp_path / "stopped"), *arguments, stop, "epoch") == {}
    assert pool(programs.trained, str(tmp_path / "stopped"), *arguments, None, "epoch") == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_best_weights_and_an_early_end_are_kept(engine: str, on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    pool, arguments = on_ranks(engine), ("2x2", "arrays")
    # stopped after the second of 3 epochs; the weights are those after the first
    expected = pool(programs.trained, str(tmp_path / "undisturbed"), *arguments, None, 3, 9, 1)
    assert expected["epochs"] == [0, 1]
    for stop in (10, -2):  # in the second epoch, and after what ends it
        assert pool(programs.trained, str(tmp_path / "stopped"), *arguments, stop, 3, 9, 1) == {}
    for _ in range(2):  # what has come to its end stays so
        assert pool(programs.trained, str(tmp_path / "stopped"), *arguments, None, 3, 9, 1) == expected


@pytest.mark.parametrize("engine", ["jax", *(pytest.param(name, marks=pytest.mark.full) for name in ENGINES[1:])])
def test_a_program_says_where_it_goes_on(engine: str, on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    """Epochs have 8 batches; a program that has come to its end says so."""
    pool, folder = on_ranks(engine), tmp_path / "run"

    def said(stop: int | None, epochs: int, patience: int = 100) -> str:
        arguments = (str(folder), "dp4", "arrays", stop, 3 if stop else "epoch", epochs, patience)
        return pool(programs.trained_and_said, *arguments).replace(f"{folder}/", "")

    assert said(7, 3) == ""
    dropped = "; the batches before it are read again and dropped"
    assert said(None, 3) == f"keras_flow: going on from step-00000006: epoch 0, batch 6 (both counted from 0){dropped}"
    assert said(None, 3) == "keras_flow: training is complete (3 of 3 epochs): nothing to do (step-00000024)"
    assert said(None, 4) == "keras_flow: going on from step-00000024: epoch 3 (counted from 0)"
    complete = "keras_flow: training is complete (4 epochs, asked: 3): nothing to do (step-00000032)"
    assert said(None, 3) == complete
    folder = tmp_path / "ended"
    assert said(None, 4, 1) == ""
    ended = "keras_flow: a callback ended the training after 2 of 4 epochs: nothing to do (step-00000016)"
    assert said(None, 4, 1) == ended


def test_an_attribute_of_that_name_is_the_datasets_own() -> None:
    import keras
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    from keras_flow.checkpoint import positions

    class Ratings(keras.utils.PyDataset):
        users, num_batches = ("ann", "bob"), 1

        def __getitem__(self, index: int) -> list[str]:
            return [*self.users]

    data = Ratings()
    assert positions._source(data, PyDatasetAdapter(data)).users is data


@pytest.mark.parametrize("engine", ["jax", *(pytest.param(name, marks=pytest.mark.full) for name in ENGINES[1:])])
def test_the_last_steps_are_saved_though_save_freq_does_not_divide(
    engine: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    """24 steps, saved every 5: a stop does not move the steps at which is saved, and what is complete stays so."""
    pool, arguments = on_ranks(engine), (str(tmp_path / "run"), "dp4", "arrays")

    def steps() -> list[int]:
        return sorted(int(each.name.partition("-")[2]) for each in (tmp_path / "run").glob("step-*"))

    assert pool(programs.trained, *arguments, 7, 5) == {}
    assert steps() == [5]
    ended = pool(programs.trained, *arguments, None, 5)
    assert steps() == [15, 20, 24]
    said = pool(programs.trained_and_said, *arguments, None, 5)
    assert said.startswith("keras_flow: training is complete (3 of 3 epochs): nothing to do (") and "00000024" in said
    assert pool(programs.trained, *arguments, None, 5) == ended
    assert steps() == [15, 20, 24]


class _Half(keras.callbacks.Callback):
    """A callback with half of the protocol: its attributes are its state."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.counted += 1

    def set_state(self, state: dict[str, int]) -> None:
        raise AssertionError("there is no get_state, which says what this takes")


def _patience(folder: str, epochs: int, shows: bool) -> dict[str, Any]:
    """Train with callbacks that differ by process; what they count at the end.

    Args:
        folder: of the checkpoints.
        epochs: the argument of `fit`.
        shows: process 0 shows a bar.
    """
    is_first = backend().world().process_index == 0
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    early = keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True)
    half = _Half()
    callbacks = [early, kf.callbacks.Checkpoint(folder, save_on_signal=()), half]
    x = np.ones((8, 4), "float32")
    with contextlib.redirect_stdout(io.StringIO()):
        model.fit(x, x[:, :1], epochs=epochs, callbacks=callbacks, verbose=1 if shows and is_first else 0)
    return {"best": early.best, "wait": early.wait, "weights": early.best_weights is not None, "half": half.counted}


def test_callbacks_that_differ_by_process_keep_what_each_counts(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    """EarlyStopping would end the training in process 0, and in no other."""
    pool, folder = on_ranks("torch"), str(tmp_path)
    expected = {"best": 9.0, "wait": 1, "weights": True, "half": 2}
    assert pool.on_each(_patience, folder, 2, True) == [expected] * 4
    assert pool.on_each(_patience, folder, 3, True) == [{**expected, "wait": 2, "half": 3}] * 4


def test_two_callbacks_of_a_class_and_one_that_is_new(four_ranks: None, tmp_path: Path) -> None:
    """What both have is given back, whatever comes before it."""

    def fit(epochs: int, *others: keras.callbacks.Callback) -> None:
        with kf.DataParallel().scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        saves = kf.callbacks.Checkpoint(tmp_path, save_on_signal=())
        x = np.ones((8, 4), "float32")
        model.fit(x, x[:, :1], epochs=epochs, callbacks=[saves, *others], verbose=0)

    early = [keras.callbacks.EarlyStopping("loss", patience=n, restore_best_weights=True) for n in (5, 6)]
    fit(2, *early)
    again, half = keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True), _Half()
    with pytest.warns(kf.errors.FlowWarning, match=r"callbacks \['EarlyStopping'\], which this fit has not"):
        fit(3, half, again)
    assert (again.wait, half.counted) == (2, 1)
    for found, kept in zip(again.best_weights, early[0].best_weights, strict=True):
        np.testing.assert_array_equal(found, kept)


def test_processes_that_save_other_names_are_told(
    four_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(agreement, "require_equal", lambda facts, what: said.append(facts))
    for name in ("one", "two"):
        layer = keras.layers.Dense(1, name=name)
        kf.checkpoint.save(tmp_path, keras.Sequential([keras.layers.Input((4,)), layer], name="net"), step=1)
    assert said[0]["variables"] != said[1]["variables"] and said[0]["variables"].startswith("2 (")
