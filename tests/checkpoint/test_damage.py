"""What is loaded of a damaged checkpoint, or of one that is of another run or model."""

from __future__ import annotations

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.checkpoint import manifest, names
from keras_flow.errors import FlowError
from tests.checkpoint.test_files import chunk_of, saved

pytestmark = pytest.mark.usefixtures("four_ranks")


def _values(model: keras.Model) -> dict[str, np.ndarray]:
    return {name: np.array(variable) for name, variable in names.named(model).items()}


def _fresh(folder: Path) -> keras.Model:
    """A model of other values: all of its variables are moved."""
    model = saved(folder)
    for variable in names.named(model).values():
        variable.assign(variable + 3)
    return model


@pytest.mark.parametrize("damage", ["a flipped bit", "a short file", "no file"])
def test_the_rest_is_loaded_and_what_is_missing_is_said(damage: str, tmp_path: Path) -> None:
    there = _values(saved(tmp_path / "run"))
    path, chunk = chunk_of(tmp_path / "run", "net/one/kernel")
    right = path.read_bytes()
    if damage == "no file":
        path.unlink()
    else:
        flipped = right[: chunk.begin] + bytes([right[chunk.begin] ^ 1]) + right[chunk.begin + 1 :]
        path.write_bytes(flipped if damage == "a flipped bit" else right[: chunk.end - 3])
    tensors = kf.checkpoint.inspect(tmp_path / "run").tensors
    damaged = {
        name
        for name, tensor in tensors.items()
        for each in tensor.chunks
        if each.file == chunk.file
        and (damage == "no file" or (each.end > chunk.end - 3 if damage == "a short file" else each == chunk))
    }
    assert damaged and set(there) - damaged and (damage == "a flipped bit") == (damaged == {"net/one/kernel"})
    model = _fresh(tmp_path / "other")
    before = _values(model)
    left_out = kf.checkpoint.load(tmp_path / "run", model, strict=False).left_out
    assert sorted(text.split("'")[1] for text in left_out) == sorted(damaged)
    assert all(chunk.file in text and "bytes" in text for text in left_out)
    for name, value in _values(model).items():
        np.testing.assert_array_equal(value, (before if name in damaged else there)[name], err_msg=name)


def test_a_manifest_of_another_run(tmp_path: Path) -> None:
    """It names the same files and bytes, with the hashes of other values."""
    _fresh(tmp_path / "other")
    keras.utils.set_random_seed(8)
    model = saved(tmp_path / "run")
    name = f"step-00000001/{manifest.NAME}"
    shutil.copy(tmp_path / "other" / name, tmp_path / "run" / name)
    chunk = kf.checkpoint.inspect(tmp_path / "run").tensors["net/one/kernel"].chunks[0]
    for call in (lambda: kf.checkpoint.verify(tmp_path / "run"), lambda: kf.checkpoint.load(tmp_path / "run", model)):
        with pytest.raises(FlowError) as caught:
            call()
        for part in (
            "'net/one/kernel'",
            chunk.file,
            f"bytes {chunk.begin} to {chunk.end}",
            "does not have the hash of",
        ):
            assert part in str(caught.value)


def test_the_first_ten_differences_are_shown(tmp_path: Path) -> None:
    def model(count: int, units: int) -> keras.Model:
        layers = [keras.layers.Dense(units, name=f"layer{number:02}") for number in range(count)]
        with kf.DataParallel().scope():
            return keras.Sequential([keras.layers.Input((units,)), *layers], name="net")

    kf.checkpoint.save(tmp_path, model(4, 3), step=1)
    with pytest.raises(FlowError) as caught:
        kf.checkpoint.load(tmp_path, model(7, 2))
    first, *lines = str(caught.value).splitlines()
    assert "is of another model than 'net'" in first and "\n" not in first
    assert lines[0] == "  'net/layer00/kernel' has shape [2, 2], and [3, 3] in the checkpoint"
    assert lines[1] == "  'net/layer00/bias' has shape [2], and [3] in the checkpoint"
    assert lines[8].startswith("  'net/layer04/kernel' is not in the checkpoint")
    assert len(lines) == 12 and lines[10] == "  and 4 more" and "strict=False" in lines[11]
