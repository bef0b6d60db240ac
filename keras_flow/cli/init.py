"""`keras-flow init`: asks how a script is to run, and writes the command for it to a file."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from keras_flow import atomic
from keras_flow.backends.engines import ENGINES, that_train
from keras_flow.cli.options import count
from keras_flow.errors import FlowError
from keras_flow.launch import submit
from keras_flow.launch.job import stated_timeout
from keras_flow.units import counted

#: launcher -> the option of `keras-flow launch` that prints its file; empty: a shell script
_LAUNCHERS = {"shell": "", "slurm": "--print-slurm", "mpirun": "--print-mpirun"}
#: calls that may say a number of ranks
_CALLS = ("kf.run", "kf.init", "keras_flow.run", "keras_flow.init")


def init(
    script: Annotated[Path | None, typer.Option(help="The script to run.")] = None,
    engine: Annotated[str | None, typer.Option(help=f"Keras backend: {', '.join(that_train())}.")] = None,
    devices: Annotated[int | None, count("Ranks on each host.")] = None,
    hosts: Annotated[int | None, count("Number of hosts.")] = None,
    launcher: Annotated[str | None, typer.Option(help=f"Who starts it: {', '.join(_LAUNCHERS)}.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Ask for engine, devices, hosts and launcher, print the command, and write it to a file.

    What is given as an option is not asked. Nothing is started. Example, without a question:

        keras-flow init --script train.py --engine jax --devices 4 --hosts 1 --launcher shell --out run.sh
    """
    # before the questions: an answer that is wrong costs none
    for what, value, legal in (("engine", engine, that_train()), ("launcher", launcher, _LAUNCHERS)):
        if value is not None:
            _one_of(what, value, legal)
    _require_new(out, force)
    present = [name for name in that_train() if importlib.util.find_spec(ENGINES[name].module)]
    script = script or Path(typer.prompt("Script", default="train.py"))
    engine = _one_of(
        "engine", engine or typer.prompt(f"Engine ({', '.join(that_train())})", (present or ["jax"])[0]), that_train()
    )
    devices = devices or _count("Ranks on each host", 4)
    hosts = hosts or _count("Hosts", 1)
    launcher = _one_of(
        "launcher", launcher or typer.prompt(f"Launcher ({', '.join(_LAUNCHERS)})", default="shell"), _LAUNCHERS
    )
    text = _text(str(script), engine, devices, hosts, launcher)
    if out is None:
        out = Path(typer.prompt("File", default="run.sh"))
        _require_new(out, force)
    try:
        atomic.write_text(out, text)
        out.chmod(0o755)
    except OSError as error:
        raise FlowError(f"keras-flow init cannot write {out}: {error.strerror}") from error
    typer.echo(text.rstrip())
    start = f"{'sbatch' if launcher == 'slurm' else 'sh'} {shlex.quote(os.fspath(out))}"
    if launcher == "shell" and hosts > 1:
        start = f"NODE_RANK=0 MASTER_ADDR=host0 KERAS_FLOW_TOKEN=SECRET {start}\n(on each host, with its own NODE_RANK)"
    if launcher == "mpirun" and hosts > 1:
        start += " HOST0,HOST1,..."
    typer.echo(f"\nwritten to {out}; start it with: {start}")
    if not script.is_file():
        typer.echo(f"{script} is not here yet.", err=True)
        return
    for call, asked in _asked_devices(script):
        if asked != devices * hosts:
            ranks = counted(devices * hosts, "rank")
            typer.echo(
                f"{script} calls {call} for {asked} ranks, and this job has {ranks}: it fails until you leave the "
                f"number out there. {call} then takes the ranks of the job.",
                err=True,
            )


def _require_new(out: Path | None, force: bool) -> None:
    if out is not None and out.exists() and not force:
        raise FlowError(f"keras-flow init: {out} is there already; give another --out, or --force to write over it.")


def _asked_devices(script: Path) -> list[tuple[str, int]]:
    """The calls of `kf.run` and `kf.init` in a script that say a number of ranks, and these numbers."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):  # the script says so when it runs
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in _CALLS:
            given = node.args[:1] if name.endswith("init") else node.args[1:2]
            given += [word.value for word in node.keywords if word.arg == "devices"]
            numbers = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, int)]
            found += [(name, number) for number in numbers]
    return found


def _count(what: str, default: int) -> int:
    count = typer.prompt(what, default=default, type=int)
    if count < 1:
        raise FlowError(f"keras-flow init: {what.lower()} {count}: legal is a whole number of at least 1.")
    return count


def _one_of(what: str, value: str, legal: object) -> str:
    if value not in list(legal):  # type: ignore[call-overload]
        near = difflib.get_close_matches(value, list(legal), 1)  # type: ignore[call-overload]
        raise FlowError(
            f"keras-flow init: {what} {value!r} is none of {', '.join(legal)}"  # type: ignore[arg-type]
            + (f"; did you mean {near[0]}?" if near else "")
        )
    return value


def _text(script: str, engine: str, devices: int, hosts: int, launcher: str) -> str:
    """The file: a shell script with one command, or what a cluster's launcher takes."""
    alone = ENGINES[engine].drives_all_ranks
    processes, share = (1, devices) if alone else (devices, 1)
    if option := _LAUNCHERS[launcher]:
        job = submit.Submission(
            engine=engine,
            program=(script,),
            is_module=False,
            nodes=hosts,
            processes=processes,
            devices=share,
            port=submit.DEFAULT_PORT,
            timeout=stated_timeout(None),
            restarts=0,
            image="",
        )
        return submit.SYSTEMS[option](job)
    words, notes = ["keras-flow", "launch"], []
    if hosts > 1:
        words += ["--nnodes", str(hosts), "--node_rank", '"$NODE_RANK"', "--master_addr", '"$MASTER_ADDR"']
        words += ["--master_port", str(submit.DEFAULT_PORT), "--nproc_per_node", str(processes)]
        words += ["--devices_per_proc", str(share)] if alone else []
        notes = [
            "# on each host: NODE_RANK is its index from 0, MASTER_ADDR the address of host 0, KERAS_FLOW_TOKEN the",
            "# same secret on all of them",
            ': "${NODE_RANK:?}" "${MASTER_ADDR:?}" "${KERAS_FLOW_TOKEN:?}"',
        ]
    else:
        words += ["--devices", str(devices)]
    command = " ".join([*words, shlex.quote(script), '"$@"'])
    return "\n".join(["#!/bin/sh", *notes, f"export KERAS_BACKEND={engine}", f"exec {command}", ""])
