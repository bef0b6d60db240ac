"""Variables on PyTorch: DTensors in the consistent view, plain tensors where all ranks compute with whole values."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, overload

import numpy as np
import torch
import torch.distributed as torch_distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keras_flow import sbp
from keras_flow.backends.files import weights_files
from keras_flow.backends.hooking import distribution_of_new, hook, layout_over_ranks
from keras_flow.backends.rendezvous import agreement
from keras_flow.backends.torch import creation, layouts, local_tensors, state_copies, tables, tensors
from keras_flow.backends.torch.step import current_step, of_all_rows
from keras_flow.current import dry_run, keras_places
from keras_flow.current.creator import Creator, creator
from keras_flow.current.keras_places import engine_core as core
from keras_flow.current.variable_layout import KerasLayout, VariableLayout, is_elsewhere, keras_layout, stage_rank
from keras_flow.errors import warn
from keras_flow.layout import Layout

if TYPE_CHECKING:
    import keras

    from keras_flow.current.distribution import Distribution


# ---- DTensors and logical values


def from_logical(full: torch.Tensor, device_mesh: DeviceMesh, placements: layouts.TorchPlacements) -> DTensor:
    """A DTensor from a logical tensor that is equal on all ranks, without communication.

    A piece keeps no reference to the whole. A gradient by the whole is gathered: each rank has its own piece's alone.
    """
    if full.requires_grad and torch.is_grad_enabled() and any(part.is_shard() for part in placements):
        whole = local_tensors.from_local(full.contiguous(), full.shape, device_mesh, layouts.replicated(device_mesh))
        return whole.redistribute(device_mesh, placements)
    local = full[layouts.local_slices(full.shape, device_mesh, placements)] if full.ndim else full
    if local.numel() != full.numel():
        local = local.clone(memory_format=torch.contiguous_format)
    return local_tensors.from_local(local.contiguous(), full.shape, device_mesh, placements)


@overload
def to_logical(value: torch.Tensor) -> torch.Tensor: ...
@overload
def to_logical(value: object) -> object: ...
def to_logical(value: object) -> object:
    """The logical tensor of a DTensor, a collective where it is split; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    full = value.full_tensor()
    if full.requires_grad:  # its gradient is a DTensor where the program computes with it and with split weights
        full.register_hook(to_logical)
    return full


# ---- creation, assignment, reading


@hook(
    "keras.Variable",
    "_initialize_with_initializer",
    "variables are created sharded; without it every rank makes the whole value",
    when=distribution_of_new,
)
def initialize_with_initializer(
    distribution: Distribution,
    original: Callable[..., None],
    variable: keras.Variable,
    initializer: Callable[..., torch.Tensor],
) -> None:
    """Hook on `Variable._initialize_with_initializer`: choose the layout first, so that a rank makes only its piece."""
    layout = _layout_at_creation(variable, tuple(variable._shape), distribution)
    if tables.is_served(layout):
        tables.make(variable, tables.block_of(initializer, tuple(variable._shape), variable._dtype), layout)
        return
    if is_elsewhere(layout, (layouts.this_rank(),)):
        creation.skip(initializer)
        _set(variable, _absent(variable))
        return
    # whole on every rank: data parallel, or nothing of it is split
    if not _as_dtensor(variable._dtype, variable._shape, layout):
        with of_all_rows():  # a model may be built by its first step, by a rank's rows
            original(variable, initializer)
        return
    placements = layouts.engine_layout(layout.layout)
    mesh = layouts.mesh(layout.distribution.placement)
    shape = tuple(variable._shape)
    value = creation.constant(initializer, shape, variable._dtype, mesh, placements)
    if value is None:
        value = creation.drawn(initializer, shape, variable._dtype, mesh, placements)
    if value is None:
        value = core.convert_to_tensor(initializer(shape, dtype=variable._dtype), dtype=variable._dtype)
    _set(variable, _distribute(value.detach(), layout))


@hook(
    "keras.Variable",
    "_initialize",
    "variables of the consistent view are DTensors; Keras 3.15 has no distribution on torch",
    when=distribution_of_new,
)
def initialize(
    distribution: Distribution, original: Callable[..., None], variable: keras.Variable, value: object
) -> None:
    """Hook on `Variable._initialize`: hold the first value of a variable in its layout."""
    # Keras shares a Parameter between variables, and infers shapes on the device "meta"
    if isinstance(value, torch.nn.Parameter) or getattr(value, "is_meta", False):
        original(variable, value)
        return
    tensor = core.convert_to_tensor(value, dtype=variable._dtype)
    if variable._shape is None:
        variable._shape = tuple(tensor.shape)
    layout = _layout_at_creation(variable, tuple(tensor.shape), distribution)
    if tables.is_served(layout):
        tables.make(variable, tables.cut_of(tensor), layout)
        return
    if is_elsewhere(layout, (layouts.this_rank(),)):
        _set(variable, _absent(variable))
    elif not _as_dtensor(variable._dtype, tensor.shape, layout):
        original(variable, to_logical(tensor))
    else:
        _set(variable, _distribute(tensor.detach(), layout))


@hook(
    "keras.Layer",
    "_track_variables",
    "explain of a model that is only described: handing variables to torch's modules would make their values",
    when=dry_run.world,
)
def _not_tracked(*args: object, **kwargs: object) -> None:
    """Hook on `Layer._track_variables`: the call is left out."""


def assigned_over_ranks(variable: keras.Variable, *args: object, **kwargs: object) -> KerasLayout | None:
    """Condition of the hook on `Variable.assign`: the layout, where the variable itself gets the value."""
    return None if keras_places.in_stateless_scope() else layout_over_ranks(variable)


@hook(
    "keras.Variable",
    "assign",
    "copy_ needs equal placements (`mixed torch.Tensor and DTensor`); of a weight in a file a rank reads its own part, "
    "and Keras makes a whole tensor first",
    when=assigned_over_ranks,
)
def assign(_: KerasLayout, original: Callable[..., object], variable: keras.Variable, value: object) -> object:
    """Hook on `Variable.assign`: each rank cuts its own piece of a logical value, without communication."""
    stored = variable._value
    if isinstance(stored, DTensor) and weights_files.is_mapped(value) and tuple(value.shape) == tuple(stored.shape):  # type: ignore[attr-defined]
        _assign_from_file(stored, value)  # type: ignore[arg-type]
        return stored
    tensor: torch.Tensor = core.convert_to_tensor(value, dtype=variable._dtype)
    # the mirrored view has whole weights on every rank; a DTensor comes from a consistent step
    if not isinstance(stored, DTensor) or tensor.shape != stored.shape:
        return original(variable, to_logical(tensor))  # a wrong shape is Keras's own error
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            own = layouts.local_slices(stored.shape, stored.device_mesh, stored.placements)
            stored.to_local().copy_(tensor[own])
        elif tensor.placements == stored.placements:
            stored.copy_(tensor)
        else:
            stored.copy_(tensor.redistribute(stored.device_mesh, stored.placements))
    return tensor


def _assign_from_file(stored: DTensor, value: np.memmap) -> None:
    """Read this rank's part of a value in a file, block by block."""
    local = stored.to_local()
    index = layouts.local_slices(stored.shape, stored.device_mesh, stored.placements)
    with torch.no_grad():
        for rows, part in weights_files.blocks(value, index):
            local[rows].copy_(torch.from_numpy(part))


def fill(variable: keras.Variable, part: Callable[[tuple[slice, ...]], np.ndarray]) -> Callable[[], object]:
    """Read this rank's part of a value; return what gives it to the variable."""
    stored = variable._value
    if stored.is_meta:  # of another rank's stage
        return lambda: None
    own, index = stored, [slice(0, length) for length in stored.shape]
    if isinstance(stored, DTensor):
        own, index = stored.to_local(), layouts.local_slices(stored.shape, stored.device_mesh, stored.placements)
    value = part(tuple(index))

    def give() -> None:
        with torch.no_grad():
            own.copy_(core.convert_to_tensor(value, dtype=variable.dtype))

    return give


def place(variable: keras.Variable, layout: KerasLayout) -> None:
    """Move a variable to another layout, keeping its value; one that is not distributed yet takes rank 0's value."""
    before = keras_layout(variable)
    variable._layout = layout
    if _is_read_outside(creator()) and not variable.trainable:
        keep_plain(variable)
    stored: torch.Tensor | None = variable._value
    if stored is None:
        return  # made later, with this layout
    # by which a module that shares the tensor finds it again: `wrapped_modules`
    variable.__dict__.setdefault("_keras_flow_first", id(stored))
    if before is not None and before.distribution.stage_rank is not None:  # one rank has the value
        stored = from_rank(variable, before.distribution.stage_rank)
    if tables.is_served(layout):
        tables.make(variable, tables.cut_of(stored), layout)
        return
    if is_elsewhere(layout, (layouts.this_rank(),)):
        if before is None:
            _value_of_rank_0(variable, stored.detach(), layout.distribution)
        _set(variable, _absent(variable))
        return
    full: torch.Tensor = to_logical(stored.detach())
    if not isinstance(stored, DTensor) and before is None:
        full = _value_of_rank_0(variable, full, layout.distribution)
    if not _stays_plain(variable) and _as_dtensor(variable._dtype, full.shape, layout, of_layer=creator() is None):
        _set(variable, _distribute(full, layout))
    elif type(own := variable._value) is not torch.nn.Parameter or own.is_meta:
        _set(variable, full.clone(), own.requires_grad)
    elif full.data_ptr() != own.data_ptr():  # optimizers, hooks and modules of torch know the Parameter
        with torch.no_grad():
            own.copy_(full)


def _absent(variable: keras.Variable) -> torch.Tensor:
    """Return a placeholder without memory for a value that another rank has. To compute with it is an error."""
    return torch.empty(tuple(variable._shape), dtype=core.to_torch_dtype(variable._dtype), device="meta")


def from_rank(variable: keras.Variable, rank: int) -> torch.Tensor:
    """The value that one rank has, on all; a collective."""
    own: torch.Tensor = variable._value.detach()
    stored = to_logical(own)
    value = torch.empty_like(stored, device=core.get_device()) if stored.is_meta else stored.clone().contiguous()
    if torch_distributed.is_initialized():
        torch_distributed.broadcast(value, rank)
    return value


def as_view(variable: keras.Variable, consistent: bool) -> None:
    """Hold a broadcast variable of a data-parallel model as DTensor (`consistent`) or plain."""
    value = _in_view(variable, consistent)
    if value is not None:
        _set(variable, value, variable._value.requires_grad)


def viewed(variables: Iterable[keras.Variable], consistent: bool) -> AbstractContextManager[None]:
    """Inside, variables are held as by `as_view`, and have their own Parameters again after it.

    Optimizers and hooks of a user's own loop know these: an `evaluate` between its steps must not replace them.
    """
    values = [(variable, _in_view(variable, consistent)) for variable in variables]
    return holding(
        [
            (variable, torch.nn.Parameter(value, requires_grad=variable._value.requires_grad))
            for variable, value in values
            if value is not None
        ]
    )


def _in_view(variable: keras.Variable, consistent: bool) -> torch.Tensor | None:
    """A variable's value as DTensor or plain, in the memory that it has; None where it is held so."""
    layout, stored = keras_layout(variable), variable._value
    if layout is None or stored is None or isinstance(stored, DTensor) == consistent:
        return None
    if isinstance(stored, DTensor):
        # a slot is split in either view
        return to_logical(stored.detach()) if layout.layout.is_broadcast else None
    # counters and seeds are equal on all ranks in either view
    if not stored.is_floating_point() or _stays_plain(variable):
        return None
    if not layouts.distributed(layout.distribution.placement):
        return None
    stored.data = stored.data.contiguous()
    return _distribute(stored.detach(), layout)


def is_split_over_processes(variable: keras.Variable) -> bool:
    """Whether ranks hold parts of a variable; one outside of the placement, which has a whole copy, says so too."""
    value, layout = variable._value, keras_layout(variable)
    if isinstance(value, tables.ServedTensor):
        return False
    if stage_rank(variable) is not None:
        return True
    if isinstance(value, DTensor):
        return any(part.is_shard() for part in value.placements)
    if layout is None or value is None or layouts.is_member(layout.distribution.placement) or _stays_plain(variable):
        return False
    has_parts = len(layout.distribution.placement.ranks) > 1 and value.is_floating_point()
    return has_parts and any(isinstance(part, sbp.Split) for part in layout.layout.nd_sbp)


def shards(variable: keras.Variable) -> dict[int, np.ndarray]:
    """The piece that this process's rank holds, from the live tensor."""
    layout, stored = keras_layout(variable), variable._value
    if isinstance(stored, tables.ServedTensor):
        return tables.shards(stored)
    # a rank outside the placement has a whole copy, which is no shard of it
    if layout is not None and not layouts.is_member(layout.distribution.placement):
        return {}
    local = stored.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return {layouts.this_rank(): tensors.as_numpy(local)}


def keep_plain(variable: keras.Variable) -> None:
    """Keep a variable a plain tensor in every view.

    `fit` reads metrics outside the step, and preprocessing layers keep tensors made of their state.
    """
    variable._keras_flow_plain = True


def _stays_plain(variable: keras.Variable) -> bool:
    return getattr(variable, "_keras_flow_plain", False)


def _is_read_outside(made_by: Creator | None) -> bool:
    if made_by is None:
        return False
    preprocesses = made_by.layer is not None and keras_places.is_of_keras(type(made_by.layer), "layers.preprocessing")
    return made_by.kind == "metric" or preprocesses


def _layout_at_creation(variable: keras.Variable, shape: tuple[int, ...], distribution: Distribution) -> KerasLayout:
    # weights that are trained (STFTSpectrogram has some) have gradients of own rows, which are summed as DTensors
    if _is_read_outside(creator()) and not variable.trainable:
        keep_plain(variable)
    layout = keras_layout(variable)
    if layout is None:
        layout = distribution.get_variable_layout(variable)
    # Keras hands `variable._layout` on to slots, Adafactor's rows and columns among them
    elif layout.layout.shape != shape or not core.to_torch_dtype(variable._dtype).is_floating_point:
        # a slot of another shape than its variable, or of integers: broadcast
        layout = KerasLayout(VariableLayout(Layout(distribution.placement, {}, shape), "default"), layout.distribution)
    variable._layout = layout
    return layout


def _as_dtensor(dtype: str, shape: object, layout: KerasLayout, of_layer: bool = False) -> bool:
    """Whether a value is stored as DTensor.

    Plain are integers and seeds, state of metrics and preprocessing, an optimizer's scalars (read outside the step),
    everything in the mirrored view, and all on ranks outside the placement.
    """
    if not layouts.distributed(layout.distribution.placement) or not core.to_torch_dtype(dtype).is_floating_point:
        return False
    made_by = creator()
    # a DTensor here would make a collective of every read by a callback
    if _is_read_outside(made_by):
        return False
    # learning rates and counts: scalars that are not of a layer
    if not len(tuple(shape)) and not of_layer and (made_by is None or made_by.kind != "layer"):  # type: ignore[arg-type]
        return False
    # data parallel holds whole values, unless a model that mixes rows is being built in a step; slots may be split
    if layout.distribution.mirrored_view and layout.layout.is_broadcast:
        step = current_step()
        return step is not None and step.consistent
    return True


def _distribute(full: torch.Tensor, layout: KerasLayout) -> DTensor:
    if isinstance(full, DTensor):  # made as a piece
        return full
    mesh = layouts.mesh(layout.distribution.placement)
    return from_logical(full, mesh, layouts.engine_layout(layout.layout))


def _set(variable: keras.Variable, value: torch.Tensor, is_trained: bool | None = None) -> None:
    if is_trained is None:
        is_trained = variable._trainable and value.is_floating_point()
    # torch's modules have the Parameter until they are told: `trainer.lists_replaced`
    if isinstance(before := getattr(variable, "_value", None), torch.Tensor):
        before._keras_flow_replaced = True  # type: ignore[attr-defined]
    variable._value = torch.nn.Parameter(value, requires_grad=is_trained)


def _value_of_rank_0(variable: keras.Variable, full: torch.Tensor, distribution: Distribution) -> torch.Tensor:
    """Return rank 0's value of a variable that each rank made on its own before the scope."""
    if not torch_distributed.is_initialized():
        return full
    value = full.contiguous().cpu()
    # a checksum first: ranks that were seeded alike send no weights
    mine = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    if not state_copies.differ_between(torch.tensor([mine])).any():
        return full
    sums = agreement.exchange(str(mine))
    torch_distributed.broadcast(value, src=0)
    if not getattr(distribution, "_said_rank_0", False):
        distribution._said_rank_0 = True  # type: ignore[attr-defined]
        ranks = [rank for rank, other in enumerate(sums) if other != sums[0]]
        warn(
            f"{variable.path} was made before the scope with other values on ranks {ranks} than on rank 0: all weights "
            "made before the scope are taken from rank 0. Build the model inside `with dist.scope():`, or seed it with "
            "keras.utils.set_random_seed"
        )
    return value.to(full.device)


@contextlib.contextmanager
def whole(variables: Iterable[keras.Variable], here: bool) -> Iterator[None]:
    """Gather variables on all ranks; where `here`, the program inside finds plain tensors and needs no collectives."""
    gathered = []
    for variable in variables:
        stored, rank = variable._value, stage_rank(variable)
        if isinstance(stored, DTensor) or rank is not None:
            # on all ranks, since it is a collective; the value is kept where it is wanted alone
            full = to_logical(stored.detach()) if rank is None else from_rank(variable, rank)
            if here:
                gathered.append((variable, torch.nn.Parameter(full, requires_grad=stored.requires_grad)))
    with holding(gathered):
        yield


@contextlib.contextmanager
def holding(values: Sequence[tuple[keras.Variable, torch.Tensor]]) -> Iterator[None]:
    """Variables hold other values inside, and their own again after it."""
    # the Parameters themselves: optimizers and torch's modules know them by identity; shapes are what `assign` compares
    before = [(variable._value, variable._shape) for variable, _ in values]
    for variable, value in values:
        variable._value, variable._shape = value, tuple(value.shape)
    try:
        yield
    finally:
        for (variable, _), (value, shape) in zip(values, before, strict=True):
            variable._value, variable._shape = value, shape
