"""Weights of other programs are read by slices, and checkpoints are written for other programs and read back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as safe

import keras_flow as kf
from keras_flow.errors import FlowError
from tests.checkpoint import programs
from tests.ranks import Pool

ENGINES = ("jax", "tensorflow", "torch")
LAYOUTS = ("dp4", "2x2", "1x4")


def _weights(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in values.items() if "@" not in name and "seed_generator" not in name}


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_of_every_format_are_loaded_under_every_layout(
    engine: str, on_ranks: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = on_ranks(engine)
    expected = _weights(pool(programs.saved, str(tmp_path / "own"), "2x2"))
    pool(programs.saved_by_keras, str(tmp_path), "2x2")
    kf.checkpoint.export(tmp_path / "own", tmp_path / "one.safetensors")
    assert list(safe.load_file(tmp_path / "one.safetensors")) == list(expected)
    _split_over_files(tmp_path / "one.safetensors", tmp_path / "many")
    own = str(next((tmp_path / "own").glob("step-*")) / "*.safetensors")
    files = ["m.keras", "m.weights.h5", "m.weights.json", "one.safetensors", "many", own]
    for layout in LAYOUTS:
        for file in files:
            found, said = pool(programs.loaded_weights, str(tmp_path / file), layout)
            assert list(found) == list(expected)
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value, err_msg=f"{file} {layout} {name}")
            assert said.left_out == ()


def test_a_rank_reads_the_bytes_that_it_holds(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    pool = on_ranks("torch")
    pool(programs.saved, str(tmp_path), "2x2")
    file = kf.checkpoint.export(tmp_path, tmp_path / "one.safetensors")
    for layout in LAYOUTS:
        held, read = pool(programs.bytes_held_and_read, str(file), layout)
        assert read == held, layout


def _split_over_files(file: Path, folder: Path) -> None:
    folder.mkdir()
    tensors = list(safe.load_file(file).items())
    names = {}
    for number, part in enumerate((tensors[:3], tensors[3:])):
        safe.save_file(dict(part), folder / f"part-{number}.safetensors")
        names.update({name: f"part-{number}.safetensors" for name, _ in part})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("format", ["keras", "safetensors", "orbax", "dcp"])
def test_export_and_import(format: str, on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    pool = on_ranks("torch" if format == "dcp" else "jax")
    expected = pool(programs.saved, str(tmp_path / "own"), "2x2")
    out = tmp_path / {"keras": "m.keras", "safetensors": "m.safetensors"}.get(format, "m")
    pool(programs.exchanged, str(tmp_path / "own"), str(out), format, str(tmp_path / "back"))
    assert kf.checkpoint.verify(tmp_path / "back", step=7) > 0
    found = kf.checkpoint.inspect(tmp_path / "back", step=7)
    # Keras makes seed generators again, and reads a Sequential model whose paths are without its name
    wanted = {
        "keras": {name: value for name, value in expected.items() if "seed_generator" not in name},
        "safetensors": _weights(expected),
    }.get(format, expected)
    if format != "keras":
        assert sorted(found.tensors) == sorted(wanted)
        for name, value in wanted.items():
            np.testing.assert_array_equal(kf.checkpoint.read_tensor(tmp_path / "back", name), value, err_msg=name)
    if format != "safetensors":
        again, _ = pool(programs.loaded, str(tmp_path / "back"), "1x4")
        for name, value in wanted.items():
            np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_errors_say_what_to_do(tmp_path: Path, on_ranks: Callable[..., Pool]) -> None:
    pool = on_ranks("torch")
    pool(programs.saved, str(tmp_path / "own"), "dp4")
    with pytest.raises(FlowError, match="does not say which format it has; it is one of 'keras', 'safetensors'"):
        kf.checkpoint.export(tmp_path / "own", tmp_path / "m")
    with pytest.raises(FlowError, match="there is no folder"):
        kf.checkpoint.export(tmp_path / "own", tmp_path / "no" / "m.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 8 + b"x" * 20)
    with pytest.raises(FlowError, match=r"bad\.safetensors' is no file of safetensors, .*longer than the file"):
        kf.checkpoint.import_(tmp_path / "bad.safetensors", tmp_path / "new")
    assert not (tmp_path / "new" / "step-00000000").exists()
    kf.checkpoint.export(tmp_path / "own", tmp_path / "dcp", "dcp")
    with pytest.raises(FlowError, match="is a pickle, which can run any program"):
        kf.checkpoint.import_(tmp_path / "dcp", tmp_path / "new")
    file = kf.checkpoint.export(tmp_path / "own", tmp_path / "m.safetensors")
    data = file.read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[:-4])
    error = pool(programs.error_of_loading, str(tmp_path / "short.safetensors"), None)
    assert "ends 4 bytes too early" in error
    error = pool(programs.error_of_loading, str(tmp_path / "none-*.safetensors"), None)
    assert "no such file" in error
    first = next(iter(safe.load_file(file)))
    error = pool(programs.error_of_loading, str(file), {first: "other/name"})
    assert "are not those of" in error and f"{first!r} is not in the file" in error


def test_the_command(on_ranks: Callable[..., Pool], tmp_path: Path) -> None:
    expected = _weights(on_ranks("torch")(programs.saved, str(tmp_path / "own"), "dp4"))
    out = tmp_path / "m.safetensors"
    command = [sys.executable, "-m", "keras_flow.cli.app", "checkpoint", str(tmp_path / "own"), "--export", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, f"wrote {out}"), done.stderr
    assert list(safe.load_file(out)) == list(expected)
