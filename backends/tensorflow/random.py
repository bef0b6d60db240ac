"""Random values on TensorFlow: the same for every layout, and those of one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor
from tensorflow.python.ops import gen_stateless_random_ops_v2 as random_ops
from tensorflow.python.ops import random_ops_util

from keras_flow import philox
from keras_flow.backends import logical_random
from keras_flow.backends.engine_records import RandomPart
from keras_flow.backends.hooking import hook
from keras_flow.backends.tensorflow import creation
from keras_flow.backends.tensorflow.data import batch_axis
from keras_flow.backends.tensorflow.layouts import in_step, replicated, view_of
from keras_flow.backends.tensorflow.mesh_values import is_dtensor, to_logical
from keras_flow.backends.tensorflow.mirrored import replica_math, strategy
from keras_flow.backends.tensorflow.operators.operations import whole_dims
from keras_flow.backends.tensorflow.traced_step import split_rows
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.keras_places import tensorflow_random as keras_random


def distribution_of_draw(*args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks on random draws: the distribution of the step on a mesh that is running."""
    distribution = active()
    if distribution is None or not strategy.works_by_dtensor(distribution):
        return None
    return distribution if in_step() and not creation.creating_values() else None


#: a hook on a function of `keras.random`, in a step on a mesh
_drawn_whole = functools.partial(
    hook,
    "keras:random",
    why="under DTensor a draw depends on how its result is split; here every rank draws the whole",
    when=distribution_of_draw,
)


@_drawn_whole(("normal", "truncated_normal", "uniform", "randint", "categorical", "gamma", "beta", "binomial"))
def draw(distribution: Distribution, original: Callable[..., tf.Tensor], *args: object, **kwargs: object) -> tf.Tensor:
    """Hook on the draws of `keras.random` that have no inputs: every rank has the whole draw.

    So its values do not depend on how it is used.
    """
    return _whole(original(*args, **kwargs), distribution)


@_drawn_whole("dropout")
def dropout(
    distribution: Distribution,
    original: Callable[..., tf.Tensor],
    inputs: tf.Tensor,
    rate: float,
    noise_shape: Sequence[int | None] | None = None,
    seed: object = None,
) -> tf.Tensor:
    """Hook on `random.dropout`: the formula of `tf.nn.dropout`, with a mask that every rank draws whole."""
    if rate in (0.0, 1.0):
        return original(inputs, rate, noise_shape, seed)
    words = _words(seed)
    shape = keras_random._get_concrete_noise_shape(inputs, noise_shape)
    mask = _whole(tf.random.stateless_uniform(shape, seed=words, dtype=inputs.dtype) >= rate, distribution)
    return tf.where(mask, inputs * (1.0 / (1.0 - rate)), tf.zeros_like(inputs))


@_drawn_whole("shuffle")
def shuffle(
    distribution: Distribution, original: Callable[..., tf.Tensor], x: tf.Tensor, axis: int = 0, seed: object = None
) -> tf.Tensor:
    """Hook on `random.shuffle`: every rank draws the whole order; the gradient goes back by the inverse order."""
    words = _words(seed)
    shape = cast("Sequence[int]", [tf.shape(x)[axis]])  # TensorFlow's stub leaves out lengths that are tensors
    return _reordered(x, tf.random.stateless_uniform(shape=shape, seed=words), axis, distribution)


def _reordered(x: tf.Tensor, keys: tf.Tensor, axis: int, distribution: Distribution) -> tf.Tensor:
    order = _whole(tf.argsort(_whole(keys, distribution), stable=True), distribution)

    def ordered(values: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        return cast("tf.Tensor", whole_dims(tf.gather(whole_dims(values, (axis,)), places, axis=axis), (axis,)))

    @tf.custom_gradient
    def shuffled(values: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        # TensorFlow's gradient of a gather is a scatter, for which DTensor has no rule
        return ordered(values, order), lambda upstream: ordered(upstream, _whole(tf.argsort(order), distribution))

    return cast("tf.Tensor", shuffled(tf.convert_to_tensor(x)))


def seed_on_mesh(seed: object) -> object | None:
    """Condition of the hook on `random._cast_seed`: a generator's state on a mesh.

    Only for an eager draw, outside of a step.
    """
    if not tf.executing_eagerly() or not is_dtensor(seed):
        return None
    return seed if not in_step() or creation.creating_values() else None


@hook(
    "keras:random",
    "_cast_seed",
    "a draw on the host by a generator whose state is on the mesh; mixing both raises",
    when=seed_on_mesh,
)
def cast_seed(_: object, original: Callable[..., object], seed: object) -> object:
    """Hook on `random._cast_seed`: read the seed words of a generator whose state is on a mesh first."""
    return original(to_logical(seed))


# ---- random="logical"


def random_part(
    shape: tuple[int, ...], inputs: tf.Tensor | None, noise_shape: Sequence[int | None] | None, is_whole: bool
) -> RandomPart | None:
    """Which elements of a draw are made here: a replica's own rows; on a mesh a rank's rows."""
    here, distribution = replica_math.rows(), distribution_of_draw()
    if not logical_random.has_known_lengths(shape):
        # a graph takes batches of many shapes, of any on one rank; rows of unknown shape are drawn whole by each
        lengths: list[Any] = list(shape)
        if inputs is not None:
            lengths = [tf.shape(inputs)[dim] if n is None else n for dim, n in enumerate(shape)]
        if any(n is None for n in lengths):
            return None
        shape = tuple(n if isinstance(n, int) else tf.cast(n, "int32") for n in lengths)
        if here is None:
            return RandomPart.whole(shape, distribution and functools.partial(_whole, distribution=distribution))
    if here is not None:
        # an order of all rows is refused by the replica's own hook
        return None if is_whole else replica_math.part_of_draw(shape, inputs, noise_shape, here)
    if distribution is None:
        return RandomPart.whole(shape)
    view = view_of(distribution)
    axis, blocks = batch_axis(distribution, view)
    rows = math.prod(shape[:1])
    # a mask has the rows of its inputs; another draw is split where its first dim is as long as the batch. A wrong
    # guess changes where numbers are drawn, not which
    has_rows = len(shape) > 1 and rows == (split_rows() if inputs is None else inputs.shape[0])
    may_split = has_rows and not is_whole and not tf.executing_eagerly()
    if may_split and axis is not None and blocks > 1 and rows % blocks == 0:
        everything = tuple(slice(0, length) for length in shape)
        return _RowsOnMesh(shape, everything, axis=axis, mesh=view.mesh)
    return RandomPart.whole(shape, functools.partial(_whole, distribution=distribution))


@dataclass(frozen=True)
class _RowsOnMesh(RandomPart):
    """All elements of a draw, of which each rank makes those of its rows.

    Attributes:
        axis: the mesh axis that splits the rows.
        mesh: the mesh of the step.
    """

    axis: str = field(kw_only=True)
    mesh: dtensor.Mesh = field(kw_only=True)


def random_words(state: tf.Tensor) -> tuple[Any, Any]:
    """The two 32-bit words of a seed: numbers, or scalars of the graph that is being made."""
    if tf.executing_eagerly():
        first, second = (int(word) & 0xFFFFFFFF for word in np.asarray(to_logical(state)))
        return first, second
    words = tf.cast(tf.math.floormod(tf.cast(state, "int64"), 2**32), "uint64")
    return words[0], words[1]


def random_fractions(words: tuple[Any, Any], tag: int, part: RandomPart) -> tf.Tensor:
    """`philox.fractions` of the elements of a part, float32."""
    if isinstance(words[0], int):
        return _constant(philox.fractions(words[0] | tag << 32, words[1], part.shape, part.slices))
    # TensorFlow's own fractions have the low bits of a word, and in a program that XLA compiles the high ones
    low = tf.bitwise.bitwise_and(_bits(words, tag, part, tf.int32), tf.constant(philox.FRACTION_BITS, "int32"))
    return tf.cast(low, "float32") * np.float32(2.0**-23)


def random_offsets(words: tuple[Any, Any], part: RandomPart, span: int) -> tf.Tensor:
    """`philox.offsets` of the elements of a part, int32."""
    if isinstance(words[0], int):
        return _constant(philox.offsets(words[0], words[1], part.shape, part.slices, span))
    product = tf.cast(_bits(words, 0, part, tf.uint32), "uint64") * tf.constant(span, "uint64")
    return tf.cast(tf.bitwise.right_shift(product, tf.constant(32, "uint64")), "int32")


def _constant(drawn: np.ndarray) -> tf.Tensor:
    """Make a tensor of numbers that NumPy has drawn, as it does outside of any program with a known seed."""
    distribution = distribution_of_draw()
    # in an eager step on a mesh, whose operators take no other tensors
    return tf.constant(drawn) if distribution is None else _whole(tf.constant(drawn), distribution)


def _bits(words: tuple[Any, Any], tag: int, part: RandomPart, dtype: tf.DType) -> tf.Tensor:
    """A random word of 32 bits for each element of a part: TensorFlow's own Philox, from the part's first counter."""
    if isinstance(part, _RowsOnMesh):
        return _bits_by_rows(words, tag, part, dtype)
    if not part.shape:
        return _bits(words, tag, RandomPart.whole((1,)), dtype)[0]
    if part.rows is not None:
        return _bits_from(words, tag, part, dtype)
    rows = part.slices[0]
    lines = (*part.shape[:-1], philox.counters_of_line(part.shape[-1]))
    # parts are whole rows, which are a range of counters; of a vector they may begin within one
    first = rows.start // 4 if len(lines) == 1 else rows.start * math.prod(lines[1:])
    last = philox.counters_of_line(rows.stop) if len(lines) == 1 else rows.stop * math.prod(lines[1:])
    flat = _words_from(words, tag, tf.stack([tf.cast(first, "uint64"), words[1]]), last - first, dtype)
    if len(lines) == 1:
        return flat[rows.start - 4 * first : rows.stop - 4 * first]
    padded = tf.reshape(flat, [rows.stop - rows.start, *part.shape[1:-1], 4 * lines[-1]])
    return tf.slice(padded, [0] * len(lines), [rows.stop - rows.start, *part.shape[1:]])


def _bits_from(words: tuple[Any, Any], tag: int, part: RandomPart, dtype: tf.DType) -> tf.Tensor:
    """The words of rows that begin where a scalar of the graph says."""
    assert part.rows is not None
    first, inner = tf.cast(part.slices[0].start, "uint64"), part.shape[1:]
    if not inner:  # a vector: four neighbours have one counter, and the rows may begin within one
        counters = philox.counters_of_line(part.rows + 3)
        flat = _words_from(words, tag, tf.stack([first // 4, words[1]]), counters, dtype)
        return tf.slice(flat, [tf.cast(first % 4, "int32")], [part.rows])
    line = philox.counters_of_line(inner[-1])
    stride = math.prod((*inner[:-1], line))
    counter = tf.stack([first * tf.constant(stride, "uint64"), words[1]])
    flat = _words_from(words, tag, counter, part.rows * stride, dtype)
    padded = tf.reshape(flat, [part.rows, *inner[:-1], 4 * line])
    return tf.slice(padded, [0] * len(part.shape), [part.rows, *inner])


def _bits_by_rows(words: tuple[Any, Any], tag: int, part: _RowsOnMesh, dtype: tf.DType) -> tf.Tensor:
    """Return random bits of which each rank makes those of its own rows, from the counter of the first of them.

    DTensor takes a block of rows for a replicated tensor, though it differs between the ranks as the numbers of their
    blocks do. Adding it to zeros that are split relabels it: the sum is a tensor that is split by rows.
    """
    axis, mesh = part.axis, part.mesh
    blocks, inner = mesh.dim_size(axis), part.shape[1:]
    rows = part.shape[0] // blocks
    stride = math.prod((*inner[:-1], philox.counters_of_line(inner[-1])))
    first = _number_of_block(axis, mesh)[0] * tf.constant(rows * stride, "uint64")
    flat = _words_from(words, tag, tf.stack([first, words[1]]), rows * stride, dtype)
    # replicated, or DTensor would split the draw, and change its key from rank to rank
    flat = dtensor.relayout(flat, replicated(mesh, 1))
    padded = tf.reshape(flat, [1, rows, *inner[:-1], 4 * philox.counters_of_line(inner[-1])])
    block = tf.slice(padded, [0] * padded.shape.rank, [1, rows, *inner])
    split = dtensor.Layout([axis, *[dtensor.UNSHARDED] * block.shape[1:].rank], mesh)
    zeros = dtensor.relayout(tf.zeros([blocks, *[1] * block.shape[1:].rank], dtype), split)
    return tf.reshape(dtensor.relayout(zeros + block, split), part.shape)


def _words_from(words: tuple[Any, Any], tag: int, counter: tf.Tensor, counters: int, dtype: tf.DType) -> tf.Tensor:
    """Four words of 32 bits for each counter from the first one on."""
    return random_ops.stateless_random_uniform_full_int_v2(
        [4 * counters],
        key=tf.reshape(words[0] + tf.constant(tag << 32, "uint64"), [1]),
        counter=counter,
        alg=random_ops_util.Algorithm.PHILOX.value,
        dtype=dtype,
    )


@functools.lru_cache(maxsize=64)
def _number_of_block(axis: str, mesh: dtensor.Mesh) -> tf.Tensor:
    """For each rank which block of rows it has: a tensor that is called replicated, and is another one on each."""
    with tf.init_scope():
        # uint64, since DTensor takes small int32 and int64 tensors for constants, equal on all ranks
        numbers = [tf.constant([place[axis]], "uint64") for place in mesh.local_device_locations()]
        return dtensor.pack(numbers, replicated(mesh, 1))


def reorder(x: tf.Tensor, keys: tf.Tensor, axis: int) -> tf.Tensor:
    """`x` with its entries along an axis in the order of `keys` [length]."""
    distribution = distribution_of_draw()
    if distribution is None:
        return cast("tf.Tensor", tf.gather(x, tf.argsort(keys, stable=True), axis=axis))
    return _reordered(x, keys, axis, distribution)


def _words(seed: object) -> tf.Tensor:
    return cast("tf.Tensor", keras_random._cast_seed(keras_random.draw_seed(seed)))


def _whole(value: tf.Tensor, distribution: Distribution) -> tf.Tensor:
    if not tf.is_tensor(value):
        return value
    mesh = view_of(distribution).mesh
    if tf.executing_eagerly() and not is_dtensor(value):
        return dtensor.pack([value] * mesh.num_local_devices(), replicated(mesh, value.shape.rank))
    return dtensor.relayout(value, replicated(mesh, value.shape.rank))
