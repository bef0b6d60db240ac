"""The list `slow.txt` of tests that take long, of which `make test` runs a few: written from a run's times.

    pytest -n 2 --dist loadgroup --junitxml=times.xml -o junit_duration_report=call
    python -m tests.slow times.xml            tests that the run had not stay as they are

A list and not a clock chooses, so that a busy machine runs the same tests as an idle one.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.sampling import SLOW, slow_tests

#: seconds on two idle cores
LIMIT = 5.0


def times(report: Path) -> dict[str, float]:
    """Return how many seconds each test of a run took, from pytest's report in JUnit's format."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        folders = case.attrib["classname"].replace(".", "/")
        name = case.attrib["name"].partition("@")[0]  # pytest-xdist adds the group
        found[f"{folders}.py::{name}"] = float(case.attrib["time"])
    return found


def updated(before: frozenset[str], measured: dict[str, float]) -> list[str]:
    """Return the list after a run: what it had by its time, the rest as it was."""
    return sorted({name for name in before if name not in measured} | {n for n, t in measured.items() if t > LIMIT})


def main(arguments: list[str]) -> int:
    """Write the list from a report."""
    (report,) = arguments
    names = updated(slow_tests(), times(Path(report)))
    SLOW.write_text("\n".join(names) + "\n")
    print(f"{SLOW.name}: {len(names)} tests over {LIMIT:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
