"""Random numbers as a function of the seed and the logical index.

Philox-4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The counter of an
element is its row-major index in the logical tensor, so that a rank draws its own elements and no other, and values
do not depend on placement, layout or engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


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
    for _ in range(_ROUNDS):
        # 32 by 32 bits in 64: the high word and the low word of the product go separate ways
        first, second = counter[0] * _MULTIPLIERS[0], counter[2] * _MULTIPLIERS[1]
        counter = [
            (second >> _SHIFT) ^ counter[1] ^ np.uint64(key[0]),
            second & _LOW,
            (first >> _SHIFT) ^ counter[3] ^ np.uint64(key[1]),
            first & _LOW,
        ]
        key = [(part + weyl) & 0xFFFFFFFF for part, weyl in zip(key, _WEYL, strict=True)]
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
