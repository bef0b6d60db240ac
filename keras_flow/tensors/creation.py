"""Making global tensors; each rank makes only its own shard."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from keras_flow import sbp as _sbp
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import NdSbp, PartialSum, SbpSpec
from keras_flow.tensors import engine, philox
from keras_flow.tensors.global_tensor import GlobalTensor, is_described


def tensor(value: Any, *, placement: Placement, sbp: SbpSpec, dtype: DTypeLike | None = None) -> GlobalTensor:
    """A global tensor with the value of an array, a number or nested lists, the same on every process.

    Args:
        value: the logical value.
        placement: ranks.
        sbp: layout. P: the first rank of the axis holds the value, the others zeros.
        dtype: None: that of an array, but for 64 bits, which become `keras.config.floatx()` and int32, the same on
            every engine; numbers and lists alike.

    Raises:
        FlowError: the engine has no such dtype.
    """
    array = np.asarray(value)
    if dtype is None:
        dtype = dtype_of(array)
    return _made(array.shape, placement, sbp, dtype, lambda slices: array[slices])


def zeros(*shape: Any, placement: Placement, sbp: SbpSpec, dtype: DTypeLike | None = None) -> GlobalTensor:
    """Zeros. Shape as one sequence or as numbers."""
    return full(shape, 0, placement=placement, sbp=sbp, dtype=dtype or _floatx())


def ones(*shape: Any, placement: Placement, sbp: SbpSpec, dtype: DTypeLike | None = None) -> GlobalTensor:
    """Ones. Shape as one sequence or as numbers."""
    return full(shape, 1, placement=placement, sbp=sbp, dtype=dtype or _floatx())


def full(shape: Any, value: Any, *, placement: Placement, sbp: SbpSpec, dtype: DTypeLike | None = None) -> GlobalTensor:
    """One number everywhere."""
    named = dtype or _default_dtype(np.asarray(value))
    sizes = _shape(shape)
    return _made(
        sizes, placement, sbp, named, lambda slices: np.full([part.stop - part.start for part in slices], value)
    )


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    *,
    placement: Placement,
    sbp: SbpSpec,
    dtype: DTypeLike | None = None,
) -> GlobalTensor:
    """Evenly spaced values, as `keras.ops.arange`."""
    if stop is None:
        start, stop = 0, start
    if step == 0:
        raise FlowError(f"kf.arange from {start} to {stop} by steps of 0; a step is above or below 0")
    count = max(0, int(np.ceil((stop - start) / step)))
    named = dtype or _default_dtype(np.asarray([start, stop, step]))
    return _made(
        (count,), placement, sbp, named, lambda slices: start + step * np.arange(slices[0].start, slices[0].stop)
    )


def rand(
    *shape: Any, placement: Placement, sbp: SbpSpec, seed: Any = None, dtype: DTypeLike | None = None
) -> GlobalTensor:
    """Uniform in [0, 1)."""
    named = _standard(dtype or _floatx())
    one = engine.numpy_dtype(named).type(1)
    below = float(np.nextafter(one, -one))  # what is drawn above it would be rounded up to 1

    def draw(seed: int, stream: int, indices: np.ndarray) -> np.ndarray:
        return np.minimum(philox.uniform(seed, stream, indices), below)

    return _drawn(shape, placement, sbp, seed, named, draw)


def randn(
    *shape: Any, placement: Placement, sbp: SbpSpec, seed: Any = None, dtype: DTypeLike | None = None
) -> GlobalTensor:
    """Standard normal."""
    return _drawn(shape, placement, sbp, seed, dtype or _floatx(), philox.normal)


def randint(
    low: int, high: int, shape: Any, *, placement: Placement, sbp: SbpSpec, seed: Any = None, dtype: DTypeLike = "int32"
) -> GlobalTensor:
    """Whole numbers from `low` up, below `high`."""
    if not 0 < high - low < 2**32:
        raise FlowError(f"kf.randint draws from low up to below high, under 2**32 numbers; got low={low}, high={high}")

    def draw(seed: int, stream: int, indices: np.ndarray) -> np.ndarray:
        return philox.integers(seed, stream, indices, low, high)

    return _drawn((shape,), placement, sbp, seed, dtype, draw)


def full_like_layout(like: GlobalTensor, value: np.ndarray) -> GlobalTensor:
    """A value on the placement of `like`, whole on every rank, of its dtype."""
    return tensor(value, placement=like.placement, sbp=(_sbp.broadcast,) * like.placement.ndim, dtype=like.dtype)


def to_global(local: Any, placement: Placement, sbp: SbpSpec) -> GlobalTensor:
    """A global tensor of what each process has: S takes shards, B copies of one value, P summands.

    Args:
        local: where this process drives one rank, its array; else rank -> array, for the ranks that it drives. A rank
            outside the placement gives an empty array, or none. Numpy's 64 bits become fewer as in `kf.tensor`; the
            engine's own arrays keep their dtype.
        placement: ranks.
        sbp: how the shards make up the logical tensor. With B the value of the first rank of each axis counts.

    Raises:
        FlowError: dtypes differ, shards are not those of a balanced split, a rank's shard is missing.
    """
    from keras_flow.tensors.joining import join

    return join(local, placement, sbp)


def _made(
    shape: Sequence[int],
    placement: Placement,
    sbp: SbpSpec,
    dtype: DTypeLike,
    block: Callable[[tuple[slice, ...]], np.ndarray],
) -> GlobalTensor:
    engine.check_placement(placement)
    dtype = _standard(dtype)
    layout = Layout(placement, sbp, shape)
    shards = {}
    if not is_described():
        engine.tensor_engine().note_call(f"making {dtype}{list(shape)} as ({_sbp.text(layout.nd_sbp)})")
        for rank in engine.local_ranks():
            if placement.contains(rank):
                value = block(layout.local_slices(rank)).astype(engine.numpy_dtype(dtype))
                held = value if _holds(layout.nd_sbp, placement, rank) else np.zeros_like(value)
                shards[rank] = engine.put(held, rank)
                engine.check_dtype(shards[rank], dtype)
    return GlobalTensor(layout, dtype, shards)


def _holds(nd_sbp: NdSbp, placement: Placement, rank: int) -> bool:
    """Of the ranks of a P axis the first has the value."""
    at = zip(placement.coordinates(rank), nd_sbp, strict=True)
    return all(index == 0 for index, part in at if isinstance(part, PartialSum))


def _drawn(
    shape: Any,
    placement: Placement,
    sbp: SbpSpec,
    seed: Any,
    dtype: DTypeLike,
    draw: Callable[[int, int, np.ndarray], np.ndarray],
) -> GlobalTensor:
    sizes = _shape(shape)
    number, stream = _seed(seed)
    engine.tensor_engine().note_call(f"drawing with seed {number}, {stream}")
    return _made(sizes, placement, sbp, dtype, lambda slices: draw(number, stream, philox.indices_of(sizes, slices)))


def _seed(seed: Any) -> tuple[int, int]:
    """Seed and stream. A `keras.random.SeedGenerator` moves on with each draw; without a seed rank 0 draws one."""
    import keras

    if isinstance(seed, keras.random.SeedGenerator):
        number, stream = np.asarray(keras.ops.convert_to_numpy(seed.next())).tolist()
        return number, stream
    if seed is None and is_described():
        return 0, 0
    if seed is None:  # `keras.utils.set_random_seed` seeds Python's generator too
        drawn = {rank: random.getrandbits(63) for rank in engine.local_ranks()}
        agreed = engine.tensor_engine().agree_on(drawn)
        return agreed[min(agreed)], 0
    return int(seed), 0


def _shape(shape: Any) -> tuple[int, ...]:
    parts = tuple(shape)
    return tuple(parts[0]) if len(parts) == 1 and isinstance(parts[0], Sequence) else parts


def _standard(dtype: DTypeLike) -> str:
    """The name of a dtype, given as `keras.ops` takes it: a name, a type, or numpy's or the engine's own."""
    import keras

    try:
        name = keras.backend.standardize_dtype(dtype)
        engine.numpy_dtype(name)
    except (TypeError, ValueError) as error:
        raise FlowError(f"{dtype!r} is no dtype of numbers; 'float32', 'int32' and 'bool' are, for example") from error
    return name


def _floatx() -> str:
    import keras

    return keras.config.floatx()


def _default_dtype(array: np.ndarray) -> str:
    if array.dtype.kind == "f":
        return _floatx()
    return "int32" if array.dtype.kind in "iu" else array.dtype.name


def dtype_of(array: np.ndarray | np.generic) -> str:
    """The dtype that an array's global tensor has unless another is asked for: its own, but for 64 bits."""
    return array.dtype.name if array.dtype.itemsize < 8 else _default_dtype(np.asarray(array))
