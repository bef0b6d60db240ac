"""Output of a cell on several ranks as one text: labelled by rank, equal lines folded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_flow.launch.noise import is_known

#: what differs between ranks and means nothing: times of a progress bar, addresses of objects
_NOISE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:us|ms|s|min|h)(?:/step|/epoch)?(?!\w)|0x[0-9a-f]+")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Printed:
    """The output of one rank.

    Attributes:
        stdout: what it wrote to stdout.
        stderr: what it wrote to stderr.
        displays: rich outputs, each with `data` (MIME type -> content) and `metadata`.
    """

    stdout: str = ""
    stderr: str = ""
    displays: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


def label(processes: Sequence[int], each: int = 1) -> str:
    """The ranks of processes in few words.

    Args:
        processes: numbers of processes.
        each: how many ranks a process drives.

    Example:
        >>> label([0, 1, 2, 3]), label([2]), label([0, 1, 3]), label([1], each=2)
        ('ranks 0-3', 'rank 2', 'ranks 0-1, 3', 'ranks 2-3')
    """
    ranks = [process * each + own for process in sorted(processes) for own in range(each)]
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def settled(text: str) -> list[str]:
    r"""The lines as a terminal shows them in the end: of a progress bar its last state.

    Example:
        >>> settled("1/2 one\r2/2 two\ndone\n")
        ['2/2 two', 'done']
    """
    lines = []
    for line in text.split("\n"):
        if is_known(line):  # of an engine, and means nothing
            continue
        states = [state for state in line.replace("\b", "").split("\r") if _STYLE.sub("", state).strip()]
        lines.append(states[-1].rstrip() if states else "")
    return lines[:-1] if lines and not lines[-1] else lines


def labelled(text: str, name: str, at_start: bool) -> str:
    r"""A piece of a rank's stream as it is shown while the cell runs: each line and each state behind the rank's name.

    Example:
        >>> labelled("one\ntwo", "rank 0", at_start=True)
        '[rank 0] one\n[rank 0] two'
    """
    mark = f"[{name}] "
    text = text.replace("\b", "")
    body = re.sub(r"([\n\r]+)(?=[^\n\r])", rf"\g<1>{mark}", text)
    return (mark if at_start and text[:1] not in "\n\r" else "") + body


def folded(texts: Mapping[int, str], each: int = 1) -> list[str]:
    r"""The lines of several processes as one list, labelled by rank.

    Those that wrote equally many lines are compared line by line, others as a whole.

    Args:
        texts: process -> what it wrote.
        each: how many ranks a process drives.

    Example:
        >>> folded({0: "ready\nI am 0\n", 1: "ready\nI am 1\n"})
        ['[ranks 0-1] ready', '[rank 0] I am 0', '[rank 1] I am 1']
    """
    lines = {process: settled(text) for process, text in texts.items()}
    if len({len(own) for own in lines.values()}) == 1:
        count = len(next(iter(lines.values())))
        rows = [{process: [own[at]] for process, own in lines.items()} for at in range(count)]
    else:
        rows = [{process: own for process, own in lines.items() if own}]
    return [
        f"[{label(alike, each)}] {line}".rstrip()
        for row in rows
        for alike in grouped({process: "\n".join(block) for process, block in row.items()})
        for line in row[alike[0]]
    ]


def grouped(texts: Mapping[int, str]) -> list[list[int]]:
    """Ranks whose texts say the same."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(_NOISE.sub("#", _STYLE.sub("", text)), []).append(rank)
    return list(groups.values())


def is_text(display: Mapping[str, Any]) -> bool:
    """Whether a rich output is plain text only, and can be folded like a line."""
    return set(display["data"]) == {"text/plain"}


def displays(of_ranks: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[tuple[list[int], Mapping[str, Any]]]:
    """Rich outputs of several processes, equal ones once, with those that have them."""
    most = max((len(shown) for shown in of_ranks.values()), default=0)
    found = []
    for at in range(most):
        there = {rank: shown[at] for rank, shown in of_ranks.items() if len(shown) > at}
        texts = {rank: str(sorted(display["data"].items())) for rank, display in there.items()}
        found += [(ranks, there[ranks[0]]) for ranks in grouped(texts)]
    return found
