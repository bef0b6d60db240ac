"""The rule of layers that multiply by a weight: Dense, EinsumDense, convolutions, Embedding, attention's products.

Each is an einsum of an input and a weight. Along one axis of the placement the input splits one of its labels, and so
does the weight; which of the labels is summed over says what has to be sent (the signatures of a matrix product in
OneFlow's SBP: S0,B->S0; B,S1->S1; S1,S0->P).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from keras_flow.explainer.graph import Call
from keras_flow.explainer.step import Splits, Step
from keras_flow.layout import itemsize

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class Product:
    """An einsum: labels of the dims of input, weight and output. A label that the input has not (the rows of an
    embedding table) is chosen by the input's values."""

    input: str
    weight: str
    output: str


def contract(step: Step, call: Call, product: Product, kernel: keras.Variable, bias: keras.Variable | None) -> None:
    """Lay the output of a call, and note what it sends."""
    (key,) = call.inputs[:1]
    weight = step.variable(kernel)
    out: dict[str, int] = {}
    sums: list[str] = []
    for axis, ranks in step.axes.items():
        if ranks == 1:
            continue
        x = _label(product.input, step.splits[key].get(axis))
        w = _label(product.weight, weight.get(axis))
        if w is not None and w == x:
            if w not in product.output:
                sums.append(axis)  # rows meet columns: each rank has a part of the sum
            else:
                out[axis] = product.output.index(w)
            continue
        if w is None:
            _whole_weight(step, call, product, axis, x, out)
        elif x is not None and x not in product.weight:
            _both(step, call, product, kernel, weight, axis, x, out)
        else:
            if x is not None:  # columns after columns
                step.gather_input(call, key, axis, "the input is split on the dim that is summed, the weight is not")
            _split_weight(step, call, product, axis, w, out, sums)
    step.give(call, out)
    for axis in sums:
        size = sum(step.local(made) for made in call.outputs)
        step.send("all_reduce", (axis,), size, "forward", call.path, "output", "split on the dim that is summed")
    if bias is not None:
        add(step, call, bias, {axis: 0 for axis, dim in out.items() if dim == len(product.output) - 1})
    _gradient(step, call, product, kernel, weight, out)


def _label(labels: str, dim: int | None) -> str | None:
    return None if dim is None else labels[dim]


def _whole_weight(step: Step, call: Call, product: Product, axis: str, x: str | None, out: dict[str, int]) -> None:
    if x is None:
        return
    if x in product.output:
        out[axis] = product.output.index(x)
        return
    (key,) = call.inputs[:1]
    step.gather_input(call, key, axis, "the input is split on the dim that is summed, the weight is whole")


def _both(
    step: Step,
    call: Call,
    product: Product,
    kernel: keras.Variable,
    weight: dict[str, int],
    axis: str,
    x: str,
    out: dict[str, int],
) -> None:
    """One axis splits rows and weight: the weight is gathered for the pass, its gradient scattered."""
    out[axis] = product.output.index(x)
    size = step.piece(tuple(kernel.shape), weight, axis) * itemsize(kernel.dtype)
    why = "the axis splits the rows, so the weight is gathered where it is used"
    step.send("all_gather", (axis,), size, "forward", call.path, f"{kernel.name}", why)
    step.send("reduce_scatter", (axis,), size, "gradients", call.path, f"{kernel.name} gradient", why)


def _split_weight(
    step: Step, call: Call, product: Product, axis: str, w: str, out: dict[str, int], sums: list[str]
) -> None:
    """The input is whole."""
    (key,) = call.inputs[:1]
    if w in product.output:  # columns
        out[axis] = product.output.index(w)
        if w not in product.input:
            step.sum_input(key, axis, call.path, "each rank has the part of its columns")
        return
    sums.append(axis)  # rows: the input is cut for nothing, its gradient has to come together again
    if w in product.input and key in step.trained:
        why = "rows of the weight are split and the input is whole"
        step.send("all_gather", (axis,), step.local(key), "backward", call.path, "input gradient", why)


def _gradient(
    step: Step, call: Call, product: Product, kernel: keras.Variable, weight: dict[str, int], out: Splits
) -> None:
    """A weight that is whole on an axis that splits the rows: its gradient is a partial sum."""
    axes = tuple(axis for axis, dim in out.items() if axis not in weight and product.output[dim] not in product.weight)
    is_table = not set(product.weight) & set(product.input)
    times = max(1, step.slots) if is_table and step.traffic.sparse_gradients_per_slot else 1
    for number in range(times):
        why = "each rank has the rows of its part of the batch"
        if number:
            why = "this engine sums the slices of a table's gradient for each slot of the optimizer"
        gradient(step, call, kernel, axes, why)


def gradient(step: Step, call: Call, variable: keras.Variable, axes: tuple[str, ...], why: str) -> None:
    """The gradient of a variable is a partial sum over axes."""
    if axes and variable.trainable:
        step.send("all_reduce", axes, step.weight(variable), "gradients", call.path, f"{variable.name} gradient", why)


def add(step: Step, call: Call, variable: keras.Variable, lies: Splits) -> None:
    """A variable that acts element by element on the output (bias, gamma, beta).

    Args:
        step: the step.
        call: the call.
        variable: the variable.
        lies: how the output lies, in the dims of the variable.
    """
    (key,) = call.outputs[:1]
    weight = step.variable(variable)
    rows = []
    for axis in step.axes:
        if axis in step.splits[key] and axis not in lies and axis not in weight:
            rows.append(axis)
        size = step.piece(tuple(variable.shape), weight, axis) * itemsize(variable.dtype)
        if axis in weight and lies.get(axis) != weight[axis]:
            why = "the output does not lie like it"
            step.send("all_gather", (axis,), size, "forward", call.path, variable.name, why)
        elif axis in lies and axis not in weight and variable.trainable:
            why = "it is whole, and the output split along it"
            step.send("all_gather", (axis,), size, "gradients", call.path, f"{variable.name} gradient", why)
    gradient(step, call, variable, tuple(rows), "each rank has the rows of its part of the batch")
