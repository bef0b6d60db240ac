"""Options that several commands have."""

from __future__ import annotations

from typing import Any

import typer

from keras_flow.layout_names import SCHEDULES

RANKS = "Number of ranks, where the layout's name does not say it."
SCHEDULE = f"Of a pipeline: {', '.join(SCHEDULES)}; default: 1f1b."
MICROBATCHES = "Of a pipeline: into how many a batch is cut; twice the stages by default."
BACKENDS = "Keras backends, separated by commas; default: those that are installed."


def count(text: str, *names: str) -> Any:
    """An option that takes a whole number of at least 1; `text` is its help."""
    return typer.Option(*names, min=1, metavar="N", help=text)


def names_of(text: str) -> tuple[str, ...]:
    """The names in an option that takes several, separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
