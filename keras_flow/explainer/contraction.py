"""Cost of layers that multiply by a weight: Dense, EinsumDense, convolutions, Embedding, attention's products.

Each is an einsum of an input and a weight (`keras_flow.signatures.layers`). On one axis of the placement the input may
be split along one of its letters and the weight along one of its own. Where these fit together nothing is sent before
the product; otherwise one of the two is gathered. For `bc,cd->bd`:

- `S(0), B -> S(0)`: rows are split (data parallel); the weight's gradient is summed over the axis.
- `B, S(1) -> S(1)`: columns of the weight are split; the input's gradient is summed.
- `S(1), S(0) -> P`: the summed dim is split in both; the output is summed.
- `S(0), S(0)` or `S(0), S(1)`: the axis is already used by the rows, so the weight is gathered (as in FSDP).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keras_flow.explainer.graph import LayerCall
from keras_flow.explainer.step_cost import Splits, StepCost
from keras_flow.layout import itemsize
from keras_flow.sbp import Sbp, Split, broadcast, partial_sum
from keras_flow.signatures.layers import Product

if TYPE_CHECKING:
    import keras


#: why parts of gradients and of new weights are sent
UPDATES_A_PART = "each rank updates a part (zero=)"


def contract(
    step: StepCost, call: LayerCall, product: Product, kernel: keras.Variable, bias: keras.Variable | None
) -> None:
    """Set the layout of a call's output, and record what it sends."""
    (key,) = call.inputs[:1]
    weight = step.variable(kernel)
    out: dict[str, int] = {}
    sums: list[str] = []
    # axis by axis: each splits the input, the weight, both or nothing
    for axis, ranks in step.axes.items():
        if ranks == 1:
            continue
        x, w = step.splits[key].get(axis), weight.get(axis)
        found = product.output_of(x, w)
        if w is None:
            found = _whole_weight(step, call, product, axis, x) if found is None else found
        elif x is None or (found is None and product.input[x] in product.weight):
            found = _split_weight(step, call, product, axis, x, w)
        elif found is None:
            found = _both(step, call, product, kernel, weight, axis, x)
        if isinstance(found, Split):
            out[axis] = found.dim
        elif found == partial_sum:
            sums.append(axis)
    step.set_outputs(call, out)
    for axis in sums:
        size = sum(step.local(output) for output in call.outputs)
        step.send("all_reduce", (axis,), size, "forward", call.path, "output", "split on the dim that is summed")
    if bias is not None:
        dims = {axis: product.bias_dim(dim) for axis, dim in out.items()}
        add(step, call, bias, {axis: dim for axis, dim in dims.items() if dim is not None})
    _gradient(step, call, product, kernel, weight, out)


def _whole_weight(step: StepCost, call: LayerCall, product: Product, axis: str, x: int | None) -> Sbp:
    """The axis splits the input along a letter of the whole weight, which is cut, or along one that is summed."""
    (key,) = call.inputs[:1]
    if x is not None and product.input[x] in product.output:
        return Split(product.output.index(product.input[x]))
    step.gather_input(call, key, axis, "the input is split on the dim that is summed, the weight is whole")
    return broadcast


def _both(
    step: StepCost,
    call: LayerCall,
    product: Product,
    kernel: keras.Variable,
    weight: dict[str, int],
    axis: str,
    x: int,
) -> Sbp:
    """The axis splits both the rows and the weight: gather the weight for the pass, scatter its gradient."""
    size = step.piece(tuple(kernel.shape), weight, axis) * itemsize(kernel.dtype)
    why = "the axis splits the rows, so the weight is gathered where it is used"
    step.send("all_gather", (axis,), size, "forward", call.path, f"{kernel.name}", why)
    step.send("reduce_scatter", (axis,), size, "gradients", call.path, f"{kernel.name} gradient", why)
    return Split(product.output.index(product.input[x]))


def _split_weight(step: StepCost, call: LayerCall, product: Product, axis: str, x: int | None, w: int) -> Sbp:
    """The axis splits the weight, and the input is whole on it, or is gathered."""
    (key,) = call.inputs[:1]
    letter = product.weight[w]
    if x is not None:  # columns after columns
        step.gather_input(call, key, axis, "the input is split on the dim that is summed, the weight is not")
    if letter in product.output:  # columns
        if letter not in product.input:
            step.sum_input(key, axis, call.path, "each rank has the part of its columns")
        return Split(product.output.index(letter))
    # rows of the weight: slicing the whole input is free, but its gradient must be gathered from the slices
    if letter in product.input and key in step.trained:
        why = "rows of the weight are split and the input is whole"
        step.send("all_gather", (axis,), step.local(key), "backward", call.path, "input gradient", why)
    return partial_sum


def stored_weight(layer: Any, reverse: bool = False) -> keras.Variable:
    """The kernel or table that is stored (LoRA and quantisation make `kernel` a product); untied, the reversed one."""
    names = ("_kernel", "_embeddings", "kernel", "embeddings")
    stored = [getattr(layer, name, None) for name in (*(("reverse_embeddings",) if reverse else ()), *names)]
    return next(variable for variable in stored if variable is not None)


def _gradient(
    step: StepCost, call: LayerCall, product: Product, kernel: keras.Variable, weight: dict[str, int], out: Splits
) -> None:
    """The gradient of a weight that is whole on an axis that splits the rows: a partial sum, which is all-reduced."""
    # axes that split the output along a label that the weight has not: the rows
    axes = tuple(axis for axis, dim in out.items() if axis not in weight and product.output[dim] not in product.weight)
    # no label in common: the input chooses rows instead of being multiplied
    is_table = not set(product.weight) & set(product.input)
    # TensorFlow reduces a sparse gradient again for each use in the optimizer's update
    times = step.uses_of_gradient if is_table and step.traffic.reduces_slices_for_each_use else 1
    for number in range(times):
        why = "each rank has the rows of its part of the batch"
        if number:
            why = "this engine sums the slices of a table's gradient for each use in the optimizer's update"
        gradient(step, call, kernel, axes, why)


def gradient(step: StepCost, call: LayerCall, variable: keras.Variable, axes: tuple[str, ...], why: str) -> None:
    """Record what becomes of a variable's gradient, a partial sum over axes.

    It is all-reduced. Where a rank updates a part of the variable, it needs the sum of that part alone. What a layer
    makes without rows, as of positions, is used with the rows of each rank.
    """
    if step.graph.is_without_rows(call):
        axes = (*axes, *(axis for axis in step.rows if axis not in (*axes, *step.variable(variable))))
    if not axes or not variable.trainable:
        return
    # a layer that is called again: its gradients may be added before they are summed over the ranks
    first = step.summed.setdefault((id(variable), axes), call)
    if first is not call and step.traffic.adds_before_summing:
        return
    size, name = step.weight(variable), f"{variable.name} gradient"
    split = tuple(axis for axis in step.part_axes(variable) if axis in axes)
    if split and step.traffic.scatters_sums:
        step.send("reduce_scatter", split, size, "gradients", call.path, name, UPDATES_A_PART)
        axes = tuple(axis for axis in axes if axis not in split)
        size = step.part(variable)
    step.send("all_reduce", axes, size, "gradients", call.path, name, why)


def add(step: StepCost, call: LayerCall, variable: keras.Variable, output_splits: Splits) -> None:
    """A variable that acts element by element on the output (bias, gamma, beta).

    Args:
        step: where collectives are recorded.
        call: the call of the variable's layer.
        variable: the bias, gamma or beta.
        output_splits: layout of the output, in the dims of the variable.
    """
    (key,) = call.outputs[:1]
    weight = step.variable(variable)
    rows = []
    for axis in step.axes:
        # the output is split along this axis by something that the variable does not have: rows
        if axis in step.splits[key] and axis not in output_splits and axis not in weight:
            rows.append(axis)
        size = step.piece(tuple(variable.shape), weight, axis) * itemsize(variable.dtype)
        if axis in weight and output_splits.get(axis) != weight[axis]:
            why = "the output does not lie like it"
            step.send("all_gather", (axis,), size, "forward", call.path, variable.name, why)
        elif axis in output_splits and axis not in weight and variable.trainable:
            why = "it is whole, and the output split along it"
            step.send("all_gather", (axis,), size, "gradients", call.path, f"{variable.name} gradient", why)
    gradient(step, call, variable, tuple(rows), "each rank has the rows of its part of the batch")
