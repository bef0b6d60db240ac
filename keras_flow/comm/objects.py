"""`broadcast_object` and `all_gather_object`: Python objects, pickled.

Unpickling runs code, so a process unpickles only what a process of its own job has signed: with HMAC-SHA256 (RFC 2104)
and the job's secret, KERAS_FLOW_TOKEN, which `keras-flow launch` makes and passes on. Launchers of others, such as
`mpirun` and `srun`, make none: without it objects that Python writes as literals travel as these, unsigned.
"""

from __future__ import annotations

import ast
import hashlib
import hmac
import math
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_flow import settings
from keras_flow.backends.active import tensor_engine
from keras_flow.comm import algorithms, movements
from keras_flow.comm.group import Group, require_same
from keras_flow.errors import FlowError
from keras_flow.placements import Placement

_SIGNATURE = hashlib.sha256().digest_size
#: in place of a signature: a literal follows
_UNSIGNED = bytes(_SIGNATURE)
#: what a process that may not send its object sends, so that all ranks raise and none waits
_REFUSED = _UNSIGNED + b"?"


@dataclass(frozen=True)
class _Unpicklable:
    """What a process sends in place of an object that it cannot pickle, so that all ranks raise and none waits.

    Attributes:
        kind: the name of the object's class.
        error: why it cannot be pickled.
    """

    kind: str
    error: str


def broadcast_object(value: object, src: int, group: Placement | None = None) -> Any:
    """A Python object of rank `src`, on all ranks.

    Args:
        value: what can be pickled; where this process drives several ranks rank -> object. That of `src` counts.
            Where it drives one, a dict is the object itself, whatever its keys.
            Without KERAS_FLOW_TOKEN (under `mpirun`, `srun`): numbers, texts, bytes and containers of them.
        src: the rank whose object it is.
        group: the ranks that take part.

    Raises:
        FlowError: the object cannot be pickled, or needs a common secret, and processes have none; `src` is not in the
            group.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.broadcast_object({0: "a", 1: "b"}, src=1, group=kf.Placement([0, 1]))
        {0: 'b', 1: 'b'}
    """
    members = Group.of(group, "broadcast_object")
    members.check_member(src, "broadcast_object")
    given = members.objects(value, "broadcast_object")
    if not given:
        return None
    if members.is_local:
        return members.answer(dict.fromkeys(given, given[src]))
    require_same(members, dict.fromkeys(given, f"broadcast_object from {src}"))
    sealed = _sealed(given[src]) if src in given else b""
    opened = _opened(algorithms.broadcast_bytes(members, sealed, src))
    return members.answer(dict.fromkeys(given, opened))


def all_gather_object(value: object, group: Placement | None = None) -> Any:
    """The Python objects of all ranks, on each: a list in the group's order.

    Args:
        value: what can be pickled, as in `broadcast_object`; where this process drives several ranks rank -> object.
        group: the ranks that take part.

    Raises:
        FlowError: an object cannot be pickled, or needs a common secret, and processes have none.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> kf.comm.all_gather_object({0: "a", 1: {"b": 2}}, group=kf.Placement([0, 1]))[0]
        ['a', {'b': 2}]
    """
    members = Group.of(group, "all_gather_object")
    given = members.objects(value, "all_gather_object")
    if not given:
        return None
    if members.is_local:
        return members.answer({rank: [given[each] for each in members.order] for rank in given})
    require_same(members, dict.fromkeys(given, "all_gather_object"))
    engine = tensor_engine()
    arrays = {rank: np.frombuffer(_sealed(each), "uint8").copy() for rank, each in given.items()}
    local = movements.all_gather(arrays, group)
    parts = local if isinstance(local, list) else next(iter(local.values()))
    objects = [_opened(engine.as_numpy(part).tobytes()) for part in parts]
    return members.answer({rank: list(objects) for rank in given})


def _sealed(value: object) -> bytes:
    secret = _secret()
    if secret is None:
        text = repr(value)
        return _UNSIGNED + text.encode() if _is_literal(text, value) else _REFUSED
    try:
        data = pickle.dumps(value)
    except Exception as error:  # whatever an object's own code raises
        data = pickle.dumps(_Unpicklable(type(value).__name__, f"{type(error).__name__}: {error}"))
    return hmac.digest(secret, data, "sha256") + data


class _Floats(ast.NodeTransformer):
    """Makes numbers of `inf` and `nan`, which Python writes for floats and reads as names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def _read(text: str) -> Any:
    """The value of a literal."""
    return ast.literal_eval(_Floats().visit(ast.parse(text, mode="eval")))


def _is_literal(text: str, value: object) -> bool:
    """Whether a text is read as this value; that of an array or of an object of one's own is not."""
    try:
        return _is_same(_read(text), value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _is_same(found: Any, value: Any) -> bool:
    """Whether two literals are equal; a NaN, which does not equal itself, is the same as a NaN."""
    if type(found) is not type(value):
        return False
    if isinstance(found, dict):
        found, value = [*found, *found.values()], [*value, *value.values()]
    if isinstance(found, (list, tuple)):
        return len(found) == len(value) and all(map(_is_same, found, value))
    return found == value or (isinstance(found, float) and math.isnan(found) and math.isnan(value))


def _opened(sealed: bytes) -> Any:
    signature, data, secret = sealed[:_SIGNATURE], sealed[_SIGNATURE:], _secret()
    if secret is None and sealed == _REFUSED:
        raise FlowError(
            "kf.comm: an object that is no number, text, bytes or container of these travels between processes that "
            f"have a common secret: start the job with keras-flow launch, or set {settings.TOKEN} to one text for all "
            "processes of the job"
        )
    if secret is None and hmac.compare_digest(signature, _UNSIGNED):
        return _read(data.decode())
    if secret is None or not hmac.compare_digest(signature, hmac.digest(secret, data, "sha256")):
        raise FlowError(
            f"kf.comm: an object came that no process of this job has signed; is {settings.TOKEN} the same in all?"
        )
    found = pickle.loads(data)
    if isinstance(found, _Unpicklable):
        raise FlowError(f"kf.comm: an object ({found.kind}) cannot be pickled: {found.error}. All ranks raise this")
    return found


def _secret() -> bytes | None:
    token = settings.read(settings.TOKEN)
    return token.encode() if token else None
