"""`keras-flow verify`: does a distributed step of this program compute what one device computes?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from keras_flow.cli.options import BACKENDS, MICROBATCHES, RANKS, SCHEDULE, count, names_of
from keras_flow.errors import require_file


def verify(
    file: Annotated[
        Path,
        typer.Argument(help="Defines build_model(), load_data(), and rules() or distributions().", metavar="FILE.py"),
    ],
    layout: Annotated[
        str,
        typer.Option(help="dp4, tp4, 2x2 or another name from the list below, or one from distributions()."),
    ],
    backends: Annotated[str | None, typer.Option(help=BACKENDS)] = None,
    batch_size: Annotated[int, count("How many rows to verify, from the first.")] = 64,
    ranks: Annotated[int | None, count(RANKS)] = None,
    schedule: Annotated[str | None, typer.Option(help=SCHEDULE)] = None,
    microbatches: Annotated[int | None, count(MICROBATCHES)] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, metavar="N", help="Of gradients and updates, relative; a tenth for losses and outputs."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float64 verifies a copy of the model that computes in it, on both sides.")
    ] = None,
    by_layer: Annotated[
        bool | None,
        typer.Option(help="Each layer by itself, or not; by default where one device cannot hold the model."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Seed of the weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare one step of FILE.py's model under a layout with one device: outputs, loss, metrics, gradients, updates.

    On rows that divide by the data ranks and on rows that do not. Nothing is trained: it takes a few steps. Exit status
    1 if a deviation is over the tolerance.
    """
    require_file(file, "keras-flow verify")
    from rich.console import Console

    from keras_flow.cli.verify_file import VerifyJob, verify_file
    from keras_flow.compare.runner import chosen_backends
    from keras_flow.progress import working
    from keras_flow.rules_check import RulesCheck
    from keras_flow.runtime.untested import say_untested
    from keras_flow.user_file import check_file, with_schedule

    names, _ = chosen_backends(None if backends is None else names_of(backends))
    say_untested(names)
    (layout,) = with_schedule((layout,), schedule, microbatches)
    check_file(file, (layout,), "a verification", ranks=ranks)
    console = Console(width=None if sys.stdout.isatty() else 140)
    job = VerifyJob(str(file.resolve()), layout, batch_size, tolerance, dtype, seed, by_layer, ranks)
    results = []
    with working("verifying") as tell, RulesCheck(file, (layout,), names, "a verification", ranks) as check:
        for name in names:
            tell(f"{name}: verifying {layout} against one device")
            results.append(verify_file(name, job, check))
            if not as_json:
                console.print(results[-1])
    if as_json:
        json.dump([result.to_dict() for result in results], sys.stdout, indent=1, allow_nan=False)
        print()
    raise typer.Exit(0 if all(result.ok for result in results) else 1)
