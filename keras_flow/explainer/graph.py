"""The calls of a model's layers, in order.

A functional or sequential model has a graph to read them from. A subclassed model or layer has none: it is called
once on symbolic tensors, and the calls of the layers inside it are recorded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import keras
from keras import tree

from keras_flow.current import models
from keras_flow.current.keras_places import compute_output_spec
from keras_flow.current.recorded_calls import recorded_by
from keras_flow.errors import FlowError

#: the length assumed where a shape has `None`
UNKNOWN = 128


@dataclass(frozen=True)
class Spec:
    """A tensor between calls."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer or operation.

    Attributes:
        layer: the layer, or the operation of a functional model.
        path: its path.
        inputs: keys of tensors, as `tree.flatten` has them: those that are given by name in the order of their names.
        outputs: keys of tensors.
        given: argument of `call` -> its value where it is no tensor, or the key of the tensor.
    """

    layer: Any  # a keras.Operation, of a class that its function in layer_costs knows
    path: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Graph:
    """Calls in order and the tensors between them.

    Attributes:
        batch: rows of a batch.
        calls: in order of execution.
        tensors: key -> shape and dtype.
        inputs: keys of the model's inputs.
        outputs: keys of the model's outputs.
        notes: what had to be assumed.
    """

    batch: int
    calls: list[LayerCall] = field(default_factory=list)
    tensors: dict[int, Spec] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    notes: dict[str, None] = field(default_factory=dict)

    def is_without_rows(self, call: LayerCall) -> bool:
        """Whether no input of the model goes into what a call makes, as into positions; of a graph that is complete."""
        return bool(call.outputs) and self._without_rows.issuperset(call.outputs)

    @functools.cached_property
    def _without_rows(self) -> frozenset[int]:
        found: set[int] = set()
        for call in self.calls:
            if found.issuperset(call.inputs):
                found |= {*call.outputs}
        return frozenset(found)

    def new(self, tensor: object) -> int:
        """A key for a symbolic tensor."""
        # numbers in the order of appearance; symbolic tensors have no names of their own
        key = len(self.tensors)
        shape = tuple(tensor.shape)  # type: ignore[attr-defined]
        if any(length is None for length in shape[1:]):
            self.notes[f"a length that the model leaves open (None) is taken as {UNKNOWN}; give keras.Input yours"] = (
                None
            )
        rows = [self.batch if length is None and dim == 0 else length for dim, length in enumerate(shape)]
        dtype = keras.backend.standardize_dtype(tensor.dtype)  # type: ignore[attr-defined]
        self.tensors[key] = Spec(tuple(UNKNOWN if length is None else int(length) for length in rows), dtype)
        return key


def graph_of(model: keras.Model, batch: int, is_leaf: Callable[[object], bool]) -> Graph:
    """The calls of a built model on a batch of `batch` rows.

    Args:
        model: the model.
        batch: rows.
        is_leaf: whether a layer is one call, whose inner layers are not looked at.

    Raises:
        FlowError: the model is not built, or cannot be called symbolically.
    """
    graph = Graph(batch)
    function = models.graph_of(model)
    if function is not None:
        keys = [graph.new(tensor) for tensor in function._inputs]
        graph.inputs = tuple(keys)
        graph.outputs = tuple(_walk(graph, function, keys, is_leaf))
        return graph
    if not model.built:
        raise FlowError(_not_built(model))
    # private: the shapes that `build` was given have no public name (Keras 3.15)
    shapes = getattr(model, "_build_shapes_dict", None)
    if not shapes:
        raise FlowError(_not_built(model))
    # a subclassed model knows the shapes it was built with, not those of a batch
    symbols = tree.map_shape_structure(
        lambda shape: keras.KerasTensor((batch, *shape[1:]), dtype=model.input_dtype), next(iter(shapes.values()))
    )
    flat = tree.flatten(symbols)
    graph.inputs = tuple(graph.new(tensor) for tensor in flat)
    known = {id(tensor): key for tensor, key in zip(flat, graph.inputs, strict=True)}
    graph.outputs = tuple(_record(graph, model, (symbols,), {}, known, list(graph.inputs), is_leaf))
    return graph


def _not_built(model: keras.Model) -> str:
    return (
        f"model {model.name!r} is not built, so its variables are not known: give its first layer a keras.Input, call "
        "model.build((None, ...)) with the shape of a batch, or call it on one batch, and ask again"
    )


def _walk(graph: Graph, function: keras.Model, keys: list[int], is_leaf: Callable[[object], bool]) -> list[int]:
    """Append the calls of a functional model; returns the keys of its outputs."""
    known = {id(tensor): key for tensor, key in zip(function._inputs, keys, strict=True)}
    # Keras counts depth from the outputs, so the deepest nodes run first
    for depth in sorted(function._nodes_by_depth, reverse=True):
        for node in function._nodes_by_depth[depth]:
            if node.is_input:
                continue
            operation = node.operation
            inputs = [known[id(tensor)] for tensor in node.input_tensors]
            outputs = node.output_tensors
            args, kwargs = node.arguments.args, node.arguments.kwargs
            inner = models.graph_of(operation)
            if inner is not None:  # it is also given the masks of its inputs
                symbols = tree.flatten(_given(operation, args, kwargs, lambda leaf: leaf)["inputs"])
                results = _walk(graph, inner, [known[id(tensor)] for tensor in symbols], is_leaf)
            # a layer whose inside is not looked into, because its cost is known as a whole
            elif is_leaf(operation):
                results = [graph.new(tensor) for tensor in outputs]
                given = _given(operation, args, kwargs, lambda leaf, known=known: _known(graph, known, leaf))
                graph.calls.append(LayerCall(operation, path_of(operation), tuple(inputs), tuple(results), given))
            else:
                at = {id(tensor): known[id(tensor)] for tensor in node.input_tensors}
                results = _record(graph, operation, args, kwargs, at, inputs, is_leaf)
            known |= {id(tensor): key for tensor, key in zip(outputs, results, strict=True)}
    return [known[id(tensor)] for tensor in function._outputs]


def _known(graph: Graph, known: dict[int, int], tensor: object) -> int:
    """The key of an argument in a functional model; an array (`x + ops.arange(9)`) is made of nothing, as in `_key`."""
    if id(tensor) in known:
        return known[id(tensor)]
    key = graph.new(tensor)
    _note_between(graph, key)
    return key


def _note_between(graph: Graph, key: int, sources: tuple[int, ...] = ()) -> None:
    """Append the plain code that makes a tensor of others, or of nothing."""
    graph.calls.append(LayerCall(_BETWEEN, "(code between layers)", sources, (key,)))


def _given(layer: Any, args: tuple, kwargs: dict, key_of: Callable[[object], object]) -> dict[str, Any]:
    """Arguments of a call by name, tensors as their keys; none where they do not fit `call`."""
    try:
        given = inspect.signature(layer.call).bind_partial(*args, **kwargs).arguments
    except (AttributeError, TypeError, ValueError):
        return {}
    return {name: key_of(value) if _is_tensor(value) else value for name, value in given.items()}


def path_of(operation: object) -> str:
    """The path of a layer; the name of an operation."""
    return getattr(operation, "path", None) or operation.name  # type: ignore[attr-defined]


def outer_of(path: str, paths: Container[str]) -> str:
    """The path among `paths` of a layer, or of the one that it is inside of; empty where there is none.

    Example: attention's projections are no calls of the graph.

        >>> outer_of("m/attention/query", {"m/attention", "m/head"})
        'm/attention'
    """
    while path and path not in paths:
        path = path.rpartition("/")[0]
    return path


# ---- layers with others inside, and no graph


@dataclass
class _GraphRecorder:
    """Appends the calls of layers to the graph while a layer without a graph is called on symbolic tensors."""

    graph: Graph
    known: dict[int, int]
    alive: list[object]  # ids are keys in `known` only while their tensors live
    last: list[int]
    is_leaf: Callable[[object], bool]
    root: object

    def note(self, original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object) -> object:
        """Call a layer, and append it to the graph if it is a leaf; else the layers inside it append themselves."""
        if not self.is_leaf(layer):
            return original(layer, *args, **kwargs)
        with recorded_by(None):
            result = original(layer, *args, **kwargs)
        inputs = [_key(self, leaf) for leaf in tree.flatten((args, kwargs)) if _is_tensor(leaf)]
        leaves = [leaf for leaf in tree.flatten(result) if _is_tensor(leaf)]
        outputs = [self.graph.new(leaf) for leaf in leaves]
        self.known |= {id(leaf): key for leaf, key in zip(leaves, outputs, strict=True)}
        self.alive += leaves
        self.last = outputs or self.last
        given = _given(layer, args, kwargs, lambda leaf: _key(self, leaf))
        self.graph.calls.append(LayerCall(layer, path_of(layer), tuple(inputs), tuple(outputs), given))
        return result


def _key(recorder: _GraphRecorder, tensor: object) -> int:
    """The key of a tensor.

    A tensor from plain code between two layers is assumed to have the layout of the last output of the same shape, and
    to be made of the outputs that nothing has read. One without rows (`ops.arange(length)`) is made of nothing.
    """
    known = recorder.known.get(id(tensor))
    if known is not None:
        return known
    graph = recorder.graph
    key = graph.new(tensor)
    spec = graph.tensors[key]
    alike = [other for other in reversed([*graph.inputs, *recorder.known.values()]) if graph.tensors[other] == spec]
    sources: tuple[int, ...] = ()
    if alike or (recorder.last and spec.shape[:1] == (graph.batch,)):
        first = alike[0] if alike else recorder.last[-1]
        read = {each for call in graph.calls for each in call.inputs}
        made = {each for each in recorder.known.values() if each not in read and each not in graph.inputs}
        sources = (first, *sorted(made - {first}))
    _note_between(graph, key, sources)
    recorder.known[id(tensor)] = key
    recorder.alive.append(tensor)
    return key


def _is_tensor(leaf: object) -> bool:
    return hasattr(leaf, "dtype") and len(getattr(leaf, "shape", ())) > 0


class _Between:
    """Stands for code between two layers."""

    name = "code between layers"
    variables: tuple = ()


_BETWEEN: keras.Operation = _Between()  # type: ignore[assignment]


def _record(
    graph: Graph,
    layer: object,
    args: tuple,
    kwargs: dict,
    known: dict[int, int],
    inputs: list[int],
    is_leaf: Callable[[object], bool],
) -> list[int]:
    """Append the calls inside a layer; returns the keys of its outputs."""
    graph.notes[
        f"{type(layer).__name__} has a call() of its own: what its layers send is counted, and what the code between "
        "them sends is not. kf.trace measures what is sent"
    ] = None
    symbols = [leaf for leaf in tree.flatten((args, kwargs)) if _is_tensor(leaf)]
    keys = [_known(graph, known, symbol) for symbol in symbols]
    recorder = _GraphRecorder(graph, {}, [], inputs, is_leaf, layer)

    def call(*args: object, **kwargs: object) -> object:
        leaves = [leaf for leaf in tree.flatten((args, kwargs)) if _is_tensor(leaf)]
        recorder.known = {id(leaf): key for leaf, key in zip(leaves, keys, strict=True)}
        recorder.alive = list(leaves)
        with recorded_by(recorder):
            result = layer.call(*args, **kwargs)  # type: ignore[attr-defined]
        recorder.last = [_key(recorder, leaf) for leaf in tree.flatten(result) if _is_tensor(leaf)]
        return result

    args, kwargs = tree.map_structure(lambda leaf: _with_rows(leaf, graph.batch), (args, kwargs))  # type: ignore[misc]
    calls, tensors = list(graph.calls), dict(graph.tensors)

    def once(*args: object, **kwargs: object) -> object:
        graph.calls[:], graph.tensors = list(calls), dict(tensors)  # an engine may trace twice
        return call(*args, **kwargs)

    _ask(layer, once, args, kwargs)
    return recorder.last


def _ask(layer: Any, function: Callable[..., object], args: tuple, kwargs: dict) -> None:
    """Call a layer's function by shapes alone, as `fit` calls the layer; of whole numbers where it takes no others.

    Raises:
        FlowError: it cannot be called so.
    """
    if layer._call_has_training_arg and "training" not in kwargs:
        kwargs = {**kwargs, "training": True}
    try:
        compute_output_spec(function, *args, **kwargs)
    except Exception as error:
        with contextlib.suppress(Exception):  # a table that is asked for its rows
            compute_output_spec(function, *cast("tuple", tree.map_structure(_whole_numbers, args)), **kwargs)
            return
        raise FlowError(
            f"{layer.name!r} cannot be called symbolically, so what it sends is not known: {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}"
        ) from error


def _whole_numbers(leaf: Any) -> Any:
    return keras.KerasTensor(leaf.shape, "int32") if isinstance(leaf, keras.KerasTensor) else leaf


def _with_rows(leaf: object, batch: int) -> object:
    if not isinstance(leaf, keras.KerasTensor):
        return leaf
    lengths = enumerate(leaf.shape or ())
    shape = [batch if dim == 0 else UNKNOWN if length is None else length for dim, length in lengths]
    return keras.KerasTensor(shape, dtype=leaf.dtype)
