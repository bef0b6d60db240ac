"""Shows the output of a cell in the notebook: the first rank's while it runs, that of all, folded, at its end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from keras_flow.notebook import output
from keras_flow.notebook.output import Printed


class Live:
    """The output of one cell.

    Args:
        process: the one whose output is shown while the cell runs, so that a progress bar is shown once.
        each: how many ranks a process drives.
    """

    def __init__(self, process: int, each: int = 1) -> None:
        self._each, self._name = each, output.label([process], each)
        self._seen = ""

    def show(self, stdout: str) -> None:
        """Show what that rank has written since the last call; `stdout` is all that it has written."""
        if stdout == self._seen:
            return
        same = self._seen
        if not stdout.startswith(same):
            pairs = enumerate(zip(self._seen, stdout, strict=False))
            same = stdout[: next((at for at, (old, new) in pairs if old != new), min(len(self._seen), len(stdout)))]
        if same == self._seen:
            text = output.labelled(stdout[len(same) :], self._name, same[-1:] in ("", "\n"))
        else:  # ipyparallel drops the states of a line that was written over
            text = "\r" + output.labelled(stdout[same.rfind("\n") + 1 :], self._name, at_start=True)
        sys.stdout.write(text)
        sys.stdout.flush()
        self._seen = stdout

    def finish(self, printed: Mapping[int, Printed]) -> None:
        """Show the output of all processes, equal lines once."""
        each = self._each
        was_shown = bool(self._seen)
        if was_shown and _clear():
            was_shown = False
        texts = {process: own.stdout for process, own in printed.items()}
        results = {process: [one for one in own.displays if output.is_text(one)] for process, own in printed.items()}
        rich = {process: [one for one in own.displays if not output.is_text(one)] for process, own in printed.items()}
        if was_shown:  # a terminal: the first rank's lines stand there already
            if not self._seen.endswith("\n"):
                print()
            lines = [line for line in output.folded(texts, each) if not line.startswith(f"[{self._name}]")]
            lines = [line for line in lines if not line.startswith(f"[{output.label(list(texts), each)}]")]
        else:
            lines = output.folded(texts, each)
        texts = {process: "".join(f"{_text(one)}\n" for one in own) for process, own in results.items()}
        lines += output.folded(texts, each)
        if lines:
            print("\n".join(lines))
        if errors := output.folded({process: own.stderr for process, own in printed.items()}, each):
            print("\n".join(errors), file=sys.stderr)
        for alike, display in output.displays(rich):
            if len(alike) < len(printed):
                print(f"[{output.label(alike, each)}]")
            _publish(display)


def _text(display: Mapping[str, Any]) -> str:
    return str(display["data"]["text/plain"])


def _publish(display: Mapping[str, Any]) -> None:
    try:
        from IPython.display import publish_display_data
    except ImportError:  # a plain script
        print(_text(display))
    else:
        publish_display_data(dict(display["data"]), dict(display.get("metadata") or {}))


def _clear() -> bool:
    """Take away what the cell has shown so far, where a notebook can."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython
    from IPython.display import clear_output

    if not hasattr(get_ipython(), "kernel"):
        return False
    clear_output(wait=True)
    return True
