"""Optimizers on TensorFlow: slots have their variable's layout, and updates need no strategy of `tf.distribute`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_flow.backends.hooking import hook
from keras_flow.backends.tensorflow.layouts import in_step, layout_on, on_mesh, replicated, view_of
from keras_flow.backends.tensorflow.mesh_values import from_logical, is_dtensor
from keras_flow.backends.tensorflow.mesh_variables import updating
from keras_flow.backends.tensorflow.mirrored import strategy
from keras_flow.backends.tensorflow.variables import place
from keras_flow.current import dry_run, keras_places
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.variable_layout import keras_layout

#: what an optimizer updates: a Keras variable, or the TensorFlow one that it holds
Target: TypeAlias = keras.Variable | tf.Variable


@hook(
    "keras.Optimizer",
    "_var_key",
    "explain of a model that is only described: the key of a variable would be read off its value",
    when=dry_run.world,
)
def described_key(_: object, original: Callable[..., object], optimizer: keras.Optimizer, variable: object) -> object:
    """Hook on `TFOptimizer._var_key`: a key for a variable without a value."""
    return id(variable)


def distribution_by_dtensor(*args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks on steps on a mesh: the active distribution, where it works by DTensor."""
    distribution = active()
    return distribution if distribution is not None and strategy.works_by_dtensor(distribution) else None


@hook(
    "keras.Optimizer",
    "add_variable_from_reference",
    "slots get their variable's layout; Keras's TensorFlow version colocates, which DTensor cannot",
)
def add_variable_from_reference(
    _: object,
    original: Callable[..., object],
    optimizer: keras.Optimizer,
    reference_variable: object,
    name: str | None = None,
    initializer: str | keras.Initializer = "zeros",
) -> object:
    """Hook on `TFOptimizer.add_variable_from_reference`: Keras's base method, which hands on the reference's layout."""
    base: Any = keras_places.find("keras:AnyOptimizer")
    return base.add_variable_from_reference(
        optimizer,
        reference_variable,
        name=name,
        initializer=initializer,  # type: ignore[arg-type]  # Keras has no annotation: pyright takes the default's type
    )


@hook(
    "keras.optimizers.LossScaleOptimizer",
    "apply",
    "its branches count as an optimizer's, which have no gradients: DTensor computes these, and no layer's",
    when=distribution_by_dtensor,
)
def scaled(
    _: object, original: Callable[..., object], optimizer: keras.Optimizer, *args: object, **kwargs: object
) -> object:
    """Hook on `LossScaleOptimizer.apply`: within its name scope, as the `apply` of every other optimizer."""
    with keras.name_scope(optimizer.name, caller=optimizer):
        return original(optimizer, *args, **kwargs)


def distribution_of_update(
    optimizer: keras.Optimizer, grads: object, trainable_variables: Iterable | None = None
) -> Distribution | None:
    """Condition of the hook on `BaseOptimizer.apply`: the distribution of the variables that are on a mesh.

    That of the step that is running or, in a loop of one's own, that which the variables have: of several the active
    one.
    """
    if in_step():
        return distribution_by_dtensor()
    if updating.get() or not tf.executing_eagerly():
        return None
    variables = optimizer._trainable_variables if optimizer.built else list(trainable_variables or ())
    placed = [keras_layout(variable) for variable in variables if isinstance(_plain(variable), dtensor.DVariable)]
    found = [each.distribution for each in placed if each is not None]
    here = active()
    return here if here in found else next(iter(found), None)


@hook(
    "keras.Optimizer",
    "apply",
    "gives gradients their variables' layouts; DTensor fails where it guesses others (EmitAllScatter)",
    when=distribution_of_update,
)
def apply(
    distribution: Distribution,
    original: Callable[..., object],
    optimizer: keras.Optimizer,
    grads: list,
    trainable_variables: list | None = None,
) -> object:
    """Hook on `BaseOptimizer.apply`: give each gradient its slots' layout before anything else uses it.

    Where slots are split further than a variable (`zero=`), what is computed of them and the gradient is split as they
    are, and the variable gets it gathered.

    The slices of an embedding's gradient stay slices, though they are summed over the ranks for each use of them then
    (Adam has two): Keras squares and clips them without adding those of one row up, and the numbers are to be those of
    one device.

    One `tf.Variable` among the variables, which is of no mesh, has all of them updated by one device: outside of a step
    variables are read as plain tensors, and what is assigned is laid again.
    """
    grads = list(grads)
    variables = list(trainable_variables) if trainable_variables is not None else optimizer._trainable_variables
    if not in_step():
        if any(isinstance(each, tf.Variable) and not isinstance(each, dtensor.DVariable) for each in variables):
            with distribution.scope():
                return original(optimizer, grads, variables if trainable_variables is not None else None)
        _lay_alike(variables, distribution)
    for index, (gradient, variable) in enumerate(zip(grads, variables, strict=False)):
        target = _plain(variable)
        # frozen in this step, or on one rank: Keras and TensorFlow know what to do
        if gradient is None or not isinstance(target, dtensor.DVariable):
            continue
        grads[index] = _as_slots(gradient, target, _of_slots(variable, target))
    if not in_step() and optimizer.built:  # it may have been built before its variables were laid
        distribution.lay_optimizer(optimizer)
    own_loop = contextlib.nullcontext() if in_step() else _update_of(distribution)
    token = updating.set(True)
    try:
        with own_loop:
            return original(optimizer, grads, variables if trainable_variables is not None else None)
    finally:
        updating.reset(token)


def _lay_alike(variables: Iterable[Target], distribution: Distribution) -> None:
    """Lay what is not laid, or by another distribution: DTensor computes an update, clipping too, on one mesh."""
    for variable in variables:
        layout = keras_layout(variable)
        if isinstance(variable, keras.Variable) and (layout is None or layout.distribution is not distribution):
            place(variable, distribution.layout_for(variable.path, tuple(variable.shape)))


@contextlib.contextmanager
def _update_of(distribution: Distribution) -> Iterator[None]:
    """Open the scope and the mesh that a step has around an update."""
    with distribution.scope(), on_mesh(view_of(distribution).mesh):
        yield


def _of_slots(variable: Target, target: dtensor.DVariable) -> dtensor.Layout:
    """The layout of a variable's slots, most often the variable's own."""
    placed = keras_layout(variable)
    if placed is None or not placed.distribution.zero_stage:
        return target.layout
    return layout_on(placed.distribution.slot_layout(placed).layout, view_of(placed.distribution))


def _as_slots(
    gradient: tf.Tensor | tf.IndexedSlices, target: dtensor.DVariable, layout: dtensor.Layout
) -> tf.Tensor | tf.IndexedSlices:
    """A gradient in its slots' layout; slices as they are in a step, otherwise whole on every rank."""
    if in_step():
        # DTensor may hand a gradient back in another layout; clipping and weight decay would then mix layouts
        if isinstance(gradient, tf.IndexedSlices):
            return gradient
        # first as the variable: else DTensor computes the gradient split as the slots are, of gathered activations
        gradient = dtensor.relayout(tf.convert_to_tensor(gradient), target.layout)
        return gradient if layout == target.layout else dtensor.relayout(gradient, layout)
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient if is_dtensor(gradient) else from_logical(gradient, layout, target.dtype)
    # TensorFlow takes slices whose rows are numbers in a tuple
    parts = (tf.convert_to_tensor(part) for part in (gradient.values, gradient.indices))
    values, indices = (from_logical(part, replicated(layout.mesh, part.shape.rank)) for part in parts)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


@hook(
    "keras.Optimizer",
    "_backend_update_step",
    "avoids the merge call of tf.distribute, which does not know DTensor variables",
    when=distribution_by_dtensor,
)
def backend_update_step(
    _: object,
    original: Callable[..., object],
    optimizer: keras.Optimizer,
    grads: list,
    trainable_variables: list,
    learning_rate: object,
) -> None:
    """Hook on `TFOptimizer._backend_update_step`: one update for each variable.

    Gradients are already those of the logical batch.
    """
    for gradient, variable in zip(grads, trainable_variables, strict=True):
        if gradient is not None:
            # Keras hands over its variables or TensorFlow's, as the caller of `apply` did
            variable = variable.value if isinstance(variable, keras.Variable) else variable
            optimizer.update_step(gradient, variable, learning_rate)


def _plain(variable: Target) -> tf.Variable:
    return variable._value if isinstance(variable, keras.Variable) else variable
