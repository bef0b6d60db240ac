"""Layers that are computed again in the backward pass: `jax.checkpoint` of what a call computes and changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from keras_flow.backends import rematerialized
from keras_flow.backends.hooking import applied_distribution, hook
from keras_flow.current.keras_places import get_stateless_scope


@hook(
    "keras:core",
    "remat",
    "jax.checkpoint fails where a layer draws, keeps statistics, or is told training=True",
    when=applied_distribution,
)
def remat(_: object, original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on `remat`: seeds and statistics that the function assigns, its losses and masks leave the checkpoint."""

    def call(*args: Any, **kwargs: Any) -> Any:
        scope: Any = get_stateless_scope()
        if scope is None:  # a call by the program itself
            return original(function)(*args, **kwargs)
        flat, structure = jax.tree.flatten((args, kwargs))
        places = [number for number, leaf in enumerate(flat) if isinstance(leaf, jax.Array)]
        masks = rematerialized.masks_of([flat[place] for place in places])
        state, losses = dict(scope.state_mapping), list(scope.losses)
        inside: list[Any] = []

        def computed(values: list[Any]) -> Any:
            rematerialized.put_masks(values, masks)
            given = list(flat)
            for place, value in zip(places, values, strict=True):
                given[place] = value
            inner_args, inner_kwargs = jax.tree.unflatten(structure, given)
            outputs = function(*inner_args, **inner_kwargs)
            changed = {key: value for key, value in scope.state_mapping.items() if value is not state.get(key)}
            inside[:] = scope.losses[len(losses) :]
            scope.state_mapping, scope.losses = dict(state), list(losses)
            return outputs, changed, list(inside), rematerialized.masks_of(outputs)

        outputs, changed, added, out_masks = jax.checkpoint(computed)([flat[place] for place in places])
        scope.state_mapping.update(changed)
        scope.losses.extend(added)
        for layer in rematerialized.layers_of(function):  # a layer knows its losses by what they are
            for old, new in zip(inside, added, strict=True):
                if rematerialized.forgets(layer, old):
                    layer._loss_ids.add(id(new))
        rematerialized.put_masks(outputs, out_masks)
        return outputs

    return call
