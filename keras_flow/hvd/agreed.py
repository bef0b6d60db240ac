"""Agreement of the ranks on their next collective, so that a wrong call is an error, and a rank may be in `join`.

Before each collective all ranks exchange eight numbers each: call, op, dtype, elements and a checksum of the rest.
Where these differ all ranks raise one error. A rank in `join` says so, and for how many calls of the others it has
been there, and then adds zeros to what the others reduce.
Horovod's ranks agree through its background thread in the same way (`Controller::ComputeResponseList`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_flow import comm
from keras_flow.backends.active import tensor_engine
from keras_flow.comm.group import dtype_name, shape_of
from keras_flow.errors import FlowError
from keras_flow.hvd import ranks
from keras_flow.hvd.ranks import ProcessSet
from keras_flow.tensors.dtypes import numpy_dtype

_CALLS = ("join", "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier")
_OPS = ("", "sum", "min", "max", "product")
_DTYPES = ("", "float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "int16", "uint8", "bool")
_JOIN = 0
#: where a rank in `join` says how many calls of others it has been there for
_SERVED = 6


def agree(call: str, process_set: ProcessSet, op: str = "", tensors: Sequence[Any] = (), detail: str = "") -> int:
    """Check that all ranks of a set make one call.

    Args:
        call: the collective.
        process_set: who makes it.
        op: the reduction.
        tensors: what this rank gives, of shapes that are equal on all ranks.
        detail: what else must be equal.

    Returns:
        How many ranks take part; those in `join` do not.

    Raises:
        FlowError: another rank makes another call; or has joined, and this one is no sum. This one is not in the set.
    """
    process_set.rank()
    if process_set.size() == 1:
        return 1
    dtype = dtype_name(tensors[0]) if tensors else ""
    shapes = ", ".join(f"{dtype_name(each)}{list(shape_of(each))}" for each in tensors)
    text = " ".join(part for part in (call, op, shapes, detail) if part)
    size = sum(math.prod(shape_of(each)) for each in tensors)
    kind = _CALLS.index(call)
    row = [kind, _OPS.index(op), _DTYPES.index(dtype) if dtype in _DTYPES else 0, size % 2**30, size // 2**30]
    rows = _told([*row, zlib.crc32(text.encode()) >> 1, 0, 0], process_set)
    return _judged(rows, text, process_set)


def join() -> int:
    """Wait until all ranks have called this; meanwhile add zeros to what the others reduce.

    As in Horovod the mean still divides by the number of all ranks; `op=hvd.AverageOfPresent` by that of those which
    have not joined. Other collectives than a sum or mean are errors once a rank has joined.

    Returns:
        The rank that came last, on all ranks; of several that came at once the highest.

    Example:
        >>> import keras_flow.hvd as hvd
        >>> hvd.init()
        >>> hvd.join()
        0
    """
    every, served = ranks.global_process_set, 0
    while every.size() > 1:
        row = [_JOIN] * 8
        row[_SERVED] = served
        rows = _told(row, every)
        live = rows[rows[:, 0] != _JOIN]
        if not len(live):
            # counted by each for itself: a rank that has seen no call of others cannot tell who made one
            return max(range(len(rows)), key=lambda rank: (-rows[rank][_SERVED], rank))
        _judged(rows, "join", every)
        _, op, dtype, low, high = (int(number) for number in live[0][:5])
        zeros = np.zeros(low + high * 2**30, numpy_dtype(_DTYPES[dtype]))
        comm.all_reduce(keras.ops.convert_to_tensor(zeros, _DTYPES[dtype]), _OPS[op])
        served += 1
    return 0


def _told(row: Sequence[int], process_set: ProcessSet) -> np.ndarray:
    """The rows of all ranks of a set [ranks, 8]."""
    engine = tensor_engine()
    mine = engine.put(np.asarray(row, "int32"), ranks.rank())
    told = comm.all_gather_into_tensor(mine, ranks.group_of(process_set))
    return engine.as_numpy(told).reshape(process_set.size(), -1)


def _judged(rows: np.ndarray, text: str, process_set: ProcessSet) -> int:
    """How many ranks take part in the call that they tell; an error, on all, where it is not one call."""
    live = rows[rows[:, 0] != _JOIN]
    has_joined = len(live) < len(rows)
    # what a joined rank adds to
    is_served = live[0][0] == _CALLS.index("allreduce") and live[0][1] == 1 and live[0][2] > 0
    if (live == live[0]).all() and (not has_joined or is_served):
        return len(live)
    engine = tensor_engine()
    letters = engine.put(np.frombuffer(text.encode(), "uint8").copy(), ranks.rank())
    parts = comm.all_gather(letters, ranks.group_of(process_set))
    texts = [engine.as_numpy(part).tobytes().decode() for part in parts]
    calls = "; ".join(f"rank {rank} calls {said}" for rank, said in zip(process_set.ranks, texts, strict=True))
    why = (
        "Once a rank has joined the others may only reduce by a sum or a mean"
        if has_joined
        else ("Every rank must make the same calls, with tensors of the same shapes and dtypes, in the same order")
    )
    raise FlowError(f"keras_flow.hvd: {calls}. {why}")
