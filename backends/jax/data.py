"""Batches on JAX: every batch is split, one that does not divide by padding on the host and slicing in the step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras import tree

from keras_flow import sbp
from keras_flow.backends.hooking import hook
from keras_flow.backends.jax.layouts import engine_layout
from keras_flow.backends.reading.batch_watch import BatchWatch, PartOfRows
from keras_flow.current.distribution import Distribution
from keras_flow.current.keras_places import data_adapter_utils
from keras_flow.errors import FlowError
from keras_flow.layout import Layout

#: batches of steps that are executed together, one by one: since Keras 3.16 `fit` takes them in this list
_PartialBatchList: Any = getattr(data_adapter_utils, "PartialBatchList", None)


@jax.tree_util.register_pytree_node_class
class Uneven:
    """`rows` logical rows in a buffer whose rows divide.

    JAX has no stored array that is split unevenly, but uneven values inside a program are legal: the step slices the
    buffer, the partitioner masks the padding out of every reduction, so that the numbers are those of the logical rows.
    A leaf for Keras (it has a shape, a dtype and `__array__`); a pytree with a static row count for JAX.
    """

    def __init__(self, buffer: jax.Array, rows: int, sharding: NamedSharding):
        self.buffer, self.rows, self.sharding = buffer, rows, sharding

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without the padding."""
        return (self.rows, *self.buffer.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the elements."""
        return self.buffer.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.buffer.ndim

    def __len__(self) -> int:
        return self.rows

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.__jax_array__()).astype(np.dtype(dtype or self.dtype))  # type: ignore[arg-type]

    def __jax_array__(self) -> jax.Array:
        # a step that is not jitted computes it whole
        return _whole_rows(self.sharding.mesh)(self)

    def tree_flatten(self) -> tuple[tuple[jax.Array], tuple[int, NamedSharding]]:
        """Children and the rest, as `jax.tree_util.register_pytree_node_class` wants them."""
        return (self.buffer,), (self.rows, self.sharding)

    @classmethod
    def tree_unflatten(cls, aux: tuple[int, NamedSharding], children: tuple[jax.Array]) -> Uneven:
        """The inverse of `tree_flatten`."""
        return cls(children[0], *aux)

    def logical(self, whole: bool = False) -> jax.Array:
        """The logical rows; inside a jitted step only.

        Args:
            whole: every rank gets all of them, and no array has rows that do not divide.
        """
        if whole:
            everywhere = NamedSharding(self.sharding.mesh, PartitionSpec())
            return jax.lax.with_sharding_constraint(self.buffer, everywhere)[: self.rows]
        return jax.lax.with_sharding_constraint(self.buffer[: self.rows], self.sharding)


@functools.cache
def _whole_rows(mesh: Mesh) -> Callable[[Uneven], jax.Array]:
    """Return the program that puts all logical rows on every device of a mesh, for use outside of a jitted step."""
    return jax.jit(lambda uneven: uneven.logical(whole=True), out_shardings=NamedSharding(mesh, PartitionSpec()))


@hook(
    "keras:engine.distribution",
    "distribute_data_input",
    "one meaning of batch_size, and batches that do not divide (Keras raises IndivisibleError)",
)
def distribute_data_input(
    distribution: Distribution, original: Callable[..., object], batch: object, *args: object, **kwargs: object
) -> object:
    """Hook on `distribute_data_input`: put one tensor of a batch on the mesh.

    Keras computes layouts from the first batch and uses them for the last, smaller one too; here each batch decides for
    itself.
    """
    if batch is None:
        return None
    given: Any = batch.own if isinstance(batch, PartOfRows) else batch
    if isinstance(given, JAXSparse):
        raise FlowError(
            f"a sparse input of shape {list(given.shape)} cannot be split over the ranks on JAX: convert it to a dense "
            "array, or keep it sparse on a single device"
        )
    # on the host, so that each device is given its rows alone
    host = batch if isinstance(batch, PartOfRows) else np.asarray(batch)
    layout = distribution.batch_layout(host.shape)
    plan = distribution.batch_plan(host.shape[0] if host.ndim else 0)
    if plan.divides:
        return _put(host, engine_layout(layout), plan.rows if host.ndim else 0)
    split = Layout(layout.placement, {axis: sbp.split(0) for axis in distribution.batch_axes}, host.shape)
    sharding = engine_layout(split)
    return Uneven(_put(host, sharding, plan.padded_rows), plan.rows, sharding)


def put_batch(data: object, distribution: Distribution) -> object:
    """Put a structure of host arrays, or of what this process read of them, on the mesh."""
    return tree.map_structure(lambda leaf: distribute_data_input(distribution, np.asarray, leaf), data)


@hook(
    "keras:EpochIterator",
    "_get_iterator",
    "each batch decides for itself how it is split, and the next one is transferred while a step runs",
)
def batches_on_mesh(
    distribution: Distribution, original: Callable[..., Iterator[object]], iterator: Any
) -> Iterator[object]:
    """Hook on `JAXEpochIterator._get_iterator`: batches on the mesh, the next one on its way while a step runs.

    As Keras does it without a distribution, and like there not on CPU, where nothing is transferred. Several processes
    read their own rows (`reading`), and compare some.
    """
    batches = _batches(iterator.data_adapter, distribution)
    batches = batches if jax.default_backend() == "cpu" else _one_ahead(batches)
    several = iterator.steps_per_execution
    if several > 1 and _PartialBatchList is not None:
        return (_PartialBatchList(group) for group in _grouped(batches, several))
    return batches


def _batches(adapter: Any, distribution: Distribution) -> Iterator[object]:
    """The batches of an adapter, put on the mesh; those of all processes must be the same."""
    watch = BatchWatch() if jax.process_count() > 1 else None
    if watch is not None:
        watch.restart(adapter.num_batches)
    for batch in adapter.get_jax_iterator():
        if watch is not None:
            watch.see(batch)
        yield put_batch(batch, distribution)


def _grouped(batches: Iterator[object], count: int) -> Iterator[list[object]]:
    """So many batches at a time, and those that are left."""
    while group := list(itertools.islice(batches, count)):
        yield group


def _one_ahead(batches: Iterator[object]) -> Iterator[object]:
    # JAX returns before a transfer ends, so it is enough that the next batch was asked for
    for current, _ in itertools.pairwise(itertools.chain(batches, [None])):
        yield current


def has_uneven(args: object) -> bool:
    """Whether there are batches that do not divide among a step's arguments."""
    return any(isinstance(leaf, Uneven) for leaf in jax.tree.leaves(args, is_leaf=_is_uneven))


def to_logical(args: object, whole: bool = False) -> object:
    """The logical values of a step's arguments; with `whole` on every rank."""
    return jax.tree.map(
        lambda leaf: leaf.logical(whole) if isinstance(leaf, Uneven) else leaf, args, is_leaf=_is_uneven
    )


def _is_uneven(leaf: object) -> bool:
    return isinstance(leaf, Uneven)


def _put(host: np.ndarray | PartOfRows, sharding: NamedSharding, padded_rows: int) -> jax.Array:
    """Give each device its rows; those after the last row are zeros."""
    values, start = (host.own, host.start) if isinstance(host, PartOfRows) else (host, 0)
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)  # 64-bit rows become 32-bit, as in Keras
    values = np.asarray(values).astype(dtype, copy=False)

    def piece(index: tuple[slice, ...] | None) -> np.ndarray:
        if not index:
            return values
        first, last, _ = index[0].indices(padded_rows)
        rows = values[max(first - start, 0) : max(last - start, 0)]
        # never computed with: the step slices them off before the model sees the batch
        missing = last - first - len(rows)
        return np.concatenate([rows, np.zeros((missing, *values.shape[1:]), dtype)]) if missing else rows

    shape = (padded_rows, *host.shape[1:]) if host.ndim else ()
    return jax.make_array_from_callback(shape, sharding, piece, dtype=dtype)
