"""`send` and `recv`: one rank to another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.collective_engine import Counts
from keras_flow.backends.rendezvous import meeting
from keras_flow.comm import repeated
from keras_flow.comm.group import (
    Group,
    as_tensor,
    count_call,
    dtype_name,
    empty,
    is_compared,
    note_compared,
    shape_of,
    shape_of_words,
    shape_words,
)
from keras_flow.errors import FlowError
from keras_flow.tensors.dtypes import standard_name

#: words of 32 bits that tell the dtype and shape of what will be sent
_NAME_WORDS, _WORDS = 4, 16
#: kinds of message between two ranks: the first has a header, which a `recv` that knows the shape does not expect
_TOLD, _KNOWN = "send that tells dtype and shape", "send of a dtype and shape that both know"


def send(x: object, dst: int, send_meta: bool = True) -> None:
    """Send a tensor to rank `dst` of another process, which calls `recv`.

    Args:
        x: this rank's tensor; where this process drives several ranks `{rank: tensor}`, the rank that sends.
        dst: the rank that receives.
        send_meta: tell it dtype and shape first; not where its `recv` names them.

    Raises:
        FlowError: `dst` is a rank of this process, or none of the job.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> if kf.env.process_count() > 1:  # between processes only
        ...     kf.comm.send([1, 2], dst=1) if kf.env.get_rank() == 0 else kf.comm.recv(src=0)
    """
    if not send_meta and (run := repeated.find("send", (dst,), None, x)):
        run(x)
        return
    engine = tensor_engine()
    local = engine.world().local_ranks
    if isinstance(x, Mapping):
        if len(x) != 1 or next(iter(x)) not in local:
            raise FlowError(f"kf.comm.send sends from one rank of this process ({list(local)}); got {sorted(x)}")
        ((source, x),) = x.items()
    elif len(local) > 1:
        raise FlowError(f"this process drives ranks {list(local)}: kf.comm.send({{{local[0]}: x}}, dst={dst})")
    else:
        source = min(local)
    _check_other(dst, "send", "dst")
    _meet(source, dst, _TOLD if send_meta else _KNOWN)
    value = as_tensor(x, source, "send")
    if not send_meta and (run := repeated.keep("send", (dst,), None, _pair(source, dst, source), {source: value})):
        run(value)
        return
    if send_meta:
        name = np.frombuffer(dtype_name(value).encode().ljust(4 * _NAME_WORDS), "int32")
        _moved(source, dst, source, engine.put(np.concatenate([name, shape_words(shape_of(value))]), source), _WORDS)
    with engine.on_rank(source):
        flat = engine.reshape(value, (-1,))
    _moved(source, dst, source, flat, math.prod(shape_of(value)))


def recv(src: int, shape: tuple[int, ...] | None = None, dtype: str | None = None, rank: int | None = None) -> Any:
    """The tensor that rank `src`, of another process, sends with `send`.

    Args:
        src: the rank that sends.
        shape: its shape, where the sender has `send_meta=False`; else None.
        dtype: its dtype; named exactly when `shape` is.
        rank: which rank receives, where this process drives several.

    Raises:
        FlowError: `src` is a rank of this process, or none of the job; one of shape and dtype is missing.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> if kf.env.process_count() > 1:  # between processes only
        ...     kf.comm.send([1, 2], dst=1) if kf.env.get_rank() == 0 else kf.comm.recv(src=0)
    """
    shape = None if shape is None else tuple(shape)
    how = (src, shape, dtype)
    if dtype is not None and rank is None and (run := repeated.find("recv", how, None, None)):
        return run(None)
    engine = tensor_engine()
    local = engine.world().local_ranks
    if rank is None:
        if len(local) > 1:
            raise FlowError(f"this process drives ranks {list(local)}: kf.comm.recv(src={src}, rank={local[0]})")
        rank = min(local)
    if rank not in local:
        raise FlowError(f"kf.comm.recv: rank {rank} is not of this process, which drives {list(local)}")
    if (shape is None) != (dtype is None):
        raise FlowError("kf.comm.recv takes shape and dtype, or neither: then the sender tells them")
    _check_other(src, "recv", "src")
    _meet(src, rank, _TOLD if shape is None else _KNOWN)
    if shape is not None and dtype is not None:
        if run := repeated.keep("recv", how, None, _pair(src, rank, rank), {rank: None}):
            return run(None)
        dtype = standard_name(dtype)
    else:
        words = engine.as_numpy(_moved(src, rank, rank, empty("int32", rank), _WORDS))
        dtype, shape = words[:_NAME_WORDS].tobytes().decode().rstrip(), shape_of_words(words[_NAME_WORDS:])
    flat = _moved(src, rank, rank, empty(dtype, rank), math.prod(shape))
    with engine.on_rank(rank):
        return engine.reshape(flat, tuple(shape))


def _check_other(rank: int, call: str, name: str) -> None:
    world = tensor_engine().world()
    if not 0 <= rank < world.size:
        raise FlowError(f"kf.comm.{call}: {name}={rank} is no rank of the job, which has 0 to {world.size - 1}")
    if rank in world.local_ranks:
        raise FlowError(f"kf.comm.{call}: {name}={rank} is a rank of this process: there is nothing to send")


def _meet(source: int, target: int, call: str) -> None:
    """Let the two processes meet before the first message of this kind from one rank to the other."""
    count_call(_processes(source, target))
    if not is_compared((source, target), call):
        words = f"kf.comm.{call}, from rank {source} to rank {target}, and its recv"
        meeting.meet_some(words, _processes(source, target))
        note_compared((source, target), call)


def _processes(*ranks: int) -> tuple[int, ...]:
    return tuple(sorted(tensor_engine().world().process_of(rank) for rank in ranks))


def _pair(source: int, target: int, here: int) -> Group:
    """Return the group of two ranks, in the same order on both; `here` is the rank of this process."""
    pair = (min(source, target), max(source, target))
    return Group(pair, (here,), pair)


def _moved(source: int, target: int, here: int, flat: Any, count: int) -> Any:
    """Run an exchange between two ranks, of which one sends."""
    pair = _pair(source, target, here).ranks
    table = [[count if (sender, receiver) == (source, target) else 0 for receiver in pair] for sender in pair]
    with meeting.waiting_for(_processes(source, target), f"kf.comm.{'send' if here == source else 'recv'}"):
        return tensor_engine().exchange(pair, {here: flat}, Counts.of(table)).results()[here]
