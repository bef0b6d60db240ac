"""What a run of the suite takes of tests that are many: another part each day, so that all are run within a few.

TEST_DAY=2026-11-23 python -m pytest ...        the part of a day
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def day() -> str:
    """Today's date, or that of the environment variable TEST_DAY; processes started afterwards have the same."""
    return os.environ.setdefault("TEST_DAY", datetime.date.today().isoformat())


def of_today(number: int, values: Sequence[T]) -> T:
    """One of some values: with each day, and with each number, the next."""
    return values[(number + datetime.date.fromisoformat(day()).toordinal()) % len(values)]


def is_of_today(number: int, every: int) -> bool:
    """Whether what has this number is run today, once in so many days."""
    return of_today(number, range(every)) == 0
