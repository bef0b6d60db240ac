"""`kf.comm` on TensorFlow: plain operations within a process, collectives of its runtime between processes.

The operations of all ranks of a process are in one function, so that they run side by side.
These operations are raw ones (`tf.raw_ops.Collective...V2`): TensorFlow has no public collective without a strategy.
Between processes elements of other dtypes than those that an operation knows travel as words of 32 bits.
"""

from __future__ import annotations

import functools
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf
from tensorflow.python.eager import context, record

from keras_flow.backends.collective_engine import Counts, Pending
from keras_flow.backends.tensorflow.devices import rank_devices
from keras_flow.current import joining
from keras_flow.errors import FlowError

#: what the runtime's all-reduce knows
REDUCED = frozenset([tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64])
#: and its all-gather
GATHERED = frozenset([tf.float32, tf.float64, tf.float16, tf.int32, tf.int64])
_OPS = {"sum": "Add", "min": "Min", "max": "Max", "product": "Mul"}
_FOLDS = {"sum": tf.reduce_sum, "min": tf.reduce_min, "max": tf.reduce_max, "product": tf.reduce_prod}


def key_of(value: object, rank: int) -> tuple[Any, ...] | None:
    """Return dtype and shape of a tensor that has values, where no tape sees operations.

    TensorFlow copies it from another device itself.
    """
    if not isinstance(value, tf.Tensor) or not hasattr(value, "numpy") or _is_followed():
        return None
    return value.dtype, shape(value)


def exchange(ranks: tuple[int, ...], values: Mapping[int, tf.Tensor], counts: Counts) -> Pending:
    """Parts of each rank's flat array for each member."""
    if len(values) == len(ranks):
        parts = {rank: tf.split(values[rank], row) for rank, row in zip(ranks, counts.table, strict=True)}
        arrived = {rank: _on(rank, [parts[sender][place] for sender in ranks]) for place, rank in enumerate(ranks)}
        return Pending(lambda: arrived)
    arrived = _run("all_to_all" if counts.is_even else "exchange", ranks, values, counts.table)
    return Pending(lambda: arrived)


def gather_all(ranks: tuple[int, ...], values: Mapping[int, tf.Tensor], counts: Sequence[int]) -> Pending:
    """The runtime's all-gather where sizes are equal; otherwise an exchange, which pads nothing."""
    if len(values) == len(ranks):
        arrived = {rank: _on(rank, [values[sender] for sender in ranks]) for rank in ranks}
        return Pending(lambda: arrived)
    if len(set(counts)) > 1:
        copies = {rank: _on(rank, [value] * len(ranks)) for rank, value in values.items()}
        return exchange(ranks, copies, Counts.of([[count] * len(ranks) for count in counts]))
    arrived = _run("gather", ranks, values) if counts[0] else dict(values)
    return Pending(lambda: arrived)


def native(kind: str, ranks: tuple[int, ...], values: Mapping[int, tf.Tensor], how: str | int) -> Pending | None:
    """Between processes the runtime's all-reduce and broadcast."""
    value = next(iter(values.values()))
    is_empty = 0 in shape(value)
    if len(values) == len(ranks) or is_empty or (kind == "all_reduce" and value.dtype not in REDUCED):
        return None
    arrived = _run(f"{kind} {how}", ranks, values)
    return Pending(lambda: arrived)


def fold(rows: tf.Tensor, op: str) -> tf.Tensor:
    """Rows [ranks, elements] as one, in their dtype."""
    if rows.dtype == tf.bool:
        return tf.reduce_any(rows, 0) if op in ("sum", "max") else tf.reduce_all(rows, 0)
    return _FOLDS[op](rows, axis=0)


def reshape(value: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Return the tensor in another shape."""
    # an operation takes longer than the question
    has_it = value.shape.as_list() == list(shape) or (shape == (-1,) and value.shape.rank == 1)
    return value if has_it else tf.reshape(value, shape)


def join(flat: Sequence[tf.Tensor]) -> tf.Tensor:
    """Join flat tensors, one after the other."""
    return tf.concat(flat, 0)


def shape(value: tf.Tensor) -> tuple[int, ...]:
    """Return the shape by `as_list`: going through a `TensorShape` takes twenty times as long."""
    return cast("tuple[int, ...]", tuple(value.shape.as_list()))


def without_gradient(value: tf.Tensor) -> tf.Tensor:
    """A tape that saw operations of programs would ask for a gradient of each, and fail."""
    return tf.stop_gradient(value)


def is_recorded(values: Sequence[tf.Tensor]) -> bool:
    """Whether a tape sees operations."""
    if not tf.executing_eagerly():
        raise FlowError(
            "kf.comm is called inside a tf.function (or a compiled Keras step), where ranks have no values yet. Call "
            "it outside, or compile with run_eagerly=True"
        )
    return _is_followed()


def with_gradient(
    forward: Callable[[Sequence[Any]], list[Any]],
    backward: Callable[[Sequence[Any]], list[Any]],
    values: Sequence[Any],
) -> list[Any]:
    """Use `tf.custom_gradient`."""

    @tf.custom_gradient
    def function(*given: tf.Tensor):
        def pullback(*cotangents: tf.Tensor) -> list[tf.Tensor]:
            return backward(cotangents)

        return tuple(forward(given)), pullback

    return list(function(*values))


def _on(rank: int, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Parts joined on the device of a rank; TensorFlow copies what is elsewhere."""
    with tf.device(rank_devices()[rank]):
        return tf.concat([tf.identity(part) for part in parts], 0)


def _length(flat: tf.Tensor) -> int:
    """Elements of a flat tensor, which are known."""
    return cast("int", flat.shape[0])


def _words_of(count: int, dtype: tf.DType) -> int:
    return -(-count * dtype.size // 4)


def _to_words(flat: tf.Tensor) -> tf.Tensor:
    """The memory of a flat tensor as int32, padded."""
    if flat.dtype == tf.bool:
        flat = tf.cast(flat, tf.uint8)
    if flat.dtype.size < 4:
        per_word = 4 // flat.dtype.size
        # zeros of any dtype, halves of 8 bits among them
        flat = tf.concat([flat, tf.cast(tf.zeros(-_length(flat) % per_word), flat.dtype)], 0)
        flat = tf.reshape(flat, [-1, per_word])
    return tf.reshape(tf.bitcast(flat, tf.int32), [-1])


def _from_words(words: tf.Tensor, count: int, dtype: tf.DType) -> tf.Tensor:
    stored = tf.uint8 if dtype == tf.bool else dtype
    if stored.size > 4:
        words = tf.reshape(words, [-1, stored.size // 4])
    flat = tf.reshape(tf.bitcast(words, stored), [-1])[:count]
    return tf.cast(flat, tf.bool) if dtype == tf.bool else flat


class _TimeLimit:
    """Ends the collectives of this process when one has waited for KERAS_FLOW_TIMEOUT: one thread looks at all.

    TensorFlow's own `timeout_seconds` keeps two threads for each operation until its time is over, and a process that
    calls one after the other runs out of them.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._begun: tuple[float, str] | None = None
        self._ended = ""

    def run(self, what: str, function: Callable[..., Sequence[tf.Tensor]], given: Sequence[tf.Tensor]) -> Any:
        """Call what waits for other processes.

        Raises:
            FlowError: it has waited too long.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="keras_flow.comm", daemon=True)
            self._thread.start()
        self._begun = (time.monotonic(), what)
        try:
            return function(*given)
        except tf.errors.OpError as error:
            raise FlowError(self._ended) if self._ended else error from error
        finally:
            self._begun = None

    def _look(self) -> None:
        limit = joining.waiting_seconds()
        while True:
            time.sleep(min(1.0, limit / 4))
            begun = self._begun
            if begun is not None and time.monotonic() - begun[0] > limit:
                self._ended = (
                    f"{begun[1]} waited {limit:g} s (KERAS_FLOW_TIMEOUT) for a process that did not call it. "
                    "Every process of the group must make the same calls; this one has no collectives any more"
                )
                # private: TensorFlow's strategies end the collectives of a process in this way, too
                cast("Any", context.context()).abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, self._ended)
                return


_limit = _TimeLimit()


def _is_followed() -> bool:
    """Whether a tape sees operations, or a program is traced. Private, since TensorFlow has no public question."""
    return record.could_possibly_record() or not tf.executing_eagerly()


def _run(
    kind: str, ranks: tuple[int, ...], values: Mapping[int, tf.Tensor], table: Sequence[Sequence[int]] = ()
) -> dict[int, tf.Tensor]:
    """A collective between processes."""
    mine, devices = tuple(values), rank_devices()
    given = list(values.values())
    if _is_followed():
        given = [without_gradient(value) for value in given]  # it is that of `with_gradient`
    shapes = tuple(shape(value) for value in given)
    function = _function(kind, ranks, mine, given[0].dtype, shapes, tuple(map(tuple, table)))
    with tf.device(devices[mine[0]]):
        results = run_within_limit(f"kf.comm: {kind.partition(' ')[0]}", function, given)
    if len(mine) == 1:
        return {mine[0]: results[0]}
    out = {}
    for rank, value in zip(mine, results, strict=True):
        with tf.device(devices[rank]):
            out[rank] = tf.identity(value)
    return out


@functools.lru_cache(maxsize=1024)
def _function(
    kind: str,
    ranks: tuple[int, ...],
    mine: tuple[int, ...],
    dtype: tf.DType,
    shapes: tuple[tuple[int, ...], ...],
    table: tuple[tuple[int, ...], ...],
):
    """The function of a collective: one operation for each rank of this process, which run side by side.

    Args:
        kind: as in `operation`.
        ranks, mine: the group, and those of it that are of this process.
        dtype, shapes: that of all tensors, and those of the tensors of this process's ranks.
        table: `Counts.table` of an exchange.
    """
    devices = rank_devices()

    def run(*given: tf.Tensor) -> tuple[tf.Tensor, ...]:
        out = []
        for rank, value in zip(mine, given, strict=True):
            with tf.device(devices[rank]):
                out.append(operation(kind, ranks, rank, value, table))
        return tuple(out)

    # not tf.function: it passes every output through the first device
    return tf.compat.v1.wrap_function(run, [tf.TensorSpec(shape, dtype) for shape in shapes])


def operation(
    kind: str, ranks: tuple[int, ...], rank: int, value: tf.Tensor, table: Sequence[Sequence[int]] = ()
) -> tf.Tensor:
    """The operation of one rank in a program, on whose device it is.

    Args:
        kind: `"all_reduce"` or `"broadcast"` with how, or `"gather"`, `"exchange"` or `"all_to_all"`.
        ranks: the group.
        rank: the one.
        value: its tensor.
        table: `Counts.table` of an exchange; an all-to-all sends equal parts.
    """
    what, _, how = kind.partition(" ")
    if what == "exchange":
        return exchanged(ranks, rank, tf.split(value, table[ranks.index(rank)]), table)
    dtype = value.dtype
    flat = value if value.shape.rank == 1 else tf.reshape(value, [-1])  # each operation of a program costs time
    ordered: dict[str, Any] = {"ordering_token": [], "is_stateless": False}
    if what == "all_reduce":
        keys = _keys(ranks, f"{kind} {dtype.name} {_length(flat)}")
        reduced = tf.raw_ops.CollectiveReduceV2(input=flat, merge_op=_OPS[how], final_op="Id", **ordered, **keys)
        return reduced if value.shape.rank == 1 else tf.reshape(reduced, value.shape)
    if what == "all_to_all":
        return _exchanged_evenly(ranks, flat)
    if what == "gather" and dtype in GATHERED:
        keys = _keys(ranks, f"{kind} {dtype.name} {_length(flat)}")
        return tf.raw_ops.CollectiveGatherV2(input=flat, **ordered, **keys)
    is_known = what == "broadcast" and dtype in GATHERED
    words = flat if is_known else _to_words(flat)
    keys = _keys(ranks, f"{kind} {words.dtype.name} {_length(words)}")
    if what == "gather":
        got = tf.raw_ops.CollectiveGatherV2(input=words, **ordered, **keys)
        if _length(flat) * dtype.size % 4 == 0:  # nothing is padded
            return _from_words(got, len(ranks) * _length(flat), dtype)
        return _joined(tf.split(got, len(ranks)), [_length(flat)] * len(ranks), dtype)
    if rank == int(how):
        got = tf.raw_ops.CollectiveBcastSendV2(input=words, **keys)
    else:
        got = tf.raw_ops.CollectiveBcastRecvV2(T=words.dtype, shape=tf.shape(words), **keys)
    got = got if is_known else _from_words(got, _length(flat), dtype)
    return got if value.shape.rank == 1 else tf.reshape(got, value.shape)


def _joined(pieces: Sequence[tf.Tensor], counts: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Words of several members as elements, one after the other."""
    found = [_from_words(piece, count, dtype) for piece, count in zip(pieces, counts, strict=True) if count]
    if not found:
        return tf.zeros([0], dtype)
    return tf.concat(found, 0) if len(found) > 1 else found[0]


def _exchanged_evenly(ranks: tuple[int, ...], flat: tf.Tensor) -> tf.Tensor:
    """Equal parts for each member: an all-to-all."""
    count = len(ranks)
    if flat.dtype in REDUCED:  # as it is
        rows, what = tf.reshape(flat, [count, -1]), f"{flat.dtype.name} {_length(flat)}"
    else:
        parts = [_to_words(part) for part in tf.split(flat, count)]
        rows, what = tf.stack(parts), f"words {count * _length(parts[0])}"
    keys = _keys(ranks, f"all_to_all {what}")
    got = tf.raw_ops.CollectiveAllToAllV2(input=rows, ordering_token=[], is_stateless=False, **keys)
    if flat.dtype in REDUCED:
        return tf.reshape(got, [-1])
    return _joined(tf.unstack(got, count), [_length(flat) // count] * count, flat.dtype)


def exchanged(
    ranks: tuple[int, ...], rank: int, pieces: Sequence[tf.Tensor], table: Sequence[Sequence[int]]
) -> tf.Tensor:
    """Flat pieces for each member, and what they send, joined: broadcasts in groups of two, which pad nothing."""
    place, count = ranks.index(rank), len(ranks)
    dtype, parts = pieces[0].dtype, [_to_words(piece) for piece in pieces]
    counts = [row[place] for row in table]
    sizes = [_words_of(count, dtype) for count in counts]
    # of itself, and of who sends nothing
    found = {other: parts[place] if other == place else tf.zeros([0], tf.int32) for other in range(count)}
    sent = []
    for other, member in enumerate(ranks):
        if other == place:
            continue
        if table[place][other]:
            sent.append(_send(parts[other], rank, member))
        if sizes[other]:
            found[other] = _received(sizes[other], member, rank)
    with tf.control_dependencies(sent):  # a function drops operations that nobody reads
        return _joined([tf.identity(found[other]) for other in range(count)], counts, dtype)


def send(flat: tf.Tensor, sender: int, receiver: int, what: str) -> tf.Tensor:
    """In a program of the sender's process: send a flat tensor to a rank of another one, which runs `received`.

    Args:
        what: tells it from others of the same size between the two that are on their way at the same time.
    """
    return _send(_to_words(flat), sender, receiver, what)


def received(count: int, dtype: tf.DType, sender: int, receiver: int, what: str) -> tf.Tensor:
    """In a program of the receiver's process: what a rank of another one sends."""
    return _from_words(_received(_words_of(count, dtype), sender, receiver, what), count, dtype)


def run_within_limit(what: str, function: Callable[..., Sequence[tf.Tensor]], given: Sequence[tf.Tensor]) -> Any:
    """Call a program that waits for other processes: at most KERAS_FLOW_TIMEOUT."""
    return _limit.run(what, function, given)


def _send(words: tf.Tensor, sender: int, receiver: int, what: str = "") -> tf.Tensor:
    keys = _keys((sender, receiver), f"send {what}{_length(words)}")
    return tf.raw_ops.CollectiveBcastSendV2(input=words, **keys)


def _received(size: int, sender: int, receiver: int, what: str = "") -> tf.Tensor:
    keys = _keys((sender, receiver), f"send {what}{size}")
    return tf.raw_ops.CollectiveBcastRecvV2(T=tf.int32, shape=[size], **keys)


def _keys(ranks: tuple[int, ...], what: str) -> dict[str, Any]:
    """Keys by which the runtime finds the members of a group, and tells its collectives apart: the same on all."""
    return {
        "group_size": len(ranks),
        "group_key": _key(f"group {ranks}"),
        "instance_key": _key(f"{ranks} {what}"),
        "communication_hint": "ring",
    }


def _key(text: str) -> int:
    # the upper half of positive numbers: strategies and DTensor count from below
    return 0x40000000 | (zlib.crc32(text.encode()) & 0x3FFFFFFF)
