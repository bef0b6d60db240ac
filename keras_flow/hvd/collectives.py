"""The collectives of Horovod, which agree on a call first and leave the rest to `kf.comm`.

`allreduce`, `grouped_allreduce` and `broadcast` also work in a compiled step of `fit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_flow import comm
from keras_flow.backends.active import backend, tensor_engine
from keras_flow.comm.group import as_tensor, dtype_name, shape_of
from keras_flow.errors import FlowError
from keras_flow.hvd import ranks
from keras_flow.hvd.agreed import agree
from keras_flow.hvd.compression import Compression
from keras_flow.hvd.ranks import ProcessSet, global_process_set
from keras_flow.layout import balanced

Average, Sum, Adasum, Min, Max, Product = "Average", "Sum", "Adasum", "Min", "Max", "Product"
#: the mean over the ranks that have not joined, which Horovod has not
AverageOfPresent = "AverageOfPresent"
#: ours -> that of `kf.comm`
_OPS = {Average: "sum", AverageOfPresent: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}


def allreduce(
    tensor: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: str | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The mean, sum, smallest, largest or product of a tensor over the ranks.

    Args:
        tensor: has one shape and dtype on all ranks; may be one of a compiled step of `fit`.
        name: compared between the ranks; not needed: calls are in order.
        average: the mean (True) or the sum; give it or `op`. The mean where neither is given.
        prescale_factor: a factor before the reduction.
        postscale_factor: a factor after it.
        op: `hvd.Average`, `Sum`, `Min`, `Max`, `Product`, or `AverageOfPresent`, which leaves out who has joined.
        compression: `hvd.Compression.fp16` or `none`.
        process_set: who takes part.

    Raises:
        FlowError: a rank gives another shape or dtype, or calls something else: on all ranks. The mean, or a factor,
            of what is no float.

    Example:
        >>> import numpy as np, keras_flow.hvd as hvd
        >>> hvd.init()
        >>> float(hvd.allreduce(np.float32(2.0), op=hvd.Sum, prescale_factor=3.0))
        6.0
    """
    return grouped_allreduce([tensor], name, average, prescale_factor, postscale_factor, op, compression, process_set)[
        0
    ]


def grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: str | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allreduce` of several tensors."""
    found, factors = checked_op(op, average), (prescale_factor, postscale_factor)
    given = [_tensor(each, "allreduce") for each in tensors]
    for each in given:
        _check_floats(found, factors, each, "allreduce")
    packed = [compression.compress(_scaled(each, prescale_factor)) for each in given]

    def run(values: list[Any]) -> list[Any]:
        return [reduced(each, found, process_set, factors, name) for each in values]

    def pullback(cotangents: list[Any]) -> list[Any]:
        if _OPS[found] != "sum":
            raise FlowError(f"hvd.allreduce: op=hvd.{found} has no gradient; hvd.Average and hvd.Sum have")
        return run(cotangents)

    results = backend().call_in_step(run, [each for each, _ in packed], pullback)
    opened = [compression.decompress(each, context) for each, (_, context) in zip(results, packed, strict=True)]
    return [_scaled(each, postscale_factor) for each in opened]


def reduced(
    value: Any, op: str, process_set: ProcessSet, factors: tuple[float, float] = (1.0, 1.0), name: str | None = None
) -> Any:
    """An array that has values, reduced over the ranks; the mean divides as Horovod does, by all.

    The factors, before and after, and the name are the caller's, and are compared.
    """
    kind = _OPS[op]
    present = agree("allreduce", process_set, kind, [value], _of(op, *factors) + (f" named {name}" if name else ""))
    if process_set.size() == 1:
        return value
    # flat, as the zeros of a rank in `join` are, which is not told the shape
    engine, shape = tensor_engine(), shape_of(value)
    total = engine.reshape(comm.all_reduce(engine.reshape(value, (-1,)), kind, ranks.group_of(process_set)), shape)
    count = {Average: process_set.size(), AverageOfPresent: present}.get(op, 1)
    return total / count if count > 1 else total


def _of(op: str, before: float, after: float) -> str:
    """The op of a call, and its factors where it has any, as ranks tell each other."""
    return f"of op={op}" + (f" times {before:g} and {after:g}" if (before, after) != (1.0, 1.0) else "")


def checked_op(op: str | None, average: bool | None) -> str:
    """The op of two arguments of which one may be given.

    Raises:
        FlowError: both are given, or the op is not there.
    """
    if op is not None and average is not None:
        raise FlowError("hvd: give op= or average=, not both; average=True is op=hvd.Average, False is op=hvd.Sum")
    found = op or (Sum if average is False else Average)
    if found == Adasum:
        raise FlowError("hvd: op=hvd.Adasum is not there; take op=hvd.Average, and a learning rate for that batch")
    if found not in _OPS:
        raise FlowError(f"hvd: op={op!r}; legal is one of hvd.{', hvd.'.join(_OPS)}")
    return found


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The tensors of all ranks, joined along dim 0, which may differ between ranks.

    Raises:
        FlowError: other dims, or dtypes, differ.
    """
    value = _tensor(tensor, "allgather")
    shape = shape_of(value)
    if not shape:
        raise FlowError("hvd.allgather takes tensors of one dim or more; x[None] makes one of a scalar")
    agree("allgather", process_set, detail=f"{dtype_name(value)}[rows, {', '.join(map(str, shape[1:]))}]")
    if process_set.size() == 1:
        return value
    return keras.ops.concatenate(comm.all_gather(value, ranks.group_of(process_set)), 0)


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The tensor of one rank, on all; they give one of the same shape. Its gradient is the sum of the ranks', there."""
    check_root(root_rank, process_set)

    def run(values: list[Any]) -> list[Any]:
        agree("broadcast", process_set, tensors=values, detail=f"from {root_rank}")
        if process_set.size() == 1:
            return values
        return [comm.broadcast(values[0], root_rank, ranks.group_of(process_set))]

    def pullback(cotangents: list[Any]) -> list[Any]:
        total = reduced(cotangents[0], Sum, process_set)
        return [total if ranks.rank() == root_rank else total * 0]

    return backend().call_in_step(run, [_tensor(tensor, "broadcast")], pullback)[0]


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """A Python object of one rank, on all; pickled, and signed with the secret of the job."""
    check_root(root_rank, process_set)
    agree("broadcast", process_set, detail=f"of an object from {root_rank}")
    return obj if process_set.size() == 1 else comm.broadcast_object(obj, root_rank, ranks.group_of(process_set))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The Python objects of all ranks, by rank."""
    agree("allgather", process_set, detail="of objects")
    return [obj] if process_set.size() == 1 else comm.all_gather_object(obj, ranks.group_of(process_set))


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Rows of a tensor for each rank; the rows that all have for this one, joined.

    Args:
        tensor: its dim 0 is rows.
        splits: how many rows each rank gets; equally many where it is None.
        name: not needed.
        process_set: who takes part.

    Returns:
        The rows; where `splits` are given also how many came from each rank.

    Raises:
        FlowError: rows do not divide, or `splits` do not fit.
    """
    value, count = _tensor(tensor, "alltoall"), process_set.size()
    if not shape_of(value):
        raise FlowError("hvd.alltoall takes tensors of one dim or more")
    rows = shape_of(value)[0]
    sizes = [rows // count] * count if splits is None else [int(each) for each in np.asarray(splits).ravel()]
    fits = len(sizes) == count and sum(sizes) == rows and min(sizes) >= 0
    wrong = "" if fits else f"{rows} rows, splits {sizes} for {count} ranks"
    # splits are each rank's own: what is wrong with them all are told, so that no rank waits for this one
    words = f"{dtype_name(value)}[rows, {', '.join(map(str, shape_of(value)[1:]))}]"
    agree("alltoall", process_set, detail=f"{words} of {wrong}" if wrong else words)
    if wrong:
        raise FlowError(
            f"hvd.alltoall: {wrong}; legal are {count} numbers whose sum is the number of rows, and without splits "
            "rows that divide"
        )
    ends = np.cumsum(sizes)
    parts = [value[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]
    got = parts if count == 1 else comm.all_to_all(parts, ranks.group_of(process_set))
    joined = keras.ops.concatenate(got, 0)
    received = keras.ops.convert_to_tensor([shape_of(each)[0] for each in got], "int32")
    return joined if splits is None else (joined, received)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The mean or sum over the ranks, of which each gets its part of dim 0; the first ones a row more if need be."""
    found = checked_op(op, None)
    if found not in (Average, Sum):
        raise FlowError(f"hvd.reducescatter: op is hvd.Average or hvd.Sum, not {found!r}")
    given = _tensor(tensor, "reducescatter")
    _check_floats(found, (prescale_factor, postscale_factor), given, "reducescatter")
    value, context = compression.compress(_scaled(given, prescale_factor))
    if not shape_of(value):
        raise FlowError("hvd.reducescatter takes tensors of one dim or more")
    agree("reducescatter", process_set, "sum", [value], _of(found, prescale_factor, postscale_factor))
    count, rows = process_set.size(), shape_of(value)[0]
    if count == 1:
        part = value
    else:
        parts = [value[slice(*balanced(rows, count, at))] for at in range(count)]
        part = comm.reduce_scatter(parts, "sum", ranks.group_of(process_set))
    scale = postscale_factor / (count if found == Average else 1)
    return _scaled(compression.decompress(part, context), scale)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait for all ranks."""
    agree("barrier", process_set)


def check_root(root_rank: int, process_set: ProcessSet) -> None:
    """Raise an error where a root is not one of the ranks that take part."""
    if root_rank not in process_set.ranks:
        raise FlowError(f"hvd.broadcast: root_rank={root_rank}; legal is one of the ranks {process_set.ranks}")


def _check_floats(op: str, factors: tuple[float, float], value: Any, call: str) -> None:
    """Raise an error where a mean or a multiple of whole numbers or truths is asked for."""
    dtype = dtype_name(value)
    if "float" not in dtype and op in (Average, AverageOfPresent):
        raise FlowError(f"hvd.{call}: the mean of {dtype} is no {dtype}; take op=hvd.Sum")
    if "float" not in dtype and factors != (1.0, 1.0):
        raise FlowError(f"hvd.{call}: {dtype} times prescale_factor or postscale_factor is no {dtype}; cast it first")


def _scaled(value: Any, factor: float) -> Any:
    """Multiply by a factor; by 1 nothing is done, so that whole numbers stay whole."""
    return value if factor == 1.0 else value * factor


def _tensor(value: Any, call: str) -> Any:
    """The engine's tensor, a traced one too."""
    ranks.rank()  # which asks for hvd.init()
    if keras.ops.is_tensor(value) and not isinstance(value, np.ndarray):
        return value
    if isinstance(value, keras.Variable):
        return value.value
    return as_tensor(value, ranks.rank(), call)
