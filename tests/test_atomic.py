"""Files that are written beside their name: writers are killed at random moments, and a whole file is there."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from keras_flow import atomic
from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(200)

WRITER = """
import sys
from keras_flow import atomic
path, number = sys.argv[1], int(sys.argv[2])
print("begins", flush=True)
while True:
    number += 1
    atomic.write_text(path, f"{number} " * 200_000)
"""


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    path, moments, seen = tmp_path / "file.txt", random.Random(7), set()
    atomic.write_text(path, "0 " * 200_000)
    for turn in range(20):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(1000 * turn)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(moments.uniform(0.0, 0.05))
        writer.kill()
        writer.communicate()
        numbers = path.read_text().split()
        assert len(numbers) == 200_000
        assert len(set(numbers)) == 1, "parts of two files"
        seen.add(numbers[0])
    assert len(seen) > 5, "the writers came to write"
    atomic.write_text(path, "last")
    assert [each.name for each in tmp_path.iterdir()] == ["file.txt"], "what dead writers left is removed"


def test_what_raises_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(ValueError, match="half"), atomic.beside(path) as new:
        new.write_text("half")
        raise ValueError("half")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file.txt"]


def test_links_modes_and_pipes(tmp_path: Path) -> None:
    path, link = tmp_path / "file.txt", tmp_path / "link.txt"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    atomic.write_text(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic.write_text(pipe, "through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)


READ_ONLY = """
import os, sys
from pathlib import Path
from keras_flow import atomic
os.setuid(65534)
folder = Path(sys.argv[1])
atomic.write_text(folder / "mine.txt", "new")
try:
    with atomic.beside(folder / "mine.txt") as new:
        new.write_text("half")
        raise ValueError("half")
except ValueError: pass
with atomic.beside(folder / "models") as new:
    new.mkdir()
    (new / "model").write_text("new")
for name in ("other.txt", "none.txt"):
    try: atomic.write_text(folder / name, "new")
    except PermissionError as error: print(Path(error.filename).name)
"""


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="becomes a user who may not write in a folder")
def test_a_folder_that_may_not_be_written() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "mine.txt").write_text("old, and longer")
        (folder / "mine.txt").chmod(0o666)
        (folder / "other.txt").write_text("old")
        (folder / "models").mkdir()
        (folder / "models").chmod(0o777)
        done = subprocess.run([sys.executable, "-c", READ_ONLY, name], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "other.txt\nnone.txt\n"), done.stderr
        assert (folder / "mine.txt").read_text() == "new"
        assert (folder / "other.txt").read_text() == "old"
        assert sorted(each.name for each in folder.iterdir()) == ["mine.txt", "models", "other.txt"]
        assert _contents(folder / "models") == {"model": "new"}


def test_writers_of_another_container_are_left_alone(tmp_path: Path) -> None:
    own = atomic._processes_seen()
    dead, other, old = (tmp_path / f"{atomic._PREFIX}{where}-999999-1-0" for where in (own, f"{own}0", "old"))
    for folder in (dead, other, old):
        folder.mkdir()
    os.utime(old, (1, 1))
    atomic.write_text(tmp_path / "file", "whole")
    assert sorted(each.name for each in tmp_path.iterdir()) == [other.name, "file"]


def test_the_old_folder_of_a_living_writer_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system cannot exchange two names, another writer may come while there is no folder."""
    monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *args, **kwargs: None)
    new, target = tmp_path / "new", tmp_path / "model"
    for folder, text in ((new, "new"), (target, "old")):
        folder.mkdir()
        (folder / "file").write_text(text)
    rename = os.rename

    def renamed(source: Path, place: Path) -> None:
        rename(source, place)
        if source == target:
            atomic.remove_left_over(tmp_path)

    monkeypatch.setattr(os, "rename", renamed)
    atomic.put(new, target)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
    assert (target / "file").read_text() == "new"
    # one that was killed there
    dead = f"{atomic._PREFIX}{atomic._processes_seen()}-999999999-1-0{atomic._OLD}"
    rename(target, tmp_path / f"model{dead}")
    atomic.remove_left_over(tmp_path)
    assert (target / "file").read_text() == "new"


def _contents(folder: Path) -> dict[str, str]:
    return {str(each.relative_to(folder)): each.read_text() if each.is_file() else "" for each in folder.rglob("*")}


def _write_folder(folder: Path, text: str) -> None:
    with atomic.beside(folder) as new:
        (new / "inside").mkdir(parents=True)
        (new / "model").write_text(text)
        (new / "inside" / "weights").write_text(text)


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    _write_folder(folder, "1")
    folder.chmod(0o2770)
    before = folder.stat().st_ino
    _write_folder(folder, "2")
    assert _contents(tmp_path) == {
        **{"folder": "", "folder/inside": "", "folder/inside/weights": "2", "folder/model": "2"}
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2770
    assert folder.stat().st_ino != before, "in one step"


@pytest.mark.parametrize("works_in_it", [False, True])
def test_what_else_is_in_a_folder_stays(works_in_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras writes into a folder that is there: rows of metrics, say, are in it too."""
    folder, far = tmp_path / "folder", tmp_path / "far"
    for name in ("empty", "inside"):
        (folder / name).mkdir(parents=True)
    far.mkdir()
    (folder / "link").symlink_to(far)
    for name in () if works_in_it else ("metrics.csv", "inside/notes"):
        (folder / name).write_text("kept")
    (folder / "model").write_text("0")
    expected = _contents(folder) | {"model": "1", "inside/weights": "1"}
    if works_in_it:
        monkeypatch.chdir(folder)
    _write_folder(Path(".") if works_in_it else folder, "1")
    assert _contents(folder) == expected
    assert (folder / "link").readlink() == far
    if works_in_it:
        for name in ("empty", "link"):
            (folder / name).unlink() if name == "link" else (folder / name).rmdir()
        _write_folder(folder, "2")  # all of it is written anew
        assert Path.cwd() == folder and Path("model").read_text() == "2"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["far", "folder"]


def test_errors_name_the_path_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^model\.x: an ending"), atomic.beside("model.x") as new:
        raise ValueError(f"{new}: an ending")
    with pytest.raises(FileNotFoundError, match=r"^\[Errno 2\] No such file or directory: 'model.x/a'$"):
        with atomic.beside("model.x") as new:
            (new / "a").read_text()
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/shard'"), atomic.folder_in(tmp_path) as folder:
        (folder / "shard").read_text()


def test_what_is_written_beside_a_file_comes_along(tmp_path: Path) -> None:
    for number in ("1", "2"):
        with atomic.beside(tmp_path / "model") as new:
            new.write_text(number)
            new.with_name("model.data").write_text(number)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"model": "2", "model.data": "2"}


def test_an_index_of_others_removes_no_file_of_theirs(tmp_path: Path) -> None:
    """What an index names is removed with it only where it is one of Keras's files beside it."""
    import json

    from keras_flow.backends.files import whole_files

    def save(weights: dict[str, str | list[str]]) -> None:
        def write(model: object, path: Path, overwrite: bool = True, max_shard_size: float | None = None) -> None:
            for name in weights.values():
                path.with_name(str(name)).write_text("new")
            path.write_text(json.dumps({"weight_map": weights}))

        whole_files.save(write, None, folder / "w.weights.json", max_shard_size=1.0)

    folder, far = tmp_path / "files", tmp_path / "far.weights.h5"
    folder.mkdir()
    kept = [far, folder / "notes.txt"]
    old = folder / "w_00001.weights.h5"
    for path in (*kept, old):
        path.write_text("old")
    index = {"weight_map": {"a": ["../far.weights.h5", str(far)], "b": "notes.txt", "c": old.name, "d": 7}}
    (folder / "w.weights.json").write_text(json.dumps(index))
    save({"a": "w_00000.weights.h5"})
    assert [path.read_text() for path in kept] == ["old", "old"]
    assert not old.exists()
    save({})  # a model without weights
    assert sorted(each.name for each in folder.iterdir()) == ["notes.txt", "w.weights.json"]


def test_what_was_written_is_noted(tmp_path: Path) -> None:
    with atomic.noting() as written:
        atomic.write_bytes(tmp_path / "a", b"1")
        with pytest.raises(FileNotFoundError, match="nowhere"):
            atomic.write_text(tmp_path / "nowhere" / "b", "2")
    assert written == [tmp_path / "a"]


# every weight, the optimizer's updates and the epoch of a backup have one number, by which a mixture is found
KERAS = """
import json, os, random, signal, sys, time
import keras_flow as kf
kf.init(1)
import keras, numpy as np
folder, moments, kills = sys.argv[1], random.Random(int(sys.argv[2])), int(sys.argv[3])
path = lambda name: os.path.join(folder, name)

def made():
    with kf.DataParallel().scope():
        layers = [keras.layers.Input((64,)), *(keras.layers.Dense(64, name=f"d{i}") for i in range(4))]
        model = keras.Sequential(layers, name="m")
        model.compile("sgd", "mse")
    return model

def save(number):
    for weight in model.weights:
        weight.assign(np.full(weight.shape, number, "float32"))
    model.optimizer.iterations.assign(number)
    model.save(path("m.keras"))
    model.save(path("unzipped"), zipped=False)
    model.save_weights(path("m.weights.h5"))
    # the shards are not equally many: what an old set left must not be read
    model.save_weights(path("s.weights.json"), max_shard_size=(20_000 + 20_000 * (number % 3)) / 1024**3)
    backup._current_epoch = number
    backup._save_model()

def number_of(weights):
    numbers = {float(value) for weight in weights for value in np.unique(np.asarray(weight))}
    assert len(numbers) == 1, numbers
    return numbers.pop()

model, other = made(), made()
backup = keras.callbacks.BackupAndRestore(path("backup"))
backup.set_model(model)
last, seen, before = 1, set(), [1.0] * 5
save(last)
for turn in range(kills):
    child = os.fork()
    if child == 0:
        while True:
            last += 1
            save(last)
    time.sleep(moments.uniform(0.02, 0.5))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = [number_of(keras.models.load_model(path("m.keras")).weights)]
    found.append(number_of(keras.models.load_model(path("unzipped")).weights))
    for name in ("m.weights.h5", "s.weights.json"):
        other.load_weights(path(name))
        found.append(number_of(other.weights))
    restoring = keras.callbacks.BackupAndRestore(path("backup"))
    restoring.set_model(other)
    restoring.on_train_begin()
    found.append(number_of(other.weights))
    assert other._initial_epoch == int(other.optimizer.iterations.numpy()) == found[-1], (other._initial_epoch, found)
    assert all(now >= then for now, then in zip(found, before)), (before, found)
    before = found
    last = int(max(found))
    seen.add(last)
save(last + 1)
print(json.dumps({"seen": len(seen), "left": sorted(os.listdir(folder)), "backup": sorted(os.listdir(path("backup")))}))
"""


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.full)])
def test_files_of_keras_under_a_distribution(kills: int, tmp_path: Path) -> None:
    import json

    script = programs.write(tmp_path, KERAS)
    folder = tmp_path / "files"
    folder.mkdir()
    seed = str(sampling.number_of("files of Keras") % 1000)
    code, out, err = programs.finish(programs.start([str(script), str(folder), seed, str(kills)]), 190)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["seen"] > kills / 4, "the writers came to write"
    shards = [name for name in result["left"] if name.startswith("s_")]
    assert result["left"] == sorted(["backup", "m.keras", "m.weights.h5", "s.weights.json", "unzipped", *shards])
    assert len(shards) <= 6, shards
    assert not [name for name in result["backup"] if name.startswith(".")]
