"""What a user sees of a self-test that failed, and how often it is run."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from keras_flow.backends import selftest
from keras_flow.errors import FlowError

_PLACES = {"keras.Model.fit": "(self, x) 1234"}
_ADVICE = "Use keras 3.15.1."


def _ask(places: dict[str, str] = _PLACES) -> None:
    selftest.require("jax", "keras 3.99.0", places, _ADVICE)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The engines that were tested; the cache folder is an empty one."""
    monkeypatch.setattr(selftest, "_folder", lambda: tmp_path / "cache")
    return []


def _finds(monkeypatch: pytest.MonkeyPatch, runs: list[str], error: str, is_final: bool = True) -> None:
    def run(engine: str) -> tuple[str, bool]:
        runs.append(engine)
        return error, is_final

    monkeypatch.setattr(selftest, "_run", run)


def test_a_failure_is_one_error_with_the_reason_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, runs: list[str]
) -> None:
    _finds(monkeypatch, runs, "two ranks: the weights differ by 0.1")
    expected = (
        "keras_flow was not tested with keras 3.99.0, where sources that it wraps have changed, and its self-test "
        "failed: two ranks: the weights differ by 0.1. Use keras 3.15.1."
    )
    for _ in range(2):  # what was found is kept, and said again
        with pytest.raises(FlowError, match=f"^{re.escape(expected)}$"):
            _ask()
    assert runs == ["jax"]
    with pytest.raises(FlowError):
        _ask({"keras.Model.fit": "(self, x) 5678"})  # other sources are tested anew
    assert runs == ["jax", "jax"]


def test_what_did_not_end_is_no_finding(monkeypatch: pytest.MonkeyPatch, runs: list[str], tmp_path: Path) -> None:
    _finds(monkeypatch, runs, "it did not end within 20 s", is_final=False)
    with pytest.raises(FlowError, match=r"its self-test failed: it did not end within 20 s\. Use"):
        _ask()
    assert list((tmp_path / "cache").iterdir()) == []
    _finds(monkeypatch, runs, "")
    _ask()
    _ask()
    assert runs == ["jax", "jax"]


@pytest.mark.parametrize(
    ("status", "written", "expected"),
    [
        (0, '{"a step": {"error": "nan"}, "another": {}}', ("a step: nan", True)),
        (0, '{"a step": {}}', ("", True)),
        (3, "", ("it ended with status 3: no memory", False)),
        (None, "", ("it did not end within 20 s (`keras-flow doctor` runs it with more time)", False)),
    ],
    ids=("failed", "passed", "crashed", "hangs"),
)
def test_what_its_process_left_is_read(
    monkeypatch: pytest.MonkeyPatch, status: int | None, written: str, expected: tuple[str, bool]
) -> None:
    class Process:
        def __init__(self, engine: str, *told: str, environment: dict[str, str]):
            assert environment["KERAS_FLOW_UNTESTED"] == "allow"  # it would ask for a self-test of its own
            self.status = status
            _write(told, written)

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait(self, seconds: float) -> bool:
            return status is not None

        def last_words(self, letters: int) -> str:
            return "no memory"

    monkeypatch.setattr(selftest, "EngineProcess", Process)
    monkeypatch.setattr(selftest, "_limit", lambda: 20.0)
    assert selftest._run("jax") == expected


def _write(told: Sequence[str], text: str) -> None:
    if text:
        Path(told[2]).write_text(text)
