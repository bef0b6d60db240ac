"""Checkpoints in object stores: what fsspec knows by a protocol.

"file://" stands for a store that several processes see: its files are written as a store's are, and nothing is renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.checkpoint import manifest, saving, store
from keras_flow.current import joining
from keras_flow.errors import FlowError
from tests.checkpoint import programs
from tests.checkpoint.test_layouts import ENGINES
from tests.launch import programs as started
from tests.ranks import Pool


def _model(value: float) -> keras.Model:
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6, name="one")], name="net")
        model.compile("adam", "mse")
    model.layers[0].kernel.assign(np.full((4, 6), value, "float32"))
    return model


def _kernel(folder: str, **which: Any) -> float:
    return float(kf.checkpoint.read_tensor(folder, "net/one/kernel", **which)[0, 0])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_save_load_keep_and_write_again(asynchronous: bool, four_ranks: None, tmp_path: Path) -> None:
    where = f"memory://{tmp_path.name}/run"
    for step in (1, 2, 3):
        saved = kf.checkpoint.save(where, _model(step), step=step, keep=2, asynchronous=asynchronous)
        assert str(saved.wait()).endswith(f"run/step-{step:08d}")
    assert manifest.steps(store.at(where)) == [2, 3]
    assert (_kernel(where), _kernel(where, step=2)) == (3, 2)
    model = _model(0)
    assert kf.checkpoint.load(where, model).step == 3
    assert np.all(np.asarray(model.layers[0].kernel) == 3)
    assert kf.checkpoint.verify(where) == kf.checkpoint.inspect(where).bytes

    kf.checkpoint.save(where, _model(7), step=3, asynchronous=asynchronous).wait()
    assert _kernel(where) == 7
    schema = json.loads((Path(__file__).parents[2] / "docs" / "checkpoint-manifest.schema.json").read_text())
    jsonschema.validate(json.loads(kf.checkpoint.inspect(where).to_json()), schema)
    there = sorted(each.name for each in (store.at(where) / "step-00000003").iterdir())
    assert len(there) == 3 and there[1:] == ["manifest.json", "model.json"]  # and the folder of the files


def test_what_is_not_finished_is_no_checkpoint(four_ranks: None, tmp_path: Path, monkeypatch: Any) -> None:
    where = f"memory://{tmp_path.name}/run"
    kf.checkpoint.save(where, _model(1), step=1)
    before = store.commit

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt  # nothing is cleared away

    monkeypatch.setattr(store, "commit", killed)
    for step in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            kf.checkpoint.save(where, _model(5), step=step)
    assert manifest.steps(store.at(where)) == [1] and _kernel(where) == 1
    monkeypatch.setattr(store, "commit", before)
    monkeypatch.setattr(joining, "waiting_seconds", lambda: -1.0)
    kf.checkpoint.save(where, _model(3), step=3)  # what is left is old, and goes
    assert sorted(each.name for each in store.at(where).iterdir()) == ["step-00000001", "step-00000003"]


def test_damage_and_what_is_not_there_are_named(four_ranks: None, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/run"
    with pytest.raises(FlowError, match="is no directory"):
        kf.checkpoint.inspect(where)
    with pytest.raises(FlowError, match=r"nowhere.*pip install"):
        kf.checkpoint.inspect("nowhere://x")
    kf.checkpoint.save(where, _model(1), step=1)
    chunk = kf.checkpoint.inspect(where).tensors["net/one/kernel"].chunks[-1]
    path = tmp_path / "run" / "step-00000001" / chunk.file
    right = path.read_bytes()
    for data, said in (
        (right[: chunk.begin] + bytes([right[chunk.begin] ^ 1]) + right[chunk.begin + 1 :], "the hash of what was"),
        (right[: chunk.end - 3], "ends 3 bytes too early"),
        (None, "cannot be read"),
    ):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        for call in (lambda: kf.checkpoint.verify(where), lambda: kf.checkpoint.load(where, _model(2))):
            with pytest.raises(FlowError) as caught:
                call()
            for part in ("'net/one/kernel'", chunk.file, f"bytes {chunk.begin} to {chunk.end}", said):
                assert part in str(caught.value)


def test_other_programs_files_come_and_go(four_ranks: None, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/run"
    kf.checkpoint.save(where, _model(4), step=1)
    for out in ("weights.safetensors", "model.keras"):
        kf.checkpoint.export(where, tmp_path / out, step=1)
        kf.checkpoint.import_(tmp_path / out, where, step=len(out))
        # Keras's files have no name of the model before the layer's
        (name,) = [each for each in kf.checkpoint.inspect(where).tensors if each.endswith("one/kernel")]
        assert np.all(kf.checkpoint.read_tensor(where, name) == 4)


@pytest.mark.parametrize("engine", ["torch", *(pytest.param(each, marks=pytest.mark.full) for each in ENGINES[:2])])
def test_processes_save_and_load_and_a_stopped_program_goes_on(
    engine: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    pool, where = on_ranks(engine), f"file://{tmp_path}"
    expected = pool(programs.saved, f"{where}/saved", "2x2")
    found, _ = pool(programs.loaded, f"{where}/saved", "dp4")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    expected = pool(programs.trained, f"{where}/undisturbed", "dp4")
    for stop in (5, 9):
        assert pool(programs.trained, f"{where}/stopped", "dp4", "arrays", stop) == {}
    assert pool(programs.trained, f"{where}/stopped", "dp4") == expected


def test_long_rows_are_read_in_several_parts(tmp_path: Path, monkeypatch: Any) -> None:
    """The system reads 2 GiB at most at a time."""
    (tmp_path / "file").write_bytes(bytes(range(20)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, begin: pread(file, min(size, 3), begin))
    assert store.read(tmp_path / "file", 2, 13) == bytes(range(2, 13))
    assert store.read(tmp_path / "file", 18, 30) == bytes([18, 19])


@pytest.mark.parametrize("place", ["", "file://"])
def test_another_process_does_not_take_an_older_checkpoint_for_the_new_one(place: str, tmp_path: Path) -> None:
    """Of a step that is there already, where process 0 fails."""
    folder = store.at(f"{place}{tmp_path}") / "step-00000001"
    folder.mkdir()
    store.write_text(folder / store.MANIFEST, "old")
    here = types.SimpleNamespace(process_index=1)
    for is_written in (True, False):

        def write(is_written: bool = is_written) -> None:
            if is_written:
                store.write_text(folder / store.MANIFEST, "new")

        said = types.SimpleNamespace(step=1)
        work: Any = types.SimpleNamespace(here=here, folder=folder, writing=folder / "gone", write=write, said=said)
        with contextlib.nullcontext() if is_written else pytest.raises(FlowError, match="process 0 failed"):
            saving._apart(work)


def test_a_reader_beside_a_writer_sees_a_whole_file_or_none(tmp_path: Path) -> None:
    path, is_over, seen = store.at(f"file://{tmp_path}") / "note.json", threading.Event(), set()

    def read() -> None:
        while not is_over.is_set():
            if path.is_file():
                with contextlib.suppress(FileNotFoundError):  # the writer has removed it in between
                    seen.add(path.read_text("utf-8"))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20_000):
        store.write_text(path, "whole")
        path.unlink()
        if seen and number > 500:
            break
    is_over.set()
    reader.join()
    assert seen == {"whole"}


_WRITER = """
import sys, keras, keras_flow as kf, keras_flow.checkpoint.manifest, keras_flow.checkpoint.store
kf.init(2)
with kf.DataParallel().scope():
    model = keras.Sequential([keras.layers.Input((256,)), keras.layers.Dense(1000)])
    model.compile("adam", "mse")
step = max(kf.checkpoint.manifest.steps(kf.checkpoint.store.at(sys.argv[1])), default=0)
while True:
    step += 1
    kf.checkpoint.save(sys.argv[1], model, step=step, keep=2, extra={"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize("kills", [pytest.param(2), pytest.param(20, marks=pytest.mark.full)])
def test_a_writer_that_is_killed_at_any_moment_loses_nothing(kills: int, tmp_path: Path) -> None:
    draw, where = random.Random(0), f"file://{tmp_path}/run"
    for _ in range(kills):
        process = started.start(["-c", _WRITER, where], "jax")
        assert process.stdout is not None
        said = [int(process.stdout.readline())]
        time.sleep(draw.random() * 0.3)
        process.kill()
        said += map(int, process.stdout.read().split())
        process.communicate()
        found = kf.checkpoint.inspect(where)
        assert found.step in (said[-1], said[-1] + 1) and found.extra == {"step": found.step}
        for each in manifest.steps(store.at(where)):
            kf.checkpoint.verify(where, step=each)
