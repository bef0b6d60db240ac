"""DTensor's sharding rules that torch 2.13 lacks or has wrong. Registered once, before operators are first used.

A rule is a list of signatures: placements of the outputs, placements of the inputs (None for what is no tensor). `R` is
broadcast, `S(d)` split, `P` partial sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, StrategyType
from torch.distributed.tensor.experimental import register_sharding

from keras_flow.backends import fingerprints
from keras_flow.backends.torch.operators import (
    attention,
    embedding,
    gathered_whole,
    in_place,
    reading_dtensors,
    resizing,
)
from keras_flow.errors import FlowError

aten = torch.ops.aten
R, P, S = Replicate(), Partial(), Shard
Signature = tuple[list[object], list[object]]


@functools.cache
def register() -> None:
    """Register all rules. Only operators on DTensors are concerned.

    Raises:
        FlowError: torch's tables of rules, which are private, are not what they were.
    """
    try:
        _register_all()
    except (AttributeError, ImportError, KeyError) as error:
        raise FlowError(
            f"keras_flow adds rules to those of torch.distributed.tensor, which in torch {torch.__version__} are not "
            f"what it was written against ({type(error).__name__}: {error}). {fingerprints.advice('torch')}"
        ) from error


def _register_all() -> None:
    _register_truth()
    _register_convolution()
    for name in ("hardswish", "hardtanh", "hardsigmoid", "hardshrink", "softshrink"):
        _register_like(getattr(aten, f"{name}_backward").default, tensors=2)
    _register_windows()
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[aten.unbind.int] = _unbind
    # torch's handler gathers local winners as if all shards were equal; uneven ones abort the process in gloo
    handlers[aten.argmax.default] = handlers[aten.argmin.default] = _arg_extremum
    handlers.update(attention.handlers())
    handlers.update(in_place.handlers())
    handlers.update(resizing.handlers())
    handlers[aten._local_scalar_dense.default] = reading_dtensors.local_scalar
    handlers[aten.equal.default] = reading_dtensors.equal
    handlers[aten.embedding.default] = embedding.look_up
    handlers[aten.as_strided.default] = gathered_whole.run
    _register_views()
    _register_solvers()
    _register_along_a_dim()
    _remember_by_all_arguments()
    _register_net()


def _rule(operator: torch._ops.OpOverload) -> Callable[[Callable[..., object]], object]:
    """`register_sharding`; a rule of torch's own for the operator, which would be asked first, is dropped."""
    DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs.pop(operator, None)
    return register_sharding(operator)


def _register_truth() -> None:
    """`any` and `all` over a split dim: the largest and the smallest of the ranks' truth values.

    torch 2.13 takes them for a sum and a product. Two that are true sum up to 2, which is 2.0 as a number. A product
    cannot be stacked with what all ranks have, as torch knows no way from `R` to a product. Partial numbers are reduced
    before they are asked: a summand that is zero says nothing.
    """
    for packet, kind in ((aten.any, "max"), (aten.all, "min")):
        for operator in (packet.default, packet.dim, packet.dims):

            @_rule(operator)
            def _(x, *args, kind=kind, **kwargs):
                options = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
                dim, keeps = options.get("dim"), options.get("keepdim", False)
                dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
                reduced = {each % x.ndim for each in dims}

                def after(split: int) -> object:
                    if split in reduced:
                        return Partial(kind)
                    return S(split if keeps else split - sum(each < split for each in reduced))

                rest = [None] * len(options)
                return [([R], [R, *rest]), *(([after(split)], [S(split), *rest]) for split in range(x.ndim))]


def _register_convolution() -> None:
    """Built-in: splits of the batch. Added: splits of channels in and out, where there is one group."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for operator in (aten.convolution.default, aten.convolution_backward.default):
        handlers.pop(operator, None)

    @_rule(aten.convolution.default)
    def _(x, w, b, stride, padding, dilation, transposed, output_padding, groups):
        def signature(out: object, x_in: object, w_in: object, b_in: object) -> Signature:
            return [out], [x_in, w_in, b_in if b is not None else None, *[None] * 6]

        candidates = [signature(R, R, R, R), signature(S(0), S(0), R, R)]
        if groups == 1:
            out_dim = 1 if transposed else 0
            candidates.append(signature(S(1), R, S(out_dim), S(0)))
            # channels in are summed over: each rank has a summand, of the bias too
            candidates.append(signature(P, S(1), S(1 - out_dim), P))
        return candidates

    @_rule(aten.convolution_backward.default)
    def _(grad, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask):
        def signature(gx: object, gw: object, gb: object, g_in: object, x_in: object, w_in: object) -> Signature:
            outputs = [part if wanted else None for part, wanted in zip((gx, gw, gb), mask, strict=True)]
            return outputs, [g_in, x_in, w_in, *[None] * 8]

        candidates = [signature(R, R, R, R, R, R), signature(S(0), P, P, S(0), S(0), R)]
        if groups == 1:
            out_dim = 1 if transposed else 0
            candidates.append(signature(P, S(out_dim), S(0), S(1), R, S(out_dim)))
            candidates.append(signature(S(1), S(1 - out_dim), R, R, S(1), S(1 - out_dim)))
        return candidates


def _register_windows() -> None:
    """Poolings and paddings: split over what is not pooled, rows and channels."""
    for name, dims in (("avg_pool2d", 2), ("avg_pool3d", 3), ("_adaptive_avg_pool2d", 2)):
        _register_like(getattr(aten, f"{name}_backward").default, tensors=2, last=dims)
    for dims in (2, 3):
        _register_like(getattr(aten, f"adaptive_max_pool{dims}d").default, tensors=1, outputs=2, last=dims)
        _register_like(getattr(aten, f"adaptive_max_pool{dims}d_backward").default, tensors=3, last=dims)
    _register_like(aten._adaptive_avg_pool3d.default, tensors=1, last=3)
    _register_like(aten._adaptive_avg_pool3d_backward.default, tensors=2, last=3)
    _register_like(aten.im2col.default, tensors=1, last=2)
    _register_like(aten.col2im.default, tensors=1, last=1)
    for dims in (1, 2, 3):
        for kind in ("replication", "reflection"):
            _register_like(getattr(aten, f"{kind}_pad{dims}d").default, tensors=1, last=dims)
            _register_like(getattr(aten, f"{kind}_pad{dims}d_backward").default, tensors=2, last=dims)


def _register_like(operator: torch._ops.OpOverload, tensors: int, outputs: int = 1, last: int = 0) -> None:
    """All tensors of the operator have one layout, which does not split the `last` dims."""

    @_rule(operator)
    def _(*args, **kwargs):
        rest = [None] * (len(args) - tensors)
        return [
            ([part] * outputs, [part] * tensors + rest) for part in (R, *(S(dim) for dim in range(args[0].ndim - last)))
        ]


def _register_solvers() -> None:
    """Systems of equations: split by systems where each tensor has all of them.

    torch's rules split the right sides alone, beside whole matrices, and dims of tensors that have fewer, which are
    broadcast.
    """
    for operator in (
        aten.linalg_solve_triangular,
        aten._linalg_solve_ex,
        aten.linalg_lu_solve,
        aten.cholesky_solve,
        aten.triangular_solve,
    ):
        outputs = len(operator.default._schema.returns)

        @_rule(operator.default)
        def _(*args, outputs=outputs, **kwargs):
            tensors = [arg for arg in args if isinstance(arg, DTensorSpec)]
            rest = [None] * (len(args) - len(tensors) + len(kwargs))
            # what is before the last two dims, the matrix: which system it is
            systems = max((tuple(one.shape) for one in tensors), key=len)[:-2]
            # pivots, and one right side of each system, have one dim less than matrices
            alike = all(tuple(one.shape)[: len(systems)] == systems and one.ndim > len(systems) for one in tensors)
            splits = [S(k) for k in range(len(systems))] if alike else []
            return [([part] * outputs, [part] * len(tensors) + rest) for part in (R, *splits)]


def _register_along_a_dim() -> None:
    """Scans, and gradients of parts of a tensor: dims are counted from the front.

    torch's rules compare a dim with those that are split as it was given, so that a scan along `dim=-1` is one of each
    rank's own piece.
    """
    for operator in (aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin):
        outputs = len(operator.default._schema.returns)

        @_rule(operator.default)
        def _(x, dim, outputs=outputs, **kwargs):
            return [
                ([part] * outputs, [part, None, *[None] * len(kwargs)])
                for part in (R, *(S(k) for k in range(x.ndim) if k != dim % x.ndim))
            ]

    # here the rules themselves are right, and only count dims as they were given; those of torch 2.14, which stand in
    # the table of rules for one axis of the mesh, count from the front
    propagator = DTensor._op_dispatcher.sharding_propagator
    strategies = propagator.op_strategy_funcs
    for operator in (aten.slice_backward.default, aten.select_backward.default):
        if operator not in propagator.op_single_dim_strategy_funcs:
            strategies[operator] = functools.partial(_with_dim_from_the_front, strategies[operator])

    @_rule(aten.unfold_copy.default)
    def _(x, dim, size, step):
        splits = [S(k) for k in range(x.ndim) if k != dim % x.ndim]
        return [([part], [part, None, None, None]) for part in (R, P, *splits)]


def _with_dim_from_the_front(strategy: Callable[[OpSchema], StrategyType], schema: OpSchema) -> StrategyType:
    grad, sizes, dim, *rest = schema.args_schema
    # -1 is the last dim, as everywhere in torch
    counted = (grad, sizes, dim % len(sizes), *rest)  # type: ignore[arg-type, operator]
    return strategy(dataclasses.replace(schema, args_schema=counted))


# ---- operators that are run on local pieces


def _unbind(operator: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    whole, *rest = args
    dim = (rest[0] if rest else kwargs.get("dim", 0)) % whole.ndim
    x, placements = _undivided(whole, dim)
    shape = [*x.shape[:dim], *x.shape[dim + 1 :]]
    return [_wrap(x, piece, _without(placements, dim), shape) for piece in operator(x._local_tensor, dim)]  # type: ignore[attr-defined]


def _arg_extremum(operator: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    whole, *rest = args
    # handlers receive arguments as the caller gave them, by place or by name
    dim = rest[0] if rest else kwargs.get("dim")
    keep = rest[1] if len(rest) > 1 else kwargs.get("keepdim", False)
    if dim is not None:
        dim %= whole.ndim
    x, placements = _undivided(whole, dim)
    shape = list(x.shape)
    if dim is None:
        shape = [1] * x.ndim if keep else []
    elif keep:
        shape[dim] = 1
    else:
        del shape[dim]
        placements = _without(placements, dim)
    return _wrap(x, operator(x._local_tensor, dim, keep), placements, shape)


def _undivided(x: DTensor, dim: int | None) -> tuple[DTensor, list]:
    """The tensor with dimension `dim` (None: all) not split, and its placements."""
    placements = [R if p.is_partial() or (isinstance(p, Shard) and dim in (None, p.dim)) else p for p in x.placements]
    return (x.redistribute(x.device_mesh, placements) if tuple(placements) != x.placements else x), placements


def _without(placements: Sequence, dim: int) -> list:
    return [S(part.dim - 1) if isinstance(part, Shard) and part.dim > dim else part for part in placements]


def _wrap(x: DTensor, local: torch.Tensor, placements: Sequence, shape: Sequence[int]) -> DTensor:
    strides = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    return DTensor(local, DTensorSpec(x.device_mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


# ---- views


def _register_views() -> None:
    """A view that moves elements between ranks redistributes, as `reshape` does.

    torch refuses it ("Cannot unflatten unevenly sharded tensor: ... Please redistribute the tensor before this
    operation").
    """
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor._ops._view_ops import register_op_strategy_map

    propagator = DTensor._op_dispatcher.sharding_propagator
    for operator in (aten.view.default, aten._unsafe_view.default):
        strict = propagator.op_strategy_funcs[operator]
        register_op_strategy_map(operator, torch.Tensor.view, RuntimeSchemaInfo(1), strict_view=False)
        loose = propagator.op_strategy_funcs[operator]
        strategy = functools.partial(_first_that_can, (strict, loose))
        propagator.register_op_strategy(operator, strategy, RuntimeSchemaInfo(1))  # type: ignore[arg-type]


def _first_that_can(strategies: Sequence[Callable[..., object]], schema: object) -> object:
    *most, last = strategies
    for strategy in most:
        try:
            return strategy(schema)
        except RuntimeError:
            continue
    return last(schema)


# ---- the net around all of them


def _remember_by_all_arguments() -> None:
    """A rule's decision, and the shape of the result with it, is remembered for arguments that are all the same.

    By default some are left out: `topk(x, 3)` after `topk(x, 2)` is given the shape of the first, and a convolution
    that of one with another dilation. Floats are left out still: they change in each step and say nothing of shapes.
    """
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator = DTensor._op_dispatcher.sharding_propagator
    for rules, infos in (
        (propagator.op_strategy_funcs, propagator.op_to_schema_info),
        (propagator.op_single_dim_strategy_funcs, propagator.op_to_schema_info_for_single_dim_strategy),
    ):
        for operator in rules:
            info = infos.get(operator) or RuntimeSchemaInfo()
            # from the first argument that says a shape on, arguments are part of the cache's key
            places = [k for k, one in enumerate(operator._schema.arguments) if not one.kwarg_only and _says_shapes(one)]
            names = [one.name for one in operator._schema.arguments if one.kwarg_only and _says_shapes(one)]
            infos[operator] = RuntimeSchemaInfo(
                min([info.static_argnum, *places]),
                sorted({*(info.static_kwargkey or ()), *names}) or None,
                info.needs_pytree,
            )


def _says_shapes(argument: torch._C.Argument) -> bool:
    kind = str(argument.type)
    return not argument.is_out and "Tensor" not in kind and any(part in kind for part in ("int", "bool", "str"))


def _register_net() -> None:
    dispatcher = DTensor._op_dispatcher
    original = dispatcher._propagate_op_sharding_dispatch_slow_path
    dispatcher._propagate_op_sharding_dispatch_slow_path = functools.partial(gathered_whole.propagate, original)  # type: ignore[method-assign]
