"""The ranks of this notebook: started, restarted, stopped, and what is run on them."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from keras_flow.backends import active
from keras_flow.errors import FlowError, shown_briefly, warn
from keras_flow.launch import by_value
from keras_flow.notebook import worker
from keras_flow.notebook.cell import RESTART, CellRun
from keras_flow.notebook.errors import CellError, ShownError
from keras_flow.notebook.workers import Workers
from keras_flow.runtime import versions
from keras_flow.runtime.init import init

#: seconds without progress after which a cell counts as deadlocked, unless `--timeout` says so
_TIMEOUT_SECONDS = 300.0
#: names in a worker through which a function travels
_CALL, _RESULT = "_keras_flow_call", "_keras_flow_result"

#: the ranks of this notebook: workers, or their number where this process drives them all
_ranks: Workers | int | None = None


@shown_briefly
def start(devices: int = 4, *, processes: int | None = None) -> None:
    """Make ranks for this notebook, and the magic `%%ranks`, which runs a cell on all of them.

    Args:
        devices: number of ranks.
        processes: number of worker processes that share the ranks. None: none where this process can drive all ranks
            (JAX, TensorFlow: `kf.init`), else one for each rank (torch).

    Raises:
        FlowError: the ranks cannot be had, ipyparallel is missing, or versions differ.
        LaunchError: a worker did not start.

    Example:
        >>> import keras_flow as kf
        >>> kf.notebook.start(4)
        >>> kf.notebook.run(lambda: kf.env.get_world_size())[0]
        4
    """
    global _ranks
    engine = active.checked_name()
    versions.check(engine)
    for name, value in (("devices", devices), ("processes", processes)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise FlowError(f"kf.notebook.start was given {name}={value!r}; legal is a whole number of at least 1.")
    alone = active.drives_all_ranks()
    if not alone and processes not in (None, devices):
        raise FlowError(f"kf.notebook.start: on {engine} each rank is a process of its own; leave processes out.")
    if devices % (processes or 1):
        raise FlowError(f"kf.notebook.start: {processes} processes cannot share {devices} ranks equally.")
    count = processes or (0 if alone else devices)
    if isinstance(_ranks, Workers):
        if _ranks.alive and (_ranks.devices, _ranks.count, _ranks.engine) == (devices, count, engine):
            return
        if _ranks.alive:
            before = f"the {_ranks.count} workers that were started before are ended"
            warn(f"kf.notebook.start: {before}, and the variables of their %%ranks cells are gone.")
        stop()
    if count == 0:
        init(devices)
        _ranks = devices
    else:
        workers = Workers(devices, count, engine)
        workers.start()
        _ranks = workers
        atexit.register(workers.end)
    if "IPython" in sys.modules:
        from keras_flow.notebook import magic

        magic.register()


@shown_briefly
def restart() -> None:
    """End the workers and start as many new ones; variables of `%%ranks` cells are gone.

    Raises:
        FlowError: none were started, or this process drives the ranks.
    """
    global _ranks
    before = _ranks
    if not isinstance(before, Workers):
        what = "no ranks were started" if before is None else "the ranks are driven by this kernel, without workers"
        raise FlowError(
            f"kf.notebook.restart: {what}. "
            + ("Call kf.notebook.start(4)." if before is None else "Restart the kernel (menu Kernel).")
        )
    warn("kf.notebook.restart: the variables of the %%ranks cells are gone; run the cells that make them again.")
    stop()
    _ranks = workers = Workers(before.devices, before.count, before.engine)
    workers.start()
    atexit.register(workers.end)


def stop() -> None:
    """End the workers, if there are any. Cells that begin with `%%ranks` run again after another `start`."""
    global _ranks
    if isinstance(_ranks, Workers):
        _ranks.end()
    _ranks = None


@shown_briefly
def run(
    function: Callable[..., Any],
    devices: int | None = None,
    *,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call a function on all ranks, which may be defined in a cell, and return what it returned.

    Args:
        function: what to call; it travels with what it uses of the notebook.
        devices: number of ranks, which are started where there are none, or others.
        args: its positional arguments.
        kwargs: its keyword arguments.
        timeout: seconds without progress after which it counts as deadlocked.

    Returns:
        One value for each process, in the order of ranks: one where a single process drives all of them.

    Raises:
        FlowError: `function` cannot be called, or cannot be sent to the workers.
        CellError: it failed on a rank, which the text names.
    """
    _require_seconds("kf.notebook.run(timeout=...)", timeout)
    if not callable(function):
        raise FlowError(f"kf.notebook.run takes a function, got {function!r}; its arguments go into args=(...)")
    if _ranks is None or (devices is not None and devices != _count()):
        start(4 if devices is None else devices)
    workers = _started()
    if not isinstance(workers, Workers):
        return [worker.plain(function(*args, **dict(kwargs or {})))]
    try:
        sent = by_value.dumps((function, tuple(args), dict(kwargs or {})))
    except Exception as error:  # whatever a __reduce__ raises
        raise FlowError(
            f"kf.notebook.run cannot send {getattr(function, '__name__', function)} to the workers: {error}. Open "
            "files, locks and models that exist in the notebook stay there: make them inside the function."
        ) from error
    everywhere = range(workers.count)
    workers.apply(worker.take, cloudpickle.dumps({_CALL: sent}))
    source = (
        f"from keras_flow.notebook import worker as _keras_flow_worker\n{_RESULT} = _keras_flow_worker.call({_CALL})"
    )
    CellRun(workers, everywhere, source, False, timeout or _TIMEOUT_SECONDS).run()
    return [cloudpickle.loads(result) for result in workers.apply(worker.give_up, _RESULT, _CALL)]


@shown_briefly
def pull(*names: str, rank: int = 0) -> Any:
    """Bring variables of `%%ranks` cells to the notebook.

    Args:
        names: the names of the variables.
        rank: whose. Tensors that lie on several ranks come whole.

    Returns:
        The value; a tuple of them for several names.

    Raises:
        FlowError: there is no such variable, or it cannot be sent.
    """
    if not names:
        raise FlowError('kf.notebook.pull needs the name of a variable: kf.notebook.pull("history")')
    values = _pulled(names, rank)
    return values[0] if len(names) == 1 else tuple(values)


def _pulled(names: Sequence[str], rank: int) -> list[Any]:
    ranks = _started()
    if not isinstance(ranks, Workers):
        _require_rank(rank, ranks)
        space = vars(sys.modules["__main__"])
        worker.require_names(names, space)
        return [worker.plain(space[name]) for name in names]
    index = _index(ranks, rank)
    # which names are missing is asked first: a rank would wait in a collective for those that have no such variable
    held = ranks.apply_each(worker.held, [(list(names), each == index) for each in range(ranks.count)])
    for name in names:
        lacking = [each for each, there in enumerate(held) if there.get(name) != "shared"]
        if held[index][name] == "shared" and lacking:
            raise FlowError(
                f"kf.notebook.pull: {name} may lie on several ranks, and {ranks.label(lacking)} has no such variable"
            )
    parts = [[name for name in names if there.get(name) == held[index][name] != "plain"] for there in held]
    parts[index] = list(names)
    pickled = ranks.apply_each(worker.give, [(part, each == index) for each, part in enumerate(parts)])
    values = cloudpickle.loads(pickled[index])
    return [values[name] for name in names]


@shown_briefly
def push(**values: object) -> None:
    """Set variables of `%%ranks` cells on all ranks: `kf.notebook.push(x=x, y=y)`."""
    ranks = _started()
    if isinstance(ranks, Workers):
        advice = "Open files, locks and models that exist in the notebook stay there: make them in a %%ranks cell"
        with worker.naming_unsent("push", values, "the workers", advice):
            pickled = cloudpickle.dumps(values)
        ranks.apply(worker.take, pickled)
    else:
        vars(sys.modules["__main__"]).update(values)


def run_cell(
    source: str, ranks: Sequence[int] | None = None, quiet: bool = False, timeout: float | None = None
) -> None:
    """Run a cell on ranks: what `%%ranks` does.

    Raises:
        CellError: it failed on a rank.
        CellInterrupted: the user stopped it.
    """
    running = _started()
    _require_seconds("%%ranks --timeout", timeout)
    if not isinstance(running, Workers):
        for rank in ranks or ():
            _require_rank(rank, running)
        _run_here(source, quiet)
        return
    indices = list(range(running.count)) if ranks is None else sorted({_index(running, rank) for rank in ranks})
    running.apply(worker.count_as, _cell_number())
    CellRun(running, indices, source, quiet, timeout or _TIMEOUT_SECONDS).run()


def _require_seconds(what: str, timeout: float | None) -> None:
    if timeout is not None and timeout <= 0:
        raise FlowError(f"{what} {timeout:g}: legal is a number of seconds above 0")


def _cell_number() -> int:
    """The number of the cell that runs, `In [8]`; 0 where there is no notebook."""
    if "IPython" not in sys.modules:
        return 0
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    # not `execution_count`: since IPython 9 it is that of the next cell while one runs
    return len(shell.history_manager.input_hist_raw) - 1 if shell is not None else 0


def _run_here(source: str, quiet: bool) -> None:
    """Run a cell in this process, which drives all ranks."""
    from IPython.core.getipython import get_ipython
    from IPython.utils.capture import capture_output

    shell: Any = get_ipython()
    if quiet:
        with capture_output() as captured:
            result = shell.run_cell(source)
        if not result.success:
            captured.show()
    else:
        result = shell.run_cell(source)
    error = result.error_in_exec or result.error_before_exec
    if isinstance(error, KeyboardInterrupt):
        raise error
    if error is not None:
        raise ShownError(f"{type(error).__name__}: {error}")


def _started() -> Workers | int:
    if _ranks is None:
        raise FlowError("no ranks run in this notebook: call kf.notebook.start(4) first")
    if isinstance(_ranks, Workers) and not _ranks.alive:
        if gone := _ranks.died():
            text = f"a worker died. {_ranks.ended(gone[0])}"
            _ranks.end()
            raise CellError(f"{text}\n{RESTART}", gone[0].rank * _ranks.each)
        raise FlowError("the workers of this notebook have ended: kf.notebook.restart() starts new ones")
    return _ranks


def _count() -> int:
    return _ranks.devices if isinstance(_ranks, Workers) else int(_ranks or 0)


def _require_rank(rank: int, count: int) -> None:
    if not 0 <= rank < count:
        raise FlowError(f"rank {rank} was asked for; this notebook has ranks 0 to {count - 1}")


def _index(workers: Workers, rank: int) -> int:
    """The process that drives a rank."""
    _require_rank(rank, workers.devices)
    return rank // workers.each
