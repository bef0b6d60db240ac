"""`keras-flow launch`: a whole script on all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from keras_flow.backends import active
from keras_flow.errors import FlowError
from keras_flow.launch import launcher


def launch(
    script: Annotated[Path, typer.Argument(help="The script that every rank runs.", metavar="SCRIPT.py")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.", metavar="ARGS...")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Number of ranks.")] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            "--nproc_per_node",
            "--nproc-per-node",
            min=1,
            help="Processes on this host: on torch the same as --devices, elsewhere 1.",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds without progress after which the job ends (KERAS_FLOW_TIMEOUT; 1800).")
    ] = None,
    all_output: Annotated[
        bool, typer.Option("--all-output", help="Show every rank's output, each line behind its rank.")
    ] = False,
) -> None:
    """Run SCRIPT.py on several ranks of this host.

    On torch every rank is a process; on JAX and TensorFlow one process drives all devices. Without --all-output the
    output of rank 0 is shown. A rank that fails ends the job, and the error names it.
    """
    engine = active.checked_name()
    one_process = active.drives_all_ranks()
    ranks = _ranks(devices, nproc_per_node, engine, one_process)
    if not script.is_file():
        raise FlowError(f"keras-flow launch was asked to run {script}, which is not a file.")
    command = [str(script), *(arguments or [])]
    if one_process:
        raise typer.Exit(_run_alone(command, ranks))
    job = launcher.Job(
        ranks=ranks,
        command=(sys.executable, "-m", "keras_flow.launch.child", "script", *command),
        timeout=launcher.stated_timeout(timeout),
        show_all=all_output,
    )
    with launcher.job_folder() as folder:
        launcher.launch(job, folder)


def _ranks(devices: int | None, processes: int | None, engine: str, one_process: bool) -> int:
    if one_process and processes is not None and processes > 1:
        raise FlowError(
            f"--nproc_per_node {processes} asks for {processes} processes, but on {engine} one process drives all "
            f"devices of a host. Use --devices {processes}."
        )
    if devices is not None and processes is not None and not one_process and devices != processes:
        raise FlowError(
            f"--devices {devices} and --nproc_per_node {processes} disagree; on {engine} they mean the same."
        )
    ranks = devices or (None if one_process else processes)
    if ranks is None:
        raise FlowError("keras-flow launch needs the number of ranks: give --devices N.")
    return ranks


def _run_alone(command: list[str], ranks: int) -> int:
    """Run the script in one process that drives all ranks; `kf.init` finds their number in its environment."""
    env = {**os.environ, active.DEVICES_VARIABLE: str(ranks)}
    process = subprocess.Popen([sys.executable, *command], env=env)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # Ctrl-C at a terminal reached the script too; it may still be tidying up
        try:
            process.wait(3)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        raise
    return code if code >= 0 else 128 - code
