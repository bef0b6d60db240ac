"""Where ranks are, read from their stacks: the last collective, and the line of the cell that called it."""

from __future__ import annotations

import re

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
#: files of an engine's collectives, of ours, and of a cell
_COLLECTIVE = re.compile(r"torch/distributed/|backends/\w+/|jaxlib?/|tensorflow/")
_CELL = re.compile(r"ipykernel_\d+/|<ipython-input")
#: functions around a collective that say nothing
_AROUND = {"wrapper", "wait", "_call_impl", "__call__", "inner", "fn", "hooked"}


def where(stack: str) -> str:
    """In words, what a rank is doing, from a stack as `faulthandler` writes it, innermost frame first.

    Example:
        >>> print(where('''  File "/site/torch/distributed/distributed_c10d.py", line 9 in all_reduce
        ...   File "/tmp/ipykernel_7/1.py", line 3 in <module>'''))
        all_reduce (distributed_c10d.py:9), called in line 3 of the cell
    """
    frames = [match for line in stack.splitlines() if (match := _FRAME.search(line))]
    if not frames:
        return "it does not answer: stopped, or stuck outside Python"
    inner = [frame for frame in frames if _COLLECTIVE.search(frame["file"])]
    named = next((frame for frame in inner if frame["name"] not in _AROUND), frames[0])
    cell = next((frame for frame in frames if _CELL.search(frame["file"])), None)
    text = f"{named['name']} ({named['file'].rpartition('/')[2]}:{named['line']})"
    if cell is None:
        return text
    line = f"line {cell['line']} of the cell"
    return line if cell is named else f"{text}, called in {line}"
