"""Operators that write into a tensor (`x[1:3] = y`, `x.mul_(2)`, `index_put_`), on DTensors.

torch 2.13 computes such an operator on a copy whenever DTensor had to change the layout on the way: a view along a
split dimension (`x[1:3]`) is taken of a gathered copy, so writing into it leaves `x` as it was, without an error. An
operator that would need another layout for the written tensor itself raises. So none of them is left to DTensor: the
functional form of the operator computes the new value, which is then written into the tensor, and for a view into the
tensor that it is a view of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from keras_flow.backends.torch import layouts
from keras_flow.backends.torch.operators.gathering import whole

aten = torch.ops.aten

#: these change what a tensor is, not its elements, and say so by no tag
_NOT_ELEMENTS = ("set_", "requires_grad_", "resize", "_resize", "detach_", "_foreach", "_fused")
#: views in place that are a view of the same elements
_VIEWS = ("squeeze_", "unsqueeze_", "t_", "transpose_")


def handlers() -> Iterator[tuple[torch._ops.OpOverload, Callable[..., object]]]:
    """A handler for each of torch's operators that write into their first argument."""
    # found by their schemas, so that an operator of a later torch is covered
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or not schema.arguments or not name.endswith("_") or name.startswith(_NOT_ELEMENTS):
            continue
        written = schema.arguments[0].alias_info
        operator = getattr(getattr(aten, name, None), schema.overload_name or "default", None)
        # a trailing underscore alone does not say that an operator writes
        if operator is None or written is None or not written.is_write:
            continue
        if name in _VIEWS:
            yield operator, functools.partial(_view, cast("torch._ops.OpOverload", _functional(operator)))
        # those change shapes and strides, and write no element
        elif torch.Tag.inplace_view not in operator.tags:
            yield operator, functools.partial(_compute, _functional(operator))


def _functional(operator: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that returns what this one writes: of the same name, and with the same arguments."""
    name = operator._schema.name.partition("::")[2]
    # `__iand__` has the functional form `__and__`, `add_` has `add`
    packet = getattr(aten, f"__{name[3:]}" if name.startswith("__i") else name.rstrip("_"), None)
    wanted = [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
    # an operator has a form for each kind of arguments: tensor and number, or two tensors
    for overload in packet.overloads() if packet is not None else ():
        found = getattr(packet, overload)
        if [(argument.name, str(argument.type)) for argument in found._schema.arguments] == wanted:
            return found
    return None


def _view(
    functional: torch._ops.OpOverload, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """DTensor changes the layout, and not the shape that the program sees."""
    target = args[0]
    new = functional(*args, **kwargs)
    target._local_tensor, target._spec = new._local_tensor, new._spec
    with torch._C._DisableTorchDispatch():
        operator(*args, **kwargs)  # the shape
    return target


def _compute(
    functional: torch._ops.OpOverload | None,
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> object:
    target = args[0]
    if operator is aten.copy_.default:
        new = _as(target, args[1])
    elif functional is not None and torch.Tag.nondeterministic_seeded not in operator.tags:
        new = functional(*args, **kwargs)
    else:  # random draws are those of one device for the logical tensor
        # so a seeded program has one device's numbers, at the price of the whole tensor
        new = whole(target).clone()
        operator(new, *map(whole, args[1:]), **{name: whole(value) for name, value in kwargs.items()})
    _write(target, new)
    return target


def _as(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return the source as `copy_` writes it: in the target's dtype and shape."""
    # `copy_` casts and broadcasts
    if source.dtype != target.dtype:
        source = aten._to_copy.default(source, dtype=target.dtype)
    return source if source.shape == target.shape else aten.expand.default(source, list(target.shape))


def _write(target: torch.Tensor, new: torch.Tensor) -> None:
    base = target._base
    if not isinstance(target, DTensor):  # plain tensors are logical, and equal on all ranks
        target.copy_(whole(new))
        return
    if base is None and target._version == 0 and torch._C._current_graph_task_id() != -1 and isinstance(new, DTensor):
        # a gradient formula fills zeros that it has just made: they need not stay whole on every rank
        target._local_tensor, target._spec = new._local_tensor.to(target.dtype), _spec_like(new, target)
        return
    # the piece keeps its memory: an optimizer's slots and views point to it
    _write_own(target, new)
    if isinstance(base, DTensor) and not _share_memory(target, base):
        _write_into_base(target, whole(new), base)


def _spec_like(new: DTensor, target: DTensor) -> DTensorSpec:
    meta = new._spec.tensor_meta
    assert meta is not None
    return DTensorSpec(new.device_mesh, new.placements, tensor_meta=meta._replace(dtype=target.dtype))


def _share_memory(view: DTensor, base: DTensor) -> bool:
    first, second = view._local_tensor, base._local_tensor
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _write_own(target: DTensor, new: torch.Tensor) -> None:
    """Into this rank's piece, in the memory that it has: views and the variable itself hold the same."""
    local, mesh = target._local_tensor, target.device_mesh
    if isinstance(new, DTensor) and new.placements == target.placements:
        local.copy_(new._local_tensor)
        return
    placements = layouts.without_sums(target.placements)
    if isinstance(new, DTensor):
        piece = new.redistribute(mesh, placements)._local_tensor
    else:
        piece = new.expand(target.shape)[layouts.local_slices(target.shape, mesh, placements)]
    # a value that is written replaces a sum, so that one rank of the axis has it and the others zeros
    if _is_first_summand(target):
        local.copy_(piece)
    else:
        local.zero_()


def _write_into_base(view: DTensor, new: torch.Tensor, base: DTensor) -> None:
    """Write new values of a view into its base. The view, taken of the base's positions, says where they are."""
    # each element of the base gets its number; the view of the numbers says which of them it shows
    positions = torch.arange(base.numel(), device=new.device).reshape(base.shape)
    written = torch.full((base.numel(),), -1, device=new.device)
    written[view._view_func_unsafe(positions).reshape(-1)] = torch.arange(new.numel(), device=new.device)
    own = written.reshape(base.shape)[
        layouts.local_slices(base.shape, base.device_mesh, layouts.without_sums(base.placements))
    ]
    # -1 where the view shows nothing of the base
    changed = own >= 0
    values = new.reshape(-1)[own[changed]].to(base.dtype)
    base._local_tensor[changed] = values if _is_first_summand(base) else torch.zeros_like(values)


def _is_first_summand(value: DTensor) -> bool:
    """Whether this rank holds the value: in a partial sum one rank of each line of the mesh does, and the others zeros.

    (Of a partial mean, minimum or maximum every rank has the whole amount.)
    """
    coordinates = value.device_mesh.get_coordinate()
    assert coordinates is not None
    return not any(at for at, part in zip(coordinates, value.placements, strict=True) if part.is_partial("sum"))
