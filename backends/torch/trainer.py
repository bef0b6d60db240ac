"""Steps on PyTorch: Keras's stock step functions, run in the view that keeps a model's numbers exact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.distributed.tensor import DTensor

from keras_flow.backends import copies, leaves, random_states, states
from keras_flow.backends.hooking import hook
from keras_flow.backends.row_wise import own_code, row_interaction
from keras_flow.backends.torch import (
    collectives,
    gathered_weights,
    gradient_buckets,
    layouts,
    optimizer,
    processes,
    state_copies,
    variables,
    wrapped_modules,
)
from keras_flow.backends.torch import data as batches
from keras_flow.backends.torch.operators import operations
from keras_flow.backends.torch.rows import (
    consistent_calls,
    log_readers,
    metrics,
    mirrored_calls,
    partial_numbers,
    split_rows,
)
from keras_flow.backends.torch.step import RunningStep, current_step, running
from keras_flow.current import models
from keras_flow.current.distribution import active
from keras_flow.errors import FlowError, warn

if TYPE_CHECKING:
    import keras

    from keras_flow.backends.torch.rows.log_readers import LogReaders
    from keras_flow.current.distribution import Distribution

#: model -> the distribution that its view was chosen for, and whether it is the consistent one
_views: WeakKeyDictionary[keras.Model, tuple[Distribution, bool]] = WeakKeyDictionary()


def enter(distribution: Distribution) -> None:
    """Take rank 0's random states, and make the mesh and the process groups."""
    placement = distribution.placement
    # first: it ends with an error where a rank enters alone, and to make groups would wait for the others
    random_states.align(placement=placement)
    # meshes and groups are collectives of the whole job: made once, here, where all ranks are
    layouts.mesh(placement)
    if layouts.has_peers():
        layouts.group(placement.ranks)
    operations.register()
    # constants and masks that a layer makes are plain tensors, equal on all ranks; so are those that a program makes
    # beside steps (`layer.call(x)`, `x @ layer.kernel`)
    DTensor._op_dispatcher._allow_implicit_replication = True


def forget_steps(model: keras.Model) -> None:
    """Drop what was chosen for the old layouts, and let torch's modules see the new parameters."""
    _views.pop(model, None)
    model.train_function = model.test_function = model.predict_function = None
    retrack(model)


def recover(model: keras.Model) -> None:
    """After a step raised: drop its half-made gradients. Weights are changed only by a finished backward pass."""
    partial_numbers.drop()
    batches.watch.restart(
        None
    )  # its source may have had other lengths on other ranks: nothing to hold a later batch to
    distribution = models.distribution_of(model)
    if distribution is not None and layouts.distributed(distribution.placement):
        gradient_buckets.reducer(distribution.placement).reset()
    for variable in model.trainable_variables:
        if variable._value is not None:
            # Keras adds to what is there, and the half of a step would stay in the next one
            variable._value.grad = None


def rejoin(times: int) -> bool:
    """Form all process groups anew, under their old names, by which meshes and DTensors find them."""
    processes.join_again(times)
    partial_numbers.drop()
    for keeps_groups in (mirrored_calls.rows_of, consistent_calls.rows_of):
        keeps_groups.cache_clear()
    collectives.forget_groups()
    return layouts.make_groups_again()


def double_precision() -> AbstractContextManager[object]:
    """Nothing to switch on."""
    return contextlib.nullcontext()


@hook(
    "keras.Model",
    ("make_train_function", "make_test_function", "make_predict_function"),
    "batches become this rank's part, and logs and outputs logical again",
)
def make_function(
    distribution: Distribution, original: Callable[..., object], model: keras.Model, force: bool = False
) -> object:
    """Hook on `make_{train,test,predict}_function`: wrap the step function that Keras stores."""
    refuse_settings(model)
    original(model, force)
    # "make_train_function" stores "train_function"
    name = original.__name__.removeprefix("make_")
    function = getattr(model, name)
    # Keras keeps a function that is made; wrapped twice, a batch would be cut twice
    if not hasattr(function, "keras_flow_step"):
        setattr(model, name, _wrapped(model, function, trains=name == "train_function"))
        metrics.place(model)
    _settle(model, distribution, trains=name == "train_function")
    return getattr(model, name)


@hook("keras:adapters", "get_data_adapter", "the first batches of each data source are compared across ranks")
def new_source(_: object, original: Callable[..., Any], x: object, *args: object, **kwargs: object) -> object:
    """Hook on `get_data_adapter`: a loop over new data begins."""
    batches.refuse(x)
    adapter = original(x, *args, **kwargs)
    batches.watch.restart(adapter.num_batches)
    return adapter


def retrack(model: keras.Layer) -> None:
    """Tell torch's modules of replaced parameters: Keras hands them over once; `zero_grad` misses new ones."""
    for layer in model._flatten_layers():
        wrapped_modules.hand_over(layer)
        tracked = layer.__dict__.get("_modules", {}).get("_torch_params")
        # built later, or a layer without weights
        if tracked is None:
            continue
        if any(
            variable.path not in tracked or tracked[variable.path] is not variable._value
            for variable in layer.variables
            if variable._value is not None
        ):
            layer._track_variables()


def lists_replaced(layer: keras.Layer, *args: object, **kwargs: object) -> bool | None:
    """Condition of the hook on `Layer.named_parameters`: whether torch's modules have Parameters that were replaced."""
    tracked = layer.__dict__.get("_modules", {}).get("_torch_params")
    listed = () if tracked is None else tracked._parameters.values()
    return any(getattr(each, "_keras_flow_replaced", False) for each in listed) or None


@hook(
    "keras.Layer",
    "named_parameters",
    "after `kf.shard` of a built layer, `zero_grad` and optimizers of torch would get the tensors that it had before",
    when=lists_replaced,
)
def named_parameters(
    _: object, original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object
) -> object:
    """Hook on `Layer.named_parameters`: those that its variables have now."""
    retrack(layer)
    return original(layer, *args, **kwargs)


def _wrapped(model: keras.Model, function: Callable[..., object], trains: bool) -> Callable[..., object]:
    compared, order = 0, gathered_weights.Order()

    def step(data: object) -> object:
        nonlocal compared
        distribution = active()
        if distribution is None:
            return function(data)
        # before the checksums: a tensor and an array of the same numbers are equal
        data = batches.to_tensors(data)
        is_first = batches.watch_of_step().see(data)
        if not layouts.distributed(distribution.placement):  # one rank, or this one outside the placement: all of it
            return function(data)
        consistent = _settled(model, distribution, trains)
        if is_first:
            replicas = distribution.num_model_replicas
            distribution.uneven_notice.see(batches.rows(data), replicas, fewest=None if consistent else replicas)
        readers = log_readers.of_next_step(model, distribution.placement)
        if consistent:
            if trains and distribution.zero_stage:
                optimizer.watch(model.trainable_variables)
            this = RunningStep(distribution, consistent=True, readers=readers)
            with _held(model, this, trains), running(this), gathered_weights.not_kept(this, order):
                out = leaves.mapped(variables.to_logical, function(batches.put_batch(data, distribution)))
                out = _settled_logs(out, readers)
        else:
            out = _mirrored_step(model, distribution, function, data, readers, trains, order)
        if compared < states.STEPS:
            compared += 1
            state_copies.compare(model, distribution.placement)
        return out

    step.keras_flow_step = True  # type: ignore[attr-defined]
    return step


def _mirrored_step(
    model: keras.Model,
    distribution: Distribution,
    function: Callable[..., object],
    data: object,
    readers: LogReaders | None,
    trains: bool,
    order: gathered_weights.Order,
) -> object:
    reducer = gradient_buckets.reducer(distribution.placement)
    # a `train_step` may ask another model, by a step of it, before its own backward pass
    of_outer_step = reducer.on and current_step() is not None
    if trains:
        reducer.attach(model.trainable_variables)
    try:
        step = RunningStep(distribution, consistent=False, readers=readers)
        with _held(model, step, trains), running(step), gathered_weights.not_kept(step, order):
            return _settled_logs(leaves.mapped(split_rows.gathered, function(data)), readers)
    finally:
        reducer.reset()
        reducer.on = of_outer_step


def _settled_logs(outputs: object, readers: LogReaders | None) -> object:
    """Settle a step's logs: a metric may be read on one rank alone between steps, unless ranks agree who reads."""
    if readers is None:
        partial_numbers.settle()
    return outputs


def _held(model: keras.Model, step: RunningStep, trains: bool) -> AbstractContextManager[object]:
    """Hold a data-parallel model's weights as the step's view asks; `fit` holds them so for good."""
    if trains or not step.distribution.mirrored_view:
        return contextlib.nullcontext()
    return variables.viewed([each for each in model.variables if len(each.shape)], step.consistent)


def _settled(model: keras.Model, distribution: Distribution, trains: bool) -> bool:
    known = _views.get(model)
    if known is None or known[0] is not distribution:
        return _settle(model, distribution, trains)
    return known[1]


def _settle(model: keras.Model, distribution: Distribution, trains: bool) -> bool:
    """Choose the view, and hold what is trained accordingly. Returns whether it is consistent."""
    own_code.look_at_classes()  # in the consistent view each call of a layer asks what is believed of it
    consistent = not distribution.mirrored_view
    if distribution.mirrored_view and layouts.distributed(distribution.placement):
        interaction = row_interaction.of_model(model)
        consistent = interaction is not None
        if interaction is not None and _views.get(model, (None, False)) != (distribution, True):
            warn(
                f"DataParallel: {interaction.text}, so model {model.name!r} is trained by the consistent view (logical "
                "tensors; the same numbers, more slowly)"
            )
        for variable in copies.variables_of(model) if trains else ():
            if len(variable.shape):
                variables.as_view(variable, consistent)
    # plain in both views, because callbacks and logs read them between steps
    for variable in model.metrics_variables:
        variables.keep_plain(variable)
        variables.as_view(variable, consistent=False)
    retrack(model)
    _views[model] = (distribution, consistent)
    return consistent


def refuse_settings(model: keras.Model) -> None:
    """Refuse what `compile` was told and torch cannot do under a distribution."""
    if model.jit_compile is True:
        raise FlowError(
            "jit_compile=True cannot be used under a keras_flow distribution on torch: torch.compile does not trace "
            'gradients of distributed tensors ("During the backward, we encountered a tensor subclass where we guessed '
            'its metadata incorrectly"). Leave it at "auto", which does not compile on torch; the jax backend compiles'
        )
    if model.steps_per_execution > 1:
        raise FlowError(
            f"steps_per_execution={model.steps_per_execution} cannot be used on torch: Keras says "
            '"`steps_per_execution` must be 1 with the PyTorch backend". Use 1; jax and tensorflow can do more'
        )
