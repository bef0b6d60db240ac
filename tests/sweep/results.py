"""Results of the sweep: what the runner's lines say, and docs/support.csv, which keeps them.

A result is `native`, `broadcast` (computed whole on every rank), `fallback` (a split became broadcast, or an operation
is computed on gathered operands) or `refused`; `wrong` and `crash` must not be. What Keras itself fails at on one
device is `not compared`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.sweep.design import Setting

TABLE = Path(__file__).parents[2] / "docs" / "support.csv"
#: from the worst; a name has the worst state of its settings
STATES = ("crash", "wrong", "refused", "fallback", "broadcast", "native")
NOT_COMPARED = "not compared"
#: between the settings, and between the reasons, in a row of the table
_SETTINGS, _REASONS = "; ", " // "
#: letters of a reason
_LONGEST = 300
#: notes that rows, or a dim of a kernel, do not divide: that depends on sizes, not on what computes them
_OF_SIZES = re.compile(r"a batch of \d+ rows does not divide|dim \d+ of \d+ does not divide")


@dataclass(frozen=True)
class Result:
    """One piece under one setting.

    Attributes:
        reasons: why it is not native.
    """

    backend: str
    name: str
    setting: Setting
    state: str
    reasons: tuple[str, ...] = ()


Key = tuple[str, str, Setting]


def by_key(results: Iterable[Result]) -> dict[Key, Result]:
    """The last result of each backend, piece and setting."""
    return {(result.backend, result.name, result.setting): result for result in results}


def of_lines(lines: Iterable[Mapping]) -> list[Result]:
    """What the lines of the runner say, the last of each piece and setting."""
    every = (Result(line["backend"], line["name"], Setting(**line["setting"]), *_state(line)) for line in lines)
    return list(by_key(every).values())


def _state(line: Mapping) -> tuple[str, tuple[str, ...]]:
    if line["state"] == "one device":
        return NOT_COMPARED, (_of_keras(line["error"]),)
    if line["state"] == "refused":
        return "refused", (_tidy(line["error"]),)
    if line["state"] != "right":
        return "wrong" if line["state"] == "wrong" else "crash", (_tidy(str(line.get("over") or line["error"])),)
    notes = tuple(_tidy(note) for note in line.get("notes", ()) if not _OF_SIZES.search(note))
    if not notes:
        return "native", ()
    return "broadcast" if all(note.startswith("ComputedWhole") for note in notes) else "fallback", notes


def _tidy(reason: str) -> str:
    """The reason without names and sizes, so that the same one is the same text."""
    text = re.sub(r"^(FlowError|\w*Error|FlowWarning): ", "", " ".join(re.sub(r"\x1b\[\d*m", "", reason).split()))
    text = re.sub(
        r"^LayoutFallback: \S+( and \d+ more)?: dim .*",
        "LayoutFallback: a dim does not divide by the ranks it is split on",
        text,
    )
    text = re.sub(r"^((\w+: )?)[\w/. ]+: (?=torch's|TensorFlow's)", r"\1", text)
    text = re.sub(r" \(the numbers are.*", "", text)
    text = re.sub(r"(?<![A-Za-z])\d+", "N", text).replace("|", "\\|")  # Conv2D is a name
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rpartition(' ')[0]} ..."


def _of_keras(error: str) -> str:
    """The engine's own words, without those of Keras around them."""
    text = re.sub(r"\x1b\[\d*m", "", " ".join(error.split())).partition(" Arguments received by")[0]
    text = re.sub(r"Exception encountered when calling \S+ ", "", text)
    return re.sub(r"Could not automatically infer .* Error encountered: ", "", text)[:200].replace("|", "\\|")


def write(results: Iterable[Result], path: Path) -> None:
    """One row for each backend, name, state and reasons, with the settings under which it is so."""
    settings: dict[tuple, list[str]] = {}
    for result in results:
        row = (result.backend, result.name, result.state, _REASONS.join(result.reasons))
        settings.setdefault(row, []).append(result.setting.name)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["backend", "name", "state", "settings", "reasons"])
        for row in sorted(settings):
            writer.writerow([*row[:3], _SETTINGS.join(sorted(settings[row])), row[3]])


def read(path: Path) -> list[Result]:
    """What `write` wrote; nothing where there is no such file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [
            Result(row["backend"], row["name"], _setting(name), row["state"], _reasons(row["reasons"]))
            for row in csv.DictReader(file)
            for name in row["settings"].split(_SETTINGS)
        ]


def _setting(name: str) -> Setting:
    return Setting(*name.split(", "))


def _reasons(text: str) -> tuple[str, ...]:
    return tuple(text.split(_REASONS)) if text else ()


def worst(results: Sequence[Result]) -> dict[tuple[str, str], Result]:
    """(backend, name) -> its worst result; not of what cannot be compared."""
    by_name: dict[tuple[str, str], Result] = {}
    for result in results:
        key = (result.backend, result.name)
        if result.state == NOT_COMPARED:
            continue
        if key not in by_name or STATES.index(result.state) < STATES.index(by_name[key].state):
            by_name[key] = result
    return by_name


def share(results: Sequence[Result], backend: str, strategy: str = "") -> tuple[int, int]:
    """(names that are native under every setting, names) of a backend, in one strategy of `DataParallel`.

    The empty name is the default, which looks for the strategy that can; one that is asked for refuses what it cannot.
    """
    own = [result for result in results if result.backend == backend and result.setting.strategy == strategy]
    states = [result.state for result in worst(own).values()]
    return states.count("native"), len(states)
