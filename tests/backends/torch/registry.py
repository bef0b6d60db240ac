"""Checks that need ranks: each module beside this one registers its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable

MODULES = (
    "checks",
    "faults",
    "held_split",
    "mixing",
    "placements",
    "operators",
    "own_steps",
    "partial",
    "reads",
    "rows",
    "short",
    "split_weights",
    "updates",
    "values",
)
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None], name: str = "") -> Callable[[], None]:
    CHECKS[name or function.__name__] = function
    return function


def load() -> dict[str, Callable[[], None]]:
    """All checks by name."""
    for module in MODULES:
        importlib.import_module(f"tests.backends.torch.{module}")
    return CHECKS


def on_all_ranks(value: object) -> list[object]:
    """The value of each rank."""
    import torch.distributed as torch_distributed

    values: list[object] = [None] * torch_distributed.get_world_size()
    torch_distributed.all_gather_object(values, value)
    return values


def error_of(action: Callable[[], object]) -> str:
    """The text of the error that an action raises; empty where it raises none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rank() -> int:
    import keras_flow as kf

    return kf.env.get_rank()
