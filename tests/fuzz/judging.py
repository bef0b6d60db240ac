"""Runs drawn programs on ranks, and judges each step by numpy on the values that the step was given."""

from __future__ import annotations

import itertools
import random as _random
import traceback
import warnings
from typing import Any

import numpy as np

import keras_flow as kf
from keras_flow.sbp import Broadcast
from tests.fuzz import operators
from tests.fuzz.drawing import Drawing
from tests.fuzz.programs import Ref, Step, layout_of, on_numpy, on_ranks

LIMIT = 1e-5

#: central differences of a function of float64; the product takes its own, operator by operator
GRADIENT_LIMIT = 1e-3


def program(random: _random.Random) -> str:
    """Draw a program of up to eight operators and run it; what is wrong, or nothing."""
    drawing = Drawing(random)
    drawing.grow([lambda growing: growing.tensor(growing.shape())])
    for _ in range(random.randint(1, 8)):
        drawing.grow(operators.SMOOTH + operators.OTHERS)
    return run(drawing.steps)


def run(steps: list[Step]) -> str:
    """Run steps on ranks and compare each; the program and what is wrong with its last step, or nothing."""
    values: dict[str, Any] = {}
    said: list[str] = []
    for step in steps:
        arrays = {name: value.numpy().copy() for name, value in values.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = on_ranks(step, values)
        except Exception:
            if step.raises:
                continue
            return "\n".join([*said, f"{step}\n{traceback.format_exc(limit=-6)}"])
        if step.raises:
            return "\n".join([*said, f"{step}, but a result comes: {layout_of(result)}"])
        results = result if isinstance(result, (list, tuple)) else [result]
        said.append(f"{step}  # {', '.join(map(layout_of, results))}")
        if wrong := _wrong(step, arrays, values, results):
            return "\n".join([*said, wrong])
        if not isinstance(result, (list, tuple)):
            values[step.target] = result
    return ""


def _wrong(step: Step, arrays: dict[str, np.ndarray], values: dict[str, Any], results: list[kf.GlobalTensor]) -> str:
    """What differs from numpy, which is given the values that the ranks held."""
    changed = [name for name, array in arrays.items() if not np.array_equal(values[name].numpy(), array)]
    if changed:
        return f"the step changed {changed}"
    given = [values[part.name] for part in _refs((step.args, tuple(step.kwargs.values())))]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        wanted = on_numpy(step, arrays)
    wanted = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    if len(wanted) != len(results):
        return f"{len(results)} results, not {len(wanted)}"
    scale = max([1.0, *(_largest(shard) for x in (*given, *results) for shard in x._shards.values())])
    for result, array in zip(results, wanted, strict=True):
        array, found = np.asarray(array), result.numpy()
        if array.dtype == "int64":  # numpy's places of `top_k`, for which Keras promises int32
            array = array.astype("int32")
        if (found.shape, found.dtype, result.dtype) != (array.shape, array.dtype, array.dtype.name):
            return f"{found.shape} {found.dtype}, not {array.shape} {array.dtype}"
        exact = array.dtype.kind != "f"
        if not (np.array_equal(found, array) if exact else np.allclose(found, array, rtol=LIMIT, atol=LIMIT * scale)):
            return f"found {found.tolist()}\nnot {array.tolist()}"
        if ranks := unequal_copies(result):
            return f"ranks {ranks} differ only along axes with B, but hold {[result.to_local(r) for r in ranks]}"
    return ""


def _refs(structure: Any) -> list[Ref]:
    if isinstance(structure, Ref):
        return [structure]
    return [ref for part in structure for ref in _refs(part)] if isinstance(structure, (list, tuple)) else []


def _largest(shard: Any) -> float:
    return float(np.abs(np.asarray(shard, "float64")).max(initial=0))


def unequal_copies(tensor: kf.GlobalTensor) -> tuple[int, int] | None:
    """Two ranks of this process that differ only along B axes and hold different shards."""
    placement = tensor.placement
    kept = [axis for axis, part in enumerate(tensor.sbp) if not isinstance(part, Broadcast)]
    first: dict[tuple[int, ...], int] = {}
    for rank in placement.ranks:
        if rank not in tensor._shards:
            continue
        at = placement.coordinates(rank)
        other = first.setdefault(tuple(at[axis] for axis in kept), rank)
        if not np.array_equal(np.asarray(tensor.to_local(other)), np.asarray(tensor.to_local(rank)), equal_nan=True):
            return other, rank
    return None


# ---- gradients


def gradients(random: _random.Random) -> str:
    """A program of up to three operators, and the gradients of a weighted sum of its result."""
    drawing = Drawing(random, lengths=(1, 2, 2, 3))
    drawing.tensor(drawing.shape(random.choice((1, 2, 2))))
    for _ in range(random.randint(1, 3)):
        drawing.grow(operators.SMOOTH)
    steps = [step for step in drawing.steps if not step.raises]
    if said := run(steps):
        return said
    made = {step.target for step in steps if step.call == "tensor"}
    last = steps[-1].target
    if drawing.arrays.get(last, np.zeros(0, "int32")).dtype != "float32" or not drawing.array(Ref(last)).size:
        return ""
    weights = np.linspace(-1, 2, drawing.array(Ref(last)).size, dtype="float32").reshape(drawing.array(Ref(last)).shape)
    fixed = {step.target: on_ranks(step, {}) for step in steps if step.target in made}
    names = [name for name, value in fixed.items() if value.dtype == "float32"]
    rest = [step for step in steps if step.target not in made]

    def loss(*leaves: kf.GlobalTensor) -> kf.GlobalTensor:
        values = fixed | dict(zip(names, leaves, strict=True))
        for step in rest:
            values[step.target] = on_ranks(step, values)
        return kf.ops.sum(values[last] * weights)

    text = "\n".join(map(str, [*steps, f"gradients of sum({last} * weights) by {names}"]))
    try:
        _, found = kf.value_and_grad(loss, argnums=range(len(names)))(*(fixed[name] for name in names))
    except Exception:
        return f"{text}\n{traceback.format_exc(limit=-8)}"
    arrays = {name: tensor.numpy() for name, tensor in fixed.items()}
    wanted, limit = _differences(rest, arrays, names, last, weights)
    for name, gradient, array in zip(names, found, wanted, strict=True):
        if gradient.placement != fixed[name].placement:
            return f"{text}\nthe gradient by {name} is on {gradient.placement}"
        if ranks := unequal_copies(gradient):
            return f"{text}\nby {name}: ranks {ranks} differ only along axes with B, but hold other gradients"
        if not np.allclose(gradient.numpy(), array, rtol=GRADIENT_LIMIT, atol=limit):
            return f"{text}\nby {name} {layout_of(fixed[name])}: {gradient.numpy().tolist()}\nnot {array.tolist()}"
    return ""


def _differences(
    steps: list[Step], arrays: dict[str, np.ndarray], names: list[str], last: str, weights: np.ndarray
) -> tuple[list[np.ndarray], float]:
    """Central differences of the weighted sum in float64 by each named array, and the limit of what is equal."""
    from backends.numpy.tensors import _keeping_float64

    in64 = {name: np.array(value, "float64" if value.dtype == "float32" else None) for name, value in arrays.items()}

    def loss() -> float:
        values = dict(in64)
        for step in steps:
            values[step.target] = on_numpy(step, values)
        return float((values[last] * weights).sum())

    wanted = []
    largest = 1.0
    with _keeping_float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            array = in64[name]
            gradient = np.zeros(array.shape)
            for place in itertools.product(*map(range, array.shape)):
                before, step = array[place], 1e-6
                array[place] = before + step
                above = loss()
                array[place] = before - step
                gradient[place] = (above - loss()) / (2 * step)
                array[place] = before
            wanted.append(gradient)
            largest = max(largest, np.abs(gradient).max(initial=0))
    return wanted, GRADIENT_LIMIT * largest
