"""`keras-flow explain`: what a layout holds, sends and repeats, without any device and without weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from keras_flow.cli.options import MICROBATCHES, RANKS, SCHEDULE, count
from keras_flow.errors import FlowError, require_file


def explain(
    file: Annotated[
        Path, typer.Argument(help="Defines build_model(), and rules() or distributions().", metavar="FILE.py")
    ],
    layout: Annotated[
        str,
        typer.Option(help="dp4, tp4, 2x2 or another name from the list below, or one from distributions()."),
    ],
    batch_size: Annotated[int, count("Rows of a global batch.")] = 64,
    ranks: Annotated[int | None, count(RANKS)] = None,
    schedule: Annotated[str | None, typer.Option(help=SCHEDULE)] = None,
    microbatches: Annotated[int | None, count(MICROBATCHES)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Print rules() with column and row pairs, instead of the explanation.")
    ] = False,
    all_rows: Annotated[
        bool, typer.Option("--all", help="Show every row of long tables, and each of the collectives that are alike.")
    ] = False,
) -> None:
    """Print layouts, memory and communication of a training step of FILE.py's model under a layout.

    Nothing is run and no weight is created. What is printed is true of the active Keras backend.
    """
    require_file(file, "keras-flow explain")
    if suggest and (as_json or all_rows):
        raise FlowError(f"--suggest prints rules() in Python; leave out {'--json' if as_json else '--all'}")
    from keras_flow.backends import active
    from keras_flow.runtime.untested import say_untested
    from keras_flow.user_file import check_file, with_schedule

    say_untested([active.checked_name()])  # before the file imports Keras, whose error names no backend that there is
    (layout,) = with_schedule((layout,), schedule, microbatches)
    check_file(file, (layout,), "explain", ("build_model",), ranks)
    from rich.console import Console

    from keras_flow.explainer.explain_file import explain_file
    from keras_flow.explainer.rules_text import rules_file
    from keras_flow.explainer.text import show

    explanation = explain_file(file, layout, batch_size, ranks)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if suggest:
        if not explanation.suggested_rules:
            typer.echo(
                "# the rules stay as they are: no pair was found that would be better. What is slow, "
                "`keras-flow explain` says without --suggest",
                err=True,
            )
        else:
            typer.echo(rules_file(explanation))
    elif as_json:
        json.dump(explanation.as_json(), sys.stdout, indent=1)
        print()
    else:
        show(explanation, console, None if all_rows else 60, fold=not all_rows)
