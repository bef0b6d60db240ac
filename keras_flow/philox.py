"""Random numbers as a function of the seed and the logical index.

Philox-4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The counter of an
element is its row-major index in the logical tensor, so that a rank draws its own elements and no other, and values
do not depend on placement, layout or engine.

Two numberings: global tensors (`kf.rand`) take a counter for each element, of which they use up to 128 bits. Draws of
`keras.random` in a model take 32 bits for each element (`fractions`), four elements to a counter, as TensorFlow's own
Philox does: that is four times as fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

#: the constants of Philox-4x32-10, from the paper
MULTIPLIERS, WEYL, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS, _WEYL = (tuple(np.uint64(each) for each in pair) for pair in (MULTIPLIERS, WEYL))
#: of a word: those that make a fraction
FRACTION_BITS = 0x7FFFFF
#: float32's 1.0, as its bits
_ONE = np.uint32(0x3F800000)
#: counters that are worked on at a time: their words and the products fit into a core's second-level cache
_CHUNK = 16384
#: and by compiled code
_LANES = 64


def words(seed: int, stream: int, indices: np.ndarray) -> tuple[np.ndarray, ...]:
    """Four random 32-bit words for each index.

    Args:
        seed: 64 bits.
        stream: 64 bits more, which tell draws of one seed apart.
        indices: whole numbers from 0 up.

    Returns:
        Four arrays of uint64 [len(indices)], below 2**32.

    Example:
        >>> [hex(int(word[0])) for word in words(0, 0, np.zeros(1, "uint64"))]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    # 128 bits: the index in two words, the stream in two
    counter = [indices.astype(np.uint64) & _LOW, indices.astype(np.uint64) >> _SHIFT]
    counter += [np.full_like(counter[0], stream & 0xFFFFFFFF), np.full_like(counter[0], (stream >> 32) & 0xFFFFFFFF)]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    first, second = np.empty_like(counter[0]), np.empty_like(counter[0])
    for _ in range(ROUNDS):
        # 32 by 32 bits in 64: the high word and the low word of the product go separate ways; in place, because new
        # arrays would take longer than the arithmetic
        np.multiply(counter[0], np.uint64(MULTIPLIERS[0]), out=first)
        np.multiply(counter[2], np.uint64(MULTIPLIERS[1]), out=second)
        np.right_shift(second, _SHIFT, out=counter[0])
        counter[0] ^= counter[1]
        counter[0] ^= np.uint64(key[0])
        np.bitwise_and(second, _LOW, out=counter[1])
        np.right_shift(first, _SHIFT, out=counter[2])
        counter[2] ^= counter[3]
        counter[2] ^= np.uint64(key[1])
        np.bitwise_and(first, _LOW, out=counter[3])
        key = [(part + weyl) & 0xFFFFFFFF for part, weyl in zip(key, WEYL, strict=True)]
    return tuple(counter)


def indices_of(shape: Sequence[int], slices: Sequence[slice]) -> np.ndarray:
    """Row-major logical indices of a block: uint64, of the block's shape."""
    total = np.zeros((1,) * len(shape), np.uint64)
    # the stride of a dim is the number of elements behind it: 12, 4 and 1 in [2, 3, 4]
    stride = 1
    for dim in reversed(range(len(shape))):
        along = np.arange(slices[dim].start, slices[dim].stop, dtype=np.uint64) * np.uint64(stride)
        total = total + along.reshape([-1 if other == dim else 1 for other in range(len(shape))])
        stride *= shape[dim]
    return total


def uniform(seed: int, stream: int, indices: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), of 53 random bits."""
    # two words are 64 bits, of which a float64 holds 53
    one, two, *_ = words(seed, stream, indices.ravel())
    bits = (one << _SHIFT) | two
    return ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(indices.shape)


def normal(seed: int, stream: int, indices: np.ndarray) -> np.ndarray:
    """float64, standard normal by Box and Muller (1958)."""
    parts = words(seed, stream, indices.ravel())
    radius = ((parts[0] << _SHIFT | parts[1]) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    angle = ((parts[2] << _SHIFT | parts[3]) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (np.sqrt(-2.0 * np.log1p(-radius)) * np.cos(2.0 * np.pi * angle)).reshape(indices.shape)


def integers(seed: int, stream: int, indices: np.ndarray, low: int, high: int) -> np.ndarray:
    """Random int64 in [low, high), a range of less than 2**32 numbers.

    By multiply and shift of 64 random bits (Lemire 2019), without rejection: the bias is below (high - low) / 2**64.
    """
    # (bits * span) >> 64 in two halves, because the product has 96 bits
    high_word, low_word, *_ = words(seed, stream, indices.ravel())
    span = np.uint64(high - low)
    offset = (high_word * span + ((low_word * span) >> _SHIFT)) >> _SHIFT
    return (offset.astype(np.int64) + low).reshape(indices.shape)


# ---- four elements to a counter


def counters_of_line(length: int) -> int:
    """Counters that the last dim of a tensor takes: four elements to each, a rest of fewer has one of its own.

    Every line begins a counter, so that a rank whose part is lines of the tensor draws nothing that it does not use.
    """
    return -(-length // 4)


def words_of_block(
    seed: int, stream: int, shape: Sequence[int], slices: Sequence[slice], compiled: bool = False
) -> np.ndarray:
    """A random 32-bit word for each element of a block of a tensor, as a function of its logical index.

    Args:
        seed: 64 bits.
        stream: 64 bits more, which tell draws of one seed apart.
        shape: logical shape.
        slices: the block, one slice for each dim.
        compiled: by numba where there is one, in a fifth of the time; it takes some 100 MB of memory to load.

    Returns:
        uint32, of the block's shape.

    Example:
        A rank that has the second row of a 2x2 tensor draws what the whole has there.

        >>> whole = words_of_block(7, 0, (2, 2), (slice(0, 2), slice(0, 2)))
        >>> own = words_of_block(7, 0, (2, 2), (slice(1, 2), slice(0, 2)))
        >>> bool((own == whole[1:]).all())
        True
    """
    if not shape:
        return words_of_block(seed, stream, (1,), (slice(0, 1),), compiled).reshape(())
    first, last = slices[-1].start // 4, counters_of_line(slices[-1].stop)
    lines = (*shape[:-1], counters_of_line(shape[-1]))
    counters = indices_of(lines, (*slices[:-1], slice(first, max(first, last))))
    out = np.empty((counters.size, 4), np.uint32)
    fill = (_compiled() if compiled else None) or _fill
    halves = [half & 0xFFFFFFFF for half in (seed, seed >> 32, stream, stream >> 32)]
    fill(counters.reshape(-1), np.array(halves, np.uint64), out)
    shift = slices[-1].start - 4 * first
    line = out.reshape(*counters.shape[:-1], 4 * counters.shape[-1])
    return line[..., shift : shift + slices[-1].stop - slices[-1].start]


def fractions(
    seed: int, stream: int, shape: Sequence[int], slices: Sequence[slice], compiled: bool = False
) -> np.ndarray:
    """float32 in [0, 1) of a block of a tensor; arguments as those of `words_of_block`.

    The low 23 bits of a word, times 2**-23: TensorFlow's uniform draws do the same, and every engine holds it exactly.
    """
    bits = words_of_block(seed, stream, shape, slices, compiled)
    bits &= np.uint32(FRACTION_BITS)
    bits |= _ONE  # the mantissa of a number in [1, 2)
    found = bits.view(np.float32)
    found -= np.float32(1)
    return found


def offsets(
    seed: int, stream: int, shape: Sequence[int], slices: Sequence[slice], span: int, compiled: bool = False
) -> np.ndarray:
    """Whole numbers in [0, span) of a block of a tensor: int32; the other arguments as those of `words_of_block`.

    By multiply and shift (Lemire 2019): floor(word * span / 2**32), with a bias below span / 2**32 as in engines' own
    draws, which take the rest of a word by span.

    Args:
        seed: 64 bits.
        stream: 64 bits more.
        shape: logical shape.
        slices: the block.
        span: how many numbers there are, up to 2**31.
        compiled: whether numba computes the words, as `words_of_block` says.

    Example:
        The word of the first element is 0x6627e8d5, 0.399 of 2**32.

        >>> offsets(0, 0, (1,), (slice(0, 1),), 10)
        array([3], dtype=int32)
    """
    product = words_of_block(seed, stream, shape, slices, compiled).astype(np.uint64)
    product *= np.uint64(span)
    product >>= _SHIFT
    return product.astype(np.int32)


def _fill(counters: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """The words of counters: NumPy's way.

    Args:
        counters: uint64 [n].
        halves: uint64 [4], the 32-bit halves of the seed and of the stream, the lower one first.
        out: uint32 [n, 4], which is written.
    """
    seed, stream = int(halves[0]) | int(halves[1]) << 32, int(halves[2]) | int(halves[3]) << 32
    for start in range(0, len(counters), _CHUNK):
        part = slice(start, start + _CHUNK)
        for place, word in enumerate(words(seed, stream, counters[part])):
            out[part, place] = word


@functools.cache
def _compiled() -> Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None:
    """`_fill` as machine code, where numba is installed and can be used; otherwise None."""
    try:
        import numba  # here, because it takes half a second
    except Exception:  # it is missing, or refuses this version of NumPy
        return None
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return None
    compiled = functools.partial(numba.njit, "void(uint64[::1], uint64[::1], uint32[:, ::1])", nogil=True)
    try:
        return compiled(cache=True)(_rounds)
    except RuntimeError:  # no folder can be written, in which the code would be kept
        return compiled()(_rounds)


def _rounds(counters: np.ndarray, halves: np.ndarray, out: np.ndarray) -> None:
    """Compute the rounds in loops; those over counters fit the fastest memory and become vector instructions.

    numba makes 64-bit floats of numbers of two kinds, so all are uint64.
    """
    first, second = np.empty(_LANES, np.uint64), np.empty(_LANES, np.uint64)
    third, fourth = np.empty(_LANES, np.uint64), np.empty(_LANES, np.uint64)
    for start in range(0, len(counters), _LANES):
        count = min(_LANES, len(counters) - start)
        for lane in range(count):
            first[lane], second[lane] = counters[start + lane] & _LOW, counters[start + lane] >> _SHIFT
            third[lane], fourth[lane] = halves[2], halves[3]
        key, other_key = halves[0], halves[1]
        for _ in range(ROUNDS):
            for lane in range(count):
                upper, lower = first[lane] * _MULTIPLIERS[0], third[lane] * _MULTIPLIERS[1]
                first[lane], second[lane] = (lower >> _SHIFT) ^ second[lane] ^ key, lower & _LOW
                third[lane], fourth[lane] = (upper >> _SHIFT) ^ fourth[lane] ^ other_key, upper & _LOW
            key, other_key = (key + _WEYL[0]) & _LOW, (other_key + _WEYL[1]) & _LOW
        for lane in range(count):
            out[start + lane, 0], out[start + lane, 1] = first[lane], second[lane]
            out[start + lane, 2], out[start + lane, 3] = third[lane], fourth[lane]
