"""Verification where one device cannot hold the model: each layer by itself, from the input recorded for it.

The model is called once under the distribution, and the arguments of each layer are copied to the host. Each layer is
then trained on them as a model of its own, under the distribution and on one device, which holds the weights of that
layer alone. Random numbers stand for the gradient of its outputs, so that its own gradients do not depend on other
layers. By the chain rule a model whose layers are right is right, but for what its own `call` computes between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_flow.backends import random_states
from keras_flow.backends.active import backend
from keras_flow.current import models
from keras_flow.layout import itemsize
from keras_flow.tensors.dtypes import is_float
from keras_flow.units import amount
from keras_flow.verify.measure import Batch

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution

#: copies of the weights that one device holds in a step, besides activations: weights, gradients and slots
COPIES = 4


@dataclass(frozen=True)
class Part:
    """A model that is verified by itself in the place of a part of the user's.

    Attributes:
        model: built and compiled.
        batch: its rows.
        has_loss: whether its loss is the user's, not a sum of random multiples of its outputs.
    """

    model: keras.Model
    batch: Batch
    has_loss: bool = False


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a layer's `call`, arrays on the host in the place of tensors, and the shapes of its outputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[tuple[int, ...]]


def why_by_layer(model: keras.Model) -> str:
    """The reason why one device cannot hold the model; empty if it can."""
    needed = COPIES * sum(itemsize(variable.dtype) * int(np.prod(variable.shape)) for variable in model.variables)
    free = backend().free_memory()
    if needed <= free:
        return ""
    return f"one device has {amount(free)} free and a step of the whole model needs {amount(needed)}"


def parts(
    model: keras.Model, full_batch: Batch, distribution: FlowDistribution, own_step: bool
) -> tuple[list[Callable[[], Part]], str]:
    """The parts that are verified instead of a model that one device cannot hold.

    Args:
        model: built and compiled.
        full_batch: the rows.
        distribution: the one under which each part is verified.
        own_step: whether the model has a `train_step` of the user's, which is left out.

    Returns:
        Functions that build the parts, to be called one after the other, so that no two parts exist at a time; and what
        of the model the parts leave out, in words.
    """
    layers = list({id(layer): layer for layer in _units(model)}.values())  # nested models may share some
    # the recording call draws dropout masks and moves moving statistics: neither must reach the user
    random, kept = random_states.states(), _changed_by_a_call(model)
    with distribution.scope():
        distribution.adopt(model)
        with _recorded(layers) as calls:
            outputs = _on_host(model(keras.tree.map_structure(ops.convert_to_tensor, full_batch.x), training=True))
        for variable, value in kept:
            variable.assign(value)
    random_states.set_states(random)
    rows = len(keras.tree.flatten(full_batch.x)[0])
    makers: list[Callable[[], Part]] = []
    left_out = []
    for layer in layers:
        call = calls.get(id(layer))
        if call is not None and _can_be_alone(call, rows):
            makers.append(functools.partial(_layer_part, layer, call, rows, distribution))
        else:
            left_out.append(layer.path or layer.name)
    notes = ["what a `call` of the user's own computes between layers"]
    if left_out:
        notes.append(f"layers that were not called with rows: {', '.join(left_out)}")
    own = {id(variable) for layer in layers for variable in layer.variables}
    others = [variable.path for variable in model.variables if id(variable) not in own]
    if others:
        notes.append(f"variables of no layer: {', '.join(others)}")
    if own_step:
        notes.append("the model's own train_step")
    else:
        makers.append(functools.partial(_loss_part, model, outputs, full_batch, distribution))
    return makers, "; ".join(notes)


def _units(model: keras.Model) -> Iterator[keras.Layer]:
    """The layers that are verified by themselves: those of nested models singly, other layers with all inside them."""
    for layer in model.layers:
        if isinstance(layer, keras.Model) and not models.own_variables(layer) and layer.layers:
            yield from _units(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            yield layer


def _changed_by_a_call(model: keras.Model) -> list[tuple[keras.Variable, np.ndarray]]:
    """The state that a call in training changes: moving statistics and seeds, not the weights."""
    variables = [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]
    variables += [variable for variable in model.variables if "seed" in variable.path]
    unique = {id(variable): variable for variable in variables}
    return [(variable, np.array(ops.convert_to_numpy(variable))) for variable in unique.values()]


@contextmanager
def _recorded(layers: Sequence[keras.Layer]) -> Iterator[dict[int, CallArguments]]:
    """Inside, the arguments of the first call of each layer are recorded, by id of the layer."""
    calls: dict[int, CallArguments] = {}

    def recorder(layer: keras.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            if id(layer) not in calls:
                shapes = [tuple(leaf.shape) for leaf in _floats(outputs)]
                calls[id(layer)] = CallArguments(_on_host(args), _on_host(kwargs), shapes)
            return outputs

        return recording

    for layer in layers:
        object.__setattr__(layer, "call", recorder(layer, layer.call))  # Keras would track it as an attribute
    try:
        yield calls
    finally:
        for layer in layers:
            object.__delattr__(layer, "call")


def _on_host(structure: Any) -> Any:
    """A structure with NumPy arrays for its tensors."""

    def value(leaf: Any) -> Any:
        return np.array(ops.convert_to_numpy(leaf)) if ops.is_tensor(leaf) else leaf

    return keras.tree.map_structure(value, structure)


def _floats(structure: Any) -> list[Any]:
    leaves = [leaf for leaf in keras.tree.flatten(structure) if hasattr(leaf, "dtype") and hasattr(leaf, "shape")]
    return [leaf for leaf in leaves if "float" in keras.backend.standardize_dtype(leaf.dtype)]


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.ndim > 0 and len(leaf) == rows


def _can_be_alone(call: CallArguments, rows: int) -> bool:
    """Whether a layer maps rows to rows, so that it can be trained on batches of them."""
    takes_rows = any(_has_rows(leaf, rows) for leaf in keras.tree.flatten((call.args, call.kwargs)))
    return takes_rows and bool(call.outputs) and all(shape and shape[0] == rows for shape in call.outputs)


class _Alone(keras.Model):
    """A function of arrays as a model.

    A trained variable of zeros is added to each floating-point input: its gradient is that of the input, summed over
    rows, which is compared so.

    Args:
        inputs: arrays [rows, ...].
        function: takes tensors in the place of the inputs.
        options: options of `keras.Model`.
    """

    def __init__(self, inputs: Sequence[np.ndarray], function: Callable[[list[Any]], Any], **options: Any):
        super().__init__(**options)
        self.function = function
        self.zeros = [
            self.add_weight(shape=leaf.shape[1:], initializer="zeros", name=f"input_{number}_gradient")
            if is_float(leaf.dtype.name)
            else None
            for number, leaf in enumerate(inputs)
        ]
        self.built = True

    def call(self, inputs: list[Any]) -> Any:
        pairs = zip(keras.tree.flatten(inputs), self.zeros, strict=True)
        return self.function([leaf if zeros is None else leaf + ops.cast(zeros, leaf.dtype) for leaf, zeros in pairs])


def _layer_part(layer: keras.Layer, call: CallArguments, rows: int, distribution: FlowDistribution) -> Part:
    kwargs = {name: value for name, value in call.kwargs.items() if name != "training"}  # `train_on_batch` sets it
    leaves = keras.tree.flatten((call.args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if _has_rows(leaf, rows)]
    inputs = [leaves[place] for place in places]
    sizes = [int(np.prod(shape[1:])) for shape in call.outputs]

    def called(tensors: list[Any]) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        args, named = keras.tree.pack_sequence_as((call.args, kwargs), given)
        # [rows, elements], because the loss weighs the elements of a row by random numbers and adds them
        flat = [ops.reshape(leaf, (-1, size)) for leaf, size in zip(_floats(layer(*args, **named)), sizes, strict=True)]
        return flat[0] if len(flat) == 1 else flat

    with distribution.scope():
        model = _Alone(inputs, called, name=layer.name, dtype=layer.dtype_policy)
        model.layer = layer  # its variables are the model's
        model.compile(keras.optimizers.SGD(), loss=[_random_multiples] * len(call.outputs))
    random = np.random.default_rng(0)
    y = [random.normal(size=(rows, size)).astype("float32") for size in sizes]
    return Part(model, Batch(inputs, y if len(y) > 1 else y[0], None, name=""))


def _random_multiples(y_true: Any, y_pred: Any) -> Any:
    """A loss [rows] whose gradient by the outputs is `y_true`."""
    return ops.sum(ops.cast(y_true, y_pred.dtype) * y_pred, axis=-1)


def _loss_part(model: keras.Model, outputs: Any, full_batch: Batch, distribution: FlowDistribution) -> Part:
    """The user's loss and metrics on the outputs of the model."""
    inputs = keras.tree.flatten(outputs)
    # private: the public `get_compile_config` has names in the place of functions
    compiled: dict[str, Any] = model._compile_config.config  # type: ignore
    with distribution.scope():
        part = _Alone(inputs, lambda tensors: keras.tree.pack_sequence_as(outputs, tensors), name="loss")
        if hasattr(model, "output_names"):
            part.output_names = model.output_names
        names = ("loss", "loss_weights", "metrics", "weighted_metrics")
        part.compile(keras.optimizers.SGD(), **{name: compiled[name] for name in names})
    return Part(part, Batch(inputs, full_batch.y, full_batch.sample_weight, name=""), has_loss=True)
