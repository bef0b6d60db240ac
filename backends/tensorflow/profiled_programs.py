"""Collectives of the programs that DTensor made, as their graphs have them: bytes, and the names of layers."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import tensorflow as tf
from tensorflow.python.eager import context  # private: there is no public way to functions by their names

from keras_flow.current.models import layer_paths

if TYPE_CHECKING:
    import keras

KINDS = {
    "CollectiveReduceV2": "all_reduce",
    "CollectiveReduceScatterV2": "reduce_scatter",
    "CollectiveGatherV2": "all_gather",
    "CollectiveAllToAllV2": "all_to_all",
    "CollectiveBcastSendV2": "broadcast",
    "CollectiveBcastRecvV2": "broadcast",
}
#: whose layers may be in programs
_models: WeakSet[keras.Model] = WeakSet()


def remember(model: keras.Model) -> None:
    """A step of this model is traced."""
    _models.add(model)


def sizes(program: str) -> dict[str, int]:
    """Bytes of each collective of a program on one rank, of the larger side, by the name of its node.

    Args:
        program: name of the function that DTensor starts; those inside have parts of it as names.
    """
    here = context.context()
    assert here is not None
    names = [name.decode() if isinstance(name, bytes) else name for name in here.list_function_names()]
    found: dict[str, int] = {}
    for name in names:
        if name.lstrip("_") in program:
            nodes = {node.name: node for node in here.get_function_def(name).node_def}
            for node in nodes.values():
                if node.op in KINDS:
                    sender = nodes.get(node.input[0].partition(":")[0].lstrip("^"))
                    found[node.name] = max(_bytes(node), _bytes(sender) if sender is not None else 0)
    return found


def _bytes(node: object) -> int:
    """Bytes of a node's first output; 0 where its shape is not known."""
    attr = node.attr  # type: ignore[attr-defined]
    shapes = attr["_output_shapes"].list.shape if "_output_shapes" in attr else ()
    if not shapes or "T" not in attr or shapes[0].unknown_rank:
        return 0
    elements = math.prod(dim.size for dim in shapes[0].dim)
    return max(0, elements * tf.as_dtype(attr["T"].type).size)


def layer_of(node: str) -> str | None:
    """The path of the layer that a node belongs to, by its scopes, which TensorFlow numbers as they come again."""
    paths = sorted({path for model in _models for path in layer_paths(model)})
    return _layer_of(node, tuple(paths))


@functools.lru_cache(maxsize=4096)
def _layer_of(node: str, paths: Sequence[str]) -> str | None:
    """The longest path that fits; of several that do, one whose parts all came again as often.

    Example:
        >>> _layer_of("gradient_tape/model_1/up_1/MatMul", ("model", "model/up", "model/up_1"))
        'model/up'
        >>> _layer_of("model/up_1/MatMul", ("model", "model/up", "model/up_1"))
        'model/up_1'
    """
    parts = node.removeprefix("gradient_tape/").split("/")
    fitting = []
    for path in paths:
        matches = [
            re.fullmatch(rf"{re.escape(name)}((?:_\d+)?)", part)
            for name, part in zip(path.split("/"), parts, strict=False)
        ]
        if all(matches) and len(matches) == path.count("/") + 1:
            again = {match[1] for match in matches if match is not None}
            fitting.append((len(matches), -len(again), path))
    return max(fitting)[2] if fitting else None
