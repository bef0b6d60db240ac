"""Optimizers on PyTorch: they see gradients summed over the ranks, and update local tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from keras_flow.backends.hooking import hook
from keras_flow.backends.optimizer_slots import slots_of
from keras_flow.backends.torch import doubling, fused_adam, local_tensors, profiling, slot_parts
from keras_flow.backends.torch.operators.gathering import whole
from keras_flow.backends.torch.slot_parts import Scatter, SlotPart
from keras_flow.backends.torch.step import current_step
from keras_flow.backends.torch.variables import from_logical, holding
from keras_flow.current import keras_places
from keras_flow.current.distribution import Distribution, active, applied
from keras_flow.current.keras_places import engine_core as core
from keras_flow.current.variable_layout import keras_layout

if TYPE_CHECKING:
    import keras

#: elements that are updated together: Keras's updates make several tensors of this size, which stay in the cache
_BLOCK = 2**18


def variables_of_dtensors(
    optimizer: object, grads: Sequence[object], trainable_variables: Sequence[keras.Variable] | None = None
) -> Sequence[keras.Variable] | None:
    """Condition of the hook on `BaseOptimizer.apply`: the variables, where they, gradients or slots are DTensors.

    Also in a stateless scope under a distribution.
    """
    updated = trainable_variables if trainable_variables is not None else getattr(optimizer, "_trainable_variables", ())
    # a plain variable beside DTensors counts too: its gradient may have become one
    has_dtensors = any(isinstance(grad, DTensor) for grad in grads) or any(
        isinstance(v._value, DTensor) or slot_parts.part_of(v) is not None for v in updated
    )
    is_stateless = keras_places.in_stateless_scope() and active() is not None
    return updated if has_dtensors or is_stateless else None


@hook(
    "keras.Optimizer",
    "apply",
    "gradients arrive as partial sums: reduced in one all-reduce, not one by one",
    when=variables_of_dtensors,
)
def apply(
    updated: Sequence[keras.Variable],
    original: Callable[..., object],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[torch.Tensor | None],
    trainable_variables: Sequence[keras.Variable] | None = None,
) -> object:
    """Hook on `BaseOptimizer.apply`: reduce the partial sums that the backward pass left, then update.

    Where slots are split further than a variable, this rank updates its part, and the new parts are gathered.

    In a loop of the program's own the optimizer may have been built before its variables were laid.
    """
    laid = next((layout for layout in map(keras_layout, updated) if layout is not None), None)
    if current_step() is None and optimizer.built and laid is not None:
        laid.distribution.lay_optimizer(optimizer)
    if keras_places.in_stateless_scope():
        return _apply_to_copies(updated, optimizer, grads, trainable_variables)
    # Keras's own updates take arrays of NumPy too; a variable without a gradient is not updated
    grads = [
        grad if grad is None or isinstance(grad, torch.Tensor) else core.convert_to_tensor(grad, dtype=variable.dtype)
        for grad, variable in zip(grads, updated, strict=True)
    ]
    parts = [None if grad is None else slot_parts.part_of(each) for grad, each in zip(grads, updated, strict=True)]
    with torch.no_grad():
        reduced = reduce(grads, updated, parts)
        del grads  # whole ones, which are not needed any more
        with slot_parts.held(updated, parts):
            return original(optimizer, reduced, trainable_variables)


def _apply_to_copies(
    updated: Sequence[keras.Variable],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[torch.Tensor | None],
    trainable_variables: Sequence[keras.Variable] | None,
) -> object:
    """Update the values of a `keras.StatelessScope` (`stateless_apply`), and leave those of the variables.

    Given values may be whole where a variable is split, or split as it was under another distribution. The variables
    hold them meanwhile, each in its own layout, and are updated as in any other step.

    They hold copies, since updates of Keras work in place. With `ema_overwrite_frequency` the average and the weight
    that Keras 3.15 returns are one tensor.
    """
    scope = keras_places.get_stateless_scope()
    # a weight may be the optimizer's own too
    variables = list({id(each): each for each in (*updated, *optimizer.variables)}.values())
    with _no_stateless_scope(), holding([(each, each._value.detach().clone()) for each in variables]):
        for variable in variables:
            given = scope.get_current_value(variable)
            if given is not None:
                variable.assign(given)
        result = optimizer.apply(grads, trainable_variables)
        updates = [(variable, variable._value) for variable in variables]
    for update in updates:
        scope.add_update(update)
    return result


@contextlib.contextmanager
def _no_stateless_scope() -> Iterator[None]:
    name = "stateless_scope"
    held = keras_places.get_global_attribute(name)
    keras_places.set_global_attribute(name, None)
    try:
        yield
    finally:
        keras_places.set_global_attribute(name, held)


def updates_by_element(optimizer: keras.optimizers.Optimizer, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook on `_backend_update_step`: the distribution of the step, a pipeline's too.

    None where the update is not one of Keras's own, all of which work element by element; and with one rank.
    """
    distribution = applied()
    if distribution is None or distribution.has_one_rank:
        return None
    is_own = _module_of(optimizer).startswith(keras_places.find("keras:torch_optimizers").__name__)
    return distribution if is_own else None


def _module_of(optimizer: keras.optimizers.Optimizer) -> str:
    return type(optimizer)._parallel_update_step.__module__


@hook(
    "keras:torch_parallel_optimizer",
    "TorchParallelOptimizer._backend_update_step",
    "updates on local tensors: DTensor dispatches each operator tensor by tensor; all at once copies the model",
    when=updates_by_element,
)
def backend_update_step(
    _: object,
    original: Callable[..., object],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[torch.Tensor],
    variables: Sequence[keras.Variable],
    learning_rate: object,
) -> None:
    """Hook on `TorchParallelOptimizer._backend_update_step`: update this rank's pieces.

    The update works element by element, so that its pieces are those of the logical update.

    Each of a dozen operators on a list of DTensors would be dispatched tensor by tensor; and on all variables at once
    they make several copies of the model, in memory that is new in each step.
    """
    # the same local piece of every gradient, slot and variable: they were laid alike
    pieces = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    if fused_adam.update(optimizer, pieces, variables, learning_rate):
        return
    every = [each for each in (*variables, *optimizer.variables) if isinstance(each._value, DTensor)]
    # changes in place reach the DTensor, and the variable whose rows they are
    with holding([(each, each._value._local_tensor) for each in every]):
        # Nadam multiplies its momentum schedule at each call, so blocks would multiply it several times
        if _module_of(optimizer).endswith("nadam"):  # it counts its calls
            original(optimizer, pieces, variables, learning_rate)
            return
        for indices, rows in _blocks(pieces):
            chosen = [variables[index] for index in indices]
            if rows is None:
                original(optimizer, [pieces[index] for index in indices], chosen, learning_rate)
                continue
            with holding([(each, each._value[rows]) for each in (*chosen, *slots_of(optimizer, *chosen))]):
                original(optimizer, [pieces[index][rows] for index in indices], chosen, learning_rate)


def _blocks(pieces: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], slice | None]]:
    """Some `_BLOCK` elements at a time: indices of pieces that follow each other, or one piece and rows of it."""
    group: list[int] = []
    size = 0
    for index, piece in enumerate(pieces):
        if piece.numel() < 2 * _BLOCK:
            group.append(index)
            size += piece.numel()
            if size >= _BLOCK:
                yield group, None
                group, size = [], 0
            continue
        # rows in a block; of a piece [1500, 1600] that is 163 rows at a time
        count = max(1, _BLOCK * len(piece) // piece.numel())
        for start in range(0, len(piece), count):
            yield [index], slice(start, start + count)
    if group:
        yield group, None


def reduce(
    grads: Sequence[torch.Tensor | None], variables: Sequence[keras.Variable], parts: Sequence[SlotPart | None]
) -> list[torch.Tensor | None]:
    """Lay each gradient as its variable, or as its slots where they are split further.

    Sums over the same axes travel together: in one all-reduce for each dtype, or in reduce-scatters of some MiB.
    """
    out = list(grads)
    together: dict[tuple[object, ...], list[int]] = {}
    scattered: dict[tuple[object, ...], list[int]] = {}
    for index, (grad, variable, part) in enumerate(zip(grads, variables, parts, strict=True)):
        value = variable._value
        if grad is None or (part is None and not isinstance(value, DTensor)):
            out[index] = whole(grad)  # of a plain variable that was used beside DTensors
            continue
        mesh, wanted = (value.device_mesh, value.placements) if part is None else (part.mesh, part.placements)
        if not isinstance(grad, DTensor):
            out[index] = from_logical(grad, mesh, wanted)
            continue
        # nothing to send: gradients of split weights are split as these are
        if grad.placements == wanted:
            continue
        differ = tuple(axis for axis, part in enumerate(grad.placements) if part != wanted[axis])
        split = () if part is None else tuple(axis for axis, _ in part.axes)
        to_sum = tuple(axis for axis in differ if axis not in split)
        # P -> B, and P -> S on all axes over which slots are split: those of the same axes can be one
        is_sum = all(grad.placements[axis].is_partial("sum") for axis in differ) and set(split) <= set(differ)
        if is_sum and all(wanted[axis].is_replicate() for axis in to_sum):
            (scattered if split else together).setdefault((split, to_sum, grad.dtype, mesh), []).append(index)
        else:
            with profiling.gradients_of((variable.path,)):
                out[index] = grad.redistribute(mesh, wanted)
    for (_, differ, _, mesh), indices in together.items():
        pieces = [out[index].to_local() for index in indices]  # type: ignore[union-attr]
        # one message for many small gradients: latency, not bytes, is what a small model pays for
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        with profiling.gradients_of(variables[index].path for index in indices):
            for axis in differ:  # type: ignore[attr-defined]
                doubling.all_reduce(flat, mesh.get_group(axis))  # type: ignore[attr-defined]
        for index, piece, summed in zip(indices, pieces, flat.split([p.numel() for p in pieces]), strict=True):
            value = variables[index]._value
            out[index] = local_tensors.from_local(summed.view(piece.shape), value.shape, mesh, value.placements)  # type: ignore[arg-type]
    for (_, to_sum, *_), indices in scattered.items():
        scatters = slot_parts.Scatters()
        for group in slot_parts.buckets([out[index]._local_tensor.nbytes for index in indices]):  # type: ignore[union-attr]
            chosen = [indices[place] for place in group]
            summands = [out[index].to_local() for index in chosen]  # type: ignore[union-attr]
            paths = [variables[index].path for index in chosen]
            scatters.add(Scatter(summands, [parts[index] for index in chosen], to_sum, paths=paths), chosen)  # type: ignore[misc, arg-type]
        for index, piece in scatters.finish():
            out[index] = parts[index].as_dtensor(piece, variables[index]._value.shape)  # type: ignore[call-overload, union-attr]
    return out


def watch(variables: Sequence[keras.Variable]) -> None:
    """Reduce each gradient of a consistent step to this rank's part as soon as it is known (`zero=2`)."""
    for variable in variables:
        part, stored = slot_parts.part_of(variable), variable._value
        if part is None or not part.at_once or not isinstance(stored, DTensor) or not stored.requires_grad:
            continue
        if getattr(stored, "_keras_flow_watched", None) != part:  # a variable that was re-laid has a new Parameter
            stored._keras_flow_watched = part  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

            def cut(parameter: torch.Tensor, variable: keras.Variable = variable, part: SlotPart = part) -> None:
                if parameter._keras_flow_watched == part:  # type: ignore[attr-defined]
                    grad, parameter.grad = parameter.grad, None
                    parameter.grad = reduce([grad], [variable], [part])[0]

            stored.register_post_accumulate_grad_hook(cut)
