"""Names of Horovod that are not here, and what does their work."""

from __future__ import annotations

from typing import NoReturn

from keras_flow.errors import MissingName

_LOOP = "use kf.DistributedDataParallel(model) in a loop of your own"
_HANDLE = "use kf.comm.all_reduce(x, async_op=True), whose handle has wait(); hvd.allreduce waits itself"
_BUILT = "leave it out: the engine brings its own collectives; `keras-flow launch --check-build` prints what is there"
#: a name, or the end of names -> what to use
_INSTEAD = {
    "DistributedGradientTape": _LOOP,
    "PartialDistributedGradientTape": _LOOP,
    "broadcast_parameters": "use hvd.broadcast_variables(model.weights, root_rank)",
    "broadcast_optimizer_state": "use hvd.broadcast_variables(optimizer.variables, root_rank)",
    "DistributedAdasumOptimizer": "use hvd.DistributedOptimizer(optimizer), which averages",
    "start_timeline": "use kf.trace",
    "stop_timeline": "use kf.trace",
    "SyncBatchNormalization": "use keras.layers.BatchNormalization(synchronized=True) under kf.DataParallel",
    "_async": _HANDLE,
    "_async_": _HANDLE,
    "poll": _HANDLE,
    "synchronize": _HANDLE,
    "_built": _BUILT,
    "_enabled": _BUILT,
    "_supported": _BUILT,
}


def refuse(name: str) -> NoReturn:
    """Raise for a name that is not there.

    Raises:
        AttributeError: a private name, for which Python itself asks.
        MissingName: any other; it says what to use.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    found = [text for end, text in _INSTEAD.items() if name == end or (end[0] == "_" and name.endswith(end))]
    instead = found[0] if found else "docs/migrate/from_horovod.md lists what there is"
    raise MissingName(f"hvd.{name} is not in keras_flow.hvd. Instead: {instead}")
