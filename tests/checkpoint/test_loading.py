"""What `load` does with damage, with names that differ, and in processes that do not agree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import safetensors.numpy

import keras_flow as kf
from keras_flow import near_names
from keras_flow.backends.rendezvous import meeting
from keras_flow.checkpoint import manifest
from keras_flow.checkpoint.weights import tensors_in
from keras_flow.errors import FlowError
from tests.checkpoint import programs
from tests.ranks import Pool


def _loaded_rest(folder: str) -> tuple[tuple[str, ...], list[str]]:
    """Load what is whole into a model of other values: what was left out, and the names of what has changed."""
    keras.utils.set_random_seed(8)
    model = programs.make("1x4", keras.optimizers.SGD())
    before = programs.values(model)
    left_out = kf.checkpoint.load(folder, model, strict=False).left_out
    after = programs.values(model)
    return left_out, [name for name in before if np.any(before[name] != after[name])]


@pytest.mark.parametrize("engine", ["torch"])
def test_a_part_that_one_process_cannot_read_is_left_out_in_all(
    engine: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = on_ranks(engine)
    pool(programs.saved, str(tmp_path), "1x4", "SGD")
    found = kf.checkpoint.inspect(tmp_path)
    name = next(each for each in found.tensors if each.endswith("up/kernel"))
    chunk = found.tensors[name].chunks[-1]
    assert chunk.start[1] > 0  # not that of rank 0
    path = tmp_path / manifest.folder_of(found.step) / chunk.file
    data = bytearray(path.read_bytes())
    data[chunk.begin] ^= 1
    path.write_bytes(data)
    results = pool.on_each(_loaded_rest, str(tmp_path))
    assert all(each == results[0] for each in results)
    (left,), changed = results[0]
    assert repr(name) in left and name not in changed and any(each.endswith("down/kernel") for each in changed)


def _saved(folder: Path, **settings: Any) -> keras.Model:
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(6, name="one")], name="net")
        model.compile("sgd", "mse")
    kf.checkpoint.save(folder, model, step=1, **settings)
    return model


def test_all_processes_meet_before_they_load(four_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that one makes alone ends with an error, also where the step is given, or a file of safetensors."""
    model = _saved(tmp_path)
    file = kf.checkpoint.export(tmp_path, tmp_path / "weights.safetensors", "safetensors")
    met: list[str] = []
    monkeypatch.setattr(meeting, "meet", met.append)
    kf.checkpoint.load(tmp_path, model, step=1)
    kf.checkpoint.load(tmp_path, model)
    kf.checkpoint.load_weights(file, model)
    assert met == ["kf.checkpoint.load", "kf.checkpoint.load", "kf.checkpoint.load_weights"]


def _block(start: int) -> dict[str, str]:
    sharding = {"weight": {"saved_offsets": [start, 0], "global_shape": [4, 3]}}
    return {"format": "np", "DCP_SHARDING_INFO": json.dumps(sharding)}


def test_files_with_the_same_elements_are_refused(tmp_path: Path) -> None:
    """Two halves that are the same one have as many elements as the whole."""
    half = {"weight": np.ones((2, 3), "float32")}
    for place, start in enumerate((0, 2)):
        safetensors.numpy.save_file(half, tmp_path / f"model-{place}.safetensors", _block(start))
    assert tensors_in(tmp_path / "model-*.safetensors").tensors["weight"].shape == (4, 3)
    safetensors.numpy.save_file(half, tmp_path / "model-1.safetensors", _block(0))
    with pytest.raises(FlowError, match=r"'weight' is in '.*model-1\.safetensors', and in a file before it"):
        tensors_in(tmp_path / "model-*.safetensors")


def test_names_are_compared_only_for_the_differences_that_are_shown(
    four_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(name: str) -> keras.Model:
        return keras.Sequential(
            [keras.layers.Input((1,)), *(keras.layers.Dense(1, name=f"{name}_{n}x") for n in range(20))]
        )

    kf.checkpoint.save(tmp_path, model("hidden"), step=1)
    compared: list[str] = []
    nearest = near_names.nearest
    monkeypatch.setattr(near_names, "nearest", lambda name, *rest: compared.append(name) or nearest(name, *rest))
    with pytest.raises(FlowError, match=r"(?s)hiden_0x/kernel' is not in the checkpoint \(nearest: .*and 70 more"):
        kf.checkpoint.load(tmp_path, model("hiden"))
    assert len(compared) == 10
