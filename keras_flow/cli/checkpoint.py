"""`keras-flow checkpoint`: what is in a checkpoint, whether it is whole, and files for other programs.

No engine is loaded, but by the formats of Keras, Orbax and torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from keras_flow.errors import FlowError


def checkpoint(
    directory: Annotated[
        str, typer.Argument(help="Directory of checkpoints, or one checkpoint's folder.", metavar="DIR")
    ],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of it and compare the hash of each chunk.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(help="Write it for other programs: model.keras, weights.safetensors, or a folder.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="Of --export: keras, safetensors, orbax or dcp; else by its ending.")
    ] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="Show every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest.")] = False,
) -> None:
    """Print what the checkpoint in DIR holds: tensors, layouts, and where `fit` was when it was saved; or export it."""
    from keras_flow import units
    from keras_flow.checkpoint import looking, manifest

    if export is None and format is not None:
        raise FlowError("--format is of --export, which names the file to write")
    if export is not None and (as_json or all_rows):
        raise FlowError(f"--export writes a file, and {'--json' if as_json else '--all'} prints: give one of them")
    wanted = "latest" if step is None else step
    read = looking.verify(directory, step=wanted) if verify else 0
    if export is not None:
        from keras_flow.checkpoint import exporting

        print(f"wrote {exporting.export(directory, export, format, step=wanted)}")
        return
    found = looking.inspect(directory, step=wanted)
    if as_json:
        print(found.to_json())
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    most = None if all_rows else manifest.SHOWN
    found.show(console, looking.facts_of(directory, found), most, "--all shows them")
    if verify:
        console.print(f"whole: {units.amount(read)} read, all hashes are right")
