"""Calls of `kf.comm` that were made before, each as one program.

They send the same messages as the calls of `collectives`. So some ranks of a group may make a direct call while others,
whose tensors have gradients, make the ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_flow.backends.collective_engine import LISTED, roles
from keras_flow.backends.tensorflow.collectives import (
    GATHERED,
    REDUCED,
    exchanged,
    fold,
    operation,
    run_within_limit,
    shape,
)
from keras_flow.backends.tensorflow.devices import rank_devices, world


def direct(
    call: str, ranks: tuple[int, ...], like: tf.Tensor | list[tf.Tensor], how: tuple[Any, ...], async_op: bool
) -> Callable[[Any], Any] | None:
    """Make the function for dtypes that the runtime knows. A call has ended when it returns."""
    given = like if isinstance(like, list) else [like]
    first, rank = given[0], world().local_ranks[0]
    is_uneven = len({shape(each) for each in given}) > 1
    if 0 in shape(first) or is_uneven or first.dtype not in (GATHERED & REDUCED if "gather" in call else REDUCED):
        return None
    gives, gets = roles(call, rank, how)
    place, what, here, dtype = rank_devices()[rank], f"kf.comm: {call}", shape(first), first.dtype
    is_listed, gives_list = isinstance(like, list), call in LISTED and gets

    def body(*values: tf.Tensor) -> tf.Tensor | list[tf.Tensor]:
        with tf.device(place):
            results = _results(call, ranks, rank, values, here, dtype, how)
        return results if gives_list else results[0]

    # not tf.function: it passes every output through the first device
    program = tf.compat.v1.wrap_function(body, [tf.TensorSpec(here, dtype)] * (len(given) if gives else 0))

    def run(value: Any) -> Any:
        values = (value if is_listed else [value]) if gives else []
        with tf.device(place):  # of the outputs
            result = run_within_limit(what, program, values)
        if call == "barrier":
            result.numpy()  # waits
        if not gets:
            return value if call == "reduce" else None
        return result

    return run


def _results(
    call: str,
    ranks: tuple[int, ...],
    rank: int,
    values: Sequence[tf.Tensor],
    shape: tuple[int, ...],
    dtype: tf.DType,
    how: tuple[Any, ...],
) -> list[tf.Tensor]:
    """Return a rank's results of a call, in its program. A rank that takes no result does not read them.

    Args:
        call, how: one of `kf.comm`, and its options.
        ranks, rank: the group, and the rank of this process.
        values: the tensors that this rank gives.
        shape, dtype: those of each tensor that is given, by whichever rank.
    """
    count = len(ranks)
    if call in ("all_reduce", "reduce", "broadcast"):
        # the runtime has nothing that reduces to one rank
        kind = "broadcast" if call == "broadcast" else "all_reduce"
        return [operation(f"{kind} {how[0]}", ranks, rank, values[0])]
    if call == "barrier":
        return [operation("all_reduce sum", ranks, rank, tf.zeros(1, "int32"))]
    if call in ("all_gather_into_tensor", "all_gather"):
        joined = operation("gather", ranks, rank, values[0])
        if call == "all_gather":
            return tf.unstack(tf.reshape(joined, [count, *shape]))
        return [tf.reshape(joined, [count * shape[0], *shape[1:]]) if len(shape) > 1 else joined]
    if call in ("reduce_scatter", "reduce_scatter_tensor", "all_to_all"):
        flat = tf.reshape(tf.stack(values) if len(values) > 1 else values[0], [-1])
        arrived = operation("all_to_all", ranks, rank, flat)
    else:
        # who sends to whom: one to all, all to one, or one to one
        sources, targets = {
            "scatter": (how, ranks),
            "gather": (ranks, how),
            "send": ((rank,), how),
            "recv": (how, (rank,)),
        }[call]
        size = tf.TensorShape(shape).num_elements()
        sizes = [size if to in targets else 0 for to in ranks]
        table = [sizes if sender in sources else [0] * count for sender in ranks]
        parts = [tf.reshape(each, [-1]) for each in values] or [tf.zeros([0], dtype)] * count
        if len(parts) == 1:
            parts = [parts[0] if each else tf.zeros([0], dtype) for each in sizes]
        arrived = exchanged(ranks, rank, parts, table)
        if not any(row[ranks.index(rank)] for row in table):
            return [arrived]
    if call in ("all_to_all", "gather"):
        return tf.unstack(tf.reshape(arrived, [count, *shape]))
    if call.startswith("reduce_scatter"):
        own = shape if call == "reduce_scatter" else (shape[0] // count, *shape[1:])
        return [tf.reshape(fold(tf.reshape(arrived, [count, -1]), how[0]), own)]
    return [tf.reshape(arrived, shape)]
