"""Are all processes fed the same batches? They compare checksums: with other data they would train on in silence."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
from keras import tree

from keras_flow.backends.active import backend
from keras_flow.backends.rendezvous import agreement, meeting
from keras_flow.current import loops
from keras_flow.errors import FlowError
from keras_flow.units import numbered

#: the first batches of each data source are compared across processes, and then every so many
_FIRST, _EVERY = 3, 100
#: model -> method for one batch -> what its batches are compared by
_of_single_batches: WeakKeyDictionary[keras.Model, dict[str, BatchWatch]] = WeakKeyDictionary()


def is_compared(number: int) -> bool:
    """Whether the batch of this number is one of those that the processes compare."""
    # by number: all processes compare the same batches, so that none waits alone
    return number < _FIRST or number % _EVERY == 0


class PartOfRows:
    """A value of a batch of which this process read its rows only; a leaf for Keras, with the logical shape.

    Args:
        own: the rows that this process read [own rows, ...].
        compared: rows that it read because another process computes them; None where the batch is not compared.
        rows: rows of the logical batch.
        start: which of them is the first of `own`.
        compared_start: and of `compared`.
        number: which batch of the data it is.
    """

    def __init__(self, own: Any, compared: Any, rows: int, start: int, compared_start: int, number: int):
        self.own, self.compared, self.rows, self.number = own, compared, rows, number
        self.start, self.compared_start = start, compared_start

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logical value."""
        return (self.rows, *self.own.shape[1:])

    @property
    def dtype(self) -> Any:
        """Dtype of the elements."""
        return self.own.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.own.shape)


@dataclass(frozen=True)
class Digest:
    """Facts about one value of a batch, by which processes find that they were fed other data.

    Attributes:
        text: what it is, in words.
        sums: rows ("all", or "8:16") -> a checksum of their bytes; "batch" -> the batch's number.
        others: the same of rows that another process computes.
    """

    text: str
    sums: dict[str, int]
    others: dict[str, int] = field(default_factory=dict)


def digest(leaf: object) -> Digest:
    """Return the facts about one value of a batch that processes compare."""
    if isinstance(leaf, PartOfRows):
        return digest_of_part(leaf, f"{leaf.dtype} of shape {list(leaf.shape)}", digest)
    # sparse and ragged tensors, which are refused later
    if not hasattr(leaf, "__array__"):
        return Digest(type(leaf).__name__, {})
    array = np.ascontiguousarray(np.asarray(leaf))
    # of the bytes: equal values have equal bytes here, and nan compares as well
    raw = repr(array.tolist()).encode() if array.dtype.kind in "OSU" else array.reshape(-1).view(np.uint8).tobytes()
    return Digest(f"{array.dtype} of shape {list(array.shape)}", {"all": zlib.crc32(raw)})


def digest_of_part(part: PartOfRows, text: str, digest: Callable[[object], Digest]) -> Digest:
    """Return the digest of a value that was read by rows: own ones and those that the next process computes."""
    sums = {"batch": part.number, **_sums(part.start, part.own, digest)}
    if part.compared is None:
        return Digest(text, sums)
    return Digest(text, sums, _sums(part.compared_start, part.compared, digest))


def _sums(start: int, rows: Any, digest: Callable[[object], Digest]) -> dict[str, int]:
    found = digest(rows).sums  # of a sparse tensor there are none
    return {f"{start}:{start + rows.shape[0]}": found["all"]} if "all" in found else {}


def of_single_batches(digest: Callable[[object], Digest] = digest) -> BatchWatch | None:
    """The watch of the method for one batch that runs, by model and method; None where a loop runs, or nothing."""
    running = next(iter(loops.running()[-1:]), None)
    if running is None or not running.name.endswith("_on_batch"):
        return None
    of_model = _of_single_batches.setdefault(running.model, {})
    if running.name not in of_model:
        of_model[running.name] = BatchWatch(digest)
    return of_model[running.name]


class BatchWatch:
    """Finds processes that are fed different batches, which would train on without any error.

    It compares checksums of the first batches of a data source and of every 100th. Where a process reads its own rows
    of a batch it reads those of the next one too, so that each row is compared by two. What a process reads and is told
    for it does not grow with the processes.

    Args:
        digest: what is compared of a value of a batch.

    Attributes:
        seen: batches of the source so far.
    """

    def __init__(self, digest: Callable[[object], Digest] = digest) -> None:
        self.seen = 0
        self.batches: int | None = None
        self._digest = digest

    def restart(self, batches: int | None) -> None:
        """A new data source, of so many batches (None: not known): look at its first ones."""
        self.seen, self.batches = 0, batches

    def see(self, data: object) -> bool:
        """Compare this batch where it is due. Returns whether it is the first of its source.

        Raises:
            FlowError: in all processes, naming those that differ and the input.
        """
        is_due, index, self.seen = is_compared(self.seen), self.seen, self.seen + 1
        meeting.step(index % self.batches if self.batches else index)  # a source may count on over the epochs
        if is_due and backend().world().process_count > 1:
            self._compare(data, index)
        return index == 0

    def _compare(self, data: object, index: int) -> None:
        found = {name: self._digest(leaf) for name, leaf in _named(data)}
        facts: dict[str, object] = {"length": self.batches, "inputs": sorted(found)}
        balance = 0
        for name, digest in found.items():
            facts[f"{name} text"] = digest.text
            facts |= {f"{name} {key}": digest.sums[key] for key in ("all", "batch") if key in digest.sums}
            balance += _balance(name, digest)
        # checksums, not inputs; those of all processes are sent where something is wrong, to say what
        if not agreement.differ(facts, balance):
            return
        mine = {name: [digest.text, digest.sums | digest.others] for name, digest in found.items()}
        if wrong := _judged(agreement.exchange(json.dumps([self.batches, mine])), index):
            raise FlowError(wrong)


def _balance(name: str, digest: Digest) -> int:
    """Its sum over the processes is 0 where all read the same of an input: what one adds another one takes away.

    Each process adds a hash of the rows that are its own, and takes away that of the next one's rows, as it read them.
    """
    if not digest.others:
        return 0
    own = {rows: sums for rows, sums in digest.sums.items() if rows != "batch"}
    return sum(_hash(name, *each) for each in own.items()) - sum(_hash(name, *each) for each in digest.others.items())


def _hash(*facts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little")


def _judged(texts: Sequence[str], index: int) -> str:
    """Say what is wrong with batch `index` by what each process told of it; empty where all are fed alike."""
    said = [json.loads(text) for text in texts]
    lengths, everyone = [length for length, _ in said], [facts for _, facts in said]
    # one rank is one process on torch, and the word that its users know
    word = "rank" if backend().world().process_count == backend().world().size else "process"
    words = "ranks" if word == "rank" else "processes"
    if len(set(lengths)) > 1:
        other = next(place for place, length in enumerate(lengths) if length != lengths[0])
        return (
            f"the {words} are fed data of different lengths: {word} 0 has {lengths[0]} batches, {word} {other} has "
            f"{lengths[other]}, and would wait for the others without end. Every {word} must have the same logical "
            f"data; do not shard it by {word}"
        )
    for name in sorted({name for facts in everyone for name in facts}):
        said_of = [facts.get(name, ["nothing", {}]) for facts in everyone]
        differ, other = _differing([{"": text, **sums} for text, sums in said_of])
        if differ:
            texts = [said_of[place][0] for place in (other, differ[0])]
            if texts[0] == texts[1]:
                received = f"both are {texts[0]}, with other values"
            else:
                received = f"{word} {other}: {texts[0]}, {word} {differ[0]}: {texts[1]}"
            return (
                f"the {words} are fed different batches: input {name!r} of batch {index} differs on "
                f"{numbered(differ, word, words)} from {word} {other} "
                f"({received}). Every {word} must read the same logical batch in the same order: seed what "
                "shuffles or augments (a DataLoader's generator, tf.data's shuffle(seed=...), a generator's own "
                f"random state), and do not shard the data by {word}"
            )
    return ""


def _differing(facts: Sequence[Mapping[str, object]]) -> tuple[list[int], int]:
    """The processes that differ, and from which one; none where all who say something of the same rows agree.

    >>> _differing([{"0:2": 7, "2:4": 5}, {"2:4": 5, "4:6": 1}, {"4:6": 3, "0:2": 9}])
    ([2], 0)
    >>> _differing([{"batch": 0, "0:2": 7}, {"batch": 0, "0:2": 7}, {"all": 5}])
    ([], 0)
    """
    for key in ("", "batch"):
        # ranks outside of the placement read whole batches, which have no number
        saying = [place for place, said in enumerate(facts) if key in said]
        if differ := [place for place in saying if facts[place][key] != facts[saying[0]][key]]:
            return differ, saying[0]
    agree = list(range(len(facts)))  # process -> the first one that it agrees with, perhaps through others
    disagree: list[tuple[int, int]] = []
    for key in sorted({key for said in facts for key in said if key not in ("", "batch")}):
        first: dict[object, int] = {}
        for place, said in enumerate(facts):
            if key not in said:
                continue
            with_this = first.setdefault(said[key], place)
            low, high = sorted((agree[place], agree[with_this]))
            agree = [low if group == high else group for group in agree]
        disagree += [(min(first.values()), place) for place in first.values() if place != min(first.values())]
    if not disagree:
        return [], 0
    others = [place for place, group in enumerate(agree) if group != 0]
    # all agree with process 0 through others: rows of one process alone are not what another reads for them
    return (others, 0) if others else ([disagree[0][1]], disagree[0][0])


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
