"""SBP: how a logical tensor is distributed over the ranks of one placement axis.

The words are OneFlow's: `split(dim)`, `broadcast`, `partial_sum`; short forms `S(0)`, `B`, `P`. An *nd_sbp* is a tuple
with one sbp for each axis of the placement, outer axis first. On a placement of 2 x 2 ranks with the axes `data` and
`model`, `S(0),B` gives the upper half of a matrix to both ranks of the first row, the lower half to both of the second.

Example:
    >>> text(nd_sbp("S(0),B", ("data", "model")))
    'S(0),B'
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from keras_flow.errors import FlowError


@dataclass(frozen=True)
class Split:
    """Each rank of the axis holds a block of dimension `dim`; block lengths follow the balanced split rule."""

    dim: int

    def __repr__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class Broadcast:
    """Each rank of the axis holds the whole tensor."""

    def __repr__(self) -> str:
        return "B"


@dataclass(frozen=True)
class PartialSum:
    """Each rank of the axis holds a summand of the tensor's shape; the tensor is their sum."""

    def __repr__(self) -> str:
        return "P"


Sbp = Split | Broadcast | PartialSum
NdSbp = tuple[Sbp, ...]
#: What a program may write for an nd_sbp: one sbp, a sequence, a string as `"S(0),B"`, or a mapping by axis name.
SbpSpec = Sbp | str | Sequence[Sbp | str] | Mapping[str, Sbp | str]

broadcast = Broadcast()
partial_sum = PartialSum()

_SHORT = re.compile(r"(?i)^(?:(?P<split>s|split)\((?P<dim>-?\d+)\)|(?P<b>b|broadcast)|(?P<p>p|partial_sum))$")


def split(dim: int) -> Split:
    """The sbp that splits dimension `dim` (negative counts from the end).

    Example:
        >>> split(1)
        S(1)

    Raises:
        FlowError: `dim` is not an int.
    """
    if isinstance(dim, bool) or not isinstance(dim, Integral):
        raise FlowError(f"sbp.split takes a dimension as an int, got {dim!r}; for example kf.sbp.split(0)")
    return Split(int(dim))


def parse(text: str) -> NdSbp:
    """Read an nd_sbp from text.

    Example:
        >>> parse("S(0), B")
        (S(0), B)

    Raises:
        FlowError: a part is none of `S(d)`, `B`, `P`.
    """
    inner = text.strip()
    if inner.startswith("(") and inner.endswith(")"):
        inner = inner[1:-1].rstrip(", ")
    return tuple(_parse_part(part.strip(), text) for part in inner.split(","))


def _parse_part(part: str, given: str | None = None) -> Sbp:
    match = _SHORT.match(part.replace(" ", ""))
    if match is None:
        meant = re.fullmatch(r"[sS]\D*(\d+)\D*", part)
        hint = f' (did you mean "S({meant[1]})"?)' if meant else ""
        if given is None:
            raise FlowError(f"cannot read the sbp {part!r}{hint}: an sbp is S(dim), B or P")
        raise FlowError(
            f"cannot read {part!r}{hint} in the nd_sbp {given!r}: each part is S(dim), B or P, separated by commas, "
            'one for each placement axis; for example "S(0),B"'
        )
    if match["split"]:
        return Split(int(match["dim"]))
    return broadcast if match["b"] else partial_sum


def _as_sbp(value: object, spec: object) -> Sbp:
    """One sbp of `spec`, given as a value or in short form."""
    if isinstance(value, Split | Broadcast | PartialSum):
        return value
    if isinstance(value, str):
        return _parse_part(value.strip())
    raise FlowError(
        f"{value!r} in {spec!r} is not an sbp: use kf.sbp.split(dim), kf.sbp.broadcast or kf.sbp.partial_sum"
    )


def nd_sbp(spec: SbpSpec, axis_names: Sequence[str]) -> NdSbp:
    """The nd_sbp that `spec` means on a placement with these axes; axes that a mapping leaves out are broadcast.

    Args:
        spec: one sbp (one axis), a sequence, a string, or a mapping axis name -> sbp.
        axis_names: names of the placement's axes, outer first.

    Raises:
        FlowError: unknown axis name, or another number of sbps than axes.

    Example:
        >>> nd_sbp({"model": split(1)}, ("data", "model"))
        (B, S(1))
    """
    if isinstance(spec, Mapping):
        unknown = [name for name in spec if name not in axis_names]
        if unknown:
            raise FlowError(f"no axis {unknown[0]!r}: the placement's axes are {list(axis_names)}")
        return tuple(_as_sbp(spec.get(name, broadcast), spec) for name in axis_names)
    if isinstance(spec, str):
        parsed = parse(spec)
    elif isinstance(spec, Split | Broadcast | PartialSum):
        parsed = (spec,)
    elif isinstance(spec, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]  # programs without types
        axes = {name: dim for dim, name in enumerate(spec) if name in axis_names}
        if axes and all(part in (None, *axis_names) for part in spec):
            meant = ", ".join(f'"{name}": kf.sbp.split({dim})' for name, dim in axes.items())
            raise FlowError(f"{spec!r} is Keras's spelling, an axis for each dimension; here it is {{{meant}}}")
        parsed = tuple(_as_sbp(value, spec) for value in spec)
    else:
        raise FlowError(
            f"cannot read an nd_sbp from {spec!r}: give a tuple, a string as 'S(0),B' or a dict by axis name"
        )
    if len(parsed) != len(axis_names):
        raise FlowError(
            f"{spec!r} has {len(parsed)} sbp, the placement has {len(axis_names)} axes {list(axis_names)}: "
            "give one sbp for each axis, outer axis first, or a dict by axis name"
        )
    return parsed


def text(value: Sequence[Sbp]) -> str:
    """The short form of an nd_sbp.

    Example:
        >>> text((split(0), broadcast))
        'S(0),B'
    """
    return ",".join(repr(part) for part in value)


def of_axes(axes: Sequence[str | tuple[str, ...] | None], where: str) -> dict[str, Split]:
    """The nd_sbp by axis name of a Keras layout, which names the axis of each dimension.

    Example:
        >>> of_axes((None, "model"), "dense/kernel")
        {'model': S(1)}

    Raises:
        FlowError: one axis on two dimensions.
    """
    out: dict[str, Split] = {}
    for dim, names in enumerate(axes):
        for name in (names,) if isinstance(names, str) else names or ():
            # an axis of ranks cuts a tensor once; Keras's own layout does not look
            if name in out:
                raise FlowError(
                    f"{where} uses axis {name!r} on dimensions {out[name].dim} and {dim}: "
                    "an axis can split one dimension of a tensor"
                )
            out[name] = split(dim)
    return out
