"""`kf.run`: a function on all ranks, in this process where it drives them all, otherwise in one process per rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

from keras_flow import settings
from keras_flow.backends import active
from keras_flow.current.processes import find
from keras_flow.errors import FlowError, LaunchError, shorten
from keras_flow.launch import launcher, noise, on_ray, output, payload, rehearsal, roles, served
from keras_flow.launch.job import Job, require_room, stated_timeout
from keras_flow.runtime import versions
from keras_flow.runtime.init import agreed_devices, init

Result = TypeVar("Result")


def run(
    main: Callable[..., Result],
    devices: int | None = None,
    *,
    processes: int | None = None,
    servers: int | None = None,
    workers: int | None = None,
    on: str | None = None,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    timeout: float | None = None,
    show_all: bool = False,
    rehearse: bool = True,
) -> Result:
    """Call `kf.init(devices)` and then `main(*args, **kwargs)` on all ranks.

    On JAX and TensorFlow, and with one rank, that happens in this process, unless several are asked for. On torch each
    rank is a new process, which imports `main` by name, or receives it by value where it stands in the script itself.
    Inside a process of a job (of `keras-flow launch` or `srun`, say) `main` is just called.

    Args:
        main: what to run. Call `run` under `if __name__ == "__main__":`.
        devices: number of ranks; None takes that of `keras-flow launch`, else the devices that the engine has (on
            torch: one rank).
        processes: number of processes that share the ranks; None: one, on torch one for each rank.
        servers: with `workers`, for `kf.ParameterServer`: `main` runs once, in a chief that has so many parameter
            servers and workers on this host. Without `devices` and `processes`.
        workers: how many compute.
        on: `"ray"`: the processes are placed on a Ray cluster (that of RAY_ADDRESS, else this machine); one for each
            rank unless `processes` says otherwise. None: this host.
        args: positional arguments of `main`.
        kwargs: keyword arguments of `main`.
        timeout: several processes only: seconds without progress after which the job ends (KERAS_FLOW_TIMEOUT, else
            1800).
        show_all: several processes only: show what every rank prints, each line behind `[rank k] `.
        rehearse: several processes only: play `main` up to its first step before they start, in a copy of this
            process that prints and writes nothing, so that a wrong rule is told within seconds. False: leave it out,
            for a `main` that writes to memory shared with others (a `numpy.memmap`) before its first step.

    Returns:
        What `main` returned on rank 0; of several processes a History comes without its model.

    Raises:
        FlowError: the ranks cannot be had (see `kf.init`), or `main` cannot be sent to them. Also a wrong placement,
            rule or layout that shows before the first step, and within seconds: no process is started then.
        LaunchError: a rank failed, left early or hung. It names the rank; no rank runs any more.

    Example:
        >>> import keras_flow as kf
        >>> def main(rows_of_a_rank):
        ...     return rows_of_a_rank * kf.env.get_world_size()
        >>> kf.run(main, devices=4, args=(8,))
        32
    """
    ranks = agreed_devices(devices, "kf.run")
    if not callable(main):  # pyright: ignore[reportUnnecessaryComparison]
        raise FlowError(f"kf.run takes a function, got {main!r}; for example kf.run(main, devices=4).")
    if not isinstance(args, Sequence) or isinstance(args, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FlowError(f"kf.run was given args={args!r}; legal is a tuple of the arguments, for example args=(1, 2).")
    named = dict(kwargs or {})
    # without this each rank would start ranks of its own, which start ranks
    if payload.is_loading():
        raise FlowError(
            "kf.run was called while a rank was importing the module that holds main: every rank would start ranks of "
            'its own. Put the call of kf.run under `if __name__ == "__main__":`.'
        )
    engine = active.checked_name()
    versions.check(engine)
    if servers is not None or workers is not None:
        roles.refuse_engine()
        if roles.find() is not None:  # inside such a job
            return main(*args, **named)
        if devices is not None or processes is not None or on is not None:
            raise FlowError("kf.run: servers= and workers= go without devices=, processes= and on=")
        return cast(Result, served.run(main, args, named, servers, workers, stated_timeout(timeout)))
    if on not in (None, "ray"):
        raise FlowError(f'kf.run was asked for on={on!r}; legal is "ray", or None for this host.')
    count = _process_count(ranks if on and processes is None else processes, ranks)
    if (count == 1 and on is None) or find().count > 1:
        if find().count == 1 and output.is_plain(sys.stderr):
            noise.filter_stderr_of_engine()
        with _announced(ranks):
            init(devices)
            try:
                return main(*args, **named)
            except Exception as error:
                shorten(error)
                raise
    if on is None:
        require_room(count)
    if on is None and rehearse:
        rehearsal.rehearse(main, args, named, ranks or count, count)
    with launcher.job_folder() as folder:
        payload.send(folder.payload, main, args, named)
        job = Job(
            processes=count,
            devices=None if ranks is None else ranks // count,
            command=(sys.executable, "-m", "keras_flow.launch.child", "main"),
            timeout=stated_timeout(timeout),
            show_all=show_all,
            # as this process found it, perhaps from Keras's file, which may change before the ranks read it
            env={"KERAS_BACKEND": engine},
        )
        if on == "ray":
            if (result := on_ray.launch(job, folder.payload.read_bytes())) is not None:
                folder.result.write_bytes(result)
        else:
            try:
                launcher.launch(job, folder)
            except LaunchError as error:
                raise error.with_traceback(None) from None  # the launcher's own lines say nothing of the program
        return cast(Result, payload.receive_result(folder.result))


def _process_count(processes: int | None, ranks: int | None) -> int:
    """How many processes to start: as asked, or one for each rank where a process drives one rank, or this one."""
    alone = active.drives_all_ranks()
    count = (1 if alone else ranks or 1) if processes is None else processes
    if not isinstance(count, int) or isinstance(count, bool) or count < 1 or (ranks or count) % count:
        raise FlowError(
            f"kf.run was asked for {ranks} ranks in processes={processes!r}; legal is a whole number of at least 1 "
            "that divides the ranks."
        )
    if not alone and count != (ranks or count):
        raise FlowError(
            f"kf.run was asked for {ranks} ranks in {count} processes, but on {active.checked_name()} each rank is a "
            "process of its own. Leave processes out."
        )
    return count


@contextmanager
def _announced(devices: int | None) -> Iterator[None]:
    """Hold every `kf.init` inside to this number of ranks."""
    before = os.environ.get(settings.DEVICES)
    if devices is not None:
        os.environ[settings.DEVICES] = str(devices)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(settings.DEVICES, None)
        else:
            os.environ[settings.DEVICES] = before
