"""Placement: which ranks hold a tensor, and in what shape they are arranged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keras_flow.errors import FlowError
from keras_flow.pictures import ranks as pictures

_TYPES = ("cpu", "gpu", "tpu")


def normalise_type(type: str | None) -> str | None:
    """The device type in lower case, `"cuda"` as `"gpu"`; None (the type that `kf.init` found) stays None.

    Raises:
        FlowError: no such type.
    """
    if type is None:
        return None
    name = {"cuda": "gpu"}.get(str(type).lower(), str(type).lower())
    if name not in _TYPES:
        raise FlowError(f'unknown device type {type!r}: legal are "cpu", "gpu" (or "cuda") and "tpu"')
    return name


@dataclass(frozen=True, init=False, eq=False)
class Placement:
    """A device type and an n-d array of ranks; the array's shape is the *hierarchy*. The order of ranks is kept.

    Two placements are equal when type, ranks and hierarchy are; the names of the axes do not count.

    Args:
        ranks: nested sequence or array of ints, each rank once.
        axis_names: one name for each axis of the array; None names them `"axis0"`, `"axis1"` ...
        type: `"cpu"`, `"gpu"` (`"cuda"` means the same) or `"tpu"`; None takes the type that `kf.init` found.

    Raises:
        FlowError: duplicate or negative ranks, no rank at all, a wrong number of names.

    Example:
        >>> mesh = Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        >>> mesh.hierarchy, mesh.ranks, mesh.axis_size("model")
        ((2, 2), (0, 1, 2, 3), 2)
    """

    hierarchy: tuple[int, ...]
    ranks: tuple[int, ...]
    axis_names: tuple[str, ...]
    type: str | None

    def __init__(self, ranks: object, axis_names: Sequence[str] | None = None, type: str | None = None):
        try:
            array = np.asarray(ranks)
        except ValueError:
            array = None
        if array is None or array.dtype == object or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise FlowError(f"ranks must be a rectangular array of ints, got {ranks!r}; for example [[0, 1], [2, 3]]")
        if array.ndim == 0:
            raise FlowError(
                f"a placement is a list of ranks, got {ranks!r}: write kf.Placement(range(4)) for four ranks, "
                f"kf.Placement([{ranks}]) for rank {ranks} alone"
            )
        if array.size == 0:
            raise FlowError("a placement needs at least one rank, got none")
        flat = [int(rank) for rank in array.flat]
        if min(flat) < 0:
            raise FlowError(f"ranks are numbered from 0, got {min(flat)} in {array.tolist()}")
        double = sorted({rank for rank in flat if flat.count(rank) > 1}) if len(set(flat)) < len(flat) else []
        if double:
            raise FlowError(
                f"each rank may stand once in a placement; {double} stand more than once in {array.tolist()}"
            )
        if axis_names is None:
            names = tuple(f"axis{i}" for i in range(array.ndim))
        else:
            # a program without types may give anything
            names = tuple(axis_names) if isinstance(axis_names, Sequence) else ()  # pyright: ignore[reportUnnecessaryIsInstance]
        if isinstance(axis_names, str) or len(names) != array.ndim or len(set(names)) != len(names):
            example = (*("data", "model")[: array.ndim], *(f"axis{dim}" for dim in range(2, array.ndim)))
            raise FlowError(
                f"axis_names is a tuple of different names, one for each axis of the ranks {array.shape}: "
                f"axis_names={example}; got {axis_names!r}"
            )
        if not all(isinstance(name, str) and name.isidentifier() for name in names):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise FlowError(f"axis names must be identifiers (letters, digits, underscore), got {names}")
        object.__setattr__(self, "hierarchy", tuple(int(n) for n in array.shape))
        object.__setattr__(self, "ranks", tuple(flat))
        object.__setattr__(self, "axis_names", names)
        object.__setattr__(self, "type", normalise_type(type))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.hierarchy)

    def axis_size(self, name: str) -> int:
        """Number of ranks along the axis `name`.

        Raises:
            FlowError: no axis of that name.
        """
        if name not in self.axis_names:
            raise FlowError(f"no axis {name!r}: the placement's axes are {list(self.axis_names)}")
        return self.hierarchy[self.axis_names.index(name)]

    @cached_property
    def _positions(self) -> dict[int, int]:
        """Rank -> its index in `ranks`."""
        return {rank: position for position, rank in enumerate(self.ranks)}

    def contains(self, rank: int) -> bool:
        """Whether `rank` belongs to the placement."""
        return rank in self._positions

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The position of `rank` in the hierarchy: one index for each axis, outer first.

        Raises:
            FlowError: the rank is not in the placement.

        Example:
            >>> Placement([[0, 1], [2, 3]]).coordinates(2)
            (1, 0)
        """
        if rank not in self._positions:
            raise FlowError(f"rank {rank} is not in the placement of ranks {list(self.ranks)}")
        position, coords = self._positions[rank], list[int]()
        for size in reversed(self.hierarchy):
            position, index = divmod(position, size)
            coords.append(index)
        return tuple(reversed(coords))

    def _key(self) -> tuple[str | None, tuple[int, ...], tuple[int, ...]]:
        return self.type, self.hierarchy, self.ranks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _repr_html_(self) -> str | None:
        """The ranks as a grid, for a notebook; None, which shows the text, where they are too many."""
        if self.size > pictures.MOST_RANKS:
            return None
        return pictures.placement(self.ranks, self.hierarchy, self.axis_names)

    def __repr__(self) -> str:
        ranks = np.asarray(self.ranks).reshape(self.hierarchy).tolist()
        kind = "" if self.type is None else f", type={self.type!r}"
        return f"Placement({ranks}, axis_names={self.axis_names}{kind})"
