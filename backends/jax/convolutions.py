"""Windows on JAX, where XLA's partitioner has wrong numbers: kernels with groups, and windows that are split.

With groups each rank computes its own rows, and the kernel's gradient is summed over the ranks. XLA's partitioner
counts the gradient of such a kernel once for each rank of an axis on which the rows are replicated, with Shardy and
with GSPMD alike (`tests/engine_bugs/jax.py`), and gathers the rows in the forward pass where there are several groups
(openxla/xla issue 47945). `shard_map` leaves it nothing to partition.

Example, a depthwise kernel on a 2x2 placement whose first axis splits the rows: ranks 0 and 1 hold rows 0 to 3, ranks 2
and 3 hold rows 4 to 7. Each rank's kernel gradient is that of its four rows, and the sum over the *first* axis is the
gradient of the batch. The partitioner sums over both axes, which is twice as much.

A window dim (height or width) of the inputs, of the kernel or of the output that is split, while another dim is split
over the same axis, is convolved with the wrong slices. These dims are gathered; rows and channels stay split.
The same holds for pooling: a split of features after `Flatten` reaches the height of what was pooled, and the gradient
of windows that overlap is wrong there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from keras_flow.backends.hooking import hook
from keras_flow.backends.jax.layouts import mesh, whole_on
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.dry_run import is_dry_run
from keras_flow.current.keras_places import standardize_data_format


def distribution_of_step(inputs: object = None, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks on operations of a step: the distribution for which it is traced.

    None inside a rank's own program (`jax.shard_map`), where nothing is left to the partitioner.
    """
    if not isinstance(inputs, Tracer) or is_dry_run() or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return active()


@hook(
    "keras:nn",
    ("conv", "depthwise_conv"),
    "XLA counts the gradient of a kernel with groups once for each rank that has the same rows",
    when=distribution_of_step,
)
def convolve(
    distribution: Distribution,
    original: Callable[..., jax.Array],
    inputs: jax.Array,
    kernel: Any,
    *args: Any,
    **kwargs: Any,
) -> jax.Array:
    """Hook on `conv` and `depthwise_conv`: with groups, each rank convolves the rows that it holds.

    Rows that do not divide by the data ranks are convolved by every rank; each rank gets all of the kernel.
    """
    weights = jax.numpy.asarray(getattr(kernel, "value", kernel))
    # one group: XLA's partitioner has the right gradients, and splits channels too
    if original.__name__ == "conv" and not _has_groups(inputs, weights, *args, **kwargs):
        return convolve_transposed(distribution, original, inputs, weights, *args, **kwargs)
    divides = distribution.batch_plan(inputs.shape[0]).divides
    rows = PartitionSpec(distribution.batch_axes or None) if divides else PartitionSpec()
    # the kernel goes in whole, so that its gradient is a sum over the axes of the rows, and over no other
    by_own_rows = jax.shard_map(
        lambda own_rows, weights: original(own_rows, weights, *args, **kwargs),
        mesh=mesh(distribution.placement),
        in_specs=(rows, PartitionSpec()),
        out_specs=rows,
    )
    return by_own_rows(inputs, weights)


@hook(
    "keras:nn",
    "conv_transpose",
    "XLA convolves windows that are split with the wrong slices",
    when=distribution_of_step,
)
def convolve_transposed(
    distribution: Distribution,
    original: Callable[..., jax.Array],
    inputs: jax.Array,
    kernel: Any,
    *args: Any,
    **kwargs: Any,
) -> jax.Array:
    """Hook on `conv_transpose`, and `conv` without groups: only rows and channels may be split."""
    weights = jax.numpy.asarray(getattr(kernel, "value", kernel))
    # the window's dims; the last two are channels, which may stay split
    weights = whole_on(weights, range(weights.ndim - 2), distribution.placement)
    arguments = inspect.signature(original).bind(inputs, weights, *args, **kwargs).arguments
    last = standardize_data_format(arguments.get("data_format")) == "channels_last"
    positions = range(1, inputs.ndim - 1) if last else range(2, inputs.ndim)
    outputs = original(whole_on(inputs, positions, distribution.placement), weights, *args, **kwargs)
    return whole_on(outputs, positions, distribution.placement)


@hook(
    "jax.lax",
    "reduce_window",
    "XLA has wrong gradients of windows that overlap, on positions that are split",
    when=distribution_of_step,
)
def pool(
    distribution: Distribution,
    original: Callable[..., jax.Array],
    operand: jax.Array,
    init_value: object,
    computation: object,
    window_dimensions: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> jax.Array:
    """Hook on `jax.lax.reduce_window`, which all poolings are made of: dims with windows are not split."""
    windows = [dim for dim, length in enumerate(window_dimensions) if length > 1]
    operand = whole_on(operand, windows, distribution.placement)
    outputs = original(operand, init_value, computation, window_dimensions, *args, **kwargs)
    return whole_on(outputs, windows, distribution.placement)


def _has_groups(
    inputs: jax.Array,
    kernel: jax.Array,
    strides: object = 1,
    padding: object = "valid",
    data_format: str | None = None,
    dilation_rate: object = 1,
) -> bool:
    channels = inputs.shape[-1 if standardize_data_format(data_format) == "channels_last" else 1]
    # the kernel has the channels of one group
    return kernel.shape[-2] != channels
