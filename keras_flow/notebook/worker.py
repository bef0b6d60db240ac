"""The program of a worker: it joins the job, obeys orders while a cell runs, and sends variables."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle
import numpy as np

from keras_flow.current import last_call, pausing
from keras_flow.errors import FlowError
from keras_flow.launch import by_value, payload
from keras_flow.launch.folder import own_folder
from keras_flow.notebook import connections
from keras_flow.runtime import versions

#: names that IPython puts among the variables of cells
_OF_IPYTHON = ("In", "Out", "exit", "quit", "open", "get_ipython")


def facts(engine: str) -> dict[str, str]:
    """Versions that a kernel and its workers must share: of what is loaded, otherwise of what is installed."""
    found = {"Python": platform.python_version()}
    for name in ("keras", engine, "keras_flow", "numpy"):
        loaded = getattr(sys.modules.get(name), "__version__", None)
        found[name] = str(loaded or versions.installed(name)).partition("+")[0]
    return found


def index() -> int:
    """Which process of the job this is: ipyparallel numbers its engines as they arrive."""
    return int(os.environ["RANK"])


def prepare(paths: Sequence[str], devices: int, engine: str) -> dict[str, Any]:
    """Join the job: what a worker does first.

    Args:
        paths: the kernel's `sys.path`, so that the same modules are found.
        devices: number of ranks of the job.
        engine: name of the Keras backend.

    Returns:
        Versions of this process, its process number and its ranks.
    """
    from keras_flow.runtime.init import init

    sys.path[:] = list(paths)
    folder, rank = own_folder(), int(os.environ["RANK"])
    assert folder is not None
    # by this signal the kernel asks for the stack of a rank that makes no progress
    last_call.open_page(folder.last_call(rank))
    faulthandler.register(signal.SIGUSR1, file=folder.stack(rank).open("w"), all_threads=False)
    world = init(devices)
    gate = pausing.Gate()
    pausing.set_gate(gate)
    threading.Thread(target=_obey, args=(gate, folder.path, rank), daemon=True).start()
    return {"facts": facts(engine), "pid": os.getpid(), "ranks": list(world.local_ranks)}


def _obey(gate: pausing.Gate, folder: Path, rank: int) -> None:
    """Read orders, one a line: the main thread may be inside a collective and hear nothing."""
    # open for writing too: the pipe then never ends
    with os.fdopen(os.open(folder / f"orders-{rank}", os.O_RDWR), encoding="utf-8") as orders:
        for line in iter(orders.readline, ""):
            order = json.loads(line)
            if order["do"] == "open":
                gate.open()
            elif order["do"] == "hold":
                begun = gate.hold()
                _answer(folder / f"held-{rank}-{order['number']}", begun if _in_a_loop() else 0)
            elif order["do"] == "stop_after":
                gate.stop_after(order["steps"])
            elif order["do"] == "cut":
                connections.cut(order["peers"], int(os.environ["MASTER_PORT"]))


def _in_a_loop() -> bool:
    """Whether the main thread is inside a loop of Keras, which passes the gate again."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        is_loop = frame.f_code.co_name in ("fit", "evaluate", "predict")
        if is_loop and str(frame.f_globals.get("__name__")).startswith("keras."):
            return True
        frame = frame.f_back
    return False


def _answer(path: Path, begun: int) -> None:
    new = path.with_suffix(".new")
    new.write_text(str(begun))
    os.replace(new, path)  # the kernel never sees half of it


def rejoin(times: int) -> bool:
    """Begin anew what ranks count together, and their process groups, after a cell that did not end well on each."""
    from keras_flow.backends.active import backend
    from keras_flow.backends.rendezvous import meeting
    from keras_flow.comm import repeated

    repeated.begin_anew()
    meeting.begin_anew(times)
    return backend().rejoin(times)


def held(names: Sequence[str], sends: bool) -> dict[str, str]:
    """Name -> `"plain"`, `"tensor"`, or `"shared"` of a value that may lie on several ranks; what the cells have.

    Args:
        names: the names of the variables.
        sends: whether this rank's are wanted.

    Raises:
        FlowError: one is not there that is wanted.
    """
    space = _namespace()
    if sends:
        require_names(names, space)
    return {name: _kind(space[name]) for name in names if name in space}


def _kind(value: Any) -> str:
    import keras

    from keras_flow.tensors.global_tensor import GlobalTensor

    parts = keras.tree.flatten(value)
    if any(isinstance(part, GlobalTensor | keras.Variable) for part in parts):
        return "shared"
    return "tensor" if any(map(keras.ops.is_tensor, parts)) else "plain"


def give(names: Sequence[str], sends: bool) -> bytes:
    """Variables of the cells, pickled.

    Args:
        names: the names of the variables.
        sends: whether this rank's are wanted; on the others only what is a collective (the value of a tensor that lies
            on several ranks) is done.

    Raises:
        FlowError: one cannot be sent.
    """
    space = _namespace()
    values = {name: plain(space[name]) for name in names}
    if not sends:
        return b""
    advice = (
        "Pull numbers, strings, numpy arrays, and lists and dicts of these: `history.history`, `model.get_weights()`"
    )
    with naming_unsent("pull", values, "the notebook", advice):
        return payload.dumps(values)


@contextmanager
def naming_unsent(function: str, values: Mapping[str, object], to: str, advice: str) -> Iterator[None]:
    """Inside, the error of a value that cannot be pickled names the values and says what to do.

    Args:
        function: the name in `kf.notebook` of what sends.
        values: name -> value, of what is sent.
        to: who gets them.
        advice: what to do instead, a sentence.
    """
    try:
        yield
    except Exception as error:  # whatever a __reduce__ raises
        kinds = ", ".join(f"{name} ({type(value).__name__})" for name, value in values.items())
        raise FlowError(f"kf.notebook.{function} cannot send {kinds} to {to}: {error}. {advice}.") from error


def plain(value: Any) -> Any:
    """A value as the notebook can have it: tensors become arrays."""
    import keras

    from keras_flow.tensors.global_tensor import GlobalTensor

    if isinstance(value, GlobalTensor):
        return value.numpy()
    if isinstance(value, keras.Variable) or keras.ops.is_tensor(value):
        return np.asarray(keras.ops.convert_to_numpy(value))
    if type(value) in (list, tuple):
        return type(value)(plain(part) for part in value)
    if type(value) is dict:
        return {key: plain(part) for key, part in value.items()}
    return value


def require_names(names: Sequence[str], space: Mapping[str, object]) -> None:
    """Check that cells have variables.

    Raises:
        FlowError: they have not; the text names others.
    """
    if missing := [name for name in names if name not in space]:
        others = sorted(name for name in space if not name.startswith("_") and name not in _OF_IPYTHON)
        has = f"they have {', '.join(others[:20])}" if others else "they have none"
        raise FlowError(f"kf.notebook.pull: the cells have no variable {', '.join(missing)}; {has}")


def give_up(name: str, *others: str) -> Any:
    """Return a variable of the cells, which they have no longer, nor the others."""
    space = _namespace()
    for other in others:
        space.pop(other)
    return space.pop(name)


def take(pickled: bytes) -> None:
    """Set variables of the cells."""
    _namespace().update(cloudpickle.loads(pickled))


def call(pickled: bytes) -> bytes:
    """Call a function that the notebook sent, with its arguments; what it returned, pickled."""
    function, args, kwargs = by_value.loads(pickled)
    return payload.dumps(plain(function(*args, **kwargs)))


def count_as(number: int) -> None:
    """Give the next cell the number that it has in the notebook, so that tracebacks name it right."""
    if number:
        from IPython.core.getipython import get_ipython

        shell: Any = get_ipython()
        shell.execution_count = number


def _namespace() -> dict[str, Any]:
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    return shell.user_ns
