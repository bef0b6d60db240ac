"""Every command that runs an engine names a version that was not tested, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from keras_flow.backends import fingerprints
from keras_flow.runtime.untested import say_untested


def test_what_was_not_tested_is_named_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions = {"keras": "3.15.1", "jax": "0.99.1", "torch": "2.13.0", "tensorflow": ""}
    monkeypatch.setattr(fingerprints, "installed", versions.__getitem__)
    say_untested(["jax", "torch", "tensorflow"])
    err = capsys.readouterr().err
    assert err.startswith("keras-flow: jax 0.99.1 was not tested (tested: 0.8.0, ")
    assert err.count("\n") == 1 and "`keras-flow doctor` runs a self-test" in err


@pytest.mark.parametrize("command", ["compare", "explain", "verify", "launch"])
def test_commands_say_it(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from keras_flow.cli.app import app

    monkeypatch.setenv("KERAS_BACKEND", "jax")
    found = fingerprints.installed
    monkeypatch.setattr(fingerprints, "installed", lambda name: "0.99" if name == "jax" else found(name))
    script = tmp_path / "program.py"
    script.write_text("import sys; sys.exit(3)")
    options = {
        "compare": ["--backends", "jax", "--layouts", ","],
        "explain": ["--layout", "dp2"],
        "verify": ["--backends", "jax", "--layout", "dp2"],
        "launch": ["--nproc_per_node", "2"],
    }[command]
    words = [command, *options, str(script)] if command == "launch" else [command, str(script), *options]
    with pytest.raises(BaseException):  # noqa: B017  # the program is none; what counts is said before
        app(words, standalone_mode=False)
    assert "keras-flow: jax 0.99 was not tested" in capsys.readouterr().err


def test_a_notebook_says_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import keras_flow as kf

    monkeypatch.setattr(fingerprints, "installed", lambda name: "0.99" if name == "jax" else "")
    (tmp_path / "program.py").write_text("")
    with pytest.raises(kf.FlowError, match="build_model"):
        kf.notebook.compare(tmp_path / "program.py", backends=["jax"], layouts=["1"], out=tmp_path)
    assert "keras-flow: jax 0.99 was not tested" in capsys.readouterr().err
