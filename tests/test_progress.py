"""Progress is shown where somebody can see it, and only of what takes long."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from keras_flow import progress


def shown(terminal: bool, seconds: float, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.1)
    stream = io.StringIO()
    with progress.working("first", Console(file=stream, force_terminal=terminal, width=60)) as tell:
        time.sleep(seconds / 2)
        tell("second")
        time.sleep(seconds / 2)
    return stream.getvalue()


def test_a_terminal_shows_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(True, 1.0, monkeypatch)
    assert "first" in text and "second" in text
    assert text.endswith("\x1b[2K"), "and clears its line"


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "first" not in shown(True, 0.0, monkeypatch)


def test_where_output_is_no_terminal_a_line_is_written_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(False, 0.5, monkeypatch) == "", "every half a minute"
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.4)
    lines = shown(False, 2.0, monkeypatch).splitlines()
    assert lines[0] == "first (0 s)" and lines[-1] in ("second (1 s)", "second (2 s)")
    assert 2 <= len(lines) <= 5


def test_a_quiet_console_in_a_notebook_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two widgets of progress at once disturb each other."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert progress.is_seen(Console(force_jupyter=True))
    assert not progress.is_seen(Console(force_jupyter=True, quiet=True))


def test_an_error_passes_through() -> None:
    with pytest.raises(KeyError):
        with progress.working("first"):
            raise KeyError("inside")


@pytest.mark.parametrize("has_widgets", [False, True])
def test_a_notebook_shows_it_where_rich_can_draw(has_widgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ipywidgets rich warns in the cell and draws nothing."""
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: name if has_widgets else None)
    assert progress.is_seen(Console(file=io.StringIO(), force_jupyter=True)) is has_widgets
