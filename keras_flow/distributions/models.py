"""Re-laying a model: its variables, slots and metrics get the layouts of another distribution."""

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
_laid: WeakKeyDictionary[keras.Model, list[KerasLayout | None]] = WeakKeyDictionary()


def adopt(model: keras.Model, distribution: Distribution) -> bool:
    """Lay every variable, slot and metric of a model as `distribution` says; those that lie so already stay.

    Returns:
        Whether anything moved.
    """
    if distribution.has_one_rank and _is_laid(model, distribution):
        return False  # what Keras made since then lies where it should
    owners = {id(variable): layer for layer in model._flatten_layers() for variable in own_variables(layer)}
    moved = False
    for variable in all_variables(model):
        layout = keras_layout(variable)
        if layout is not None and layout.distribution is distribution:
            continue
        moved |= _lay(variable, distribution, owners.get(id(variable)))
    layouts = [keras_layout(variable) for variable in model.weights]
    relaid = any(a is not b for a, b in zip(layouts, _laid.get(model, layouts), strict=False))  # by kf.shard
    _laid[model] = layouts
    moved |= _adopt_slots(model, distribution, relaid)
    if moved or relaid:
        backend().forget_steps(model)
    return moved or relaid


def _is_laid(model: keras.Model, distribution: Distribution) -> bool:
    layouts = [keras_layout(variable) for variable in model.weights]
    return _laid.get(model) == layouts and all(one is not None and one.distribution is distribution for one in layouts)


def relay_layer(layer: keras.Layer) -> None:
    """Lay a built layer's own variables anew after `kf.shard` (outside any distribution: when it is next trained)."""
    for variable in own_variables(layer):
        layout = keras_layout(variable)
        if layout is not None:
            _lay(variable, layout.distribution, layer)


def _lay(variable: keras.Variable, distribution: Distribution, layer: keras.Layer | None) -> bool:
    shape = tuple(variable.shape)
    if layer is None:  # a metric's, an optimizer's or a seed: broadcast
        placed = KerasLayout(VariableLayout(Layout(distribution.placement, {}, shape), "default"), distribution)
    else:
        placed = distribution.layout_for(variable.path, shape, layer)
    backend().place(variable, placed)
    return True


def _adopt_slots(model: keras.Model, distribution: Distribution, relaid: bool) -> bool:
    """Slots carry no reference to their variable: found by Keras's naming, `path_with_underscores + "_" + slot`."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return False
    moved = False
    variables = {variable.path.replace("/", "_"): variable for variable in model.trainable_variables}
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
            placed = keras_layout(variables[max(owners, key=len)])
        else:
            placed = KerasLayout(
                VariableLayout(Layout(distribution.placement, {}, tuple(slot.shape)), "default"), distribution
            )
        if placed is not None:
            backend().place(slot, placed)
            moved = True
    return moved
