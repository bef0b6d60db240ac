"""Steps with dims that do not divide, on JAX: such dims are gathered before operations that XLA partitions wrongly.

XLA pads a dim that does not divide by its axis and must take the padding out of every operation that combines its
elements: rows that do not divide by the data ranks, or features of which a slice keeps an odd number. It does so for
elementwise operations, products, convolutions and reductions. It does not for scatters (on a mesh with a second axis
the padding is counted), and it aborts the process where it has to split the gradient of a sort. So a step is traced
first. Operations that `tests/sweep` has proven stay as they are; before any other, the dims that do not divide are
gathered, and all other dims stay split. docs/adr/011 has the evidence.

Example: 11 rows on a 2x2 placement whose first axis splits the rows, through an embedding. Its gradient is a scatter of
[11, 8] into the table [20, 8]. 11 does not divide by 2, so both data ranks get all 11 rows of this one gradient; the 8
features, and every other tensor of the step, keep their layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
from jax import core as jax_core
from jax._src import core as internal_core  # private: jaxprs_in_params, before jax 0.10 made it public
from jax._src import source_info_util  # private: there is no public way to name an operation as it was named before
from jax.extend import core

from keras_flow.backends.jax import data
from keras_flow.backends.jax.layouts import whole_on
from keras_flow.current.distribution import expected
from keras_flow.errors import ComputedWhole, warn

if TYPE_CHECKING:
    from keras_flow.current.distribution import Distribution

#: Operations that give the numbers of one device on dims that do not divide, forward and backward, on every mesh of the
#: sweep. An operation that is not named is unproven, which is reason enough to gather; scatters (the gradient of a
#: max pool is one) and sorts were tried, and are wrong. Concatenations: `splits_left_over_dims`.
SPLITS_LEFT_OVER_DIMS = frozenset(
    (
        "abs add add_any and argmax argmin asinh atan atan2 bessel_i0e bessel_i1e bitcast_convert_type "
        "broadcast_in_dim cbrt ceil checkpoint clamp complex cond conj conv_general_dilated convert_element_type copy "
        "cos cosh cumprod cumsum custom_jvp_call div dot_general dynamic_slice dynamic_update_slice empty2 eq erf "
        "erf_inv erfc exp exp2 expm1 floor gather ge gt imag integer_pow iota is_finite jit le log log1p logistic lt "
        "lt_to max min mul name ne neg nextafter not or pad random_bits random_gamma random_split random_wrap real "
        "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window_max reduce_window_sum rem "
        "remat2 reshape reshard rev round rsqrt scan select_n shard_map shift_right_arithmetic shift_right_logical "
        "sign sin sinh slice split sqrt square squeeze stack stop_gradient sub tan tanh tile top_k transpose unstack "
        "while"
    ).split()
)


#: calls whose body may replace the call, once gradients are taken
_INLINED = frozenset(("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"))

#: calls whose body is computed again in the backward pass (`jax.checkpoint`): another body takes its place
_AGAIN = frozenset(("checkpoint", "remat2"))
#: calls whose operations can be looked at one by one
_OPENED = _INLINED | _AGAIN


def partitioned(function: Callable[..., object], args: tuple[object, ...]) -> object:
    """Call a step, inside jit.

    Args:
        function: the step.
        args: its arguments, among which may be batches that do not divide (`data.Uneven`).
    """
    distribution = expected()
    # batches that do not divide come padded; inside the step the padding is cut off again
    logical = data.to_logical(args)
    # traced before it is compiled: only then is it known which operations, of gradients too, a step has
    program, shape = jax.make_jaxpr(function, return_shape=True)(*logical)  # type: ignore[misc]
    hidden = sorted(set(_unproven_in_loops(program.jaxpr))) if data.has_uneven(args) else []
    if hidden:  # a loop's body is one program: no operation of it can be given gathered dims alone
        _warn(hidden, distribution.num_model_replicas)
        logical = data.to_logical(args, whole=True)
    # a program takes and returns flat lists
    leaves = jax.tree.leaves(logical)
    if not all(map(splits_left_over_dims, _equations(program.jaxpr))):
        results = _evaluated(program, leaves, _LeftOver(distribution))
    else:
        results = jax_core.eval_jaxpr(program.jaxpr, program.consts, *leaves)
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def splits_left_over_dims(equation: core.JaxprEqn) -> bool:
    """Whether XLA is proven to partition this operation rightly where a dim does not divide.

    Concatenations are where their parts are of equal length: with other parts along a split dim they are wrong.
    """
    if equation.primitive.name == "concatenate":
        # [3, 2] and [3, 2] joined along dim 1 are right, [3, 2] and [3, 1] are wrong
        dim = equation.params["dimension"]
        return len({part.aval.shape[dim] for part in equation.invars}) == 1  # type: ignore[attr-defined]
    return equation.primitive.name in SPLITS_LEFT_OVER_DIMS


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The operations of a program, those of loops and calls inside it too.

    Not those of `shard_map`: they are a rank's own, and XLA has nothing to split there.
    """
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "shard_map":
            for inner in _jaxprs_in_params(equation.params):
                yield from _equations(inner)


def _unproven_in_loops(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Names of unproven operations inside loops, branches and whatever else has a program of its own."""
    for equation in jaxpr.eqns:
        for inner in _jaxprs_in_params(equation.params):
            if equation.primitive.name in _OPENED:
                yield from _unproven_in_loops(inner)
            elif equation.primitive.name != "shard_map":
                unproven = (inside for inside in _equations(inner) if not splits_left_over_dims(inside))
                yield from (inside.primitive.name for inside in unproven)


class _LeftOver:
    """Gathers the dims of a value that do not divide by the axes of a distribution."""

    def __init__(self, distribution: Distribution):
        self.placement = placement = distribution.placement
        # each axis alone, those that split the batch together, and those that rules put on one dim
        groups = [(axis,) for axis in placement.axis_names] + [distribution.batch_axes, *distribution.joined_axes]
        self.sizes = {math.prod(placement.axis_size(axis) for axis in group) for group in groups}

    def __call__(self, value: jax.Array) -> jax.Array:
        # by length alone: what XLA splits inside a program is known to XLA only
        left_over = [dim for dim, length in enumerate(value.shape) if any(length % size for size in self.sizes)]
        return whole_on(value, left_over, self.placement) if left_over else value


def _evaluated(program: core.ClosedJaxpr, args: Sequence[Any], left_over: _LeftOver) -> list[Any]:
    """Run a traced program operation by operation (JAX's own `eval_jaxpr`, with the gathers of `_LeftOver`)."""
    jaxpr = program.jaxpr
    values: dict[Any, Any] = {
        **dict(zip(jaxpr.constvars, program.consts, strict=True)),
        **dict(zip(jaxpr.invars, args, strict=True)),
    }
    for equation in jaxpr.eqns:
        inputs = [var.val if isinstance(var, core.Literal) else values[var] for var in equation.invars]
        inner = _body(equation)
        # a call with an unproven operation inside is opened, so that only that one is gathered
        if inner is not None and not all(map(splits_left_over_dims, _equations(inner.jaxpr))):
            with _named_as(equation):
                opened = functools.partial(_evaluated, inner, left_over=left_over)
                outputs = _again(equation, opened, inputs) if equation.primitive.name in _AGAIN else opened(inputs)
        else:
            proven = splits_left_over_dims(equation)
            operands = inputs if proven else list(map(_gathered(left_over), inputs))
            # the options under which the operation was traced (64 bits, a mesh)
            with _named_as(equation), equation.ctx.manager:
                outputs = _bind(equation, operands)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
            if not proven:  # else XLA would split the result as it likes, and the next operation is wrong
                outputs = list(map(_gathered(left_over), outputs))
        values.update(zip(equation.outvars, outputs, strict=True))
    return [var.val if isinstance(var, core.Literal) else values[var] for var in jaxpr.outvars]


def _again(equation: core.JaxprEqn, body: Callable[[Sequence[Any]], list[Any]], inputs: Sequence[Any]) -> list[Any]:
    """Compute a call of `jax.checkpoint` by another body; what keeps XLA from computing it once stays around it."""
    made = jax.make_jaxpr(lambda *values: body(values))(*inputs)
    program = made.jaxpr.replace(invars=[*made.jaxpr.constvars, *made.jaxpr.invars], constvars=[])
    return equation.primitive.bind(*made.consts, *inputs, **{**equation.params, "jaxpr": program})


def _named_as(equation: core.JaxprEqn) -> AbstractContextManager[None]:
    """Inside, operations have the equation's scopes and lines of the program, as in JAX's own `eval_jaxpr`."""
    source = equation.source_info
    name_stack = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=name_stack)


def _gathered(left_over: _LeftOver) -> Callable[[Any], Any]:
    """The function that gathers an array of numbers, and returns random keys and scalars unchanged."""

    def gathered(value: Any) -> Any:
        # random keys have an extended dtype, which no sharding constraint takes
        plain = getattr(value, "ndim", 0) and not jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)
        return left_over(value) if plain else value

    return gathered


def _body(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """The program of a call that may be opened, or None."""
    if equation.primitive.name in _AGAIN:
        return core.ClosedJaxpr(equation.params["jaxpr"], ())
    if equation.primitive.name not in _INLINED:
        return None
    bodies = [value for value in equation.params.values() if isinstance(value, core.ClosedJaxpr)]
    return bodies[0] if bodies else None


def _warn(hidden: Sequence[str], replicas: int) -> None:
    warn(
        f"a batch that does not divide by {replicas} data ranks is computed whole by every rank (the numbers are those "
        f"of one device): a loop of the step has operations that XLA does not split over rows that are left over "
        f"({', '.join(hidden)}). A batch size that divides keeps them split",
        ComputedWhole,
    )


#: public since jax 0.10
_jaxprs_in_params = getattr(core, "jaxprs_in_params", None) or internal_core.jaxprs_in_params


def _bind(equation: core.JaxprEqn, operands: Sequence[Any]) -> Any:
    """Compute an equation on other operands."""
    found = equation.primitive.get_bind_params(equation.params)
    # before jax 0.10 functions among the parameters came first, apart
    functions, params = found if isinstance(found, tuple) else ((), found)
    return equation.primitive.bind(*functions, *operands, **params)
