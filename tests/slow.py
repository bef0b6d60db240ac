"""The list `slow.txt` of tests that take long, of which `make test` runs a few: written from a run's times.

    pytest -n 2 --dist loadgroup --junitxml=times.xml -o junit_duration_report=call
    python -m tests.slow times.xml            tests that the run had not stay as they are

A list and not a clock chooses, so that a busy machine runs the same tests as an idle one. Of those that the run had,
the quickest of a file and engine stays out of the list, if no other of them is run. One that takes very long stays out
if nothing else of the file is run. What must be run each time is in `daily.txt`.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.sampling import SLOW, SLOW_EVERY, daily_tests, is_chosen, slow_tests

#: seconds on two idle cores
LIMIT = 2.5
#: seconds above which a test is not run for its engine alone
VERY_LONG = 10.0


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
    slow = {name for name in before if name not in measured} | {n for n, t in measured.items() if t > LIMIT}
    slow -= daily_tests()
    run = {name for name in measured if name not in slow or is_chosen(name, SLOW_EVERY)}
    groups, files = {group(name) for name in run}, {group(name)[0] for name in run}
    for name in sorted(measured, key=lambda name: measured[name]):
        file, engine = group(name)
        if (file, engine) not in groups and (measured[name] <= VERY_LONG or file not in files):
            slow.discard(name)
            groups.add((file, engine))
            files.add(file)
    return sorted(slow)


def group(name: str) -> tuple[str, str]:
    """Return the file of a test and the engine in its name, if it has one."""
    engine = re.search("jax|tensorflow|torch", name.partition("::")[2])
    return name.partition("::")[0], engine[0] if engine else ""


def main(arguments: list[str]) -> int:
    """Write the list from a report."""
    (report,) = arguments
    names = updated(slow_tests(), times(Path(report)))
    SLOW.write_text("\n".join(names) + "\n")
    print(f"{SLOW.name}: {len(names)} tests over {LIMIT:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
