"""A case for each door: what is done with a stage, and the numbers that come of it.

`CASES[door](stage)` returns numbers (a tree of what NumPy reads, texts and None), which are compared with those of one
device. `REASONS[door]` says in one line why a door has no case.
"""

from __future__ import annotations

from tests.doors.cases import after, beside, callbacks, layers, models, parts
from tests.doors.cases.reasons import REASONS as REASONS
from tests.doors.cases.registry import CASES as CASES
from tests.doors.cases.registry import MAKERS as MAKERS

__all__ = ["CASES", "MAKERS", "REASONS", "after", "beside", "callbacks", "layers", "models", "parts"]
