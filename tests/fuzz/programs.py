"""A random program of global tensors: its steps as data, so that it can be printed and run again."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import keras_flow as kf
from keras_flow import sbp

#: ranks of the job
RANKS = 6

PLACEMENTS: tuple[list, ...] = (
    [0, 1, 2, 3],
    [[0, 1], [2, 3]],
    [[3, 1], [0, 2]],
    [[0], [1], [2], [3]],
    [[0, 1, 2, 3]],
    [1, 3],
    [2],
    [[[0, 1]], [[2, 3]]],
    [[[0], [1]], [[2], [3]]],
    [[[3, 2], [1, 0]]],
    [5, 0, 4],
    [[0, 1, 2], [3, 4, 5]],
    [[4, 1], [0, 5], [2, 3]],
)

#: Python's operators -> those of `keras.ops`, whose dtypes they have
OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "mod",
    "matmul": "matmul",
    "neg": "negative",
    "abs": "absolute",
    "lt": "less",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
}


@dataclass(frozen=True)
class Ref:
    """A tensor of the program, by its name."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Step:
    """One line of a program.

    Attributes:
        target: name of the result.
        call: `"tensor"`, `"to_global"`, `"operator.NAME"` or the name of an operator of `keras.ops`.
        args: arguments by position, with a `Ref` where a tensor stands.
        kwargs: arguments by name.
        raises: numpy raises an error here, and so must keras_flow.
    """

    target: str
    call: str
    args: tuple
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    raises: bool = False

    def __str__(self) -> str:
        given = ", ".join([*map(_text, self.args), *(f"{key}={_text(value)}" for key, value in self.kwargs.items())])
        name = self.call if self.call.startswith("operator.") or self.call in _OWN else f"kf.ops.{self.call}"
        return f"{self.target} = {name}({given}){'  # raises' if self.raises else ''}"


_OWN = ("tensor", "to_global", "setitem")


def _text(value: Any) -> str:
    return f"np.{value!r}" if isinstance(value, np.ndarray) else repr(value)


def random_values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """The values of a `"tensor"` step: no two floats closer than 1e-3, none near 0."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.random(shape) < 0.6
    if dtype == "int32":
        return random.integers(-3, 9, shape).astype(dtype)
    count = int(np.prod(shape))
    spaced = (random.permutation(2 * count)[:count] - count + 0.5) * min(0.1, 4 / max(count, 1))
    return spaced.reshape(shape).astype(dtype)


def filled(structure: Any, values: Mapping[str, Any]) -> Any:
    """The structure with values for its `Ref`s."""
    if isinstance(structure, Ref):
        return values[structure.name]
    if isinstance(structure, (list, tuple)):
        return type(structure)(filled(part, values) for part in structure)
    return structure


def on_numpy(step: Step, values: Mapping[str, Any]) -> Any:
    """The result of a step by numpy, with the dtypes of Keras."""
    from keras import ops

    args = filled(step.args, values)
    kwargs = {key: filled(value, values) for key, value in step.kwargs.items()}
    if step.call == "tensor":
        return random_values(*args[:3])
    if step.call == "to_global":
        return args[0]
    if step.call == "setitem":
        changed = np.array(args[0])
        changed[args[1]] = args[2]
        return changed
    if step.call == "operator.getitem":
        return np.asarray(args[0])[args[1]]
    name = OPERATORS[step.call.removeprefix("operator.")] if step.call.startswith("operator.") else step.call
    if name in ("scatter_update", "slice_update"):  # which write into what they are given
        args = (np.array(args[0]), *args[1:])
    return getattr(ops, name)(*args, **kwargs)


def on_ranks(step: Step, values: Mapping[str, Any]) -> Any:
    """The result of a step by keras_flow."""
    args = filled(step.args, values)
    kwargs = {key: filled(value, values) for key, value in step.kwargs.items()}
    if step.call == "tensor":
        shape, dtype, seed, ranks, spec = args
        return kf.tensor(random_values(shape, dtype, seed), placement=kf.Placement(ranks), sbp=spec)
    if step.call == "to_global":
        return args[0].to_global(kf.Placement(args[1]), args[2])
    if step.call == "setitem":
        changed = kf.GlobalTensor(args[0].layout, args[0].dtype, args[0]._shards)
        changed[args[1]] = args[2]
        return changed
    if step.call.startswith("operator."):
        return getattr(operator, step.call.removeprefix("operator."))(*args)
    return getattr(kf.ops, step.call)(*args, **kwargs)


def layout_of(value: Any) -> str:
    """Shape, dtype, sbp and ranks of a global tensor."""
    ranks = np.asarray(value.placement.ranks).reshape(value.placement.hierarchy).tolist()
    return f"{value.dtype}{list(value.shape)} as ({sbp.text(value.sbp)}) on {ranks}"
