"""Operators that DTensor cannot compute on split tensors, or not rightly: they run on gathered ones, on every rank.

DTensor asks a table of rules how to split an operator. Some rules are wrong, some operators have none, and what such
an operator raises means nothing to who wrote the model. So rules are believed for the operators of `believed_rules`
only, which the sweep of `tests/backends/torch` compares with one device. Any other operator gets its tensors whole.
That is decided from layouts and shapes alone, so all ranks decide alike, before they communicate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from operator import is_ as operator_is
from typing import Any, cast

import torch
import torch._decomp
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OutputSharding
from torch.utils import _pytree as pytree

from keras_flow.backends.torch.operators.believed_rules import (
    compares,
    is_taken_apart,
    is_trusted,
    may_divide_by_zero,
    rounds,
)
from keras_flow.backends.torch.operators.gathering import replicated, whole
from keras_flow.backends.torch.step import current_step
from keras_flow.errors import ComputedWhole, FlowError, warn

aten = torch.ops.aten

#: decisions that are not believed: the axes of the mesh to gather along first, or None where there is no rule
_doubts: dict[OpSchema | None, frozenset[int] | None] = {}
#: warnings that were given already: the place in the model, and the operator
_said: set[tuple[str, str]] = set()


def propagate(
    original: Callable[..., object],
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    op_info: OpInfo,
    try_cache: bool,
) -> object:
    """In the place of DTensor's look for a rule, which it does once for an operator, its layouts and shapes.

    Returns:
        The rule's decision, which DTensor remembers, or the operator's result, which it hands on.
    """
    # before any rule is asked: how many elements a mask chooses is known to nobody
    if operator in (aten.index.Tensor, aten.index_put.default) and _has_mask(args[1]):
        return _by_mask(operator, args, kwargs)
    if not is_trusted(operator):
        return _without_rule(operator, args, kwargs)
    if (
        (compares(operator) or may_divide_by_zero(operator, args) or rounds(operator, args, kwargs))
        and isinstance(args[0], DTensor)
        and any(part.is_partial("sum") for part in args[0].placements)
    ):
        # the tensor itself changes its layout, so that the next reader finds the sum ready
        _settle(args[0])
        return operator(*args, **kwargs)
    # operator, layouts and shapes: decided once, and the same on all ranks
    schema = op_info.schema
    if schema not in _doubts:
        try:
            decision = original(operator, args, kwargs, op_info, try_cache)
        except (RuntimeError, NotImplementedError, AssertionError, ValueError, IndexError, TypeError):
            _doubts[schema] = None  # where the program is wrong it raises below, and as on one device
        else:
            axes = _doubtful_axes(decision, args, kwargs) if isinstance(decision, OutputSharding) else frozenset()
            if not axes:
                return decision
            _doubts[schema] = axes
    doubt = _doubts[schema]
    if doubt is None:
        return _without_rule(operator, args, kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    # gentlest first: gather along the doubtful axes, then sum what is partial, then give up on the rule
    for change in (functools.partial(_gathered, axes=doubt), _summed):
        new_args, new_kwargs = pytree.tree_map_only(DTensor, change, (args, kwargs))
        if not all(map(operator_is, leaves, pytree.tree_leaves((new_args, new_kwargs)))):
            return operator(*new_args, **new_kwargs)
    return _without_rule(operator, args, kwargs)


def _settle(value: DTensor) -> None:
    """Sum a partial sum once for all who read it.

    Summed twice, in two ways, it differs in its last bits, and the gradient of a maximum looks for the elements that
    equal it.
    """
    settled = _summed(cast(DTensor, value.detach()))
    value._local_tensor, value._spec = settled._local_tensor, settled._spec


def _summed(value: DTensor) -> DTensor:
    placements = [Replicate() if part.is_partial("sum") else part for part in value.placements]
    return value if tuple(placements) == value.placements else value.redistribute(value.device_mesh, placements)


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _by_mask(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Elements where a mask holds: how many they are differs between the ranks' pieces, so that no rule is right."""
    x, indices, *rest = args
    if operator is aten.index_put.default and len(indices) == 1 and indices[0].shape == x.shape:
        values, accumulate = rest[0], rest[1] if len(rest) > 1 else kwargs.get("accumulate", False)
        # `x[mask] = number` is a choice between two tensors, element by element
        if values.numel() == 1 and not accumulate:
            return aten.where.self(indices[0], values.reshape(()), x)
    return run(operator, args, kwargs)


def _without_rule(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    if _is_composite(operator):  # its parts are dispatched to this mode again
        return operator.decompose(*args, **kwargs)
    if is_taken_apart(operator):
        return torch._decomp.decomposition_table[operator](*args, **kwargs)
    return run(operator, args, kwargs)


def run(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Compute an operator on whole tensors, on every rank.

    Raises:
        FlowError: it writes into its arguments.
    """
    if operator._schema.is_mutable:
        raise FlowError(
            f"{_place()}: {operator} writes into tensors that are split over the ranks, which torch cannot do here. "
            "Use the function that returns a new tensor instead"
        )
    # only where something is split does each rank compute more than it would
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    if any(part.is_shard() for leaf in leaves for part in leaf.placements):
        _say(operator)
    whole_args, whole_kwargs = pytree.tree_map_only(DTensor, whole, (args, kwargs))
    mesh = leaves[0].device_mesh
    return pytree.tree_map(lambda leaf: replicated(leaf, mesh), operator(*whole_args, **whole_kwargs))


def _is_composite(operator: torch._ops.OpOverload) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


def _doubtful_axes(decision: OutputSharding, args: object, kwargs: object) -> frozenset[int]:
    """Axes of the mesh along which a decision is not believed.

    There are three kinds. Ranks would hold parts of different sizes, or nothing: many rules are wrong for these. They
    would hold rows in strides, which most rules do not know. Or they would hold summands with a mask, which can be read
    only once.
    """
    outputs = decision.output_spec
    specs = list(outputs) if isinstance(outputs, Sequence) else [outputs]
    specs += [leaf._spec for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    if decision.redistribute_schema is not None:
        specs += decision.redistribute_schema.args_spec
    return frozenset(axis for spec in specs if isinstance(spec, DTensorSpec) for axis in _doubtful(spec))


def _doubtful(spec: DTensorSpec) -> Iterator[int]:
    parts = [1] * len(spec.shape) if spec.tensor_meta is not None else []
    for axis, part in enumerate(spec.placements):
        if part.is_shard() and parts:
            # several axes may split one dim: 8 rows over 2 and then 3 ranks do not divide
            parts[part.dim] *= spec.mesh.size(axis)  # type: ignore[attr-defined]
        is_plain = type(part) in (Shard, Replicate, Partial)
        if not is_plain or (part.is_shard() and parts and spec.shape[part.dim] % parts[part.dim]):  # type: ignore[attr-defined]
            yield axis


def _gathered(value: DTensor, axes: frozenset[int]) -> DTensor:
    placements = [Replicate() if axis in axes else part for axis, part in enumerate(value.placements)]
    return value if tuple(placements) == value.placements else value.redistribute(value.device_mesh, placements)


def _say(operator: torch._ops.OpOverload) -> None:
    place = _place()
    if (place, str(operator)) in _said:
        return
    _said.add((place, str(operator)))
    warn(
        f"{place}: torch's distributed tensors cannot compute {operator.name().removeprefix('aten::')} split over the "
        "ranks, so each rank computes it whole (the numbers are those of one device, nothing is gained there)",
        ComputedWhole,
    )


def _place() -> str:
    """Return where in the model the program is."""
    if torch._C._current_graph_task_id() != -1:
        return "in the gradients"
    step = current_step()
    return step.layers[-1] if step is not None and step.layers else "outside of layers"
