"""Runs one command as several processes and ends all of them when one fails, naming it."""

from __future__ import annotations

import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from keras_flow import settings
from keras_flow.current import joining, last_call
from keras_flow.errors import LaunchError
from keras_flow.launch import environment, failure, hang, interruption
from keras_flow.launch.failure import Interruption, RankError
from keras_flow.launch.folder import JobFolder
from keras_flow.launch.job import Job
from keras_flow.launch.nodes import Nodes, nodes_of
from keras_flow.launch.output import Shown
from keras_flow.launch.processes import OUTPUT_SECONDS, Interrupts, RankProcess, Ranks

#: seconds between two looks at the ranks
_LOOK_SECONDS = 0.03

#: seconds that a rank which has written its exception may take to leave
_LEAVING_SECONDS = 2.0

#: seconds in which the rank that caused another's "connection closed" shows up as failed itself
_CAUSE_SECONDS = 0.5

#: seconds in which a launcher that sees no cause among its own processes hears of it from another host's
_OTHERS_SECONDS = 5.0

#: exit codes of a process that its engine ends from within when another one is gone
_ABORTS = (-signal.SIGABRT, 128 + signal.SIGABRT)


@contextmanager
def job_folder() -> Iterator[JobFolder]:
    """A private folder for a job, removed afterwards; by the guardian where this process is killed."""
    try:
        path = tempfile.mkdtemp(prefix="keras-flow-")
    except OSError as error:
        raise LaunchError(f"keras_flow makes a folder for each job among temporary files (TMPDIR): {error}.") from error
    try:
        yield JobFolder(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def launch(job: Job, folder: JobFolder) -> None:
    """Run the processes of `job` on this host until those of all hosts have left with exit code 0.

    Raises:
        LaunchError: a process failed, left while others needed it, or the job made no progress, more often than
            `job.restarts`. No process runs any more.
        KeyboardInterrupt: the same, after Ctrl-C.
    """
    if os.name != "posix":
        raise LaunchError("keras_flow starts several processes only on POSIX systems (Linux, macOS, WSL).")
    given = job.env.get(settings.TOKEN) or settings.read(settings.TOKEN)
    # several hosts without one: the launchers go by a known word, by which no rank may unpickle
    token = given or (secrets.token_hex(32) if job.nodes == 1 else "")
    if not token:
        print(
            f"keras-flow: {settings.TOKEN} is not set: whoever reaches {job.host}:{job.port} can join this job. Set it "
            "to the same secret on all hosts.",
            file=sys.stderr,
        )
    if job.logs is not None:
        names = _log_folder(job, 0) + ("" if job.processes == 1 else f"..{job.first + job.processes - 1}")
        print(f"keras-flow: output is in {job.logs}/{names}/stdout and stderr", file=sys.stderr)
    with Interrupts() as interrupts, nodes_of(job, token.encode() or joining.token()) as nodes:
        for attempt in range(job.attempt, job.restarts + 1):
            try:
                _run(job, folder, nodes, interrupts, attempt, token)
                return
            except RankError as error:
                if attempt == job.restarts or isinstance(error, Interruption) or nodes.lost:
                    raise
                print(f"keras-flow: {error}\nkeras-flow: restart {attempt + 1} of {job.restarts}", file=sys.stderr)
                folder.clear()


def _run(job: Job, folder: JobFolder, nodes: Nodes, interrupts: Interrupts, attempt: int, token: str) -> None:
    """Start the processes of this host, once all hosts are ready, and watch them, once."""
    free = job.port if job.nodes == 1 and job.port is not None else environment.free_port()
    ranks = Ranks(interrupts, folder)
    try:
        with ranks:
            try:
                with interrupts.at_once():
                    port = nodes.begin(free)
                for local in range(job.processes):
                    interrupts.check()
                    env = environment.of_process(job, folder, local, port, attempt, token)
                    ranks.start(job.first + local, job.command, env, _shown(job, local, attempt))
                if attempt == 0:
                    _tell_start(job)
                _watch(job, folder, ranks, interrupts, nodes)
            except (KeyboardInterrupt, SystemExit) as asked:
                # at once: the processes of all hosts stop at one step
                number = signal.SIGTERM if isinstance(asked, SystemExit) else signal.SIGINT
                nodes.fail(Interruption(number, socket.gethostname(), job.first))
                ranks.give_time()
                raise
            except RankError as error:
                error.endings = ranks.endings(error.rank)
                if isinstance(error, Interruption):
                    ranks.give_time()
                nodes.fail(error)
                raise
    except (KeyboardInterrupt, SystemExit):
        print(f"keras-flow: {interruption.outcome('interrupted', job, folder, ranks)}", file=sys.stderr)
        raise
    except Interruption as error:
        text = interruption.outcome(str(error), job, folder, ranks)
        raise Interruption(error.number, error.host, error.rank, text) from None
    except RankError as error:
        for process in ranks.processes:
            if process.rank == error.rank:
                process.output.tell_left_out()  # it is ended, and its output is read to its end
        raise


def _tell_start(job: Job) -> None:
    """Say in a terminal that processes start: until an engine is loaded, which takes seconds, they print nothing."""
    if job.processes == 1 or not sys.stderr.isatty():
        return
    shows_first_alone = not (job.first or job.show_all or job.logs)
    follows = f"; the output of {job.word} 0 follows" if shows_first_alone else ""
    print(f"keras-flow: {job.processes} processes start{follows}", file=sys.stderr)


def _shown(job: Job, local: int, attempt: int) -> Shown:
    folder = None if job.logs is None else job.logs / _log_folder(job, local)
    return Shown(
        word=job.word,
        every=job.show_all,
        first=job.first == 0 and local == 0,
        hidden=folder is not None and not job.tee,
        folder=folder,
        append=attempt > 0,
    )


def _log_folder(job: Job, local: int) -> str:
    """The folder of a process's output: hosts may share the one that it is in."""
    return f"local_rank_{local}" if job.nodes == 1 else f"rank_{job.first + local}"


def _watch(job: Job, folder: JobFolder, ranks: Ranks, interrupts: Interrupts, nodes: Nodes) -> None:
    watch, stops = hang.HangWatch(job.timeout), hang.StopWatch()
    while running := ranks.running():
        if number := interruption.of_a_rank(folder, ranks.processes):
            interrupts.note(number)
        interrupts.check()
        if first := _first_failure(folder, ranks.processes):
            raise _explain(job, folder, ranks, first, nodes)
        nodes.look()
        nodes.left_well([process.rank for process in ranks.processes if folder.left(process.rank).exists()])
        if stopped := stops.stopped(running):
            raise failure.rank_hangs(stopped, job, {})
        if watch.expired(running):
            suspects, stacks = hang.find_suspects(running, folder)
            if not suspects:
                # all of this host wait, so that the one they wait for is on another
                _wait(_OTHERS_SECONDS if job.nodes > 1 else 0.0, lambda: not _looked(nodes))
            raise failure.rank_hangs(suspects or [process.rank for process in running], job, stacks)
        time.sleep(_LOOK_SECONDS)
    if first := _first_failure(folder, ranks.processes):
        raise _explain(job, folder, ranks, first, nodes)
    _wait(OUTPUT_SECONDS, lambda: _looked(nodes) and all(process.output.finish() for process in ranks.processes))
    nodes.done()
    while not nodes.all_done():
        interrupts.check()
        nodes.look()
        time.sleep(_LOOK_SECONDS)


def _first_failure(folder: JobFolder, processes: Sequence[RankProcess]) -> RankProcess | None:
    """The rank that failed first, by its exit code or by the exception it wrote down; None where none has."""
    failed: list[tuple[bool, float, RankProcess]] = []
    found = {process: failure.read(folder, process.rank) for process in processes}
    # the first process left because this one was silent, and the engine then ended this one
    is_told = any(written is not None and written.silent for written in found.values())
    for process, written in found.items():
        if written is not None:
            failed.append((written.lost_neighbour or written.waited_too_long, written.time, process))
        elif is_told and process.code in _ABORTS:
            failed.append((True, math.inf, process))
        elif process.code:
            # killed, or no Python error: its neighbours can only have failed because of it
            failed.append((False, 0.0, process))
    return min(failed, key=lambda each: each[:2])[2] if failed else None


def _explain(job: Job, folder: JobFolder, ranks: Ranks, first: RankProcess, nodes: Nodes) -> LaunchError:
    """The error for a failed job, once its cause is known."""
    written = failure.read(folder, first.rank)
    # its engine ended it from within, or raised, because another process is gone
    lost = first.code in _ABORTS if written is None else written.lost_neighbour
    if lost:
        if stopped := [process.rank for process in ranks.running() if process.is_stopped()]:
            return failure.rank_hangs(stopped, job, {})
        # the neighbour that was lost may have left a moment earlier and not been seen yet, perhaps on another host
        _wait(_CAUSE_SECONDS, lambda: _looked(nodes) and _first_failure(folder, ranks.processes) not in (None, first))
        ranks.running()
        first = _first_failure(folder, ranks.processes) or first
        written = failure.read(folder, first.rank)
        lost = first.code in _ABORTS if written is None else written.lost_neighbour
    if lost or (written is not None and written.waited_too_long):
        # at exit an engine may wait for the others, so that the one that left early still runs
        early = [each.rank for each in ranks.processes if each.code == 0 or folder.left(each.rank).exists()]
        early += sorted(nodes.left)
        if 0 < len(early) < job.count:
            return failure.rank_left_early(early[0], first.rank, job, written)
    if (lost or (written is not None and written.waited_too_long)) and job.nodes > 1:
        # the cause is on another host, whose launcher finds it about now, and may know where that process is
        is_known = written is not None and written.silent
        _wait(_LEAVING_SECONDS if is_known else _OTHERS_SECONDS, lambda: not _looked(nodes))
    if written is not None and written.waited_too_long:
        others = [process for process in ranks.running() if process is not first]
        suspects, stacks = hang.find_suspects(others, folder)
        if not suspects and written.silent:
            suspects = [written.silent]
        if suspects:
            return failure.rank_hangs(suspects, job, stacks)
    _wait(_LEAVING_SECONDS, lambda: first.poll() is not None)
    code = first.code or (written.exit_code if written else 1)
    if code == -signal.SIGTERM and written is not None:
        code = written.exit_code
    first.output.finish(0.5)
    entered = last_call.read(folder.last_call(first.rank))
    return failure.rank_failed(first.rank, job, code, written, first.output.kept(), entered)


def _looked(nodes: Nodes) -> bool:
    """Look at what the other hosts say; raises the error of a process that failed there."""
    nodes.look()
    return True


def _wait(seconds: float, until: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(_LOOK_SECONDS)
