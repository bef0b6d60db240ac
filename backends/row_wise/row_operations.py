"""Do the rows of a batch interact in the operations of a functional model? Read from the table of signatures.

An operation acts row by row where the table has the signature S(0) -> S(0): every tensor of the graph split by rows,
every constant whole, every result split by rows. A rank then computes it on its own rows. An operation that names the
number of rows, as `reshape(x, (8, 4))` does, cannot be given fewer. So each is described anew for another number.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import keras
from keras import tree

from keras_flow.current import keras_places, models
from keras_flow.sbp import Sbp, Split, broadcast
from keras_flow.signatures import OperatorCall, signatures_on_axis
from keras_flow.signatures.registry import SIGNATURE_FUNCTIONS

#: another number of rows, and a length for the other dims that are unknown
_ROWS, _LENGTH = 83, 120
#: classes of operations whose functions have other names
_NAMED_OTHERWISE = {
    "GetItem": "getitem",
    "Conjugate": "conj",
    "LayerNorm": "layer_normalization",
    "RMSNorm": "rms_normalization",
    "BatchNorm": "batch_normalization",
}


@dataclass(frozen=True)
class Interaction:
    """How rows may interact.

    Attributes:
        kind: `"own code"` of the user's; a `"function"` of the user's inside one of Keras's layers; `"along rows"`, an
            axis that is dimension 0; `"state"` of the batch's rows, or that a call assigns; a `"quantization"` by all
            rows; an `"added loss"` over all rows; a `"shape"` without the rows; or `"unknown"`, for what is in no
            table.
        text: who, and why, as the beginning of a sentence.
        operation: the class of the operation of a functional model, where it is one.
    """

    kind: Literal["own code", "function", "along rows", "state", "quantization", "added loss", "shape", "unknown"]
    text: str
    operation: str = ""


def touches_rows(axes: object, rank: int | None) -> bool:
    """Whether axes of a tensor of so many dims (None: it is not known) are that of the rows, or may be."""
    flat = [int(axis) for axis in tree.flatten(axes) if axis is not None]
    # without a rank only the last dim is known not to be that of the rows
    return any(axis == 0 or (axis == -rank if rank is not None else axis < -1) for axis in flat)


def of_operations(model: keras.Layer) -> Iterator[Interaction]:
    """The interactions of rows in the graph of a functional model, its layers left out; none in other layers."""
    graph = models.graph_of(model)
    if graph is None:
        return
    # an added loss is a number of the whole batch already
    if getattr(graph, "_losses_override", None) or graph._losses:
        yield Interaction("added loss", f"model {graph.name!r} calls add_loss, which is over all rows")
    # an input without dims has no rows, which differs from an unknown number of them (None)
    rows = {tensor.shape[0] if len(tensor.shape) else () for tensor in tree.flatten(graph.inputs)}
    if len(rows) > 1 or () in rows:
        yield Interaction("shape", f"the inputs of {graph.name!r} have different numbers of rows")
    for nodes in graph._nodes_by_depth.values():
        for node in nodes:
            operation = node.operation
            is_layer = isinstance(operation, keras.Layer)
            # an output that lost the batch dim has mixed the rows on the way
            if any(not len(x.shape) or x.shape[0] not in rows for x in tree.flatten(node.output_tensors)):
                text = f"the output of {operation.name!r} in {graph.name!r} has no batch dimension"
                yield Interaction("shape", text, "" if is_layer else type(operation).__name__)
            elif is_layer:
                if _has_constant_rows(operation, node.arguments.args, node.arguments.kwargs):
                    yield Interaction("shape", f"layer {operation.name!r} is given a constant that may have rows")
            elif (found := of_operation(operation, node.arguments)) is not None:
                yield found


def without_rows(layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Names of tensors in a call of one of Keras's layers, or KerasHub's, that have too few dims to have rows."""
    given = _by_name(layer, args, kwargs)
    if not given.keys() & {"attention_mask", "positions"}:
        return []
    # after dims of rows and heads, a mask has those of the queries and those of the keys
    axes = getattr(layer, "attention_axes", None) or range(1, _dims(next(iter(given.values()))) - 1)
    least = {"attention_mask": 1 + 2 * len(axes), "positions": 2}
    return [name for name, dims in least.items() if 0 < _dims(given.get(name)) < dims]


def _has_constant_rows(layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a layer in a graph is given a constant, other than by those names, whose first dim may be the rows."""
    given = _by_name(layer, args, kwargs)
    found = tree.flatten([given[name] for name in given.keys() - without_rows(layer, args, kwargs)])
    return any(_dims(leaf) and leaf.shape[0] != 1 and not isinstance(leaf, keras.KerasTensor) for leaf in found)


def _by_name(layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(layer._call_signature.parameters, args, strict=False)), **kwargs}


def _dims(value: Any) -> int:
    return len(getattr(value, "shape", ()))


def of_operation(operation: keras.Operation, arguments: Any) -> Interaction | None:
    """The interaction of rows in one operation of a graph, or None where it acts row by row.

    Args:
        operation: one of Keras's, or of the user's.
        arguments: the arguments of its call: `args` and `kwargs`, tensors of the graph among them.
    """
    name = type(operation).__name__
    if not keras_places.is_of_keras(type(operation)) or _operator(name) not in SIGNATURE_FUNCTIONS:
        return Interaction("unknown", f"operation {name} is not known to act row by row", name)
    if _splits_rows(operation, arguments):
        return None
    ranks = {len(tensor.shape) for tensor in arguments.keras_tensors}
    why = "joins tensors of different ranks, so rows may meet" if len(ranks) > 1 else "works along dimension 0"
    return Interaction("along rows", f"operation {name} {why}", name)


def _operator(name: str) -> str:
    """The name in the table of signatures of an operation's class.

    >>> _operator("LogSoftmax"), _operator("Log1p"), _operator("GetItem")
    ('log_softmax', 'log1p', 'getitem')
    """
    return _NAMED_OTHERWISE.get(name) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _splits_rows(operation: keras.Operation, arguments: Any) -> bool:
    """Whether the operation has the signature of rows, for another number of them and for a single one."""
    # without an axis `squeeze` keeps rows, but not a rank's only one
    alone, described = _described(operation, arguments, 1), _described(operation, arguments, _ROWS)
    if alone is None or described is None:
        return False
    call, by_rows = described
    return any(
        signature.inputs == by_rows and all(part == Split(0) for part in signature.outputs)
        for signature in signatures_on_axis(call)
    )


def _described(operation: keras.Operation, arguments: Any, rows: int) -> tuple[OperatorCall, tuple[Sbp, ...]] | None:
    """The operation on so many rows, and the layouts of its inputs where rows are split; None where that cannot be."""

    def with_rows(leaf: Any) -> Any:
        if not isinstance(leaf, keras.KerasTensor):
            return leaf
        return keras.KerasTensor((rows, *(length or _LENGTH for length in leaf.shape[1:])), leaf.dtype)

    args, kwargs = cast("Any", tree.map_structure(with_rows, (arguments.args, arguments.kwargs)))
    try:
        outputs = tree.flatten(operation.compute_output_spec(*args, **kwargs))
    except Exception:
        # whatever Keras or the engine raises: it cannot be given this number of rows
        return None
    shapes = tuple(tuple(output.shape) for output in outputs)
    if any(shape[:1] != (rows,) for shape in shapes):
        return None
    bound = inspect.signature(operation.call).bind(*args, **kwargs).arguments
    tensors = {name: [leaf for leaf in tree.flatten(value) if hasattr(leaf, "shape")] for name, value in bound.items()}
    leaves = [(name, leaf) for name, found in tensors.items() for leaf in found]
    # Keras's operations keep the arguments of the function in `keras.ops` as attributes of the same names
    options = {name: value for name, value in vars(operation).items() if not name.startswith("_")}
    options |= {name: value for name, value in bound.items() if not tensors[name]}
    if "key" in bound:
        options["key"] = _entries(bound["key"], len(leaves[0][1].shape))
    operator = _operator(type(operation).__name__)
    inputs, names = tuple(tuple(leaf.shape) for _, leaf in leaves), tuple(name for name, _ in leaves)
    by_rows = tuple(Split(0) if isinstance(leaf, keras.KerasTensor) else broadcast for _, leaf in leaves)
    return OperatorCall(operator, inputs, shapes, options, names, ranks=2), by_rows


def _entries(key: Any, ndim: int) -> tuple[Any, ...]:
    """An index as the table has it: a number or a slice for each dim of the tensor."""
    # None makes a new dim
    entries = [entry for entry in (key if isinstance(key, tuple) else (key,)) if entry is not None]
    place = entries.index(Ellipsis) if Ellipsis in entries else len(entries)
    rest = entries[place + 1 :]
    return (*entries[:place], *[slice(None)] * (ndim - place - len(rest)), *rest)
