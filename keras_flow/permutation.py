"""Orders of rows as a function of a seed, an epoch and the position: no table of all rows is made or kept.

A permutation of n rows is a Feistel network on the numbers of ceil(log2(n)) bits (Luby and Rackoff, "How to construct
pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 17, 1988), whose parts take turns where they
are unequal. A number from n on is put through it again until it is below n ("cycle walking": Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002), less than twice on average. Philox's words are the rounds' keys.

Example: of 10 rows (4 bits) position 3 may go to 12, which is none, and 12 to 7: row 7 stands at position 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keras_flow import philox

#: rounds of the network: few bits need many, since a round of one bit can do little
_ROUNDS = 12
#: odd constants that mix the bits of 64-bit numbers (Steele, Lea, Flood, "Fast splittable pseudorandom number
#: generators", OOPSLA 2014)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = np.uint64(32)


@dataclass(frozen=True)
class Permutation:
    """A permutation of the rows 0 to `length` - 1.

    Attributes:
        length: how many rows there are.
        seed: 64 bits.
        stream: 64 bits more, which tell permutations of one seed apart.

    Example:
        >>> order = Permutation(length=5, seed=1, stream=0)
        >>> sorted(int(row) for row in order.rows(np.arange(5)))
        [0, 1, 2, 3, 4]
        >>> bool((order.rows(np.array([3])) == order.rows(np.arange(5))[3]).all())
        True
    """

    length: int
    seed: int
    stream: int

    @cached_property
    def _keys(self) -> np.ndarray:
        high, low, *_ = philox.words(self.seed, self.stream, np.arange(_ROUNDS, dtype=np.uint64))
        return high << _SHIFT | low

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The rows that stand at some positions: int64, of their shape."""
        found = self._network(positions.ravel().astype(np.uint64))
        outside = np.flatnonzero(found >= self.length)
        while len(outside):
            found[outside] = self._network(found[outside])
            outside = outside[found[outside] >= self.length]
        return found.astype(np.int64).reshape(positions.shape)

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        """The permutation of all numbers of as many bits as the last row has, at least two."""
        bits = max(2, (self.length - 1).bit_length())
        # the lower part is mixed into the upper one, then both change places with their widths
        lower, upper = bits // 2, bits - bits // 2
        for key in self._keys:
            left, right = numbers >> np.uint64(lower), numbers & np.uint64((1 << lower) - 1)
            left ^= _mixed(right ^ key) & np.uint64((1 << upper) - 1)
            numbers = right << np.uint64(upper) | left
            lower, upper = upper, lower
        return numbers


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Numbers whose every bit depends on all bits of those given."""
    for constant, shift in zip(_MIX, (np.uint64(30), np.uint64(27)), strict=True):
        numbers = (numbers ^ (numbers >> shift)) * constant
    return numbers ^ (numbers >> np.uint64(31))
