"""Are all processes fed the same batches? They compare checksums: with other data they would train on in silence."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable

import numpy as np
from keras.src import tree

from keras_flow.backends import agreement
from keras_flow.backends.active import backend
from keras_flow.errors import FlowError

#: the first batches of each data source are compared across processes, and then every so many
_FIRST, _EVERY = 3, 100


def is_compared(number: int) -> bool:
    """Whether the batch of this number is one of those that the processes compare."""
    # by number: all processes compare the same batches, so that none waits alone
    return number < _FIRST or number % _EVERY == 0


def checksum(leaf: object) -> tuple[str, int]:
    """What a value of a batch is, in words, and a checksum of its bytes."""
    # sparse and ragged tensors, which are refused later
    if not hasattr(leaf, "__array__"):
        return type(leaf).__name__, 0
    array = np.ascontiguousarray(np.asarray(leaf))
    # of the bytes: equal values have equal bytes here, and nan compares as well
    raw = repr(array.tolist()).encode() if array.dtype.kind in "OSU" else array.reshape(-1).view(np.uint8).tobytes()
    return f"{array.dtype} of shape {list(array.shape)}", zlib.crc32(raw)


class BatchWatch:
    """Finds processes that are fed different batches, which would train on without any error.

    It compares checksums of the first batches of a data source and of every 100th.

    Args:
        checksum: text and number that tell a value of a batch apart.

    Attributes:
        seen: batches of the source so far.
    """

    def __init__(self, checksum: Callable[[object], tuple[str, int]] = checksum) -> None:
        self.seen = 0
        self.batches: int | None = None
        self._checksum = checksum

    def restart(self, batches: int | None) -> None:
        """A new data source, of so many batches (None: not known): look at its first ones."""
        self.seen, self.batches = 0, batches

    def see(self, data: object) -> bool:
        """Compare this batch where it is due. Returns whether it is the first of its source.

        Raises:
            FlowError: in all processes, naming those that differ and the input.
        """
        is_due, index, self.seen = self.is_due(), self.seen, self.seen + 1
        if is_due and backend().world().process_count > 1:
            self._compare(data, index)
        return index == 0

    def is_due(self, number: int | None = None) -> bool:
        """Whether the batch of this number is one of those that are compared; None: the next one."""
        return is_compared(self.seen if number is None else number)

    def _compare(self, data: object, index: int) -> None:
        mine = {name: self._checksum(leaf) for name, leaf in _named(data)}
        # a checksum for each input, not the input: a few bytes for each process
        said = [json.loads(text) for text in agreement.exchange(json.dumps([self.batches, mine]))]
        lengths, everyone = [length for length, _ in said], [facts for _, facts in said]
        # one rank is one process on torch, and the word that its users know
        word = "rank" if backend().world().process_count == backend().world().size else "process"
        words = "ranks" if word == "rank" else "processes"
        if len(set(lengths)) > 1:
            other = next(place for place, length in enumerate(lengths) if length != lengths[0])
            raise FlowError(
                f"the {words} are fed data of different lengths: {word} 0 has {lengths[0]} batches, {word} {other} has "
                f"{lengths[other]}, and would wait for the others without end. Every {word} must have the same logical "
                f"data; do not shard it by {word}"
            )
        for name in sorted({name for facts in everyone for name in facts}):
            differ = [place for place, facts in enumerate(everyone) if facts.get(name) != everyone[0].get(name)]
            if differ:
                received = ", ".join(
                    f"{word} {place}: {everyone[place].get(name, ('nothing', 0))[0]}" for place in (0, differ[0])
                )
                raise FlowError(
                    f"the {words} are fed different batches: input {name!r} of batch {index} differs on "
                    f"{words if len(differ) > 1 else word} {', '.join(map(str, differ))} from {word} 0 ({received}). "
                    f"Every {word} must read the same logical batch in the same order: seed what shuffles or augments "
                    "(a DataLoader's generator, tf.data's shuffle(seed=...), a generator's own random state), and do "
                    f"not shard the data by {word}"
                )


def _named(data: object) -> list[tuple[str, object]]:
    out = []
    for role, part in zip(("x", "y", "sample_weight"), _roles(data), strict=False):
        for path, leaf in tree.flatten_with_path(part):
            if leaf is not None:
                out.append((role + "".join(f"[{key!r}]" for key in path), leaf))
    return out


def _roles(data: object) -> tuple[object, ...]:
    """(x, y, sample_weight) of what a step function receives: a list of one batch."""
    batch = data[0] if isinstance(data, list) and len(data) == 1 else data
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)
