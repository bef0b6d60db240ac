"""Who writes what: each element of a tensor is written by one rank that holds it, and all write about as many bytes.

Every process computes the same answer from the layouts, without a message. What several ranks hold alike is given to
those that have least so far, the largest tensors first ("longest processing time first", Graham 1969).

Example: a mesh [[0, 1], [2, 3]], a kernel [4, 6] laid (B, S(1)) and a bias [6] laid (B, B). Ranks 0 and 2 hold the same
half of the kernel: 0 writes it. Ranks 1 and 3 hold the other one: 1 does. The bias is then written by rank 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keras_flow.layout import Layout, balanced

#: bytes that one rank writes of what several hold alike, before it is shared out among them
LARGEST = 128 << 20


@dataclass(frozen=True)
class Share:
    """A block of a tensor, and the rank that writes it.

    Attributes:
        rank: which writes it, from its own shard.
        start: where it begins in the tensor.
        shape: its lengths.
        skipped: rows of the rank's shard before it.
    """

    rank: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    skipped: int = 0

    def cut(self, shard: np.ndarray) -> np.ndarray:
        """Cut the block out of what its rank holds."""
        return shard[self.skipped : self.skipped + self.shape[0]] if self.shape else shard


def assigned(
    tensors: Mapping[str, tuple[Layout | None, Sequence[int], int]], ranks: Sequence[int]
) -> dict[str, list[Share]]:
    """Say who writes what.

    Args:
        tensors: name -> layout (None: every rank has it whole), logical shape, and bytes of an element.
        ranks: all ranks of the job.

    Returns:
        name -> its blocks; at most one of a tensor for each rank. Empty blocks are left out.
    """
    return _assigned(tuple((name, each[0], tuple(each[1]), each[2]) for name, each in tensors.items()), tuple(ranks))


@functools.lru_cache(maxsize=2)  # a program saves the same model again and again
def _assigned(
    tensors: tuple[tuple[str, Layout | None, tuple[int, ...], int], ...], ranks: tuple[int, ...]
) -> dict[str, list[Share]]:
    loads, boxes_of = np.zeros(max(ranks) + 1, np.int64), functools.cache(_boxes)
    boxes = [
        (math.prod(shape for _, shape in box) * size, name, box, holders)
        for name, layout, shape, size in tensors
        for box, holders in boxes_of(layout, shape, ranks)
    ]
    found: dict[str, list[Share]] = {name: [] for name, *_ in tensors}
    taken: dict[str, set[int]] = {name: set() for name in found}
    # in the order of bytes, then of names: the same in all processes
    for count, name, box, holders in sorted(boxes, key=lambda each: (-each[0], each[1], each[2])):
        if not count:
            continue
        start, shape = tuple(first for first, _ in box), tuple(length for _, length in box)
        parts = min(len(holders), -(-count // LARGEST), shape[0] if shape else 1)
        for part in range(parts):
            first, last = balanced(shape[0], parts, part) if shape else (0, 1)
            free = [rank for rank in holders if rank not in taken[name]]
            rank = free[int(np.argmin(loads[free]))]
            taken[name].add(rank)
            loads[rank] += count * (last - first) // (shape[0] if shape else 1)
            piece = ((start[0] + first, *start[1:]), (last - first, *shape[1:])) if shape else ((), ())
            found[name].append(Share(rank, *piece, skipped=first))
    return found


def _boxes(
    layout: Layout | None, shape: tuple[int, ...], ranks: tuple[int, ...]
) -> list[tuple[tuple[tuple[int, int], ...], list[int]]]:
    """The different blocks of a tensor as (start, length) for each dim, with the ranks that hold each."""
    if layout is None or layout.is_broadcast:
        return [(tuple((0, length) for length in shape), list(ranks if layout is None else layout.placement.ranks))]
    boxes: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in layout.placement.ranks:
        box = tuple((part.start, part.stop - part.start) for part in layout.local_slices(rank))
        boxes.setdefault(box, []).append(rank)
    return list(boxes.items())
