"""What number a checkpoint has, and what a process that writes one does with those that are there."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow import atomic
from keras_flow.checkpoint import manifest, saving, store

pytestmark = pytest.mark.usefixtures("four_ranks")

#: an optimizer, and the numbers of what a `fit` of 12 batches leaves that saves each
_LATE = {
    "accumulates": (lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), [0, 1, 2, 3]),
    # the gradients of the first batches overflow
    "overflows": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=3e38), None),
    "counts": (lambda: keras.optimizers.SGD(0.1), list(range(1, 13))),
}


@pytest.mark.parametrize("kind", _LATE)
def test_the_newest_state_has_the_highest_number(kind: str, tmp_path: Path) -> None:
    """Also where batches are trained before the optimizer counts: a job that is stopped there loses none."""
    make, expected = _LATE[kind]
    trained: list[int] = []
    x = np.tile(np.eye(4, dtype="float32"), (3, 1))

    def fit(stop: int) -> None:
        with kf.DataParallel().scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
            model.compile(make(), "mse")
        saves = kf.callbacks.Checkpoint(tmp_path, 1, keep=None, save_on_signal=(), asynchronous=False)

        def end(batch: int, logs: Any) -> None:
            trained.append(batch)
            if len(trained) == stop:
                saves._lock.close()  # as of a process that is killed
                raise KeyboardInterrupt

        stops = keras.callbacks.LambdaCallback(on_train_batch_end=end)
        model.fit(x, x, batch_size=1, callbacks=[saves, stops], verbose=0)

    for stop in (2, 6, 11):
        with pytest.raises(KeyboardInterrupt):
            fit(stop)
        found = kf.checkpoint.inspect(tmp_path)
        # the last batch was not saved: the callback comes after the one that stops
        assert (found.training["batch"], found.training["batches"]) == (trained[-1], trained[-1])
    fit(-1)
    assert trained == [0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 11]
    there = manifest.steps(tmp_path)
    assert there == (expected or there) and kf.checkpoint.inspect(tmp_path).training["epoch"] == 1


def test_the_optimizer_that_counts_most_says_the_number() -> None:
    """That of a GAN's generator may begin later than that of its discriminator."""
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    model.second = keras.optimizers.SGD()
    model.second.build(model.trainable_variables)
    found = []
    for first, second in ((0, 5), (1, 6)):
        model.optimizer.iterations.assign(first)
        model.second.iterations.assign(second)
        found.append(saving.step_of(model))
    assert found == [5, 6]


def test_a_checkpoint_of_step_0_beside_one_that_is_written_again(tmp_path: Path) -> None:
    """A process that waits for process 0 looks for later steps, of which there are none."""
    for step in (0, 1):
        (tmp_path / manifest.folder_of(step)).mkdir()
        store.write_text(tmp_path / manifest.folder_of(step) / store.MANIFEST, "old")
    folder = tmp_path / manifest.folder_of(1)

    def write() -> None:
        store.write_text(folder / store.MANIFEST, "new")

    here, said = types.SimpleNamespace(process_index=1), types.SimpleNamespace(step=1)
    work: Any = types.SimpleNamespace(here=here, folder=folder, writing=folder / "gone", write=write, said=said)
    saving._apart(work)


@pytest.mark.parametrize("fails", ["rm", "mv"])
def test_what_fails_after_the_manifest_loses_no_checkpoint(fails: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A store may refuse to remove old files, or say that a move failed when the file is there."""
    where = f"memory://{tmp_path.name}/run"
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
    files = type(store.at(where).files)
    original = getattr(files, fails)

    def failing(self: Any, *args: Any, **kwargs: Any) -> None:
        if fails == "mv" or not kwargs.get("recursive"):
            original(self, *args, **kwargs)
        if kwargs.get("recursive") if fails == "rm" else "manifest" in str(args):
            raise RuntimeError("the store is busy")

    for asynchronous in (False, True):
        for extra in (1, 2, 3):
            if extra > 1:
                monkeypatch.setattr(files, fails, failing)
            # the second in place of the first, then one after which the first would be removed
            step = extra // 3 + 2 * asynchronous
            kf.checkpoint.save(where, model, step=step, extra={"n": extra}, keep=1, asynchronous=asynchronous).wait()
            monkeypatch.setattr(files, fails, original)
            assert kf.checkpoint.inspect(where).extra == {"n": extra}
            assert kf.checkpoint.verify(where) == kf.checkpoint.inspect(where).bytes


def test_looks_for_other_processes_become_rare(monkeypatch: Any) -> None:
    """A checkpoint that is written for minutes is not asked for fifty times a second, and a store less often still."""
    for place, most in ((Path("run"), 1.0), (store.at("memory://run"), 5.0)):
        clock, pauses = [0.0], []

        def sleep(seconds: float, clock: list[float] = clock, pauses: list[float] = pauses) -> None:
            pauses.append(seconds)
            clock[0] += seconds

        monkeypatch.setattr(saving, "time", types.SimpleNamespace(monotonic=lambda clock=clock: clock[0], sleep=sleep))
        saving._wait(lambda clock=clock: clock[0] > 300, 1000.0, "it", place)
        assert pauses[0] < 0.05 and max(pauses) == pauses[-1] == most
        with pytest.raises(kf.errors.FlowError, match="it did not come to its end"):
            saving._wait(lambda: False, clock[0] + 10, "it", place)


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"keep": 2.5}, {"keep": True}, {"save_freq": True}, {"save_freq": 0}])
def test_numbers_of_a_callback_are_checked_as_it_is_made(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(kf.FlowError, match=f"{next(iter(wrong))}="):
        kf.callbacks.Checkpoint(tmp_path, **wrong)


def test_an_imported_checkpoint_has_a_number_that_is_found_again(tmp_path: Path) -> None:
    for step in (-1, 1.5, True):
        with pytest.raises(kf.FlowError, match="legal is a whole number of at least 0"):
            kf.checkpoint.import_(tmp_path / "weights.safetensors", tmp_path, step=step)  # type: ignore[arg-type]


def test_a_checkpoint_that_changed_places_as_its_writer_was_killed_is_the_newest(tmp_path: Path) -> None:
    """A system without `renameat2` renames twice; what is between is found by whoever loads."""
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
    for step in (1, 2):
        kf.checkpoint.save(tmp_path, model, step=step)
    folder = tmp_path / manifest.folder_of(2)
    host, pid, _, number = atomic._name_of_writer().rsplit("-", 3)
    folder.rename(folder.with_name(f"{folder.name}{host}-{pid}-0-{number}{atomic._OLD}"))
    assert manifest.steps(tmp_path) == [1]
    assert kf.checkpoint.load(tmp_path, model).step == 2
