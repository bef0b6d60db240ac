"""Draws random programs; numpy runs along, so that each step fits the shapes and values that it is given."""

from __future__ import annotations

import contextlib
import random as _random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.fuzz.programs import PLACEMENTS, Ref, Step, on_numpy

LENGTHS = (0, 1, 2, 2, 3, 4, 4, 5, 6, 7)

#: larger results are dropped: rounding is judged against values of about 1
LARGEST = 200.0
MOST_ELEMENTS = 400


class DoesNotFit(Exception):
    """A tensor that a step needs would be too large."""


class Drawing:
    """A program that grows.

    Args:
        random: what draws.
        lengths: of dims.
    """

    def __init__(self, random: _random.Random, lengths: Sequence[int] = LENGTHS):
        self.random = random
        self.lengths = lengths
        self.steps: list[Step] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.placements: dict[str, list] = {}

    # ---- tensors

    def shape(self, ndim: int | None = None) -> tuple[int, ...]:
        """A random shape of `ndim` dims."""
        ndim = self.random.choice((0, 1, 1, 2, 2, 2, 3, 3, 4)) if ndim is None else ndim
        return tuple(self.random.choice(self.lengths[: 8 if ndim > 3 else None]) for _ in range(ndim))

    def spec(self, ranks: list, ndim: int, dtype: str = "float32") -> str:
        """A random nd_sbp for a tensor of `ndim` dims."""
        parts = ["B"] + ["P"] * (dtype != "bool") + 2 * [f"S({dim})" for dim in range(ndim)]
        return ",".join(self.random.choice(parts) for _ in range(np.ndim(ranks)))

    def tensor(self, shape: tuple[int, ...], dtype: str = "float32", ranks: list | None = None) -> Ref:
        """A new tensor; given `ranks` it may come there from another placement."""
        made_on = ranks if ranks is not None and self.random.random() < 0.7 else self.random.choice(PLACEMENTS)
        seed = self.random.randrange(1000)
        made = self.note("tensor", (shape, dtype, seed, made_on, self.spec(made_on, len(shape), dtype)))
        if made is None:
            raise DoesNotFit
        return made if ranks is None else self.moved(made, ranks)

    def moved(self, ref: Ref, ranks: list) -> Ref:
        """The tensor on these ranks."""
        if self.placements[ref.name] == ranks:
            return ref
        array = self.arrays[ref.name]
        result = self.note("to_global", (ref, ranks, self.spec(ranks, array.ndim, array.dtype.name)))
        assert result is not None
        return result

    def any_of(self, fits: Callable[[np.ndarray], bool]) -> Ref | None:
        """A tensor of the program, the latest more often."""
        names = [name for name, array in self.arrays.items() if fits(array)]
        if not names:
            return None
        return Ref(names[-1] if self.random.random() < 0.6 else self.random.choice(names))

    def array(self, ref: Ref) -> np.ndarray:
        """Its value."""
        return self.arrays[ref.name]

    def ranks(self, ref: Ref) -> list:
        """Its placement."""
        return self.placements[ref.name]

    def operand(self, ref: Ref, dtype: str = "float32") -> Ref:
        """A tensor on the same ranks that broadcasts against this one; one of the program where there is."""
        array = self.array(ref)
        if self.random.random() < 0.4:
            legal = [
                name
                for name, value in self.arrays.items()
                if value.dtype == dtype and _broadcasts(value.shape, array.shape)
            ]
            if legal:
                return self.moved(Ref(self.random.choice(legal)), self.ranks(ref))
        shape = tuple(1 if self.random.random() < 0.2 else length for length in array.shape)
        shape = shape[self.random.choice((0, 0, 0, 1)) :]
        return self.tensor(shape, dtype, self.ranks(ref))

    # ---- steps

    def grow(self, draws: Sequence[Callable[[Drawing], object]]) -> None:
        """Add the steps of one of these operators; none where it does not fit."""
        with contextlib.suppress(DoesNotFit):
            self.random.choice(draws)(self)

    def note(self, call: str, args: tuple, **kwargs: Any) -> Ref | None:
        """Add a step; None where its result is too large, or is not finite, and the program goes without it."""
        target = f"t{len(self.steps)}"
        step = Step(target, call, args, kwargs)
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                result = on_numpy(step, self.arrays)
        except Exception:
            self.steps.append(Step(target, call, args, kwargs, raises=True))
            return None
        arrays = [np.asarray(one) for one in (result if isinstance(result, (list, tuple)) else [result])]
        for array in arrays:
            if array.size > MOST_ELEMENTS or array.ndim > 5:
                return None
            if array.size and not (np.isfinite(array).all() and np.abs(array.astype("float64")).max() < LARGEST):
                return None
        self.steps.append(step)
        ranks = self._ranks_of(step)
        if not isinstance(result, (list, tuple)):
            self.arrays[target], self.placements[target] = arrays[0], ranks
        return Ref(target)

    def _ranks_of(self, step: Step) -> list:
        if step.call == "tensor":
            return step.args[3]
        if step.call == "to_global":
            return step.args[1]
        flat = [part for arg in step.args for part in (arg if isinstance(arg, (list, tuple)) else [arg])]
        return next(self.placements[part.name] for part in flat if isinstance(part, Ref))


def _broadcasts(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(shape, other)
    except ValueError:
        return False
    return True
