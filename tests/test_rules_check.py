"""`compare` and `verify` know wrong rules of a file before they start a process, and take nothing else for one."""

import signal
import sys
from pathlib import Path

import pytest

import keras_flow as kf
from keras_flow import rules_check
from keras_flow.backends.engine_process import EngineProcess
from tests.launch import programs

pytestmark = pytest.mark.timeout(200)

FILE = """
{head}
import sklearn.base, matplotlib  # that Keras did not see them is no fault of the file
import keras, keras_flow as kf
def load_data(): raise AssertionError("not needed")
def build_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="hidden")])
    model.compile("sgd", "mse")
    return model
def rules(): return {{"{key}": {{"model": kf.sbp.split({dim})}}}}
"""


def check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, head: str = "", key: str = "hidden/kernel", dim: int = 1
) -> None:
    monkeypatch.setattr(rules_check, "_SECONDS", 100.0)  # on a machine with other work
    file = programs.write(folder, FILE.format(head=head, key=key, dim=dim), "compared.py")
    with rules_check.RulesCheck(file, ["1", "2x2"], ["torch"], "us"):
        pass


def test_rows_that_the_model_does_not_take_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = 'def load_data(): import numpy as np; return np.zeros((6, 9), "float32"), np.zeros((6, 4), "float32")'
    monkeypatch.setattr(
        sys.modules[__name__], "FILE", FILE.replace('def load_data(): raise AssertionError("not needed")', wide)
    )
    with pytest.raises(kf.FlowError, match=r"x has the shape \(6, 9\)\. .*'hidden' .* to have value 8") as error:
        check(tmp_path, monkeypatch)
    assert "\n" not in str(error.value)


def test_a_layout_of_the_files_own_has_the_ranks_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_check, "_SECONDS", 100.0)
    own = 'def distributions(): return {{"eight": lambda: kf.DataParallel(kf.Placement(range(8)))}}\n'
    text = (FILE + own).format(head="", key="hidden/kernel", dim=1)
    file = programs.write(tmp_path, text, "compared.py")
    with rules_check.RulesCheck(file, ["eight"], ["torch"], "us", 8):
        pass
    with (
        pytest.raises(kf.FlowError, match="ranks up to 7"),
        rules_check.RulesCheck(file, ["eight"], ["torch"], "us"),
    ):
        pass


def test_a_signal_while_it_waits_ends_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(process: EngineProcess, *_: object) -> bool:
        started.append(process)
        raise SystemExit(143)

    started: list[EngineProcess] = []
    monkeypatch.setattr(EngineProcess, "wait", interrupted)
    with pytest.raises(SystemExit):
        check(tmp_path, monkeypatch)
    assert started[0].status is not None


def test_what_is_wrong_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(kf.FlowError, match="rule 'hiden/kernel' matched no variable") as error:
        check(tmp_path, monkeypatch, key="hiden/kernel")
    assert "Found before" not in str(error.value), "no line of the file is to blame"
    with pytest.raises(kf.FlowError, match=r"a dimension that the shape \[8, 4\] does not have: legal are dims 0 to 1"):
        check(tmp_path, monkeypatch, dim=2)
    check(tmp_path, monkeypatch)


@pytest.mark.parametrize("head", ["import torch", "raise ValueError('here')", "open('written', 'w')"])
def test_what_else_a_file_does_is_left_to_the_ranks(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(tmp_path, monkeypatch, head=head)
    assert not (tmp_path / "written").exists()


def test_a_check_that_takes_longer_ends_the_process_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = programs.write(tmp_path, FILE.format(head="", key="hiden/kernel", dim=1), "compared.py")
    monkeypatch.setattr(rules_check, "_SECONDS", 0.0)
    with (
        rules_check.RulesCheck(file, ["2x2"], ["jax"], "us") as found,
        pytest.raises(kf.FlowError, match="hiden"),
        EngineProcess("jax", "http.server", "0") as beside,
    ):
        beside.wait(100, found.raise_what_is_found)
    assert beside.status == -signal.SIGTERM


@pytest.mark.parametrize(
    ("source", "engine"),
    [
        ("import keras", "jax"),
        ("import torch", "torch"),
        ("keras.backend.backend() == 'jax'", "torch"),
        ("KERAS_BACKEND", "torch"),
        ("the torchlight", "jax"),
    ],
)
def test_the_engine_of_a_check(source: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_check.versions, "installed", lambda name: "1")
    assert rules_check._engine_for(source, ["torch", "jax"]) == engine
