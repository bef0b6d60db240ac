"""Which steps XLA's partitioner may split over rows that do not divide, found by tracing.

XLA pads rows that are left over and must take the padding out of every operation that joins rows. It does so for
elementwise operations, products, convolutions and reductions. It does not for scatters on a mesh with a second axis
(the padding is counted) and aborts the process where it has to sort such rows. So a step is traced first: if all its
operations are among those that the sweep (`tests/sweep`) has seen right, its rows stay split, else that batch is
computed whole by every rank, which is exact by construction. docs/adr/011 has the evidence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import jax
from jax.extend import core

from keras_flow.backends.jax import data
from keras_flow.distributions.distribution import active
from keras_flow.errors import ComputedWhole

#: Operations that give the numbers of one device on rows that do not divide, forward and backward, on every mesh of the
#: sweep. An operation that is not named has not been seen, which is reason enough; scatters and sorts have been, and
#: are wrong.
SPLITS_LEFT_OVER_ROWS = frozenset(
    (
        "abs add add_any and argmax argmin asinh atan atan2 bessel_i0e bessel_i1e bitcast_convert_type "
        "broadcast_in_dim cbrt ceil clamp concatenate cond conv_general_dilated convert_element_type copy cos cosh "
        "cumprod cumsum custom_jvp_call div dot_general dynamic_slice dynamic_update_slice empty2 eq erf erf_inv erfc "
        "exp exp2 expm1 floor gather ge gt integer_pow iota is_finite jit le log log1p logistic lt max min mul ne neg "
        "nextafter not or pad random_bits random_gamma random_split random_wrap reduce_and reduce_max reduce_min "
        "reduce_or reduce_prod reduce_sum reduce_window_max reduce_window_sum rem reshape reshard rev round rsqrt "
        "scan select_and_scatter_add select_n shard_map shift_right_arithmetic shift_right_logical sign sin sinh "
        "slice split sqrt square squeeze stack stop_gradient sub tan tanh tile top_k transpose unstack while"
    ).split()
)


def primitives(jaxpr: core.Jaxpr) -> Iterator[str]:
    """The names of all operations of a program, those of loops and calls inside it too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from primitives(inner)


def on_rows_left_over(function: Callable[..., object], args: tuple[object, ...]) -> object:
    """Call a step, inside jit, on arguments among which are batches that do not divide (`data.Uneven`)."""
    program, shape = jax.make_jaxpr(function, return_shape=True)(*data.logical(args))  # type: ignore[misc]
    unseen = sorted({name for name in primitives(program.jaxpr) if name not in SPLITS_LEFT_OVER_ROWS})
    if unseen:
        _say(unseen)
    leaves = jax.tree.leaves(data.logical(args, whole=bool(unseen)))
    results = jax.core.eval_jaxpr(program.jaxpr, program.consts, *leaves)
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _say(unseen: list[str]) -> None:
    distribution = active()
    assert distribution is not None
    warnings.warn(
        f"a batch that does not divide by {distribution.num_model_replicas} data ranks is computed whole by every rank "
        f"(the numbers are those of one device): the step has operations that XLA does not split over rows that are "
        f"left over ({', '.join(unseen)}). A batch size that divides keeps them split",
        ComputedWhole,
        stacklevel=2,
    )
