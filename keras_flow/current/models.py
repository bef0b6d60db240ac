"""Questions about a model or layer: which distribution applies to it, which variables and layers it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import keras

from keras_flow.current.distribution import Distribution, active, applied
from keras_flow.current.keras_places import (
    GLOBAL_SEED_GENERATOR,
    Functional,
    current_distribution,
    get_global_attribute,
)
from keras_flow.current.variable_layout import keras_layout
from keras_flow.errors import FlowError

#: a model whose variables were not laid yet -> the distribution of the scope that it was made in
_made_under: WeakKeyDictionary[keras.Layer, Distribution] = WeakKeyDictionary()


def distribution_of(model: keras.Layer, *args: object, **kwargs: object) -> Distribution | None:
    """The distribution that applies to a model: the active one, otherwise that of its variables, otherwise None.

    The result is also None where one of Keras's own distributions is active: Keras then follows that one.

    Raises:
        FlowError: one of Keras's own distributions is active, and the model's variables were laid by one of keras_flow.
    """
    # Keras's own question first: a distribution that is not ours may be active
    current = current_distribution()
    if current is None:
        return remembered(model)
    if not isinstance(current, Distribution):
        ours = remembered(model)
        if ours is not None and not ours.has_one_rank:
            raise FlowError(
                f"model {model.name!r} was made or trained under {ours!r} and is used in the scope of "
                f"keras.distribution.{type(current).__name__}, which does not know its layouts. Leave that scope, or "
                "make the model inside it"
            )
    return active()


def remembered(model: keras.Layer) -> Distribution | None:
    """Return the distribution that last laid a model's variables, otherwise the scope that made it, otherwise None."""
    for variable in model.variables:
        layout = keras_layout(variable)
        if layout is not None:
            return layout.distribution.whole
    return _made_under.get(model)


def made_under(distribution: Distribution, model: keras.Model) -> None:
    """Remember the scope that a model was made in: its variables may come with the first batch, after the scope."""
    _made_under[model] = distribution


def awaits_variables(model: keras.Layer, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hooks on calls that build a model: where it has left its scope, the distribution of that."""
    # asked in each call of a layer; one without `super().__init__()` has no `built`, and Keras says so
    if getattr(model, "built", True) or current_distribution() is not None:
        return None
    return _made_under.get(model)


def laid(model: keras.Model) -> None:
    """Forget the scope that a model, and those inside it, were made in: its variables tell, where it has any."""
    if model in _made_under and any(keras_layout(variable) is not None for variable in model.variables):
        for layer in model._flatten_layers():
            _made_under.pop(layer, None)


def distribution_of_functions(model: keras.Model) -> Distribution | None:
    """The distribution for which a model's compiled functions are made: outside of its scope the remembered one.

    None within a step that runs without its distribution, and for a single rank: those functions are Keras's own.
    """
    if applied() is not None:
        return active()
    ours = distribution_of(model)
    return None if ours is None or ours.has_one_rank else ours


def is_built(layer: keras.Layer) -> bool:
    """Whether a layer and all layers inside it have their variables.

    `build` of a subclassed model only says that it is built (Keras warns); its layers are built by their first call.
    """
    return all(inner.built for inner in layer._flatten_layers())


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The variables that the layer itself created, not those of layers inside it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def owners_of(model: keras.Model) -> dict[int, keras.Layer]:
    """The id of a variable -> the layer that has it itself."""
    return {id(variable): layer for layer in model._flatten_layers() for variable in own_variables(layer)}


def layer_paths(model: keras.Model) -> list[str]:
    """Paths of the layers, as `activations` sees them."""
    return [layer.path or layer.name for layer in model._flatten_layers()]


def all_variables(
    model: keras.Model, *, metrics: bool = True, optimizers: bool = False, global_seed: bool = False
) -> Iterator[keras.Variable]:
    """Variables and seeds of the model, its layers and its sampler, each once and in one order on all ranks.

    Args:
        model: the model.
        metrics: give the state of its metrics too.
        optimizers: give the variables of its optimizers too.
        global_seed: give the state of Keras's global generator too, from which draws without an own one come.
    """
    found = list(model.variables)
    # what draws the next token of a text is no layer, and Keras does not track its seeds
    found += getattr(getattr(model, "sampler", None), "variables", ())
    of_metrics = {id(variable): variable for variable in model.metrics_variables}
    if metrics:
        found += of_metrics.values()
    else:
        found = [variable for variable in found if id(variable) not in of_metrics]
    for optimizer in optimizers_of(model) if optimizers else ():
        found += optimizer.variables
    generator = get_global_attribute(GLOBAL_SEED_GENERATOR) if global_seed else None
    if generator is not None:
        found.append(generator.state)
    # a layer that is shared lists its variables twice
    yield from {id(variable): variable for variable in found}.values()


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The model's optimizer, and others that are its attributes (a GAN has two)."""
    optimizers = {id(value): value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)}
    return list(optimizers.values())


def calls_in_step(model: keras.Model) -> bool:
    """Whether an optimizer of the model waits for other processes inside a step (keras_flow.hvd)."""
    return any(hasattr(each, "keras_flow_calls_in_step") for each in optimizers_of(model))


def with_inner(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """An optimizer and those inside it: of a loss scale, or of `MultiOptimizer`."""
    scaled = getattr(optimizer, "inner_optimizer", None)
    inside = getattr(optimizer, "optimizers", ()) if scaled is None else (scaled,)
    return [optimizer, *(each for inner in inside for each in with_inner(inner))]


def has_own(model: keras.Layer, *names: str) -> bool:
    """Whether one of these methods of a model is not Keras's: its class has another, or it was set on the model."""
    stock = keras.Model
    return any(name in vars(model) or getattr(type(model), name, None) is not getattr(stock, name) for name in names)


def graph_of(model: keras.Layer) -> Any:
    """The functional model whose graph a model is: itself, or the one inside a Sequential; None for other layers."""
    graph = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else model
    return graph if isinstance(graph, Functional) else None


def has_stock_class(layer: Any) -> bool:
    """Whether a layer is a functional or Sequential model whose class has Keras's `call`, which runs its layers."""
    if isinstance(layer, keras.Sequential):
        return type(layer).call is keras.Sequential.call
    return isinstance(layer, Functional) and type(layer).call is Functional.call


def stock_graph(layer: Any) -> Any:
    """The graph that a functional or Sequential model runs; None for layers, and for a `call` of the user's own."""
    return graph_of(layer) if has_stock_class(layer) and "call" not in vars(layer) else None


def layer_in_call() -> object:
    """The innermost layer whose call is running. Keras's name scopes hold their layers; private, Keras 3.15."""
    scopes = get_global_attribute("name_scope_stack") or ()
    return next((scope.caller for scope in reversed(scopes) if scope.caller is not None), None)
