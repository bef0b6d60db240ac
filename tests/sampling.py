"""What a run of the suite takes of tests that are many: another part each day, so that all are run within a few.

TEST_DAY=2026-11-23 python -m pytest ...        the part of a day
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def day() -> str:
    """Today's date, or that of the environment variable TEST_DAY; processes started afterwards have the same."""
    return os.environ.setdefault("TEST_DAY", datetime.date.today().isoformat())


def ordinal() -> int:
    """The number of the day."""
    return datetime.date.fromisoformat(day()).toordinal()


def of_today(number: int, values: Sequence[T]) -> T:
    """One of some values: with each day, and with each number, the next."""
    return values[(number + ordinal()) % len(values)]


def is_of_today(number: int, every: int) -> bool:
    """Whether what has this number is run today, once in so many days."""
    return of_today(number, range(every)) == 0


def in_turn(number: int, every: int) -> list[pytest.MarkDecorator]:
    """The marks of a test that is run once in so many days, and by `make test-full`."""
    return [] if is_of_today(number, every) else [pytest.mark.full]


def in_turns(number: int, every: int) -> Callable[[T], T]:
    """Decorator of a test that is run once in so many days, and by `make test-full`.

    A test whose engine changes from day to day meets all of them only where `every` and their number have no common
    divisor.
    """

    def marked(test: T) -> T:
        for mark in in_turn(number, every):
            test = mark(test)
        return test

    return marked


def some(values: Sequence[Any], every: int = 2) -> list[Any]:
    """The parameter of a test of which each value is run once in so many days, and by `make test-full`."""
    return [pytest.param(value, marks=in_turn(number, every)) for number, value in enumerate(values)]


def on_one(engines: Sequence[str], first: int = 0) -> list[Any]:
    """The parameter of a test that is run on one of the engines today, on the others in `make test-full`.

    Args:
        engines: names of engines.
        first: sets tests apart, so that not all of them take the same engine.
    """
    today = of_today(first, engines)
    return [pytest.param(engine, marks=[] if engine == today else pytest.mark.full) for engine in engines]


def each_on_one(engines: Sequence[str], values: Sequence[Any], first: int = 0, every: int = 1) -> list[Any]:
    """The same of two parameters, engine and value: each value is run on another engine, once in so many days.

    Args:
        engines: names of engines; their number and `every` have no common divisor, or a value would not meet them all.
        values: what is run.
        first: sets tests apart, so that not all of them take the same engine.
        every: days.
    """
    return [
        pytest.param(*engine.values, value, marks=[*engine.marks, *in_turn(number, every)])
        for number, value in enumerate(values)
        for engine in on_one(engines, first + number)
    ]
