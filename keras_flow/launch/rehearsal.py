"""Plays `main` up to its first step before any rank is started, so that a wrong rule costs no start of processes.

It is played in a fork of this process, as a dry run: variables have no values, ranks are numbers. Whatever others could
notice (a file written, a connection, a process) ends the rehearsal before it happens, and what is printed is dropped.
Errors about placements, rules and layouts are raised. Any other error is left to the ranks, which run all of it.

What Python does not announce it cannot see. Compiled code (h5py, `torch.save`, safetensors) cannot write into files,
and may yet make an empty one, or empty one that is there. `main` may write to memory that other processes share (a
`numpy.memmap`, a `multiprocessing.shared_memory`). `kf.run(main, rehearse=False)` is for a program that does one of
these before its first step.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence

from keras_flow.backends import symbolic
from keras_flow.backends.engines import ENGINES
from keras_flow.current import dry_run
from keras_flow.current.channel import is_readable
from keras_flow.current.world import World
from keras_flow.errors import FlowError, LayoutError, frames_of_user

#: seconds after which the ranks are started, whatever the rehearsal has found
_SECONDS = 4.0
#: events of `sys.audit` that others could notice; `open` and `os.mkdir` are looked at more closely
_NOTICED = frozenset(
    (
        *(f"os.{name}" for name in ("remove", "rename", "rmdir", "link", "symlink", "truncate", "chmod", "chown")),
        *(f"os.{name}" for name in ("utime", "system", "exec", "posix_spawn", "spawn", "fork", "forkpty", "killpg")),
        *(f"socket.{name}" for name in ("connect", "bind", "sendto", "sendmsg")),
        *("subprocess.Popen", "signal.pthread_kill", "sqlite3.connect", "os.kill", "fcntl.flock", "fcntl.lockf"),
    )
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: modules whose errors are about placements, rules and layouts alone
_OF_LAYOUTS = (
    *("keras_flow.sbp", "keras_flow.placements", "keras_flow.layout", "keras_flow.distributions."),
    "keras_flow.user_file",
)
_KINDS = {kind.__name__: kind for kind in (FlowError, LayoutError)}


def rehearse(
    main: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], ranks: int, processes: int
) -> None:
    """Call `main` in a dry run on so many ranks, until its first step, for some seconds at most.

    Nothing is done where it would take long (Keras is not loaded yet) or could disturb (threads, notebooks).

    Raises:
        FlowError: what `main` raised about placements, rules or layouts, with the line of the program.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if "keras" not in sys.modules or "ipykernel" in sys.modules or not in_main or not hasattr(os, "fork"):
        return
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python and JAX, which warn of forks: this one is ended where it hangs
        pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            leave_out_other_engines()
            play(lambda: main(*args, **kwargs), ranks, processes, writing)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        found = _read(reading)
    finally:
        os.close(reading)
        with contextlib.suppress(OSError):  # a program that ignores SIGCHLD has no children to wait for
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    raise_found(found)


def raise_found(found: bytes) -> None:
    """Raise the error that `play` wrote; nothing if it wrote none.

    Raises:
        FlowError: that error.
    """
    if found:
        kind, text, where = json.loads(found)
        place = f"\nFound before any rank was started, at:\n{where.rstrip()}" if where else ""
        raise _KINDS.get(kind, FlowError)(f"{text}{place}")


def _read(pipe: int) -> bytes:
    """Read what the rehearsal writes until it ends; return nothing where it takes too long."""
    end, found = time.monotonic() + _SECONDS, b""
    while is_readable(pipe, end - time.monotonic()):
        part = os.read(pipe, 65536)
        if not part:
            return found
        found += part
    return b""


def leave_out_other_engines() -> None:
    """Let this process load no other engine: Keras loads each that it finds, which takes seconds, to set its seed."""
    for engine in ENGINES.values():
        sys.modules.setdefault(engine.module, None)  # type: ignore[arg-type]  # Python takes None for "cannot be had"


def play(main: Callable[[], object], ranks: int, processes: int, pipe: int) -> None:
    """Call `main` in a dry run in this process, which is used for nothing else, and write what it raised about layouts.

    Args:
        main: the function.
        ranks: how many ranks there will be.
        processes: how many processes will drive them.
        pipe: the file descriptor for `raise_found`'s bytes.
    """
    import resource  # which only POSIX has

    # they load Keras, which the process that calls kf.run may never need
    from keras_flow.backends.active import backend
    from keras_flow.backends.installing import install

    _silence(pipe)
    sys.addaudithook(_end_before_it_is_noticed)
    # compiled code announces nothing: it gets an error where it writes into a file
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        install(backend())
        local = tuple(range(ranks // processes))
        with dry_run.on(World(ranks, backend().world().type, local, 0, processes)):
            main()
    except FlowError as error:
        if _is_of_layouts(error) or symbolic.misfit(error):
            _tell(pipe, error, str(error))
    except BaseException as error:
        if text := symbolic.misfit(error):
            _tell(pipe, error, text)
        # the ranks also meet any other, and their launcher tells it


def _tell(pipe: int, error: BaseException, text: str) -> None:
    import resource

    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # `pipe` may be a file
    where = "".join(traceback.format_list(frames_of_user(error)[-1:]))
    os.write(pipe, json.dumps([type(error).__name__, text, where]).encode())


def _silence(pipe: int) -> None:
    """Let nothing be written but to `pipe`: what is open already is `/dev/null` from here on."""
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_RDWR)
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for number in map(int, os.listdir(folder)):
        if number not in (null, pipe):
            with contextlib.suppress(OSError):  # that of the list itself is closed again
                os.dup2(null, number)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the life of the process


def _end_before_it_is_noticed(event: str, args: tuple[object, ...]) -> None:
    noticed = event in _NOTICED
    if event == "open":
        flags = args[2] if len(args) > 2 else 0
        noticed = args[:1] != (os.devnull,) and isinstance(flags, int) and bool(flags & _WRITING)
    elif event == "os.mkdir":  # one that is there stays as it is
        path = args[0] if args else None
        noticed = not (isinstance(path, str | bytes | os.PathLike) and os.path.isdir(path))
    if noticed:
        os._exit(0)


def _is_of_layouts(error: FlowError) -> bool:
    if isinstance(error, LayoutError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    if name == "keras_flow.user_file" and error.__cause__ is not None:
        return isinstance(error.__cause__, FlowError)  # else the file fails in another way, perhaps only here
    return name.startswith(_OF_LAYOUTS)
