"""Layers that are computed again in the backward pass: a gradient that computes a layer anew from its inputs.

`tf.recompute_grad`, which Keras calls, takes no Keras variables. Here the layer's variables are given as tensors, so
that a call is a function of its inputs and them (`keras.StatelessScope`), and what it assigns is assigned afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_flow.backends import leaves, rematerialized
from keras_flow.backends.hooking import applied_distribution, hook
from keras_flow.current import microbatch


@hook(
    "keras:core",
    "remat",
    "TensorFlow's recompute_grad fails with Keras variables, with an error that does not name the layer",
    when=applied_distribution,
)
def remat(_: object, original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on `remat`: the second run of a layer draws the same numbers, and changes nothing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        flat = _leaves((args, kwargs))
        places = [number for number, leaf in enumerate(flat) if tf.is_tensor(leaf) and leaf.dtype.is_floating]
        layers = rematerialized.layers_of(function)
        if not places or not layers:
            return function(*args, **kwargs)
        weights = list({id(each): each for layer in layers for each in layer.trainable_variables}.values())
        state = rematerialized.state_of(layers)
        begun = [_read(variable) for variable in state]
        part, draws_again = microbatch.current(), rematerialized.python_draws()
        said: list[Any] = []

        def computed(values: Sequence[Any]) -> Any:
            """The layer's outputs, of its inputs and weights; what else it made is put into `said`."""
            numbers = dict(zip(places, values, strict=False))
            given = iter([numbers.get(number, leaf) for number, leaf in enumerate(flat)])
            inner_args, inner_kwargs = leaves.mapped(lambda _: next(given), (args, kwargs))
            rematerialized.put_masks(list(values[: len(places)]), masks)
            mapping = [*zip(weights, values[len(places) :], strict=True), *zip(state, begun, strict=True)]
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope, microbatch.computing(part):
                outputs = function(*inner_args, **inner_kwargs)
            after = [scope.get_current_value(variable) for variable in state]
            said[:] = [outputs, after, list(scope.losses)]
            return [*_leaves(outputs), *scope.losses]

        masks = rematerialized.masks_of([flat[place] for place in places])

        @tf.custom_gradient
        def checkpointed(*values: Any) -> Any:
            results = computed(values)
            first = list(said)

            def gradient(*upstream: Any) -> Any:
                # what the gradient comes from is there before the second run begins, or it would be the first one
                with tf.control_dependencies([each for each in upstream if each is not None]):
                    again = [tf.identity(value) for value in values]
                with tf.GradientTape() as tape, draws_again():
                    tape.watch(again)
                    outputs = computed(again)
                found = tape.gradient(outputs, again, output_gradients=list(upstream))
                said[:] = first
                return found

            return results, gradient

        results = list(checkpointed(*(flat[place] for place in places), *map(_read, weights)))
        outputs, after, losses = said
        out_masks = rematerialized.masks_of(outputs)
        made = iter(results)
        outputs = leaves.mapped(lambda _: next(made), outputs)
        rematerialized.put_masks(outputs, out_masks)
        for variable, before, value in zip(state, begun, after, strict=True):
            if value is not before:
                variable.assign(value)
        for old, new in zip(losses, made, strict=True):
            for layer in layers:
                if rematerialized.forgets(layer, old):
                    layer.add_loss(new)
        return outputs

    return call


def _leaves(structure: Any) -> list[Any]:
    """The leaves of a structure in the order in which `leaves.mapped` comes to them."""
    found: list[Any] = []
    leaves.mapped(found.append, structure)
    return found


def _read(variable: keras.Variable) -> Any:
    """A variable's value of now: what Keras calls its value is TensorFlow's variable, which is read when it is used."""
    return tf.convert_to_tensor(variable.value)
