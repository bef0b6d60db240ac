"""The operators that random programs call, and how their arguments are chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.drawing import Drawing
from tests.fuzz.programs import Ref

#: adds the steps of one operator to a program, none where no tensor of it fits
Draw = Callable[[Drawing], None]
SMOOTH: list[Draw] = []
OTHERS: list[Draw] = []


def smooth(draw: Draw) -> Draw:
    """An operator for programs with gradients too."""
    SMOOTH.append(draw)
    return draw


def other(draw: Draw) -> Draw:
    """An operator for programs without gradients."""
    OTHERS.append(draw)
    return draw


def any_float(d: Drawing, least: int = 0, nonempty: bool = False) -> Ref:
    """A float tensor of so many dims."""
    chosen = d.any_of(lambda a: a.dtype == "float32" and a.ndim >= least and (a.size > 0 or not nonempty))
    return chosen or d.tensor(tuple(max(n, 1) for n in d.shape(max(least, 2))))


def any_tensor(d: Drawing, least: int = 0) -> Ref:
    """A tensor of any dtype."""
    return d.any_of(lambda a: a.ndim >= least) or d.tensor(d.shape(max(least, 1)))


def axis_of(d: Drawing, ndim: int) -> int:
    """A dim, which may count from the end."""
    return d.random.randrange(-ndim, ndim)


def axes_of(d: Drawing, ndim: int) -> Any:
    """None, one dim, or several."""
    kind = d.random.random()
    if kind < 0.2 or not ndim:
        return None
    if kind < 0.7:
        return axis_of(d, ndim)
    return tuple(d.random.sample(range(ndim), d.random.randint(1, ndim)))
