"""Each KERAS_FLOW_* variable is checked before anything starts, and a page says what it may be."""

import ast
import re
from pathlib import Path

import pytest

import keras_flow as kf
from keras_flow import settings
from tests.launch import programs

ROOT = Path(__file__).parents[1]
#: a value that each variable refuses; the others take any text
WRONG = {
    "KERAS_FLOW_TIMEOUT": "soon",
    "KERAS_FLOW_GRACE": "long",
    "KERAS_FLOW_RANDOM": "Stock",
    "KERAS_FLOW_UNTESTED": "yes",
    "KERAS_FLOW_DEVICES": "0",
    "KERAS_FLOW_RESTARTS": "-1",
    "KERAS_FLOW_OWN_ACCELERATORS": "true",
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_value_is_told_before_ranks_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, WRONG[name])
    with pytest.raises(kf.FlowError, match=rf"{name} is '{WRONG[name]}'; legal is {settings.SETTINGS[name].legal}"):
        kf.init(1)


def test_the_others_take_any_text() -> None:
    others = settings.SETTINGS.keys() - WRONG.keys()
    assert others == {"KERAS_FLOW_TOKEN", "KERAS_FLOW_JOB"}


@pytest.mark.parametrize("value", ["inf", "nan", "0", "-3", ""])
def test_seconds(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_FLOW_GRACE", value)
    if not value:
        assert settings.seconds(settings.GRACE, 30) == 30, "an empty variable is one that is not set"
    else:
        with pytest.raises(kf.FlowError, match="a number of seconds above 0"):
            settings.seconds(settings.GRACE, 30)


def test_a_slip_of_the_keys_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_FLOW_TIME_OUT", "7")
    with pytest.raises(kf.FlowError, match=r"KERAS_FLOW_TIME_OUT is none .* did you mean KERAS_FLOW_TIMEOUT\?"):
        settings.check()
    monkeypatch.delenv("KERAS_FLOW_TIME_OUT")
    monkeypatch.setenv("KERAS_FLOW_OF_MY_OWN", "7")
    settings.check()


def test_a_command_says_it_in_one_line(tmp_path: Path) -> None:
    script = programs.write(tmp_path, "raise SystemExit('started')")
    command = ["-m", "keras_flow.cli.app", "launch", "--nproc_per_node", "2", str(script)]
    code, out, err = programs.finish(programs.start(command, KERAS_FLOW_GRACE="long"))
    assert (code, out) == (1, "")
    assert err == (
        "keras-flow: the environment variable KERAS_FLOW_GRACE is 'long'; legal is a number of seconds above 0.\n"
    )


def test_the_page_has_what_users_may_set() -> None:
    page = (ROOT / "docs" / "processes.md").read_text()
    rows = re.findall(r"^\| `(KERAS_FLOW_\w+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert rows == [(each.name, each.legal, each.what) for each in settings.SETTINGS.values() if not each.by_launcher]


def test_no_other_module_names_them() -> None:
    found = []
    for path in sorted([*(ROOT / "keras_flow").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            is_name = isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
            if is_name and re.fullmatch(r"KERAS_FLOW_[A-Z_]+", node.value):  # type: ignore[attr-defined]
                found.append(path.relative_to(ROOT).as_posix())
    assert set(found) == {"keras_flow/settings.py"}
