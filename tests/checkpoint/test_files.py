"""Files of checkpoints: damage is found and named, other readers read them, and a kill at any moment loses nothing."""

from __future__ import annotations

import fcntl
import json
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import keras
import numpy as np
import pytest
import safetensors.numpy

import keras_flow as kf
from keras_flow.checkpoint import manifest
from keras_flow.checkpoint.monitor import Monitor
from keras_flow.errors import FlowError
from tests.launch import programs

pytestmark = pytest.mark.usefixtures("four_ranks")


def saved(folder: Path, step: int = 1, **settings: Any) -> keras.Model:
    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    with kf.ModelParallel(mesh, rules={"one/kernel": {"model": "S(1)"}}, batch_axes="data").scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6, name="one")], name="net")
        model.compile("adam", "mse")
        kf.checkpoint.save(folder, model, step=step, **settings)
    return model


def chunk_of(folder: Path, name: str) -> tuple[Path, manifest.Chunk]:
    chunk = kf.checkpoint.inspect(folder).tensors[name].chunks[-1]
    return folder / "step-00000001" / chunk.file, chunk


def test_a_flipped_bit_a_short_file_and_a_missing_one_are_named(tmp_path: Path) -> None:
    model = saved(tmp_path)
    path, chunk = chunk_of(tmp_path, "net/one/kernel")
    right = path.read_bytes()
    for data, said in (
        (right[: chunk.begin] + bytes([right[chunk.begin] ^ 1]) + right[chunk.begin + 1 :], "the hash of what was"),
        (right[: chunk.end - 3], "ends 3 bytes too early"),
        (None, "No such file"),
    ):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        for call in (lambda: kf.checkpoint.verify(tmp_path), lambda: kf.checkpoint.load(tmp_path, model)):
            with pytest.raises(FlowError) as caught:
                call()
            for part in ("'net/one/kernel'", chunk.file, f"bytes {chunk.begin} to {chunk.end}", said):
                assert part in str(caught.value)
    loaded = kf.checkpoint.load(tmp_path, model, strict=False)
    assert any("'net/one/kernel'" in text for text in loaded.left_out)


def test_bytes_that_are_not_those_of_the_shape_are_damage(tmp_path: Path) -> None:
    model = saved(tmp_path)
    path = tmp_path / "step-00000001" / manifest.NAME
    found = manifest.Manifest.from_json(path.read_text(), "")
    tensors = {
        name: replace(each, dtype="float64" if name == "net/one/bias" else each.dtype)
        for name, each in found.tensors.items()
    }
    path.write_text(replace(found, tensors=tensors).to_json())
    with pytest.raises(FlowError, match="are not the 48 bytes of float64"):
        kf.checkpoint.verify(tmp_path)
    assert "'net/one/bias'" in kf.checkpoint.load(tmp_path, model, strict=False).left_out[0]


def test_a_changed_manifest_and_one_of_another_format(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "step-00000001" / manifest.NAME
    text = path.read_text()
    for changed, said in (
        (text.replace('"float32"', '"float16"', 1), "is damaged"),
        (json.dumps({"format": "another"}), "is no manifest"),
        (text[:100], "is no manifest"),
        (text.replace('"version": 1', '"version": 9', 1), "version 9"),
    ):
        path.write_text(changed)
        with pytest.raises(FlowError, match=said):
            kf.checkpoint.inspect(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_library_of_safetensors_and_torchs_reader_read_them(tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    model = saved(tmp_path)
    folder, expected = tmp_path / "step-00000001", np.asarray(model.layers[0].kernel)
    blocks = [safetensors.numpy.load_file(path).get("net/one/kernel") for path in sorted(folder.glob("*.safetensors"))]
    np.testing.assert_array_equal(np.concatenate([each for each in blocks if each is not None], 1), expected)
    state = {"net/one/kernel": torch.zeros(4, 6)}
    load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    np.testing.assert_array_equal(state["net/one/kernel"].numpy(), expected)


def test_the_manifest_is_as_its_schema_says(tmp_path: Path) -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs" / "checkpoint-manifest.schema.json").read_text())
    saved(tmp_path, extra={"note": "x"})
    jsonschema.validate(json.loads((tmp_path / "step-00000001" / manifest.NAME).read_text()), schema)


def test_the_newest_stay_and_a_step_is_written_again(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3):
        saved(tmp_path, step, keep=2, extra={"at": step})
    assert manifest.steps(tmp_path) == [2, 3]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    assert kf.checkpoint.inspect(tmp_path).extra == {"at": 3}


def test_a_run_that_begins_anew_keeps_its_own(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        saved(tmp_path, step)
    for step in (4, 5, 6):
        saved(tmp_path, step, keep=2)
    assert manifest.steps(tmp_path) == [5, 6, 10, 20, 30]
    with pytest.warns(UserWarning, match="has checkpoints of an earlier run, up to step 30"):
        _fit(tmp_path, 1, resume=False)


def test_what_a_program_adds_is_read_as_json_has_it(tmp_path: Path) -> None:
    names = {number: f"class {number}" for number in range(12)}
    model = saved(tmp_path, extra={"names": names})
    assert kf.checkpoint.load(tmp_path, model).extra["names"] == {str(number): name for number, name in names.items()}


def _fit(
    folder: Path,
    epochs: int,
    after_batch: Any = None,
    rate: Any = 0.1,
    fit: Any = None,
    others: Sequence[keras.callbacks.Callback] = (),
    **settings: Any,
) -> Any:
    callback = kf.callbacks.Checkpoint(folder, save_on_signal=(), asynchronous=False, **settings)
    x = np.eye(4, dtype="float32")
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4, kernel_initializer="ones")])
        optimizer = rate if isinstance(rate, keras.optimizers.Optimizer) else keras.optimizers.SGD(rate)
        model.compile(optimizer, "mse", metrics=[keras.metrics.F1Score()])
    other = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: after_batch and after_batch(callback))
    callbacks = [callback, other, *others]
    model.fit(x, x, batch_size=2, epochs=epochs, shuffle=False, callbacks=callbacks, verbose=0, **(fit or {}))
    return model


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    """A job that is asked to end saves what is not the best."""
    settings = {"monitor": "loss", "save_best_only": True, "keep": 1}

    def save(callback: Any) -> None:
        if callback._epoch:
            callback.save_now()

    model = _fit(tmp_path, 2, save, rate=-0.1, **settings)  # each epoch is worse than the one before
    assert model.history.history["loss"][0] < model.history.history["loss"][1]
    assert manifest.steps(tmp_path)[0] == 2 and len(manifest.steps(tmp_path)) == 2
    model = _fit(tmp_path, 4, rate=-0.1, **settings)
    assert manifest.steps(tmp_path)[0] == 2


def test_a_metric_says_whether_more_of_it_is_better() -> None:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, "sigmoid")])
    own = keras.metrics.MeanMetricWrapper(lambda y, found: y - found, "own")
    model.compile(loss="mse", metrics=[keras.metrics.Precision(name="p"), "mae", own])
    model.evaluate(np.ones((2, 1)), np.ones((2, 1)), verbose=0)

    def saved(log: str, values: list[float], mode: str = "auto") -> list[bool]:
        monitor = Monitor(log, mode)
        return [monitor.is_better(epoch, {log: value}, model) for epoch, value in enumerate(values)]

    nan = float("nan")
    assert saved("val_p", [nan, 0.3, 0.2, nan, 0.4]) == [False, True, False, False, True]
    assert saved("mae", [0.3, 0.2, 0.4]) == saved("out_loss", [0.3, 0.2, 0.4]) == [True, True, False]
    assert saved("own", [0.3, 0.2, 0.4], "max") == [True, False, True]
    with pytest.raises(FlowError, match=r"give mode='max' or mode='min'"):
        saved("own", [0.3])


def test_epochs_without_validation_are_notsaved(tmp_path: Path) -> None:
    x, settings = np.eye(4, dtype="float32"), {"monitor": "val_loss", "save_best_only": True}
    validation = {"validation_data": (x, x), "validation_freq": 2}
    with pytest.warns(kf.errors.FlowWarning, match="epoch 0 has no such log"):
        _fit(tmp_path, 4, fit=validation, **settings)
    assert manifest.steps(tmp_path) == [4, 8]
    with (
        pytest.warns(kf.errors.FlowWarning, match="epoch 0 has no such log"),
        pytest.raises(FlowError, match="no epoch had such a log"),
    ):
        _fit(tmp_path / "none", 2, **settings)


def test_logs_may_be_arrays_and_a_fit_after_one_that_went_on_begins_anew(tmp_path: Path) -> None:
    first = _fit(tmp_path, 1)
    model = _fit(tmp_path, 2)
    scores = model.history.history["f1_score"]
    assert [np.shape(each) for each in scores] == [(4,), (4,)]
    np.testing.assert_array_equal(scores[0], first.history.history["f1_score"][0])
    x = np.eye(4, dtype="float32")
    assert model.fit(x, x, epochs=2, verbose=0).epoch == [0, 1]
    with pytest.raises(FlowError, match="this log has 4 numbers"):
        Monitor("f1_score", "auto").is_better(0, {"f1_score": scores[0]}, model)


def test_two_callbacks_and_other_batches_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(
        FlowError, match=r"fit has 2 callbacks kf.callbacks.Checkpoint \('.*', '.*'\), and goes on from"
    ):
        _fit(tmp_path, 1, others=[kf.callbacks.Checkpoint(tmp_path / "other", save_on_signal=())])

    def stop(callback: Any) -> None:
        callback._lock.close()
        raise KeyboardInterrupt

    x = np.tile(np.eye(4, dtype="float32"), (4, 1))
    model = _fit(tmp_path / "short", 0)

    def fit(batch_size: int, *callbacks: keras.callbacks.Callback) -> Any:
        saves = kf.callbacks.Checkpoint(tmp_path / "run", 1, save_on_signal=(), asynchronous=False)
        stops = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: stop(saves) if (batch, batch_size) == (1, 2) else None
        )
        return model.fit(x, x, batch_size=batch_size, callbacks=[saves, stops, *callbacks], verbose=0)

    with pytest.raises(KeyboardInterrupt):
        fit(2)
    trained: list[int] = []
    counts = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: trained.append(batch))
    said = r"\(steps is 4 and was 8, batch_size is 4 and was 2\): epoch 0 begins anew"
    with pytest.warns(kf.errors.FlowWarning, match=said):
        fit(4, counts)
    assert trained == [0, 1, 2, 3]


def test_a_fit_after_one_that_has_nothing_to_do(tmp_path: Path) -> None:
    """Its rows have the order that they had: that of an epoch that is begun for the second time."""
    x = np.arange(64, dtype="float32").reshape(16, 4)

    def program() -> list[np.ndarray]:
        keras.utils.set_random_seed(7)
        with kf.DataParallel().scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
            model.compile(keras.optimizers.SGD(1e-4), "mse")
        for callbacks in ([kf.callbacks.Checkpoint(tmp_path, save_on_signal=())], []):
            model.fit(x, x[:, ::-1], batch_size=4, epochs=2, callbacks=callbacks, verbose=0)
        return model.get_weights()

    for found, value in zip(program(), program(), strict=True):
        np.testing.assert_array_equal(found, value)


def test_arrays_of_callbacks_that_safetensors_does_not_know_are_left_out(tmp_path: Path) -> None:
    class Keeps(keras.callbacks.Callback):
        texts, numbers = [np.array(["a"])], [np.ones(2)]

        def __init__(self) -> None:
            super().__init__()
            self.texts, self.numbers = [np.array(["a"]), np.ones(1, "complex64")], [np.ones(2)]

    with pytest.warns(kf.errors.FlowWarning, match="leave out Keeps/texts, which a callback keeps: .* complex64"):
        _fit(tmp_path, 2, others=[Keeps()])
    kept = [name for name in kf.checkpoint.inspect(tmp_path).tensors if name.startswith("@callbacks/")]
    assert kept == ["@callbacks/0/Keeps/numbers/0"]  # the number within its class


def test_averaged_weights_that_are_in_the_model_are_taken_out_again(tmp_path: Path) -> None:
    """The private `_ema_weights_in_model` of Keras's callback is kept: the next epoch trains the weights themselves."""

    def fit(folder: Path, after_batch: Any = None) -> keras.Model:
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
        return _fit(folder, 4, after_batch, optimizer, others=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])

    def stop(callback: Any) -> None:
        if callback._epoch == 2:
            callback._lock.close()
            raise KeyboardInterrupt

    expected = fit(tmp_path / "once").get_weights()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "stopped", stop)
    for found, value in zip(fit(tmp_path / "stopped").get_weights(), expected, strict=True):
        np.testing.assert_array_equal(found, value)


def test_directories_that_hold_none_or_cannot_be_written(tmp_path: Path) -> None:
    model = saved(tmp_path / "there")
    with pytest.raises(FlowError, match="is no directory"):
        kf.checkpoint.inspect(tmp_path / "nowhere")
    with pytest.raises(FlowError, match="holds no checkpoint"):
        kf.checkpoint.load(tmp_path, model)
    with pytest.raises(FlowError, match="no checkpoint of step 7; there are 1"):
        kf.checkpoint.inspect(tmp_path / "there", step=7)
    with pytest.raises(FlowError, match="has no tensor 'net/one/kernal'"):
        kf.checkpoint.read_tensor(tmp_path / "there", "net/one/kernal")
    for index in ([slice(0, 4, 2), slice(None)], [slice(2)], [slice(2)] * 3, [0, slice(2)]):
        with pytest.raises(FlowError, match="give one slice for each dim, without a step"):
            kf.checkpoint.read_tensor(tmp_path / "there", "net/one/kernel", index)  # type: ignore[arg-type]
    with pytest.raises(FlowError, match="is the checkpoint of step 1, and step 7 is asked for"):
        kf.checkpoint.load(tmp_path / "there" / "step-00000001", model, step=7)
    for step in (-1, 2.7):
        with pytest.raises(FlowError, match="legal is a whole number of at least 0"):
            kf.checkpoint.save(tmp_path / "there", model, step=step)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(FlowError, match="no checkpoint can be written in"):
        kf.checkpoint.save(tmp_path / "file", model)
    with pytest.raises(FlowError, match="is saved as JSON"):
        kf.checkpoint.save(tmp_path / "there", model, extra={"array": np.ones(2)})


def test_a_thread_that_cannot_write_says_so_when_it_is_waited_for(tmp_path: Path, monkeypatch: Any) -> None:
    from keras_flow.checkpoint import writer

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    saved(tmp_path, 1)
    monkeypatch.setattr(writer.File, "add", full)
    with pytest.raises(FlowError, match="No space left on device"):
        saved(tmp_path, 2)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6)])
    saving = kf.checkpoint.save(tmp_path, model, step=2, asynchronous=True)
    for _ in range(2):
        with pytest.raises(FlowError, match="those before it are as they were"):
            saving.wait()
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_a_thread_that_cannot_write_ends_fit_at_the_next_batch(tmp_path: Path, monkeypatch: Any) -> None:
    from keras_flow.checkpoint import writer

    trained: list[int] = []
    add = writer.File.add

    def full_at_3(file: writer.File, *args: Any) -> None:
        if "step-00000003" in str(file._path):  # those before it may still be written when batch 2 ends
            raise OSError(28, "No space left on device")
        add(file, *args)

    monkeypatch.setattr(writer.File, "add", full_at_3)
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6)])
        model.compile("adam", "mse")
    callbacks = [
        kf.callbacks.Checkpoint(tmp_path, save_freq=1, save_on_signal=()),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: trained.append(batch)),
    ]
    with pytest.raises(FlowError, match="No space left on device"):
        model.fit(np.ones((32, 4)), np.ones((32, 6)), batch_size=4, callbacks=callbacks, verbose=0)
    assert trained == [0, 1, 2, 3]
    assert kf.checkpoint.inspect(tmp_path).step == 2


def test_a_thread_that_fails_after_fit_was_broken_off_says_so_at_the_next_fit(tmp_path: Path, monkeypatch: Any) -> None:
    from keras_flow.checkpoint import writer

    is_over = threading.Event()

    def full(*args: object) -> None:
        is_over.wait(30)
        raise OSError(28, "No space left on device")

    def stop(batch: int, logs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer.File, "add", full)
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6)])
        model.compile("adam", "mse")
    saves = kf.callbacks.Checkpoint(tmp_path, save_freq=1, save_on_signal=())
    data = np.ones((8, 4)), np.ones((8, 6))
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data, callbacks=[saves, keras.callbacks.LambdaCallback(on_train_batch_end=stop)], verbose=0)
    is_over.set()
    with pytest.raises(FlowError, match="No space left on device"):
        model.fit(*data, callbacks=[saves], verbose=0)


def test_two_threads_of_a_job_hold_one_directory(tmp_path: Path, monkeypatch: Any) -> None:
    from keras_flow.checkpoint import lock

    monkeypatch.setattr(lock, "WAITED", 0.2)
    take, begin, failed = lock._locked, threading.Barrier(2), []

    def slowly(directory: Path) -> int:
        time.sleep(0.1)
        return take(directory)

    def hold() -> None:
        begin.wait()
        try:
            with lock.held(tmp_path):
                time.sleep(0.5)
        except FlowError as error:
            failed.append(error)

    monkeypatch.setattr(lock, "_locked", slowly)
    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not lock._held
    link = tmp_path.with_name(f"{tmp_path.name} by another name")
    link.symlink_to(tmp_path)
    with lock.held(tmp_path), lock.held(link):
        assert list(lock._held) == [tmp_path]


def test_two_jobs_in_one_directory(tmp_path: Path, monkeypatch: Any) -> None:
    from keras_flow.checkpoint import lock

    monkeypatch.setattr(lock, "WAITED", 0.2)
    model = saved(tmp_path)
    other = os.open(tmp_path, os.O_RDONLY)  # another opening of the directory, as another job has it
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(FlowError, match="another job writes checkpoints in"):
        kf.checkpoint.save(tmp_path, model, step=2)
    with pytest.raises(FlowError, match="another job writes checkpoints in"):
        model.fit(
            np.ones((8, 4)),
            np.ones((8, 6)),
            callbacks=[kf.callbacks.Checkpoint(tmp_path, save_on_signal=(), resume=False)],
            verbose=0,
        )
    os.close(other)
    assert kf.checkpoint.save(tmp_path, model, step=2).wait().name == "step-00000002"


def test_a_directory_that_may_not_be_written(tmp_path: Path, monkeypatch: Any) -> None:
    model = saved(tmp_path)

    def forbidden(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", forbidden)
    with pytest.raises(FlowError, match=r"no checkpoint can be written in .*: PermissionError: Permission denied"):
        kf.checkpoint.save(tmp_path, model, step=2)


def test_more_ranks_than_elements(tmp_path: Path) -> None:
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, name="one")], name="net")
        kf.checkpoint.save(tmp_path, model, step=1)
        values = [np.asarray(each) for each in model.weights]
        for each in model.weights:
            each.assign(each + 1)
    kf.checkpoint.load(tmp_path, model)
    for value, each in zip(values, model.weights, strict=True):
        np.testing.assert_array_equal(value, each)


_WRITER = """
import pathlib, sys, keras, keras_flow as kf, keras_flow.checkpoint.manifest
kf.init(2)
with kf.DataParallel().scope():
    model = keras.Sequential([keras.layers.Input((256,)), keras.layers.Dense(1000)])
    model.compile("adam", "mse")
step = max(kf.checkpoint.manifest.steps(pathlib.Path(sys.argv[1])), default=0)
while True:
    step += 1
    kf.checkpoint.save(sys.argv[1], model, step=step, keep=2, extra={"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.full)])
def test_a_writer_that_is_killed_at_any_moment_loses_nothing(kills: int, tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(kills):
        process = programs.start(["-c", _WRITER, str(tmp_path)], "jax")
        assert process.stdout is not None
        said = [int(process.stdout.readline())]
        time.sleep(draw.random() * 0.3)
        process.kill()
        said += map(int, process.stdout.read().split())
        process.communicate()
        found = kf.checkpoint.inspect(tmp_path)
        # what was said to be written is there, or a later one that was being made
        assert found.step in (said[-1], said[-1] + 1) and found.extra == {"step": found.step}
        assert kf.checkpoint.verify(tmp_path) == found.bytes
        for each in manifest.steps(tmp_path):
            kf.checkpoint.verify(tmp_path, step=each)


_SAVER = """
import pathlib, sys, keras, keras_flow as kf
kf.init(2 if keras.config.backend() == "jax" else 1)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
kf.checkpoint.save(sys.argv[1], model)
print("tensorflow" in sys.modules, pathlib.Path(sys.argv[1], "step-00000000", "model.json").stat().st_size > 100)
"""


@pytest.mark.parametrize("engine", ["jax", pytest.param("torch", marks=pytest.mark.full)])
def test_another_engine_does_not_load_tensorflow_to_save(engine: str, tmp_path: Path) -> None:
    code, out, err = programs.finish(programs.start(["-c", _SAVER, str(tmp_path)], engine), 120)
    assert code == 0, err
    assert out.split() == ["False", "True"]
