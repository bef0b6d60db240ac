"""Changes the layouts of a model that exists: its variables, slots and metrics get those of another distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from keras_flow.backends.active import backend
from keras_flow.current.models import all_variables, own_variables
from keras_flow.current.variable_layout import KerasLayout, VariableLayout, keras_layout
from keras_flow.layout import Layout

if TYPE_CHECKING:
    import keras

    from keras_flow.current.distribution import Distribution


#: model -> the layouts of its weights when it was last trained or adopted
_last_layouts: WeakKeyDictionary[keras.Model, list[KerasLayout | None]] = WeakKeyDictionary()


def adopt(model: keras.Model, distribution: Distribution) -> bool:
    """Give every variable, slot and metric of a model its layout under `distribution`, unless it has it already.

    Compiled steps of the model are dropped when a layout changes.

    Returns:
        Whether the layout of any of them changed.
    """
    if distribution.has_one_rank and _has_layouts(model, distribution):
        return False  # on one rank, what Keras has created since then is where it belongs
    owners = {id(variable): layer for layer in model._flatten_layers() for variable in own_variables(layer)}
    changed = False
    for variable in all_variables(model):
        layout = keras_layout(variable)
        if layout is not None and layout.distribution is distribution:
            continue
        changed |= _place(variable, distribution, owners.get(id(variable)))
    layouts = [keras_layout(variable) for variable in model.weights]
    # `kf.shard` gives a layer's variables new layouts behind our back: compare with what was last seen
    relaid = any(a is not b for a, b in zip(layouts, _last_layouts.get(model, layouts), strict=False))  # by kf.shard
    _last_layouts[model] = layouts
    changed |= _adopt_slots(model, distribution, relaid)
    if changed or relaid:
        backend().forget_steps(model)
    return changed or relaid


def _has_layouts(model: keras.Model, distribution: Distribution) -> bool:
    """Whether the model's weights have the layouts that they were last given, all by this distribution."""
    layouts = [keras_layout(variable) for variable in model.weights]
    return _last_layouts.get(model) == layouts and all(
        layout is not None and layout.distribution is distribution for layout in layouts
    )


def relay_layer(layer: keras.Layer) -> None:
    """Move the own variables of a built layer into the layouts that `kf.shard` gave them.

    Variables without a distribution get them when the model is next trained under one.
    """
    for variable in own_variables(layer):
        layout = keras_layout(variable)
        if layout is not None:
            _place(variable, layout.distribution, layer)


def _place(variable: keras.Variable, distribution: Distribution, layer: keras.Layer | None) -> bool:
    """Move a variable into the layout that it gets as one of `layer`."""
    shape = tuple(variable.shape)
    if layer is None:  # a metric's, an optimizer's or a seed: broadcast
        placed = KerasLayout(VariableLayout(Layout(distribution.placement, {}, shape), "default"), distribution)
    else:
        placed = distribution.layout_for(variable.path, shape, layer)
    backend().place(variable, placed)
    return True


def _adopt_slots(model: keras.Model, distribution: Distribution, relaid: bool) -> bool:
    """Give the optimizer's slots the layouts of their variables; whether any changed.

    Slots have no reference to their variable, only a name by it: `path_with_underscores + "_" + slot`.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return False
    changed = False
    variables = {variable.path.replace("/", "_"): variable for variable in model.trainable_variables}
    # slots of a changed variable must change with it, or the update mixes two layouts
    for slot in optimizer.variables:
        layout = keras_layout(slot)
        if layout is not None and layout.distribution is distribution and not relaid:
            continue
        owners = [
            name
            for name, variable in variables.items()
            if slot.name.startswith(name + "_") and tuple(slot.shape) == tuple(variable.shape)
        ]
        if owners:
            # of `dense_kernel` and `dense_kernel_1` the longer name is the variable's
            placed = keras_layout(variables[max(owners, key=len)])
        else:
            placed = KerasLayout(
                VariableLayout(Layout(distribution.placement, {}, tuple(slot.shape)), "default"), distribution
            )
        if placed is not None:
            backend().place(slot, placed)
            changed = True
    return changed
