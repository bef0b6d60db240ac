"""`keras-flow launch`: a whole script in several processes, on one host or several."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from keras_flow import settings
from keras_flow.backends import active
from keras_flow.cli.check_build import check_build
from keras_flow.cli.options import count
from keras_flow.current.processes import LOOPBACK
from keras_flow.errors import FlowError, require_file
from keras_flow.launch import launcher, noise, on_ray, roles, served, submit
from keras_flow.launch.failure import Interruption, RankError
from keras_flow.launch.job import Job, require_room, stated_timeout
from keras_flow.runtime.untested import say_untested


def launch(
    script: Annotated[Path, typer.Argument(help="The script that every process runs.", metavar="SCRIPT.py")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script is given.", metavar="ARGS...")] = None,
    devices: Annotated[
        int | None,
        count(
            "Ranks on this host: processes on torch, virtual devices of one process on JAX and TensorFlow.",
            "--devices",
            "--ranks",
        ),
    ] = None,
    nproc_per_node: Annotated[int | None, count("Processes on each host.", "--nproc_per_node")] = None,
    devices_per_proc: Annotated[
        int | None,
        count("Ranks that each process drives (JAX, TensorFlow: virtual CPU devices; torch: 1).", "--devices_per_proc"),
    ] = None,
    nnodes: Annotated[int, count("Number of hosts; run this command on each.")] = 1,
    node_rank: Annotated[int, typer.Option("--node_rank", min=0, metavar="N", help="Index of this host.")] = 0,
    master_addr: Annotated[str, typer.Option("--master_addr", help="Address of host 0.")] = LOOPBACK,
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master_port",
            min=1,
            metavar="N",
            max=65535,
            help="Free port of host 0 (one host: any; several: 29500).",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT.py is the name of a module.")] = False,
    no_python: Annotated[bool, typer.Option("--no_python", help="SCRIPT.py is a program: it is run as it is.")] = False,
    redirect: Annotated[
        bool,
        typer.Option(
            "--redirect",
            help="Write output to files of LOGDIR, and show none.",
        ),
    ] = False,
    logdir: Annotated[Path | None, typer.Option(help="Folder for --redirect and --tee; default: log.")] = None,
    tee: Annotated[
        bool, typer.Option("--tee", help="Write output to LOGDIR, and show every line with its rank.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds without progress after which a job of several processes ends (KERAS_FLOW_TIMEOUT; 1800)."
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max_restarts",
            min=0,
            metavar="N",
            help="How often all processes start again after a failure (with kf.callbacks.Checkpoint they go on).",
        ),
    ] = 0,
    servers: Annotated[
        int | None, count("Parameter servers, for kf.ParameterServer (TensorFlow, torch; with --workers).")
    ] = None,
    workers: Annotated[int | None, count("Workers beside the chief, which runs the script (with --servers).")] = None,
    min_workers: Annotated[
        int, count("Workers without which the job ends; the others go on until then.", "--min-workers")
    ] = 1,
    all_output: Annotated[
        bool, typer.Option("--all-output", help="Show the output of every process, each line behind its rank.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(
            help="ray: a process for each of --ranks on the Ray cluster of RAY_ADDRESS, otherwise on this machine."
        ),
    ] = None,
    print_slurm: Annotated[
        bool, typer.Option("--print-slurm", help="Run nothing: print a batch script for Slurm's sbatch.")
    ] = False,
    print_k8s: Annotated[
        bool, typer.Option("--print-k8s", help="Run nothing: print a JobSet for Kubernetes (needs --image).")
    ] = False,
    print_mpirun: Annotated[
        bool, typer.Option("--print-mpirun", help="Run nothing: print a shell script for OpenMPI's mpirun.")
    ] = False,
    image: Annotated[str, typer.Option(help="Container image with keras_flow and the script, for --print-k8s.")] = "",
    _: Annotated[
        bool,
        typer.Option(
            "--check-build",
            is_eager=True,
            callback=check_build,
            help="Run nothing: print the engines, starters and transports that are found here.",
        ),
    ] = False,
) -> None:
    """Run SCRIPT.py on several ranks, in several processes and on several hosts.

    On torch every rank is a process: --devices 4 and --nproc_per_node 4 mean the same. On JAX and TensorFlow
    --devices 4 is one process with 4 devices, --nproc_per_node 2 --devices_per_proc 2 is two processes with two each.

    For two hosts run on each, with its --node_rank: keras-flow launch --nnodes 2 --node_rank 0 --master_addr host0
    --master_port 29500 --nproc_per_node 4 SCRIPT.py. KERAS_FLOW_TOKEN is the secret by which they know each other.

    Without --all-output or --tee the output of process 0 is shown. A process that fails ends the job on every host;
    the error names it, and its exit status is passed on.
    """
    engine = active.checked_name()
    if on not in (None, "ray"):
        raise FlowError(f"--on {on}: legal is ray. Without it processes are started on this host.")
    if on and nnodes > 1:
        raise FlowError("--on ray places processes on nodes by itself: give --ranks, and leave --nnodes out.")
    if redirect and tee:
        raise FlowError("--redirect shows no output, and --tee every line: give one of them.")
    if logdir is not None and not (redirect or tee):
        raise FlowError("--logdir is the folder of --redirect and --tee: give one of them too.")
    logs = (logdir or Path("log")) if redirect or tee else None
    if logs is not None and logs.exists() and not logs.is_dir():
        raise FlowError(f"--logdir {logs} is a file; it must be a folder, or not exist yet.")
    if image and not print_k8s:
        raise FlowError("--image is of --print-k8s.")
    printing = zip(submit.SYSTEMS, (print_slurm, print_k8s, print_mpirun), strict=True)
    asked = [option for option, is_asked in printing if is_asked]
    counts = (devices, nproc_per_node, devices_per_proc)
    if servers or workers:
        if not (servers and workers) or any((*counts, on, asked)) or nnodes > 1:
            raise FlowError(
                "keras-flow launch takes --servers and --workers together, for one host, and without --devices, "
                "--nproc_per_node, --on and --print-... On several hosts set TF_CONFIG "
                "(docs/migrate/from_tf_distribute.md)."
            )
        if min_workers > workers:
            raise FlowError(f"--min-workers {min_workers} is more than --workers {workers}.")
        roles.refuse_engine()
        if redirect or tee or all_output:
            raise FlowError(
                "--redirect, --tee and --all-output are not of a job with --servers: it shows the chief's output, and "
                "that of another process where it fails."
            )
        command = _command(script, arguments or [], module, no_python)
        try:
            with launcher.job_folder() as folder:
                served.launch(command, servers, workers, stated_timeout(timeout), max_restarts, folder, min_workers)
        except KeyboardInterrupt:  # the launcher has said how it ended
            raise typer.Exit(128 + signal.SIGINT) from None
        return
    if min_workers > 1:
        raise FlowError("--min-workers is of a job with --servers and --workers.")
    if late := _late_options(arguments or [], counts == (None, None, None)):
        raise FlowError(
            f"keras-flow launch: {late} stands behind {script}, so that the script is given it. Options of launch "
            f"stand before the script: keras-flow launch {late} ... {script}"
        )
    processes, share = _division(devices, nproc_per_node or (devices if on else None), devices_per_proc, engine)
    if node_rank >= nnodes:
        raise FlowError(f"--node_rank {node_rank} is no host of --nnodes {nnodes}; legal is 0 to {nnodes - 1}.")
    if module and no_python:
        raise FlowError("--module and --no_python exclude each other: a module is run by Python.")
    if not (no_python or on or asked):
        require_room(processes)
    if asked:
        if len(asked) > 1 or no_python:
            raise FlowError(f"{' '.join(asked)}: print one of them, of a script or module (not --no_python).")
        if print_k8s and not image:
            raise FlowError("--print-k8s needs --image, a container image that has keras_flow and the script.")
        output = [
            name
            for name, is_given in (("--redirect", redirect), ("--tee", tee), ("--all-output", all_output))
            if is_given
        ]
        output += [] if logdir is None else ["--logdir", str(logdir)]
        job = submit.Submission(
            engine=engine,
            program=(str(script), *(arguments or [])),
            is_module=module,
            nodes=nnodes,
            processes=processes,
            devices=share,
            port=master_port or submit.DEFAULT_PORT,
            timeout=stated_timeout(timeout),
            restarts=max_restarts,
            image=image,
            output=output,
        )
        print(submit.SYSTEMS[asked[0]](job), end="")
        return
    command = _command(script, arguments or [], module, no_python)
    if processes > 1 or nnodes > 1 or on:  # else the process becomes the script's, which says it
        say_untested([engine])
    if processes == 1 and nnodes == 1 and not (redirect or tee or max_restarts or on):
        raise typer.Exit(_run_alone(command, share, None if timeout is None else stated_timeout(timeout)))
    job = Job(
        processes=processes,
        command=command,
        timeout=stated_timeout(timeout),
        show_all=all_output or tee,
        devices=share,
        nodes=nnodes,
        node=node_rank,
        host=master_addr,
        port=master_port or (submit.DEFAULT_PORT if nnodes > 1 else None),
        logs=logs and logs.absolute(),
        tee=tee,
        restarts=max_restarts,
        script=None if module or no_python else script,
    )
    if on:
        on_ray.launch(replace(job, env={"KERAS_BACKEND": engine}))
        return
    try:
        with launcher.job_folder() as folder:
            launcher.launch(job, folder)
    except KeyboardInterrupt:  # the launcher has said how it ended
        raise typer.Exit(128 + signal.SIGINT) from None
    except RankError as error:
        if not isinstance(error, Interruption):
            _print_endings(error, job)
        raise


def _division(devices: int | None, processes: int | None, share: int | None, engine: str) -> tuple[int, int | None]:
    """Processes on this host, and the ranks that each drives (None: as many as the engine finds)."""
    one_each = not active.drives_all_ranks()
    if one_each and share not in (None, 1):
        raise FlowError(f"--devices_per_proc {share}: on {engine} each rank is a process of its own; leave it out.")
    if devices is None and processes is None and share is None:
        raise FlowError(
            "keras-flow launch needs the number of ranks or processes: give --devices N or --nproc_per_node N."
        )
    if processes is None:
        processes = devices or 1 if one_each else (devices or share or 1) // share if share and devices else 1
    if devices is not None and share is not None and share > devices:
        raise FlowError(
            f"--devices_per_proc {share} is more than --devices {devices}, which all processes have together."
        )
    if devices is not None and share is None:
        share = max(1, devices // processes)
    if one_each:
        share = 1
    if devices is not None and share is not None and processes * share != devices:
        raise FlowError(
            f"--devices {devices}, --nproc_per_node {processes} and --devices_per_proc {share} disagree on {engine}: "
            f"{processes} times {share} is {processes * share}. Leave --devices out."
        )
    return processes, share


def _late_options(arguments: list[str], lacks_ranks: bool) -> str:
    """The first of a script's arguments that is an option of launch; empty: there is none.

    Args:
        arguments: of the script.
        lacks_ranks: launch was given no number of ranks, so that one in the script's arguments was meant for it.
    """
    options = (*submit.SYSTEMS, *(("--devices", "--ranks", "--nproc_per_node") if lacks_ranks else ()))
    return next((word.partition("=")[0] for word in arguments if word.partition("=")[0] in options), "")


def _command(script: Path, arguments: list[str], module: bool, no_python: bool) -> tuple[str, ...]:
    if no_python:
        program = shutil.which(str(script))
        if program is None:
            raise FlowError(f"keras-flow launch was asked to run the program {script}, which is not found.")
        return (program, *arguments)
    if not module and script.suffix not in ("", ".py", ".pyc", ".pyw", ".pyz"):
        raise FlowError(
            f"keras-flow launch runs Python, and {script} does not end in .py; another program is run with --no_python."
        )
    if not module:
        require_file(script, "keras-flow launch")
    package = str(script).partition(".")[0]
    if module and importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
        raise FlowError(f"keras-flow launch was asked to run the module {script}, which is not found.")
    mode = "module" if module else "script"
    return (sys.executable, "-m", "keras_flow.launch.child", mode, str(script), *arguments)


def _run_alone(command: tuple[str, ...], ranks: int | None, timeout: float | None) -> int:
    """Run the script in one process that drives all ranks, as it would run by itself; nobody watches its progress.

    Their number and the timeout, of what waits in it, are in its environment.
    """
    if command[2:3] == ("keras_flow.launch.child",):
        mode, *rest = command[3:]
        command = (sys.executable, *(("-m",) if mode == "module" else ()), *rest)
    told = {settings.DEVICES: ranks, settings.TIMEOUT: timeout}
    env = {**os.environ, **{name: str(value) for name, value in told.items() if value is not None}}
    if os.name != "posix":
        return subprocess.call(command, env=env)
    sys.stdout.flush()
    sys.stderr.flush()
    noise.filter_stderr()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a program would inherit that
        signal.signal(number, signal.SIG_DFL)
    # this process becomes the script's: signals for the launcher are for the script
    os.execvpe(command[0], command, env)


def _print_endings(error: RankError, job: Job) -> None:
    """A table of how each process of this host ended, on stderr."""
    if len(error.endings) < 2:
        return
    import socket

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"processes of host {job.node} ({socket.gethostname()})", title_justify="left")
    for heading in (job.word, "ended"):
        table.add_column(heading)
    for rank, ending in sorted(error.endings.items()):
        table.add_row(str(rank), ending, style="bold" if rank == error.rank else "")
    Console(stderr=True).print(table)
