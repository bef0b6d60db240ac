"""`kf.init`: how many ranks there are, and of which type."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from pathlib import Path

from keras_flow import settings
from keras_flow.backends import active, random_states
from keras_flow.backends.interface import World
from keras_flow.backends.rendezvous import agreement
from keras_flow.current import dry_run
from keras_flow.current.processes import find
from keras_flow.errors import FlowError
from keras_flow.placements import normalise_type
from keras_flow.runtime import versions

#: whether the processes of the job were compared and named
_announced = False


def init(devices: int | None = None, type: str | None = None, simulate: bool = False) -> World:
    """Start with `devices` ranks. Must come before anything else uses the engine.

    On JAX and TensorFlow a CPU gives that many virtual devices. On torch every rank is a process, so the job must have
    been started with as many by `kf.run` or `keras-flow launch`; with `simulate` this process plays them, for looking.

    Args:
        devices: number of ranks. None: that of `kf.run` or `keras-flow launch`, else the real devices.
        type: `"cpu"`, `"gpu"` (`"cuda"` means the same) or `"tpu"`; None takes what the engine prefers.
        simulate: play the ranks in this process, on the CPU. On JAX and TensorFlow virtual devices do that anyway. On
            torch global tensors, boxing, `kf.comm` and pictures work so, slowly; distributions, and with them `fit`,
            raise and say how to start ranks.

    Returns:
        The ranks as this process sees them.

    Raises:
        FlowError: the engine cannot give these ranks, was initialised before with fewer, is missing or of an
            unsupported version, or `devices` disagrees with the number that the job was started with.

    Example:
        >>> import keras_flow as kf
        >>> kf.init(4).size
        4
    """
    global _announced
    count = agreed_devices(devices)
    kind = normalise_type(type)
    versions.check(active.checked_name())
    played = dry_run.world()
    if played is not None:  # a rehearsal of `kf.run`
        return played
    if simulate:
        if count is None or kind not in (None, "cpu"):
            raise FlowError(
                f"kf.init(devices={devices!r}, type={type!r}, simulate=True): simulated ranks are of type 'cpu', and "
                "need a number, for example kf.init(4, simulate=True)."
            )
        return active.tensor_engine().simulate(count)
    world = active.tensor_engine().init(count, kind)
    if world.process_count > 1 and not _announced:
        _announced = True
        agreement.require_equal(_facts(), "versions, or a program,")
        # before the program makes data, layers and pipelines, so that those without a seed are alike
        random_states.align(begins=True)
        # those that were started by our launcher know it
        if world.process_index == 0 and settings.JOB not in os.environ:
            print(f"keras-flow: {world.size} ranks; this is {find()}", file=sys.stderr)
    return world


def _facts() -> dict[str, object]:
    """Return the facts that must be equal in all processes of a job: name -> value."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = Path(main).read_bytes() if main and Path(main).is_file() else b""
    return {
        "Python": platform.python_version(),
        "keras": versions.installed("keras"),
        active.checked_name(): versions.installed(active.checked_name()),
        settings.RANDOM: settings.read(settings.RANDOM) or "logical",
        "the script's content": hashlib.sha256(script).hexdigest()[:12],
    }


def agreed_devices(devices: int | None, asked: str = "kf.init") -> int | None:
    """The number of ranks that the caller asks for or the job was started with; None if neither says.

    Raises:
        FlowError: it is no number, or the two disagree.
    """
    if devices is not None and (not isinstance(devices, int) or isinstance(devices, bool) or devices < 1):
        raise FlowError(f"{asked} was given devices={devices!r}; legal is a whole number of at least 1, or None.")
    settings.check()
    announced = active.announced_devices()
    if announced is not None and devices not in (None, announced):
        raise FlowError(
            f"{asked} was asked for {devices} ranks inside a job of {announced}. "
            f"Leave devices out, or ask for {announced}."
        )
    return announced or devices
