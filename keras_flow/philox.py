"""Random numbers as a function of the seed and the logical index.

Philox-4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The counter of an
element is its row-major index in the logical tensor, so that a rank draws its own elements and no other, and values
do not depend on placement, layout or engine.

Two numberings: global tensors (`kf.rand`) take a counter for each element, of which they use up to 128 bits. Draws of
`keras.random` in a model take 32 bits for each element (`fractions`), four elements to a counter, as TensorFlow's own
Philox does: that is four times as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: the constants of Philox-4x32-10, from the paper
MULTIPLIERS, WEYL, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
#: of a word: those that make a fraction
FRACTION_BITS = 0x7FFFFF
#: counters that are worked on at a time: their words and the products fit into a core's second-level cache
_CHUNK = 16384


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


def words_of_block(seed: int, stream: int, shape: Sequence[int], slices: Sequence[slice]) -> np.ndarray:
    """A random 32-bit word for each element of a block of a tensor, as a function of its logical index.

    Args:
        seed: 64 bits.
        stream: 64 bits more, which tell draws of one seed apart.
        shape: logical shape.
        slices: the block, one slice for each dim.

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
        return words_of_block(seed, stream, (1,), (slice(0, 1),)).reshape(())
    first, last = slices[-1].start // 4, counters_of_line(slices[-1].stop)
    lines = (*shape[:-1], counters_of_line(shape[-1]))
    counters = indices_of(lines, (*slices[:-1], slice(first, max(first, last))))
    flat, out = counters.reshape(-1), np.empty((counters.size, 4), np.uint32)
    for start in range(0, len(flat), _CHUNK):
        part = slice(start, start + _CHUNK)
        for place, word in enumerate(words(seed, stream, flat[part])):
            out[part, place] = word
    shift = slices[-1].start - 4 * first
    line = out.reshape(*counters.shape[:-1], 4 * counters.shape[-1])
    return line[..., shift : shift + slices[-1].stop - slices[-1].start]


def fractions(seed: int, stream: int, shape: Sequence[int], slices: Sequence[slice]) -> np.ndarray:
    """float32 in [0, 1) of a block of a tensor; arguments as those of `words_of_block`.

    The low 23 bits of a word, times 2**-23: TensorFlow's uniform draws do the same, and every engine holds it exactly.
    """
    bits = words_of_block(seed, stream, shape, slices) & np.uint32(FRACTION_BITS)
    return bits.astype(np.float32) * np.float32(2.0**-23)


def offsets(high: np.ndarray, low: np.ndarray, span: int) -> np.ndarray:
    """Whole numbers in [0, span) from two draws of `fractions`: int64.

    By multiply and shift of their 46 bits (Lemire 2019): floor(bits * span / 2**46), with a bias below span / 2**46.

    Args:
        high: draw of the upper 23 bits.
        low: draw of the lower 23 bits.
        span: how many numbers there are, up to 2**31.

    Example:
        >>> offsets(np.float32([0.0, 0.5, 0.75]), np.float32([0.5, 0.0, 0.0]), 10)
        array([0, 5, 7])
    """
    # 46 bits at the upper end of 64, as two words: products with 31 bits stay below 2**63
    upper, lower = ((part * np.float32(2.0**23)).astype(np.int64) for part in (high, low))
    first, second = (upper << 9) | (lower >> 14), (lower << 18) & 0xFFFFFFFF
    return (first * span + ((second * span) >> 32)) >> 32
