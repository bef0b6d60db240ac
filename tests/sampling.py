"""What `make test` runs of tests that are many: a fixed part, chosen by a hash of each test's name.

The part is the same on every day and machine, and a test that is added or removed moves no other. What is left out is
marked `full`: `make test-changed` runs all of it that tests a changed file, `make test-full` all.

    @sampling.one_in(3)                                                # this test is run if its name's hash says so
    @pytest.mark.parametrize("engine", sampling.on_one(ENGINES))       # on one of the engines
    @pytest.mark.parametrize("name", sampling.some(NAMES, every=5))    # about every fifth name

Of the tests that take long, which `slow.txt` names, one in some 70 is run. `daily.txt` has those that are run
whatever their hash says.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

#: names of tests, a line each, written by tests/slow.py
SLOW = Path(__file__).parent / "slow.txt"
#: names of tests, a line each, and comments
DAILY = Path(__file__).parent / "daily.txt"
#: of them one in so many is run
SLOW_EVERY = 72


def number_of(name: str) -> int:
    """Return the hash of a name, which is the same in every process and version of Python."""
    return zlib.crc32(name.encode())


def chosen(name: str, values: Sequence[T]) -> T:
    """Return one of some values, by a name."""
    return values[number_of(name) % len(values)]


def is_chosen(name: str, every: int) -> bool:
    """Return whether a name is one of those that are run: one in so many."""
    return number_of(name) % every == 0


def one_in(every: int) -> pytest.MarkDecorator:
    """Return the mark of tests of which about one in so many is run."""
    return pytest.mark.one_in(every)


def some(values: Sequence[Any], every: int = 2) -> list[Any]:
    """Return the parameter of a test of which about one value in so many is run."""
    return [pytest.param(value, marks=one_in(every)) for value in values]


def on_one(engines: Sequence[str]) -> list[Any]:
    """Return the parameter of a test that is run on one of the engines, which the test's name chooses."""
    return [pytest.param(engine, marks=pytest.mark.one_of(engine, tuple(engines))) for engine in engines]


def each_on_one(engines: Sequence[str], values: Sequence[Any], every: int = 1) -> list[Any]:
    """Return two parameters, engine and value: about one value in so many is run, each on one of the engines."""
    return [
        pytest.param(*engine.values, value, marks=[*engine.marks, one_in(every)])
        for value in values
        for engine in on_one(engines)
    ]


@functools.cache
def slow_tests() -> frozenset[str]:
    """Return the names of the tests that take long."""
    return frozenset(SLOW.read_text().splitlines())


@functools.cache
def daily_tests() -> frozenset[str]:
    """Return the names of the tests that `make test` always runs."""
    return frozenset(line for line in DAILY.read_text().splitlines() if "::" in line)


def is_run(item: pytest.Item) -> bool:
    """Return whether `make test` runs a test: by its name, its marks `one_in` and `one_of`, and the two lists."""
    if item.nodeid in daily_tests():
        return True
    if item.nodeid in slow_tests() and not is_chosen(item.nodeid, SLOW_EVERY):
        return False
    one_of, every = item.get_closest_marker("one_of"), item.get_closest_marker("one_in")
    name = item.nodeid
    if one_of is not None:  # the name without the engine, so that just one of its engines is chosen
        path, bracket, parameters = name.partition("[")
        name = path + bracket + re.sub(rf"(?<![a-z0-9]){re.escape(one_of.args[0])}(?![a-z0-9])", "*", parameters)
    number = number_of(name)
    if every is not None:
        number, rest = divmod(number, every.args[0])
        if rest:
            return False
    return one_of is None or one_of.args[1][number % len(one_of.args[1])] == one_of.args[0]


def in_part(item: pytest.Item, part: str) -> bool:
    """Return whether a test is in a part of all tests: `3/7` is the third of seven."""
    number, parts = map(int, part.split("/"))
    return number_of(item.nodeid) % parts == number - 1
