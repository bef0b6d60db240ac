"""Changes the layouts of a model that exists: its variables, slots and metrics get those of another distribution."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import keras

from keras_flow.backends import hub_models
from keras_flow.backends.active import backend
from keras_flow.backends.optimizer_slots import slots_of
from keras_flow.current import reachable
from keras_flow.current.creator import creating
from keras_flow.current.keras_places import get_global_attribute
from keras_flow.current.models import all_variables, own_variables
from keras_flow.current.variable_layout import KerasLayout, keras_layout

if TYPE_CHECKING:
    from keras_flow.current.distribution import Distribution

#: model -> the layouts of its weights when it was last trained or adopted
_last_layouts: WeakKeyDictionary[keras.Model, list[KerasLayout | None]] = WeakKeyDictionary()
#: model -> weak references to what it was compiled with when all that it reaches was last laid
_last_parts: WeakKeyDictionary[keras.Model, list[weakref.ref[object] | None]] = WeakKeyDictionary()


def adopt(model: keras.Model, distribution: Distribution, *others: object) -> bool:
    """Give every variable that a model reaches its layout under `distribution`, unless it has it already.

    Those are its own, of its optimizers, metrics, losses and seed generators, wherever they were made. Compiled steps
    of the model are dropped when a layout changes.

    Args:
        model: the model.
        distribution: what lays them.
        others: objects that are used with the model in this call, as callbacks are; what they reach is laid too.

    Returns:
        Whether the layout of any of them changed.
    """
    if distribution.has_one_rank and _has_layouts(model, distribution):
        return False  # on one rank, what Keras has created since then is where it belongs
    changed = False
    # the walk over all objects is for what Keras does not list: once for each `compile`
    if not (_was_compiled_with(model) and _listed_are_laid(model, distribution)):
        # of a sampler too, which no object of Keras holds
        changed = lay((model, list(all_variables(model))), distribution)
    changed = (lay(others, distribution, shared=False) if others else False) or changed
    _last_parts[model] = [None if part is None else weakref.ref(part) for part in _parts(model)]
    layouts = [keras_layout(variable) for variable in model.weights]
    # `kf.shard` gives a layer's variables new layouts behind our back: compare with what was last seen
    relaid = any(a is not b for a, b in zip(layouts, _last_layouts.get(model, layouts), strict=False))
    _last_layouts[model] = layouts
    if relaid and not changed:
        lay((model,), distribution)  # the slots of what was moved
    if changed or relaid:
        backend().forget_steps(model)
        hub_models.forget(model)
    return changed or relaid


def _parts(model: keras.Model) -> list[object]:
    return [getattr(model, name, None) for name in ("optimizer", "_compile_loss", "_compile_metrics")]


def _was_compiled_with(model: keras.Model) -> bool:
    """Whether the model has the optimizer, losses and metrics with which it was last laid."""
    known = _last_parts.get(model)
    return known is not None and all(
        part is None if reference is None else reference() is part
        for reference, part in zip(known, _parts(model), strict=True)
    )


def _listed_are_laid(model: keras.Model, distribution: Distribution) -> bool:
    """Whether all variables that Keras lists for a model, and its optimizers', were laid by this distribution."""
    return all(is_laid(variable, distribution) for variable in all_variables(model, optimizers=True))


def is_laid(variable: keras.Variable, distribution: Distribution) -> bool:
    """Return whether a variable has its layout from this distribution."""
    layout = keras_layout(variable)
    return layout is not None and layout.distribution.whole is distribution


def _has_layouts(model: keras.Model, distribution: Distribution) -> bool:
    """Whether the model's weights have the layouts that they were last given, all by this distribution."""
    layouts = [keras_layout(variable) for variable in model.weights]
    return _last_layouts.get(model) == layouts and all(is_laid(variable, distribution) for variable in model.weights)


def lay(roots: Iterable[object], distribution: Distribution, shared: bool = True) -> bool:
    """Give every variable that some objects reach its layout under `distribution`, with its value.

    Variables of layers get it by the rules, an optimizer's slots that of their variable, all others are broadcast.

    Args:
        roots: the objects.
        distribution: what lays them.
        shared: all processes have them, whose values are compared or made equal; a callback may be in some alone.

    Returns:
        Whether the layout of any of them changed.
    """
    found = list(reachable.variables(*roots, get_global_attribute("global_seed_generator")))
    # a layer may hold another's variable; rules by layer are those of the one that made it
    layers = {id(owner): owner for _, owner in found if isinstance(owner, keras.Layer)}
    makers = {id(variable): layer for layer in layers.values() for variable in own_variables(layer)}
    optimizers = {id(owner): owner for _, owner in found if isinstance(owner, keras.Optimizer)}
    slots = {id(slot) for optimizer in optimizers.values() for slot in optimizer._variables}
    listed = {id(variable) for root in roots if isinstance(root, keras.Layer) for variable in root.variables}
    changed = False
    for variable, owner in found:
        if id(variable) not in slots and not is_laid(variable, distribution):
            # of another model, which a function of the user's knows by its name: its own distribution holds
            if keras_layout(variable) is not None and id(variable) in makers and id(variable) not in listed:
                continue
            _place(variable, distribution, makers.get(id(variable), owner), shared)
            changed = True
    # slots last: they follow their variables
    return any([lay_optimizer(optimizer, distribution, shared) for optimizer in optimizers.values()]) or changed


def relay_layer(layer: keras.Layer) -> None:
    """Move the own variables of a built layer into the layouts that `kf.shard` gave them.

    Variables without a distribution get them when the model is next trained under one.
    """
    for variable in own_variables(layer):
        layout = keras_layout(variable)
        if layout is not None:
            _place(variable, layout.distribution, layer)


def _place(variable: keras.Variable, distribution: Distribution, owner: reachable.Owner, shared: bool = True) -> None:
    """Move a variable into the layout that it would have had, made by its owner under the distribution."""
    layer = owner if isinstance(owner, keras.Layer) else None
    # an optimizer reaches the variables that it updates, which are not its own
    by_hand = owner is None or isinstance(owner, keras.Optimizer)
    with nullcontext() if by_hand else creating("layer" if layer is not None else "metric", layer):
        layout = distribution.layout_for(variable.path, tuple(variable.shape), layer, variable.dtype)
        if isinstance(owner, keras.Metric) or not shared:
            # not compared between processes, as what has a layout is not
            variable._layout = layout
        backend().place(variable, layout)


def lay_optimizer(optimizer: keras.Optimizer, distribution: Distribution, shared: bool = True) -> bool:
    """Give an optimizer's slots the layouts that go with their variables'; return whether any changed.

    Slots have no reference to their variable. Keras has lists of them in the order of the variables. What is in no list
    has a name by its variable, `path_with_underscores + "_" + slot`, which is one for `a_b/c` and `a/b_c`.
    """
    changed = False
    references = [each for each in optimizer._trainable_variables if isinstance(each, keras.Variable)]
    variables = {variable.path.replace("/", "_"): variable for variable in references}
    listed = {id(slot): variable for variable in references for slot in slots_of(optimizer, variable)}
    for slot in optimizer._variables:
        owner = listed.get(id(slot))
        if owner is None:
            owners = [
                name
                for name, variable in variables.items()
                if slot.name.startswith(name + "_") and tuple(slot.shape) == tuple(variable.shape)
            ]
            # of `dense_kernel` and `dense_kernel_1` the longer name is the variable's
            owner = variables[max(owners, key=len)] if owners else None
        of_variable = None if owner is None else keras_layout(owner)
        wanted = of_variable.distribution.slot_layout(of_variable) if of_variable is not None else None
        found = keras_layout(slot)
        if found is not None and (
            found.distribution.whole is distribution
            if wanted is None
            else found.distribution is wanted.distribution and found.layout == wanted.layout
        ):
            continue
        with creating("optimizer"):
            layout = wanted or distribution.layout_for(slot.path, tuple(slot.shape), dtype=slot.dtype)
            if not shared:
                slot._layout = layout
            backend().place(slot, layout)
        changed = True
    return changed
