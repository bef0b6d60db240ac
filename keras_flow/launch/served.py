"""`keras-flow launch --servers 1 --workers 2`, and `kf.run(main, servers=1, workers=2)`.

The program runs in one process, the chief, which the others serve.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from keras_flow import settings
from keras_flow.backends.active import checked_name
from keras_flow.backends.engines import ENGINES
from keras_flow.current.processes import LOOPBACK
from keras_flow.errors import FlowError, LaunchError
from keras_flow.launch import failure, interruption, launcher, payload
from keras_flow.launch.environment import free_port
from keras_flow.launch.failure import RankError, left_how
from keras_flow.launch.folder import JobFolder
from keras_flow.launch.job import Job
from keras_flow.launch.output import Shown
from keras_flow.launch.processes import OUTPUT_SECONDS, Interrupts, RankProcess, Ranks

_LOOK_SECONDS = 0.05


def run(
    main: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    servers: int | None,
    workers: int | None,
    timeout: float,
) -> object:
    """Call `main` in a chief with servers and workers on this host; what it returns.

    Raises:
        FlowError: not both numbers are given, or they are no numbers.
        LaunchError: `main` failed, a server ended, or no worker is left.
    """
    for name, count in (("servers", servers), ("workers", workers)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise FlowError(
                f"kf.run was given {name}={count!r}; legal is a whole number of at least 1, for both: kf.run(main, "
                "servers=1, workers=2)"
            )
    assert servers is not None and workers is not None
    with launcher.job_folder() as folder:
        payload.send(folder.payload, main, args, kwargs)
        launch((sys.executable, "-m", "keras_flow.launch.child", "chief"), servers, workers, timeout, 0, folder)
        return payload.receive_result(folder.result)


def launch(
    command: Sequence[str],
    servers: int,
    workers: int,
    timeout: float,
    restarts: int,
    folder: JobFolder,
    least: int = 1,
) -> None:
    """Run a program as the chief of servers and workers on this host, until it ends.

    A worker that ends is started again, `restarts` times in all; without that the others go on, if they are `least`.

    Args:
        command: the program and its arguments.
        servers: how many hold variables.
        workers: how many compute.
        timeout: seconds without progress after which the chief gives up.
        restarts: how often workers are started again.
        folder: the job's private folder.
        least: with fewer workers the job ends.

    Raises:
        RankError: the chief failed.
        LaunchError: a server ended, and its variables with it, or too few workers are left.
    """
    names = ["chief", *(f"worker {n}" for n in range(workers)), *(f"parameter server {n}" for n in range(servers))]
    ports = list(dict.fromkeys(free_port() for _ in range(4 * len(names))))[: len(names)]
    addresses = [f"{LOOPBACK}:{port}" for port in ports]
    cluster = {"chief": addresses[:1], "worker": addresses[1 : 1 + workers], "ps": addresses[1 + workers :]}
    tasks = [(job, index) for job in cluster for index in range(len(cluster[job]))]
    others = [sys.executable, "-m", "keras_flow.servers"]
    of_chief = {settings.JOB: str(folder.path), "RANK": "0", "WORLD_SIZE": "1"}
    now: dict[int, RankProcess] = {}
    on_cpu = ENGINES[checked_name()].on_cpu.partition("=")
    token = settings.read(settings.TOKEN) or secrets.token_hex(32)
    interrupts = Interrupts()
    serving, chief = Ranks(interrupts, folder), Ranks(interrupts, folder)
    # left in the other order: the chief, which may save as it ends, is served until it has ended
    with _telling_how_it_ended(Job(1, command, timeout), folder, chief), interrupts, serving, chief:

        def start(number: int) -> None:
            job, index = tasks[number]
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            told = {"PYTHONUNBUFFERED": "1", "TF_CONFIG": config, settings.TIMEOUT: str(timeout), settings.TOKEN: token}
            if number > workers:  # which computes on the memory of the host
                told[on_cpu[0]] = on_cpu[2]
            ranks = serving if number else chief
            ranks.start(
                number,
                others if number else command,
                {"TF_CPP_MIN_LOG_LEVEL": "1", **os.environ, **told, **({} if number else of_chief)},
                Shown(first=number == 0),
            )
            now[number] = ranks.processes[-1]

        for number in range(len(tasks)):
            start(number)
        while (code := now[0].poll()) is None:
            try:
                interrupts.check()
            except (KeyboardInterrupt, SystemExit):
                chief.give_time()
                raise
            for number, process in list(now.items())[1:]:
                ended = process.poll()
                if ended is None or now[0].poll() is not None:
                    continue
                how = left_how(ended)
                serving.forget(process)
                words = process.output.kept()
                words = f"\nIts output:\n{failure.tail(words)}" if words else ""
                if number > workers:
                    raise LaunchError(
                        f"{names[number]} failed: {how}. The variables that it held are lost: start the job again, and "
                        f"go on from the last checkpoint (kf.callbacks.Checkpoint){words}"
                    )
                del now[number]
                if restarts:
                    restarts -= 1
                    start(number)
                left = len([each for each in now if 0 < each <= workers])
                if left < least:
                    why = "it was the last one"
                    if least > 1:
                        why = f"of {workers} workers {left} {'is' if left == 1 else 'are'} left, --min-workers {least}"
                    raise LaunchError(f"{names[number]} failed: {how}, and {why}{words}")
                does = "started again" if number in now else "the others go on"
                print(f"keras-flow: {names[number]} failed: {how}; {does}", file=sys.stderr)
            time.sleep(_LOOK_SECONDS)
        now[0].output.finish(OUTPUT_SECONDS)
        if code:
            raise _failed(code, failure.read(folder, 0))


@contextmanager
def _telling_how_it_ended(job: Job, folder: JobFolder, chief: Ranks) -> Iterator[None]:
    """Say what the chief has saved where the job is asked to end."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        print(f"keras-flow: {interruption.outcome('interrupted', job, folder, chief)}", file=sys.stderr)
        raise


def _failed(code: int, found: failure.Failure | None) -> RankError:
    if found is None:
        return RankError(f"the chief failed: {left_how(code)}", 0, code)
    if found.left:
        return RankError(f"the chief left with {left_how(code)}", 0, code)
    return RankError(f"the chief failed: {found.summary}\nWhere it was:\n{failure.tail(found.trace)}", 0, code)
