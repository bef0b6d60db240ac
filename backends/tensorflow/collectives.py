"""`kf.comm` on TensorFlow: plain operations within a process, collectives of its runtime between processes.

The operations of all ranks of a process are in one function, so that they run side by side.
These operations are raw ones (`tf.raw_ops.Collective...V2`): TensorFlow has no public collective without a strategy.
Between processes elements travel as words of 32 bits, since the operations do not know every dtype.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_flow.backends.collective_engine import Counts, Pending
from keras_flow.backends.tensorflow.devices import rank_devices, world
from keras_flow.current import joining
from keras_flow.errors import FlowError

#: what the runtime's all-reduce knows
_REDUCED = frozenset([tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64])
_OPS = {"sum": "Add", "min": "Min", "max": "Max", "product": "Mul"}
_FOLDS = {"sum": tf.reduce_sum, "min": tf.reduce_min, "max": tf.reduce_max, "product": tf.reduce_prod}

#: what a function does for one rank: its input, its place in the group, and what makes keys -> its output
_Body = Callable[[tf.Tensor, int, Callable[..., dict[str, Any]]], tf.Tensor]


def exchange(ranks: tuple[int, ...], values: Mapping[int, tf.Tensor], counts: Counts) -> Pending:
    """Parts of each rank's flat array for each member."""
    mine = _own(ranks)
    parts = {rank: tf.split(values[rank], counts.table[ranks.index(rank)]) for rank in mine}
    dtype = next(iter(values.values())).dtype
    if len(mine) == len(ranks):
        arrived = {rank: _on(rank, [parts[sender][place] for sender in ranks]) for place, rank in enumerate(ranks)}
        return Pending(lambda: arrived)
    words = [[_words_of(count, dtype) for count in row] for row in counts.table]
    sent = {}
    for rank in mine:
        with tf.device(rank_devices()[rank]):
            sent[rank] = tf.concat([_to_words(part) for part in parts[rank]], 0)
    kind = "all_to_all" if counts.is_even else "exchange"
    got = _run(kind, ranks, sent, tuple(map(tuple, words)))
    out = {}
    for rank in mine:
        place = ranks.index(rank)
        with tf.device(rank_devices()[rank]):
            pieces = tf.split(got[rank], [row[place] for row in words])
            whole = [_from_words(piece, row[place], dtype) for piece, row in zip(pieces, counts.table, strict=True)]
            out[rank] = tf.concat(whole, 0)
    return Pending(lambda: out)


def gather_all(ranks: tuple[int, ...], values: Mapping[int, tf.Tensor], counts: Sequence[int]) -> Pending:
    """The runtime's all-gather where sizes are equal; else an exchange, which pads nothing."""
    if len(_own(ranks)) == len(ranks):
        arrived = {rank: _on(rank, [values[sender] for sender in ranks]) for rank in ranks}
        return Pending(lambda: arrived)
    if len(set(counts)) > 1:
        copies = {rank: _on(rank, [value] * len(ranks)) for rank, value in values.items()}
        return exchange(ranks, copies, Counts.of([[count] * len(ranks) for count in counts]))
    dtype = next(iter(values.values())).dtype
    size = _words_of(counts[0], dtype)
    got = _run("gather", ranks, {rank: _to_words(value) for rank, value in values.items()}, size) if size else {}
    out = {}
    for rank, value in values.items():
        with tf.device(rank_devices()[rank]):
            pieces = tf.split(got[rank], len(ranks)) if size else []
            out[rank] = tf.concat([_from_words(piece, counts[0], dtype) for piece in pieces], 0) if size else value
    return Pending(lambda: out)


def native(kind: str, ranks: tuple[int, ...], values: Mapping[int, tf.Tensor], how: str | int) -> Pending | None:
    """Between processes the runtime's all-reduce and broadcast."""
    value = next(iter(values.values()))
    size = int(tf.size(value))
    if len(_own(ranks)) == len(ranks) or not size or (kind == "all_reduce" and value.dtype not in _REDUCED):
        return None
    shape, dtype = value.shape, value.dtype
    if kind == "all_reduce":
        reduced = _run(f"reduce {how}", ranks, {rank: tf.reshape(each, [-1]) for rank, each in values.items()}, size)
        return Pending(lambda: {rank: tf.reshape(each, shape) for rank, each in reduced.items()})
    words = {rank: _to_words(tf.reshape(each, [-1])) for rank, each in values.items()}
    got = _run(f"broadcast {how}", ranks, words, _words_of(size, dtype))
    out = {}
    for rank, each in got.items():
        with tf.device(rank_devices()[rank]):
            out[rank] = tf.reshape(_from_words(each, size, dtype), shape)
    return Pending(lambda: out)


def fold(rows: tf.Tensor, op: str) -> tf.Tensor:
    """Rows [ranks, elements] as one, in their dtype."""
    if rows.dtype == tf.bool:
        return tf.reduce_any(rows, 0) if op in ("sum", "max") else tf.reduce_all(rows, 0)
    return _FOLDS[op](rows, axis=0)


def reshape(value: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """In another shape."""
    return tf.reshape(value, shape)


def join(flat: Sequence[tf.Tensor]) -> tf.Tensor:
    """One after the other."""
    return tf.concat(flat, 0)


def with_gradient(
    forward: Callable[[Sequence[Any]], list[Any]],
    backward: Callable[[Sequence[Any]], list[Any]],
    values: Sequence[Any],
) -> list[Any]:
    """By `tf.custom_gradient`."""
    if not tf.executing_eagerly():
        raise FlowError(
            "kf.comm is called inside a tf.function (or a compiled Keras step), where ranks have no values yet. Call "
            "it outside, or compile with run_eagerly=True"
        )

    @tf.custom_gradient
    def function(*given: tf.Tensor):
        def pullback(*cotangents: tf.Tensor) -> list[tf.Tensor]:
            return backward(cotangents)

        return tuple(forward(given)), pullback

    return list(function(*values))


def _own(ranks: tuple[int, ...]) -> list[int]:
    mine = set(world().local_ranks)
    return [rank for rank in ranks if rank in mine]


def _on(rank: int, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Parts joined on the device of a rank; TensorFlow copies what is elsewhere."""
    with tf.device(rank_devices()[rank]):
        return tf.concat([tf.identity(part) for part in parts], 0)


def _words_of(count: int, dtype: tf.DType) -> int:
    return -(-count * dtype.size // 4)


def _to_words(flat: tf.Tensor) -> tf.Tensor:
    """The memory of a flat tensor as int32, padded."""
    if flat.dtype == tf.bool:
        flat = tf.cast(flat, tf.uint8)
    if flat.dtype.size < 4:
        per_word = 4 // flat.dtype.size
        count = int(tf.size(flat))
        # zeros of any dtype, halves of 8 bits among them
        flat = tf.concat([flat, tf.cast(tf.zeros(-count % per_word), flat.dtype)], 0)
        flat = tf.reshape(flat, [-1, per_word])
    return tf.reshape(tf.bitcast(flat, tf.int32), [-1])


def _from_words(words: tf.Tensor, count: int, dtype: tf.DType) -> tf.Tensor:
    stored = tf.uint8 if dtype == tf.bool else dtype
    if stored.size > 4:
        words = tf.reshape(words, [-1, stored.size // 4])
    flat = tf.reshape(tf.bitcast(words, stored), [-1])[:count]
    return tf.cast(flat, tf.bool) if dtype == tf.bool else flat


def _run(kind: str, ranks: tuple[int, ...], values: Mapping[int, tf.Tensor], sizes: Any) -> dict[int, tf.Tensor]:
    """A collective of flat tensors between processes."""
    mine = _own(ranks)
    dtype = next(iter(values.values())).dtype
    # gradients are those of `with_gradient`: a tape that saw these operations would ask for one of each, and fail
    with tf.device(rank_devices()[mine[0]]):
        results = _function(kind, ranks, dtype, sizes)(*(tf.stop_gradient(values[rank]) for rank in mine))
    out = {}
    for rank, value in zip(mine, results, strict=True):
        with tf.device(rank_devices()[rank]):
            out[rank] = tf.identity(value)
    return out


@functools.lru_cache(maxsize=1024)
def _function(kind: str, ranks: tuple[int, ...], dtype: tf.DType, sizes: Any):
    """The function of a collective: one operation for each rank of this process, which run side by side."""
    mine, devices = _own(ranks), rank_devices()
    lengths = {rank: sizes if isinstance(sizes, int) else sum(sizes[ranks.index(rank)]) for rank in mine}

    def run(*flat: tf.Tensor) -> tuple[tf.Tensor, ...]:
        out = []
        for rank, value in zip(mine, flat, strict=True):
            with tf.device(devices[rank]):
                out.append(_operation(kind, ranks, rank, value, sizes))
        return tuple(out)

    # not tf.function: it passes every output through the first device
    return tf.compat.v1.wrap_function(run, [tf.TensorSpec([lengths[rank]], dtype) for rank in mine])


def _operation(kind: str, ranks: tuple[int, ...], rank: int, value: tf.Tensor, sizes: Any) -> tf.Tensor:
    """The operation of one rank."""
    if kind == "exchange":
        return _exchanged(ranks, rank, value, sizes)
    keys = _keys(ranks, f"{kind} {value.dtype.name} {value.shape[0]}")
    if kind == "all_to_all":
        rows = tf.reshape(value, [len(ranks), -1])
        got = tf.raw_ops.CollectiveAllToAllV2(input=rows, ordering_token=[], is_stateless=False, **keys)
        return tf.reshape(got, [-1])
    if kind == "gather":
        return tf.raw_ops.CollectiveGatherV2(input=value, ordering_token=[], is_stateless=False, **keys)
    what, _, how = kind.partition(" ")
    if what == "reduce":
        return tf.raw_ops.CollectiveReduceV2(
            input=value, merge_op=_OPS[how], final_op="Id", ordering_token=[], is_stateless=False, **keys
        )
    if rank == int(how):
        return tf.raw_ops.CollectiveBcastSendV2(input=value, **keys)
    return tf.raw_ops.CollectiveBcastRecvV2(T=value.dtype, shape=tf.shape(value), **keys)


def _exchanged(ranks: tuple[int, ...], rank: int, value: tf.Tensor, counts: Sequence[Sequence[int]]) -> tf.Tensor:
    """Parts of several sizes, as broadcasts in groups of two, which pad nothing."""
    place = ranks.index(rank)
    parts = tf.split(value, counts[place])
    found: dict[int, tf.Tensor] = {place: parts[place]}
    sent = []
    for other, member in enumerate(ranks):
        if other == place:
            continue
        if counts[place][other]:
            keys = _keys((rank, member), f"send {counts[place][other]}")
            sent.append(tf.raw_ops.CollectiveBcastSendV2(input=parts[other], **keys))
        size = counts[other][place]
        if size:
            keys = _keys((member, rank), f"send {size}")
            found[other] = tf.raw_ops.CollectiveBcastRecvV2(T=value.dtype, shape=[size], **keys)
        else:
            found[other] = tf.zeros([0], value.dtype)
    with tf.control_dependencies(sent):  # a function drops operations that nobody reads
        return tf.concat([tf.identity(found[other]) for other in range(len(ranks))], 0)


def _keys(ranks: tuple[int, ...], what: str) -> dict[str, Any]:
    """Keys by which the runtime finds the members of a group, and tells its collectives apart: the same on all."""
    return {
        "group_size": len(ranks),
        "group_key": _key(f"group {ranks}"),
        "instance_key": _key(f"{ranks} {what}"),
        "communication_hint": "ring",
        "timeout_seconds": joining.waiting_seconds(),
    }


def _key(text: str) -> int:
    # the upper half of positive numbers: strategies and DTensor count from below
    return 0x40000000 | (zlib.crc32(text.encode()) & 0x3FFFFFFF)
