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
        rank: the one whose output is shown while the cell runs, so that a progress bar is shown once.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen = ""

    def show(self, stdout: str) -> None:
        """Show what that rank has written since the last call; `stdout` is all that it has written."""
        if stdout == self._seen:
            return
        pairs = enumerate(zip(self._seen, stdout, strict=False))
        length = next((at for at, (old, new) in pairs if old != new), min(len(self._seen), len(stdout)))
        same = stdout[:length]
        if same == self._seen:
            text = output.labelled(stdout[len(same) :], self._rank, same[-1:] in ("", "\n"))
        else:  # ipyparallel drops the states of a line that was written over
            text = "\r" + output.labelled(stdout[same.rfind("\n") + 1 :], self._rank, at_start=True)
        sys.stdout.write(text)
        sys.stdout.flush()
        self._seen = stdout

    def finish(self, printed: Mapping[int, Printed]) -> None:
        """Show the output of all ranks, equal lines once."""
        was_shown = bool(self._seen)
        if was_shown and _clear():
            was_shown = False
        texts = {rank: each.stdout for rank, each in printed.items()}
        results = {rank: [shown for shown in each.displays if output.is_text(shown)] for rank, each in printed.items()}
        rich = {rank: [shown for shown in each.displays if not output.is_text(shown)] for rank, each in printed.items()}
        if was_shown:  # a terminal: the first rank's lines stand there already
            if not self._seen.endswith("\n"):
                print()
            lines = [line for line in output.folded(texts) if not line.startswith(f"[rank {self._rank}]")]
            lines = [line for line in lines if not line.startswith(f"[{output.label(list(texts))}]")]
        else:
            lines = output.folded(texts)
        lines += output.folded({rank: "".join(f"{_text(shown)}\n" for shown in each) for rank, each in results.items()})
        if lines:
            print("\n".join(lines))
        if errors := output.folded({rank: each.stderr for rank, each in printed.items()}):
            print("\n".join(errors), file=sys.stderr)
        for ranks, display in output.displays(rich):
            if len(ranks) < len(printed):
                print(f"[{output.label(ranks)}]")
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
