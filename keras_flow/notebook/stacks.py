"""The places where ranks are, read from their stacks: the last collective, and the line of the cell that called it."""

from __future__ import annotations

import os
import re

import keras_flow
from keras_flow.backends import engines

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
#: files of an engine and of ours, in which a rank waits for others, and of a cell
_OURS = "|".join(re.escape(os.path.dirname(str(module.__file__))) for module in (keras_flow, engines))
_WAITING = re.compile(rf"-packages/(torch/distributed|jaxlib|jax|tensorflow)/|(?:{_OURS})/")
_CELL = re.compile(r"ipykernel_\d+/|<ipython-input")
#: functions that are collectives by their name, as engines and `kf.comm` call them
_COLLECTIVE = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|gather|scatter|reduce|send|recv)(_\w+)?"
)


def where(stack: str) -> str:
    """In words, what a rank is doing, from a stack as `faulthandler` writes it, innermost frame first.

    Example:
        >>> print(where('''  File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce
        ...   File "/tmp/ipykernel_7/1.py", line 3 in <module>'''))
        all_reduce (distributed_c10d.py:9), called in line 3 of the cell
    """
    frames = [match for line in stack.splitlines() if (match := _FRAME.search(line))]
    if not frames:
        return "it does not answer: stopped, or stuck outside Python"
    cell = next((frame for frame in frames if _CELL.search(frame["file"])), None)
    below = frames[: frames.index(cell)] if cell is not None else frames
    inner = [frame for frame in below if _WAITING.search(frame["file"])]
    named = next((frame for frame in inner if _COLLECTIVE.fullmatch(frame["name"])), None)
    if named is None and not inner:  # in the user's own code, or what it calls
        return f"line {cell['line']} of the cell" if cell is not None else _named(frames[0], frames[0]["name"])
    text = _named(named, named["name"]) if named else _named(inner[0], "waits for other ranks")
    return text if cell is None else f"{text}, called in line {cell['line']} of the cell"


def _named(frame: re.Match[str], what: str) -> str:
    return f"{what} ({frame['file'].rpartition('/')[2]}:{frame['line']})"
