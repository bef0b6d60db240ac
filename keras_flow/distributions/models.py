"""Models and distributions: which one holds, and laying a model anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from keras_flow.backends.active import backend
from keras_flow.distributions.distribution import FlowDistribution, active
from keras_flow.distributions.placed import Placed, PlacedLayout, placed_layout
from keras_flow.layout import Layout

if TYPE_CHECKING:
    import keras


#: model -> the layouts of its weights when it was last trained or adopted
_laid: WeakKeyDictionary[keras.Model, list[PlacedLayout | None]] = WeakKeyDictionary()


def distribution_of(model: keras.Layer) -> FlowDistribution | None:
    """The active distribution, else the one that the model's variables were made or re-placed under, else None.

    Another active Keras distribution (not ours) holds as Keras says: None.
    """
    from keras.src.distribution import distribution_lib

    if distribution_lib.distribution() is not None:
        return active()
    return remembered(model)


def remembered(model: keras.Layer) -> FlowDistribution | None:
    """The distribution of the model's variables, or None."""
    for variable in model.variables:
        layout = placed_layout(variable)
        if layout is not None:
            return layout.distribution
    return None


def is_built(layer: keras.Layer) -> bool:
    """Whether a layer and all layers inside it have their variables.

    `build` of a subclassed model only says that it is built (Keras warns); its layers are built by their first call.
    """
    return all(inner.built for inner in layer._flatten_layers())


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """Variables that the layer made itself, not those of layers inside it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def layer_paths(model: keras.Model) -> list[str]:
    """Paths of the layers, as `activations` sees them."""
    return [layer.path or layer.name for layer in model._flatten_layers()]


def adopt(model: keras.Model, distribution: FlowDistribution) -> bool:
    """Lay every variable, slot and metric of a model as `distribution` says; those that lie so already stay.

    Returns:
        Whether anything moved.
    """
    if distribution.has_one_rank and _is_laid(model, distribution):
        return False  # what Keras made since then lies where it should
    owners = {id(variable): layer for layer in model._flatten_layers() for variable in own_variables(layer)}
    moved = False
    for variable in all_variables(model):
        layout = placed_layout(variable)
        if layout is not None and layout.distribution is distribution:
            continue
        moved |= _lay(variable, distribution, owners.get(id(variable)))
    layouts = [placed_layout(variable) for variable in model.weights]
    relaid = any(a is not b for a, b in zip(layouts, _laid.get(model, layouts), strict=False))  # by kf.shard
    _laid[model] = layouts
    moved |= _adopt_slots(model, distribution, relaid)
    if moved or relaid:
        backend().forget_steps(model)
    return moved or relaid


def _is_laid(model: keras.Model, distribution: FlowDistribution) -> bool:
    layouts = [placed_layout(variable) for variable in model.weights]
    return _laid.get(model) == layouts and all(one is not None and one.distribution is distribution for one in layouts)


def relay_layer(layer: keras.Layer) -> None:
    """Lay a built layer's own variables anew after `kf.shard` (outside any distribution: when it is next trained)."""
    for variable in own_variables(layer):
        layout = placed_layout(variable)
        if layout is not None:
            _lay(variable, layout.distribution, layer)


def all_variables(model: keras.Model) -> Iterator[keras.Variable]:
    """Variables and seeds of the model and its layers, and the state of its metrics, each once."""
    seen: set[int] = set()
    for variable in (*model.variables, *model.metrics_variables):
        if id(variable) not in seen:
            seen.add(id(variable))
            yield variable


def _lay(variable: keras.Variable, distribution: FlowDistribution, layer: keras.Layer | None) -> bool:
    shape = tuple(variable.shape)
    if layer is None:  # a metric's, an optimizer's or a seed: broadcast
        placed = PlacedLayout(Placed(Layout(distribution.placement, {}, shape), "default"), distribution)
    else:
        placed = distribution.layout_for(variable.path, shape, layer)
    backend().place(variable, placed)
    return True


def _adopt_slots(model: keras.Model, distribution: FlowDistribution, relaid: bool) -> bool:
    """Slots carry no reference to their variable: found by Keras's naming, `path_with_underscores + "_" + slot`."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return False
    moved = False
    variables = {variable.path.replace("/", "_"): variable for variable in model.trainable_variables}
    for slot in optimizer.variables:
        layout = placed_layout(slot)
        if layout is not None and layout.distribution is distribution and not relaid:
            continue
        owners = [
            name
            for name, variable in variables.items()
            if slot.name.startswith(name + "_") and tuple(slot.shape) == tuple(variable.shape)
        ]
        if owners:
            placed = placed_layout(variables[max(owners, key=len)])
        else:
            placed = PlacedLayout(
                Placed(Layout(distribution.placement, {}, tuple(slot.shape)), "default"), distribution
            )
        if placed is not None:
            backend().place(slot, placed)
            moved = True
    return moved
