"""`kf.tensor`, `kf.zeros`, `kf.randn` ...: new global tensors, of which each rank makes only its own shard.

Nothing is communicated: every process computes its shards from the same arguments. Random numbers are a function of the
seed and the logical index (`philox.py`), so they are equal for every layout and engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import keras
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from keras_flow import philox
from keras_flow import sbp as _sbp
from keras_flow.backends.active import tensor_engine
from keras_flow.backends.rendezvous import meeting
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import NdSbp, PartialSum, SbpSpec
from keras_flow.tensors import dry_run
from keras_flow.tensors.dtypes import check_dtype, default_of_array, default_of_values, numpy_dtype, standard_name
from keras_flow.tensors.global_tensor import GlobalTensor
from keras_flow.tensors.ranks import check_placement, local_ranks

#: one number of a shape, or a whole shape
Size: TypeAlias = int | Sequence[int]
#: a whole number, a generator that moves on with each draw, or None for a seed that rank 0 draws
Seed: TypeAlias = int | keras.random.SeedGenerator | None


def tensor(value: ArrayLike, *, placement: Placement, sbp: SbpSpec, dtype: DTypeLike | None = None) -> GlobalTensor:
    """A global tensor with the value of an array, a number or nested lists, the same on every process.

    Args:
        value: the logical value.
        placement: the ranks that hold it.
        sbp: one sbp for each axis of the placement. With P the first rank of the axis holds the value, the others
            zeros.
        dtype: None means that of the array, except for 64 bits, which become `keras.config.floatx()` and int32 on
            every engine; numbers and lists likewise.

    Raises:
        FlowError: the engine has no such dtype, or the job has fewer ranks.

    Example:
        >>> import keras_flow as kf
        >>> kf.tensor([[1, 2], [3, 4], [5, 6]], placement=kf.Placement([0, 1]), sbp="S(0)")
        GlobalTensor(shape=(3, 2), dtype=int32, sbp=(S(0)), Placement([0, 1], axis_names=('axis0',)))
          rank 0: [[1 2]
                   [3 4]]
          rank 1: [[5 6]]
    """
    # on the host, whole: it is given on every process
    array = np.asarray(value)
    if dtype is None:
        dtype = default_of_array(array)
    return _from_blocks(array.shape, placement, sbp, dtype, lambda slices: array[slices])


def zeros(*shape: Size, placement: Placement, sbp: SbpSpec, dtype: DTypeLike | None = None) -> GlobalTensor:
    """A global tensor of zeros.

    Args:
        *shape: logical shape, as numbers or as one sequence.
        placement: the ranks that hold it.
        sbp: one sbp for each axis of the placement.
        dtype: None means `keras.config.floatx()`.

    Example:
        >>> import keras_flow as kf
        >>> kf.zeros(4, 2, placement=kf.Placement([0, 1]), sbp="S(0)").to_local(rank=0).shape
        (2, 2)
    """
    return full(_shape(shape), 0, placement=placement, sbp=sbp, dtype=dtype or keras.config.floatx())


def ones(*shape: Size, placement: Placement, sbp: SbpSpec, dtype: DTypeLike | None = None) -> GlobalTensor:
    """A global tensor of ones; arguments as those of `kf.zeros`.

    Example:
        >>> import keras_flow as kf
        >>> kf.ones(2, placement=kf.Placement([0, 1]), sbp="P").to_local(rank=1)  # summands of ones: 1 + 0
        array([0., 0.], dtype=float32)
    """
    return full(_shape(shape), 1, placement=placement, sbp=sbp, dtype=dtype or keras.config.floatx())


def full(
    shape: Sequence[int], value: ArrayLike, *, placement: Placement, sbp: SbpSpec, dtype: DTypeLike | None = None
) -> GlobalTensor:
    """A global tensor with one number everywhere.

    Args:
        shape: logical shape.
        value: the number.
        placement: the ranks that hold it.
        sbp: one sbp for each axis of the placement.
        dtype: None means `keras.config.floatx()` for a float, int32 for a whole number, bool for a truth value.

    Example:
        >>> import keras_flow as kf
        >>> kf.full((3,), 7, placement=kf.Placement([0, 1]), sbp="B").numpy()
        array([7, 7, 7], dtype=int32)
    """
    named = dtype or default_of_values(np.asarray(value))
    return _from_blocks(
        tuple(shape), placement, sbp, named, lambda slices: np.full([part.stop - part.start for part in slices], value)
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
    """Evenly spaced values, as `keras.ops.arange` gives them.

    Args:
        start: first value; the end, and 0 the first value, where `stop` is None.
        stop: the end, which is not reached.
        step: difference of neighbours.
        placement: the ranks that hold it.
        sbp: one sbp for each axis of the placement.
        dtype: None means int32 for whole numbers, else `keras.config.floatx()`.

    Raises:
        FlowError: a step of 0.

    Example:
        >>> import keras_flow as kf
        >>> kf.arange(5, placement=kf.Placement([0, 1]), sbp="S(0)").to_local(rank=0)
        array([0, 1, 2], dtype=int32)
    """
    # one number is the end, as in range()
    if stop is None:
        start, stop = 0, start
    if step == 0:
        raise FlowError(f"kf.arange from {start} to {stop} by steps of 0; a step is above or below 0")
    # arange(0, 1, 0.3) has 4 values: 0, 0.3, 0.6, 0.9
    count = max(0, int(np.ceil((stop - start) / step)))
    named = dtype or default_of_values(np.asarray([start, stop, step]))
    return _from_blocks(
        (count,), placement, sbp, named, lambda slices: start + step * np.arange(slices[0].start, slices[0].stop)
    )


def rand(
    *shape: Size, placement: Placement, sbp: SbpSpec, seed: Seed = None, dtype: DTypeLike | None = None
) -> GlobalTensor:
    """Random numbers, uniform in [0, 1).

    Args:
        *shape: logical shape, as numbers or as one sequence.
        placement: the ranks that hold it.
        sbp: one sbp for each axis of the placement.
        seed: a whole number, or a `keras.random.SeedGenerator`, which moves on with each draw. None: rank 0 draws a
            seed from Python's generator, which `keras.utils.set_random_seed` seeds.
        dtype: None means `keras.config.floatx()`.

    Example:
        >>> import keras_flow as kf
        >>> one_rank = kf.rand(4, placement=kf.Placement([0]), sbp="B", seed=1)
        >>> two_ranks = kf.rand(4, placement=kf.Placement([0, 1]), sbp="S(0)", seed=1)
        >>> bool((one_rank.numpy() == two_ranks.numpy()).all())
        True
    """
    named = standard_name(dtype or keras.config.floatx())
    one = numpy_dtype(named).type(1)
    below = float(np.nextafter(one, -one))  # draws are float64; one above this would be rounded up to 1

    def draw(seed: int, stream: int, indices: np.ndarray) -> np.ndarray:
        return np.minimum(philox.uniform(seed, stream, indices), below)

    return _random(_shape(shape), placement, sbp, seed, named, draw)


def randn(
    *shape: Size, placement: Placement, sbp: SbpSpec, seed: Seed = None, dtype: DTypeLike | None = None
) -> GlobalTensor:
    """Random numbers of the standard normal distribution; arguments as those of `kf.rand`.

    Example:
        >>> import keras_flow as kf
        >>> kf.randn(2, 3, placement=kf.Placement([0, 1]), sbp="S(1)", seed=1).shape
        (2, 3)
    """
    return _random(_shape(shape), placement, sbp, seed, dtype or keras.config.floatx(), philox.normal)


def randint(
    low: int,
    high: int,
    shape: int | Sequence[int],
    *,
    placement: Placement,
    sbp: SbpSpec,
    seed: Seed = None,
    dtype: DTypeLike = "int32",
) -> GlobalTensor:
    """Random whole numbers from `low` up, below `high`, each equally likely.

    Args:
        low: the least.
        high: one more than the largest.
        shape: logical shape.
        placement: the ranks that hold it.
        sbp: one sbp for each axis of the placement.
        seed: as for `kf.rand`.
        dtype: the dtype of the result.

    Raises:
        FlowError: no number between low and high, or 2**32 of them or more.

    Example:
        >>> import keras_flow as kf
        >>> kf.randint(0, 10, (3,), placement=kf.Placement([0, 1]), sbp="B", seed=1).dtype
        'int32'
    """
    # 64 random bits for a range of 32: what is left of a bias is below 2**-32
    if not 0 < high - low < 2**32:
        raise FlowError(f"kf.randint draws from low up to below high, under 2**32 numbers; got low={low}, high={high}")

    def draw(seed: int, stream: int, indices: np.ndarray) -> np.ndarray:
        return philox.integers(seed, stream, indices, low, high)

    return _random(_shape((shape,)), placement, sbp, seed, dtype, draw)


def broadcast_like(like: GlobalTensor, value: np.ndarray) -> GlobalTensor:
    """A value in the dtype of `like`, broadcast on its placement."""
    return tensor(value, placement=like.placement, sbp=(_sbp.broadcast,) * like.placement.ndim, dtype=like.dtype)


def _from_blocks(
    shape: Sequence[int],
    placement: Placement,
    sbp: SbpSpec,
    dtype: DTypeLike,
    block: Callable[[tuple[slice, ...]], np.ndarray],
) -> GlobalTensor:
    """A tensor of which `block` gives the logical values at any slices; called once for each rank of this process."""
    check_placement(placement)
    dtype = standard_name(dtype)
    layout = Layout(placement, sbp, shape)
    shards = {}
    if not dry_run.is_on():
        meeting.note(f"making {dtype}{list(shape)} as ({_sbp.text(layout.nd_sbp)})")
        for rank in local_ranks():
            if placement.contains(rank):
                value = block(layout.local_slices(rank)).astype(numpy_dtype(dtype))
                # each value must be in the sum once
                if not _holds_summand(layout.nd_sbp, placement, rank):
                    value = np.zeros_like(value)
                shards[rank] = tensor_engine().put(value, rank)
                check_dtype(shards[rank], dtype)
    return GlobalTensor(layout, dtype, shards)


def _holds_summand(nd_sbp: NdSbp, placement: Placement, rank: int) -> bool:
    """Whether a rank has the values of a partial sum: the first rank of each P axis does, and the others have zeros."""
    axes = zip(placement.coordinates(rank), nd_sbp, strict=True)
    return all(index == 0 for index, part in axes if isinstance(part, PartialSum))


def _random(
    shape: tuple[int, ...],
    placement: Placement,
    sbp: SbpSpec,
    seed: Seed,
    dtype: DTypeLike,
    draw: Callable[[int, int, np.ndarray], np.ndarray],
) -> GlobalTensor:
    """A tensor of random numbers; `draw` takes a seed, a stream and the logical indices of the elements."""
    number, stream = _seed(seed)
    meeting.note(f"drawing with seed {number}, {stream}")
    return _from_blocks(
        shape, placement, sbp, dtype, lambda slices: draw(number, stream, philox.indices_of(shape, slices))
    )


def _seed(seed: Seed) -> tuple[int, int]:
    """Seed and stream. A `keras.random.SeedGenerator` moves on with each draw; without a seed rank 0 draws one."""
    # two words, the second of which counts draws: the stream
    if isinstance(seed, keras.random.SeedGenerator):
        number, stream = np.asarray(keras.ops.convert_to_numpy(seed.next())).tolist()
        return number, stream
    # nothing is drawn, and no seed is used up
    if seed is None and dry_run.is_on():
        return 0, 0
    if seed is None:  # `keras.utils.set_random_seed` also seeds Python's generator
        # once, however many ranks this process drives: what is drawn after it is the same on every engine
        agreed = tensor_engine().agree_on(dict.fromkeys(local_ranks(), random.getrandbits(63)))
        return agreed[min(agreed)], 0
    return int(seed), 0


def _shape(sizes: Sequence[Size]) -> tuple[int, ...]:
    """A shape given as several numbers, or as one sequence of them."""
    if len(sizes) == 1 and isinstance(sizes[0], Sequence):
        return tuple(sizes[0])
    return tuple(cast("Sequence[int]", sizes))
