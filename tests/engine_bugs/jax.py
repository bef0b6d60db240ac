"""Bugs of XLA's partitioner that keras_flow goes around, each in a few lines of JAX alone.

Seen in jax 0.10.2 (CPU, Shardy and GSPMD).

    python -m tests.engine_bugs.jax

runs them on four virtual devices and prints which are still there. A function returns True while its bug is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_ROWS = PartitionSpec("data")
#: the gradient of a sort of rows that do not divide; it takes the process with it
_SORT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rows = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), P("data"))
x = jax.device_put(np.random.default_rng(0).normal(size=(12, 8)).astype("float32"), rows)
def loss(w, x):
    own = jax.lax.with_sharding_constraint(x[:11], rows)
    return (jnp.sort(own @ w, axis=-1) ** 2).sum()
print(jax.jit(jax.grad(loss))(jnp.eye(8), x).shape)
"""
#: a step that overwrites two arguments, which are one array on two devices
_TWICE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
x = jax.device_put(jnp.ones(3), NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P()))
try:
    jax.jit(lambda a, b: (a + 1, b + 1), donate_argnums=(0, 1))(x, x)
except jax.errors.JaxRuntimeError:
    pass
"""


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def the_gradient_of_a_grouped_kernel_is_counted_twice() -> bool:
    """The gradient of a convolution's kernel with groups is counted once for each rank of an axis beside that of the
    rows.

    Instead: convolutions with groups run under `shard_map`, each rank on its own rows (`backends/jax/convolutions.py`).
    """
    x = np.random.default_rng(0).random((8, 6, 6, 4)).astype("float32")
    kernel = np.ones((3, 3, 1, 4), "float32")

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=4).sum()

    split = jax.jit(jax.grad(loss))(kernel, jax.device_put(x, NamedSharding(_mesh(), _ROWS)))
    return bool(np.allclose(split, 2 * np.asarray(jax.grad(loss)(kernel, x)), rtol=1e-4))


def a_kernel_that_is_split_on_its_window_is_convolved_wrongly() -> bool:
    """A convolution whose kernel is split on a dim of its window is wrong where the inputs are split on their channels
    over the same axis; so is one of inputs split on their height whose kernel is split on its channels.

    Instead: inputs, kernel and output are gathered on their window dims (`backends/jax/convolutions.py`).
    """
    random = np.random.default_rng(0)
    x, kernel = random.normal(size=(6, 4, 4, 8)), random.normal(size=(2, 2, 8, 4))

    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    split = jax.jit(convolved)(
        jax.device_put(x, NamedSharding(_mesh(), PartitionSpec(None, None, None, "model"))),
        jax.device_put(kernel, NamedSharding(_mesh(), PartitionSpec("model"))),
    )
    return not np.allclose(split, convolved(x, kernel), atol=1e-2)


def the_gradient_of_an_overlapping_max_pool_is_wrong_where_positions_are_split() -> bool:
    """The gradient of a max pool whose windows overlap is wrong where its positions are split, which a split of
    features after flattening them does.

    Instead: the inputs of poolings are gathered on their positions (`backends/jax/convolutions.py`).
    """
    x = np.random.default_rng(0).normal(size=(4, 8, 8, 4)).astype("float32")

    def loss(x: jax.Array) -> jax.Array:
        pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")
        return (pooled**2).sum()

    split = jax.jit(jax.grad(loss))(jax.device_put(x, NamedSharding(_mesh(), PartitionSpec(None, "model"))))
    return not np.allclose(split, jax.grad(loss)(x), atol=1e-2)


def a_scatter_counts_the_padding_of_rows() -> bool:
    """A scatter-add of rows that do not divide counts the padding, on a mesh with a second axis.

    Instead: dims that do not divide are gathered before it; the batch is computed whole by every rank if a loop of its
    step scatters (`backends/jax/partitioning.py`).
    """
    ids = np.arange(12, dtype="int32")
    split = jax.device_put(ids, NamedSharding(_mesh(), _ROWS))
    counted = jax.jit(lambda ids: jax.ops.segment_sum(jnp.ones(11), ids[:11], num_segments=12))(split)
    return float(counted.sum()) != 11.0


def the_gradient_of_a_sort_of_uneven_rows_aborts() -> bool:
    """The gradient of a sort of rows that do not divide ends the process: `Check failed: IsScalarWithElementType`.

    Instead: dims that do not divide are gathered before it; the batch is computed whole by every rank if a loop of its
    step sorts (`backends/jax/partitioning.py`).
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", _SORT], env=environment, capture_output=True, timeout=120)
    return done.returncode != 0


def the_gradient_of_a_transform_of_split_columns_fails() -> bool:
    """The gradient of an FFT on CPUs fails where its operand's columns are split and its rows an odd number: the
    operand is gathered column-major, and `IsMonotonicWithDim0Major` does not hold.

    Instead: transforms run under `shard_map`, each rank on its own rows, row-major (`backends/jax/fourier.py`).
    """
    columns = NamedSharding(_mesh(), PartitionSpec(None, "model"))
    kernel, x = jax.device_put(np.ones((8, 8), "float32"), columns), np.ones((11, 8), "float32")

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return (jnp.abs(jnp.fft.fft(x @ kernel)) ** 2).sum()

    try:
        jax.block_until_ready(jax.jit(jax.grad(loss))(kernel, x))
    except jax.errors.JaxRuntimeError as error:
        return "IsMonotonicWithDim0Major" in str(error)
    return False


def an_array_that_is_donated_twice_ends_the_process() -> bool:
    """A jitted function that is given one array for two donated arguments is a segmentation fault on several devices.
    On one device it raises "Attempt to donate the same buffer twice". Keras comes there by itself: a `fit` with
    `use_ema=True` assigns the averages to the weights without a copy, and the next `fit` or `train_on_batch` raises.
    After such a `fit` and a `predict` the averages are deleted arrays: `predict` gives its step the weights alone.

    Instead: a variable that is assigned another one gets a copy (`backends/jax/variables.py`), and what occurs twice in
    the state of a step is copied (`backends/jax/trainer.py`), so that training goes on.
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", _TWICE], env=environment, capture_output=True, timeout=120)
    return done.returncode != 0


BUGS: tuple[Callable[[], bool], ...] = (
    the_gradient_of_a_grouped_kernel_is_counted_twice,
    a_kernel_that_is_split_on_its_window_is_convolved_wrongly,
    the_gradient_of_an_overlapping_max_pool_is_wrong_where_positions_are_split,
    a_scatter_counts_the_padding_of_rows,
    the_gradient_of_a_sort_of_uneven_rows_aborts,
    the_gradient_of_a_transform_of_split_columns_fails,
    an_array_that_is_donated_twice_ends_the_process,
)


def main() -> dict[str, bool]:
    """Bug -> whether it is there."""
    return {bug.__name__: bug() for bug in BUGS}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    print(json.dumps(main(), indent=1))
