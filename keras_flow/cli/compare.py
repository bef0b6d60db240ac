"""`keras-flow compare`: the same training on every backend and layout, and how far the numbers deviate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from keras_flow.cli.options import BACKENDS, MICROBATCHES, RANKS, SCHEDULE, count, names_of
from keras_flow.compare.options import LAYOUTS, WITHOUT_RULES
from keras_flow.errors import require_file


def compare(
    file: Annotated[
        Path,
        typer.Argument(help="Defines build_model(), load_data(), and distributions() or rules().", metavar="FILE.py"),
    ],
    backends: Annotated[str | None, typer.Option(help=BACKENDS)] = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            help="1 (one device) and names from the list below or from distributions(), separated by commas; default: "
            f"{','.join(LAYOUTS)}, of a file without rules() {','.join(WITHOUT_RULES)}."
        ),
    ] = None,
    ranks: Annotated[int | None, count(RANKS)] = None,
    schedule: Annotated[str | None, typer.Option(help=SCHEDULE)] = None,
    microbatches: Annotated[int | None, count(MICROBATCHES)] = None,
    steps: Annotated[int | None, count("Steps to train; default: whole epochs.")] = None,
    epochs: Annotated[int | None, count("Epochs to train; default: 1, or as many as --steps needs.")] = None,
    batch_size: Annotated[int | None, count("Rows of a global batch; default: 64.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Seed of weights and of the order of samples.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Folder for report.html and report.json.")] = Path("compare-out"),
    trace: Annotated[bool, typer.Option("--trace", help="Write a timeline of three more steps of each run.")] = False,
) -> None:
    """Train FILE.py on several backends and layouts from the same weights, and report how far they deviate.

    Exit status 1 if a deviation is over the tolerance, or a layout used fewer ranks than it names.
    """
    require_file(file, "keras-flow compare")
    from rich.console import Console

    from keras_flow.compare.runner import CompareOptions, compare  # loads keras
    from keras_flow.user_file import with_schedule

    named = with_schedule(() if layouts is None else names_of(layouts), schedule, microbatches)
    options = CompareOptions(
        file=file,
        backends=None if backends is None else names_of(backends),
        layouts=None if layouts is None else named,
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        out=out,
        trace=trace,
        ranks=ranks,
    )
    raise typer.Exit(compare(options, Console(width=None if sys.stdout.isatty() else 140)))
