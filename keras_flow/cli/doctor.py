"""`keras-flow doctor`: what works here."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from keras_flow.backends.engines import that_train
from keras_flow.cli.options import names_of
from keras_flow.errors import FlowError


def doctor(
    backends: Annotated[str, typer.Option(help="Backends to check, separated by commas.")] = ",".join(that_train()),
    bandwidth: Annotated[bool, typer.Option("--bandwidth", help="Also measure the links of 2 and 4 ranks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="N", help="Seconds that one process of a check may take.")
    ] = 120,
) -> None:
    """Check this machine: versions, devices, ports, a collective and two training steps on each installed backend.

    Each backend is checked in processes of its own, so that a broken one leaves the others. Exit status 1 if a check
    failed.
    """
    from rich.console import Console

    from keras_flow.doctor.runner import examine
    from keras_flow.doctor.show import show
    from keras_flow.progress import working

    console = Console(width=None if sys.stdout.isatty() else 120)
    names = names_of(backends)
    if not names:
        raise FlowError(f"--backends {backends!r} names no backend; legal are {', '.join(that_train())}.")
    with working("checking") as tell:
        report = examine(names, bandwidth=bandwidth, seconds=timeout, tell=tell)
    if as_json:
        json.dump(report.as_json(), sys.stdout, indent=1)
        print()
    else:
        show(report, console)
    raise typer.Exit(1 if report.failures else 0)
