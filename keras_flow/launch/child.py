"""The process of one rank: `python -m keras_flow.launch.child`, started by the launcher with the rank's environment.

`child script FILE.py ARGS...` runs a script as `__main__`, `child module NAME ARGS...` a module; `child main` runs the
function that `kf.run` sent, `child chief` the one that it sent to the chief of parameter servers.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import runpy
import signal
import sys
from types import TracebackType

from keras_flow.current import last_call
from keras_flow.launch import failure
from keras_flow.launch.folder import JobFolder, own_folder

#: modules whose frames stand above those of the user's program
_OWN_MODULES = {"runpy", "keras_flow.launch.payload"}


def main() -> None:
    """Run the script or function that the command line names, and record the exception that ends it."""
    folder, rank, process = own_folder(), int(os.environ["RANK"]), os.getpid()
    assert folder is not None
    last_call.open_page(folder.last_call(rank))
    # by this signal the launcher asks the ranks of a job that hangs for their stacks
    stack = folder.stack(rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # not printed here: the launcher's error repeats it, once and with the rank
        if os.getpid() != process:  # a fork of the program's
            sys.__excepthook__(kind, error, trace)
            return
        error.with_traceback(_without_own_frames(trace))
        failure.record(folder, rank, error)

    sys.excepthook = tell
    code = 1  # unless the program comes to its end
    atexit.register(lambda: _leave(code))  # the first to be registered is the last to run
    mode, *rest = sys.argv[1:]
    try:
        if mode == "script":
            _run_script(rest)
        elif mode == "module":
            _run_module(rest)
        else:
            _run_main(folder, rank, joins=mode == "main")
        code = 0
        if os.getpid() == process:
            folder.left(rank).touch()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if os.getpid() != process:
            raise
        if code != 0:
            sys.last_value = leaving  # a failure too: what runs at exit must not wait for the other ranks
            leaving.with_traceback(_without_own_frames(leaving.__traceback__))
            failure.record(folder, rank, leaving, code)
        else:
            folder.left(rank).touch()
        raise


def _leave(code: int) -> None:
    """End the process once its threads and what runs at exit are done, without taking the interpreter down.

    That would free an engine's modules one by one, which takes a rank about 2 s, and meanwhile threads of the engine's
    own may abort the process (`backends/torch/devices.py`, `_part`, says of which this is known).
    """
    _flush_files()
    gc.collect()  # what the program no longer reaches is finished, as it would be; it may write
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
                thing.flush()
    ctypes.CDLL(None).fflush(None)  # and what C code wrote


def _run_script(command: list[str]) -> None:
    sys.argv[:] = command
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))  # as `python FILE.py` has it
    runpy.run_path(os.path.abspath(command[0]), run_name="__main__")


def _run_module(command: list[str]) -> None:
    sys.argv[:] = command
    sys.path[0] = os.getcwd()  # as `python -m NAME` has it
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _run_main(folder: JobFolder, rank: int, joins: bool) -> None:
    from keras_flow.launch import payload
    from keras_flow.runtime.init import init

    if joins:  # a chief is joined by kf.ParameterServer
        init()
    call = payload.receive(folder.payload)  # afterwards: arrays among the arguments start an engine
    result = call()
    if rank == 0:
        payload.send_result(folder.result, result)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    first = trace
    while first is not None and (
        first.tb_frame.f_code.co_filename == __file__ or first.tb_frame.f_globals.get("__name__") in _OWN_MODULES
    ):
        first = first.tb_next
    return first or trace


if __name__ == "__main__":
    main()
