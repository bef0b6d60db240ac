"""How a checkpoint is written: in which order, what its handle says, and that nothing is pickled."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.backends.files import backups
from keras_flow.checkpoint import saving, writer
from keras_flow.errors import FlowError
from tests.checkpoint import programs
from tests.checkpoint.test_files import saved
from tests.ranks import Pool


def test_nothing_is_pickled() -> None:
    """Only a foreign format is, whose names torch writes by pickle."""
    found = set()
    for path in sorted(Path(saving.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            said = [*imported, getattr(node, "module", None) or "", getattr(node, "attr", ""), getattr(node, "id", "")]
            for word in ("pickle", "marshal", "shelve", "joblib", "dill"):
                found |= {(path.name, each) for each in said if word in each}
            if isinstance(node, ast.Call):
                found |= {(path.name, each.arg) for each in node.keywords if each.arg == "allow_pickle"}
                if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in ("torch.save", "torch.load"):
                    found.add((path.name, ast.unparse(node.func)))
    assert found <= {("exporting.py", "allow_pickle")}, found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_files_are_on_the_disk_before_the_name_is_given(
    asynchronous: bool, four_ranks: None, tmp_path: Path, monkeypatch: Any
) -> None:
    done: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, os.rename

    def logged(descriptor: int) -> None:
        done.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def renamed(old: Any, new: Any, **kwargs: Any) -> None:
        rename(old, new, **kwargs)
        done.append(("rename", Path(new)))

    monkeypatch.setattr(os, "fsync", logged)
    monkeypatch.setattr(os, "rename", renamed)
    saved(tmp_path, asynchronous=asynchronous)
    while threads := [each for each in threading.enumerate() if each.name == "keras_flow-checkpoint"]:
        threads[0].join()
    named = done.index(("rename", tmp_path / "step-00000001"))
    written = {path.name for what, path in done[:named] if what == "fsync"}
    there = {each.name for each in (tmp_path / "step-00000001").iterdir()}
    assert len(there) >= 4 and there <= written
    assert ("fsync", tmp_path) in done[named:]  # the name itself


def _part(folder: str) -> int:
    return kf.checkpoint.save(folder, programs.make("2x2"), step=1).bytes


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_the_handles_of_all_processes_have_the_bytes_of_the_manifest(
    engine: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    parts = on_ranks(engine).on_each(_part, str(tmp_path))
    assert len(parts) == (4 if engine == "torch" else 1) and 0 not in parts
    assert sum(parts) == kf.checkpoint.inspect(tmp_path).bytes


def test_the_handle_says_how_long_training_was_blocked(four_ranks: None, tmp_path: Path, monkeypatch: Any) -> None:
    """By the writes where it waits for them, and not where a thread makes them."""
    model, add, may_write = saved(tmp_path / "first"), writer.File.add, threading.Event()

    def late(file: writer.File, *args: Any) -> None:
        assert may_write.wait(60)
        add(file, *args)

    monkeypatch.setattr(writer.File, "add", late)
    begun = time.monotonic()
    saving = kf.checkpoint.save(tmp_path, model, step=2, asynchronous=True)
    blocked = saving.blocked_seconds
    assert 0 < blocked <= time.monotonic() - begun and not saving.is_done()
    may_write.set()
    saving.wait()
    assert saving.blocked_seconds == blocked

    def slow(file: writer.File, *args: Any) -> None:
        time.sleep(0.05)
        add(file, *args)

    monkeypatch.setattr(writer.File, "add", slow)
    assert kf.checkpoint.save(tmp_path, model, step=3).blocked_seconds >= 0.05


def test_a_thread_that_cannot_write_ends_fit_at_the_batch_after_it(
    four_ranks: None, tmp_path: Path, monkeypatch: Any
) -> None:
    """Two batches before the next save, which waits for the thread anyway."""
    failed, trained = threading.Event(), []

    def full(*args: object) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    def begins(batch: int, logs: Any) -> None:
        if batch == 3:
            assert failed.wait(60) and checkpoint._saving is not None and checkpoint._saving._thread is not None
            checkpoint._saving._thread.join()

    monkeypatch.setattr(writer.File, "add", full)
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6)])
        model.compile("adam", "mse")
    checkpoint = kf.callbacks.Checkpoint(tmp_path, save_freq=3, save_on_signal=())
    other = keras.callbacks.LambdaCallback(
        on_train_batch_begin=begins, on_train_batch_end=lambda batch, logs: trained.append(batch)
    )
    with pytest.raises(FlowError, match="No space left on device"):
        model.fit(np.ones((32, 4)), np.ones((32, 6)), batch_size=4, callbacks=[checkpoint, other], verbose=0)
    assert trained == [0, 1, 2, 3]


class _Says(keras.callbacks.Callback):
    """A callback whose state is no attribute that would be saved."""

    def __init__(self) -> None:
        super().__init__()
        self._state: dict[str, Any] = {"seen": [], "sum": np.zeros(2)}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._state["seen"].append((self.params["epochs"], batch))
        self._state["sum"] += batch

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        self._state = state


def test_a_callback_that_says_its_state_gets_it_back(four_ranks: None, tmp_path: Path) -> None:
    def fit(epochs: int) -> _Says:
        with kf.DataParallel().scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6)])
            model.compile("sgd", "mse")
        says, saves = _Says(), kf.callbacks.Checkpoint(tmp_path, save_on_signal=())
        model.fit(np.ones((8, 4)), np.ones((8, 6)), batch_size=4, epochs=epochs, callbacks=[says, saves], verbose=0)
        return says

    fit(1)
    state = fit(2)._state
    assert state["seen"] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    np.testing.assert_array_equal(state["sum"], [2.0, 2.0])


def test_keras_own_backup_says_that_it_is_not_exact(four_ranks: None, tmp_path: Path) -> None:
    backups._say_what_is_exact.cache_clear()
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6)])
        model.compile("sgd", "mse")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for _ in range(2):
            backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
            model.fit(np.ones((8, 4)), np.ones((8, 6)), callbacks=[backup], verbose=0)
    (line,) = [line for line in said.getvalue().splitlines() if "BackupAndRestore" in line]
    assert "steps after it are made twice" in line and "kf.callbacks.Checkpoint goes on after the last batch" in line
