"""A functional model as one list of calls: the graphs of models inside it are part of it.

Two layers and an addition, `y = x + dense(x)`, are two calls:

    0  dense  (tensor 0) -> tensor 1        tensor 0 is the model's input
    1  add    (tensor 0, tensor 1) -> tensor 2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
from keras import tree

from keras_flow.current import models
from keras_flow.errors import FlowError


@dataclass(frozen=True)
class Ref:
    """A tensor of the graph, where it stands in arguments or outputs."""

    key: int


@dataclass(frozen=True)
class Call:
    """One call of a layer or an operation.

    Attributes:
        operation: the layer or operation.
        args: positional arguments, with a `Ref` for each tensor.
        kwargs: those by name.
        inputs: keys of the tensors in them.
        outputs: keys of the tensors that it returns, flat.
    """

    operation: Any
    args: Any
    kwargs: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def path(self) -> str:
        """The layer's path, or the operation's name."""
        return getattr(self.operation, "path", "") or self.operation.name

    def run(self, tensors: Mapping[int, Any], training: bool | None) -> list[Any]:
        """Compute it from the tensors known so far."""
        kwargs = filled(self.kwargs, tensors) if self.kwargs else {}
        # as a functional model does: what `fit` says goes before what the graph's own calls said
        if training is not None and "training" in getattr(self.operation, "_call_context_args", ()):
            kwargs["training"] = training
        # most calls have one tensor: a walk through structures would take as long as a small layer
        args = [tensors[each.key] if isinstance(each, Ref) else filled(each, tensors) for each in self.args]
        result = self.operation(*args, **kwargs)
        return tree.flatten(result) if isinstance(result, list | tuple | dict) else [result]


@dataclass
class CallGraph:
    """The calls of a model in an order in which they can be computed.

    Attributes:
        calls: in that order.
        tensors: the symbolic tensor of each key.
        inputs: keys of the model's inputs, flat.
        outputs: the model's outputs as it returns them, with a `Ref` for each tensor.
    """

    calls: list[Call] = field(default_factory=list)
    tensors: list[keras.KerasTensor] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: Any = None

    @property
    def output_keys(self) -> tuple[int, ...]:
        """Keys of the model's outputs, flat."""
        return tuple(ref.key for ref in _refs(self.outputs))

    def new(self, tensor: keras.KerasTensor) -> int:
        """A key for a symbolic tensor."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def of(model: keras.Model, uncut: Sequence[keras.Layer] = ()) -> CallGraph:
    """Return the calls of a functional or Sequential model.

    Args:
        model: which.
        uncut: models inside it that are one call each.

    Raises:
        FlowError: it is neither, so that its calls are not known.
    """
    function = models.stock_graph(model)
    if function is None:
        raise FlowError(
            f"model {model.name!r} has a `call` of its own, from which no stages can be cut. Make it by the functional "
            "API, keras.Model(inputs, outputs), with its parts as layers"
        )
    graph = CallGraph()
    keys = [graph.new(tensor) for tensor in function.inputs]
    graph.inputs = tuple(keys)
    known = _walk(graph, function, keys, uncut)
    graph.outputs = _with_refs(function._outputs_struct, known)
    return graph


def _walk(graph: CallGraph, function: Any, keys: Sequence[int], uncut: Sequence[keras.Layer]) -> dict[int, int]:
    """Append the calls of a graph; tensors -> keys."""
    known = {id(tensor): key for tensor, key in zip(function.inputs, keys, strict=True)}
    for depth in sorted(function._nodes_by_depth, reverse=True):
        for node in function._nodes_by_depth[depth]:
            if node.is_input or not all(id(tensor) in known for tensor in node.input_tensors):
                continue
            args, kwargs = (_with_refs(each, known) for each in (node.arguments.args, node.arguments.kwargs))
            inputs = [ref.key for ref in (*_refs(args), *_refs(kwargs))]
            is_whole = any(node.operation is each for each in uncut)
            inner = None if is_whole else _graph_inside(node.operation, kwargs, graph, inputs)
            if inner is not None:
                inside = _walk(graph, inner, inputs, uncut)
                found = [inside[id(tensor)] for tensor in tree.flatten(inner._outputs_struct)]
                known.update(zip(map(id, node.outputs), found, strict=True))
                continue
            outputs = [graph.new(tensor) for tensor in node.outputs]
            known.update(zip(map(id, node.outputs), outputs, strict=True))
            graph.calls.append(Call(node.operation, args, kwargs, tuple(inputs), tuple(outputs)))
    return known


def _graph_inside(operation: Any, kwargs: Mapping[str, Any], graph: CallGraph, inputs: Sequence[int]) -> Any:
    """The graph of a model that is called within the graph; None for layers, and where the call is not plain."""
    inner = models.stock_graph(operation)
    if inner is None:
        return None
    if set(kwargs) - {"training"} or len(inputs) != len(inner.inputs):
        return None
    same = all(len(graph.tensors[key].shape) == len(own.shape) for key, own in zip(inputs, inner.inputs, strict=True))
    return inner if same else None


def units(layer: keras.Layer) -> Iterator[keras.Layer]:
    """A layer, or those of which a model consists that is called as a layer."""
    if models.stock_graph(layer) is None:
        yield layer
        return
    for inner in layer.layers:
        yield from units(inner)


def filled(structure: Any, tensors: Mapping[int, Any]) -> Any:
    """A structure of `Ref`s with the tensors that they name."""
    return tree.map_structure(lambda leaf: tensors[leaf.key] if isinstance(leaf, Ref) else leaf, structure)


def _refs(structure: Any) -> list[Ref]:
    return [leaf for leaf in tree.flatten(structure) if isinstance(leaf, Ref)]


def _with_refs(structure: Any, known: Mapping[int, int]) -> Any:
    """A structure with a `Ref` in the place of each symbolic tensor."""
    return tree.map_structure(
        lambda leaf: Ref(known[id(leaf)]) if isinstance(leaf, keras.KerasTensor) else leaf, structure
    )
