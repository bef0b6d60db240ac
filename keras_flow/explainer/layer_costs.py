"""Cost of each kind of layer: the layout of its output, the collectives it needs, what it keeps for the backward pass.

`COST_FUNCTIONS` has a function for each class. What layers multiply by is in `keras_flow.signatures.layers`. A class
that is not in the table has a safe upper estimate, of `by_rows` or `by_shape`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from keras_flow.current.models import own_variables
from keras_flow.explainer.contraction import add, contract, gradient, stored_weight
from keras_flow.explainer.graph import LayerCall, Spec
from keras_flow.explainer.step_cost import StepCost
from keras_flow.layout import itemsize
from keras_flow.signatures.layers import product_of

if TYPE_CHECKING:
    import keras

CostFunction = Callable[[StepCost, LayerCall], None]


def cost_function(layer: object) -> CostFunction | None:
    """The function that costs a layer or operation; None for an unknown layer with layers inside, each costed alone."""
    # a subclass costs what its nearest known ancestor does
    for cls in type(layer).__mro__:
        if cls.__name__ in COST_FUNCTIONS:
            return COST_FUNCTIONS[cls.__name__]
    if _has_inside(layer):
        return None
    return by_rows if getattr(layer, "variables", ()) else by_shape


def is_leaf(layer: object) -> bool:
    """Whether a layer is costed as a whole, and the layers inside it are not looked at."""
    return cost_function(layer) is not None


def _has_inside(layer: object) -> bool:
    return bool(getattr(layer, "_layers", ()))


# ---- layers with weights


def product(step: StepCost, call: LayerCall) -> None:
    """A layer that multiplies by a weight: Dense, EinsumDense, convolutions, Embedding."""
    reverse = bool(call.given.get("reverse"))
    letters = product_of(call.layer, len(step.shape(call.inputs[0])), reverse)
    if letters is None:
        # with groups, channels are not contracted as a whole: the safe upper estimate
        by_rows(step, call)
        return
    kernel, bias = stored_weight(call.layer, reverse), getattr(call.layer, "bias", None)
    contract(step, call, letters, kernel, bias)
    for variable in own_variables(call.layer):  # adapters
        if variable.shape and variable is not kernel and variable is not bias:
            weight, rows = step.variable(variable), step.splits[call.outputs[0]].items()
            axes = tuple(axis for axis, dim in rows if dim == 0 and axis not in weight)
            gradient(step, call, variable, axes, "each rank has the rows of its part of the batch")
    _activate(step, call)


def _activate(step: StepCost, call: LayerCall) -> None:
    """Count what the layer's activation function keeps for the backward pass."""
    name = _name_of(getattr(call.layer, "activation", None))
    for key in call.outputs:
        step.keep(step.memory.tensors_of_activation(name), key)


def _name_of(function: object) -> str:
    """The name of an activation function, which may be a layer or an operation."""
    return "linear" if function is None else getattr(function, "__name__", type(function).__name__).lower()


def attention(step: StepCost, call: LayerCall) -> None:
    """`MultiHeadAttention`, `GroupedQueryAttention`: projections to heads, products head by head, projection back."""
    layer, graph = call.layer, step.graph
    query = call.given.get("query", call.inputs[0])
    value = call.given.get("value", query)
    key = value if call.given.get("key") is None else call.given["key"]
    # keys of new tensors [rows, length, heads, size]
    projected = [
        _inner(step, call, part, source)
        for part, source in (
            (layer._query_dense, query),
            (layer._key_dense, key),
            (layer._value_dense, value),
        )
    ]
    heads = graph.tensors[projected[0]]
    query_splits = dict(step.splits[projected[0]])
    for axis, dim in list(query_splits.items()):
        # Megatron splits heads (dim 2), which costs nothing here
        if dim == 3:  # the size of a head is summed over in the scores
            rows, length, count, _ = heads.shape
            keys = graph.tensors[projected[1]].shape[1]  # length of the sequence of keys
            pieces = step.piece((rows, count, length, keys), {a: 0 for a, d in query_splits.items() if d == 0})
            size = pieces * itemsize(heads.dtype)
            why = "each head is split, so scores are partial sums"
            step.send("all_reduce", (axis,), size, "forward", call.path, "attention scores", why)
            step.send("all_reduce", (axis,), size, "backward", call.path, "attention scores gradient", why)
    # keys and values must be split as queries are, for the products of heads
    for number in (1, 2):
        for axis, dim in step.splits[projected[number]].items():
            if query_splits.get(axis) != dim:  # fewer heads of keys and values (grouped) may not divide: another layout
                inner = LayerCall(layer, call.path, (projected[number],), ())
                step.gather_input(inner, projected[number], axis, "keys and values lie unlike queries")
                break
    count, length, keys = heads.shape[2], heads.shape[1], graph.tensors[projected[1]].shape[1]
    scores = step.piece((heads.shape[0], length, count, keys), {a: d for a, d in query_splits.items() if d != 3})
    step.activations += step.memory.attention_score_copies * scores * itemsize(heads.dtype)
    for projection in projected:
        step.keep(step.memory.attention_head_copies, projection)
    step.trained.add(projected[0])
    result = len(graph.tensors)
    graph.tensors[result] = heads if projected[2] == projected[0] else _context(step, projected[0], projected[2])
    step.splits[result] = query_splits
    step.keep(step.memory.attention_head_copies, result)
    step.trained.add(result)
    # the projection back, as a call of its own: its inputs are the heads
    last = LayerCall(layer._output_dense, f"{call.path}/{layer._output_dense.name}", (result,), call.outputs)
    product(step, last)


def _inner(step: StepCost, call: LayerCall, layer: keras.Layer, source: int) -> int:
    """Record a projection to heads; the key of its output [rows, length, heads, size], a new tensor of the graph."""
    graph = step.graph
    kernel = layer.kernel
    spec = graph.tensors[source]
    output = len(graph.tensors)
    graph.tensors[output] = Spec((*spec.shape[:-1], *kernel.shape[1:]), layer.compute_dtype)
    product(step, LayerCall(layer, f"{call.path}/{layer.name}", (source,), (output,)))
    return output


def _context(step: StepCost, query: int, value: int) -> Spec:
    """Attention's result before the projection back: [rows, length, heads, size of a value head]."""
    heads, values = step.graph.tensors[query], step.graph.tensors[value]
    return Spec((*heads.shape[:-1], values.shape[-1]), heads.dtype)


def batch_normalization(step: StepCost, call: LayerCall) -> None:
    """`BatchNormalization`: statistics of all rows, per channel."""
    layer, (key,) = call.layer, call.inputs[:1]
    # -1 as a number from 0 up
    channel = layer.axis % len(step.shape(key))
    splits = dict(step.splits[key])
    for variable in (layer.gamma, layer.beta):
        if variable is None:
            continue
        for axis in step.variable(variable):
            if axis not in splits:
                splits[axis] = channel
                _gather_back(step, call, key, axis)
    step.set_outputs(call, splits)
    step.keep(step.memory.batch_normalization_tensors, call.outputs[0])
    # every axis that splits something else than channels splits what the statistics are taken over
    rows = tuple(axis for axis, dim in splits.items() if dim != channel)
    channels = step.piece((step.shape(key)[channel],), {a: 0 for a, d in splits.items() if d == channel})
    forward, backward = step.traffic.batch_statistics_vectors
    why = "they are those of all rows"
    if step.batch_statistics == "replica":  # each rank takes its own; the moving ones, two vectors, are averaged
        forward, backward, why = 2, 0, "the moving ones are means over the ranks"
    for phase, vectors in (("forward", forward), ("backward", backward)):
        if layer.trainable and call.given.get("training") is not False:
            size = vectors * channels * itemsize("float32")
            step.send("all_reduce", rows, size, phase, call.path, "statistics", why)
    for variable in (layer.gamma, layer.beta):
        if variable is not None:
            add(step, call, variable, {a: 0 for a, d in splits.items() if d == channel})


def layer_normalization(step: StepCost, call: LayerCall) -> None:
    """`LayerNormalization`, `RMSNormalization`: statistics of each row; a split of what they go over costs sums."""
    layer, (key,) = call.layer, call.inputs[:1]
    axes = layer.axis if isinstance(layer.axis, (list, tuple)) else (layer.axis,)
    over = {axis % len(step.shape(key)) for axis in axes}
    splits = dict(step.splits[key])
    variables = own_variables(layer)
    # variables have the dims that the statistics go over, the last ones of the input
    first = min(over)
    step.set_outputs(call, splits)
    step.keep(step.memory.normalization_tensors, call.outputs[0])
    for axis in [axis for axis, dim in splits.items() if dim in over]:
        # two numbers, mean and variance, for each place that keeps its own statistics
        rows = [length for dim, length in enumerate(step.shape(key)) if dim not in over]
        size = 2 * step.piece(tuple(rows), {a: 0 for a, d in splits.items() if d == 0}) * itemsize("float32")
        for phase in ("forward", "backward"):
            step.send("all_reduce", (axis,), size, phase, call.path, "statistics", "they go over a split dim")
    for variable in variables:
        add(step, call, variable, {a: d - first for a, d in splits.items() if d in over})


def _gather_back(step: StepCost, call: LayerCall, key: int, axis: str) -> None:
    """Record the gather of an input's gradient where a split variable makes each rank use a slice of a whole input."""
    if key in step.trained:
        why = "its variables are split and the input is whole"
        step.send("all_gather", (axis,), step.local(key), "backward", call.path, "input gradient", why)


def by_rows(step: StepCost, call: LayerCall) -> None:
    """A layer that the table does not know: a split of the rows is kept; other splits, of weights too, are gathered."""
    for key in call.inputs:
        for axis, dim in list(step.splits[key].items()):
            if dim != 0:
                step.gather_input(call, key, axis, "the layer needs it whole")
    rows = {axis: 0 for key in call.inputs for axis, dim in step.splits[key].items() if dim == 0}
    step.set_outputs(call, rows)
    for variable in call.layer.variables:
        # a scalar or a seed: nothing that could be split
        if not variable.shape or variable.path.endswith("seed_generator_state"):
            continue
        weight = step.variable(variable)
        for axis in weight:
            size = step.piece(tuple(variable.shape), weight, axis) * itemsize(variable.dtype)
            why = "the layer needs it whole"
            step.send("all_gather", (axis,), size, "forward", call.path, variable.name, why)
            if axis in rows and variable.trainable:
                step.send("reduce_scatter", (axis,), size, "gradients", call.path, f"{variable.name} gradient", why)
        axes = tuple(axis for axis in rows if axis not in weight)
        gradient(step, call, variable, axes, "each rank has the rows of its part of the batch")


# ---- operations without weights


def by_shape(step: StepCost, call: LayerCall) -> None:
    """An operation without weights, judged by shapes alone.

    A split stays if the output has the same dim: at the same place if the number of dims is the same, else first
    (rows) or last (features). Inputs with other splits, or with different ones, are gathered.
    """
    if not call.outputs:
        return
    out = step.shape(call.outputs[0])
    out_splits: dict[str, int] = {}
    for axis in step.axes:
        places = [
            (key, _place(step.shape(key), out, step.splits[key][axis]))
            for key in call.inputs
            if axis in step.splits[key]
        ]
        # where the split would be in the output; None where no dim matches
        targets = {place for _, place in places}
        whole = [key for key in call.inputs if axis not in step.splits[key] and len(step.shape(key)) == len(out)]
        if len(targets) == 1 and None not in targets and (not whole or _cuts_freely(step, whole, next(iter(targets)))):
            out_splits[axis] = targets.pop()  # type: ignore[assignment]
            continue
        for key, _ in places:
            step.gather_input(call, key, axis, "the operation needs it whole, or as its other inputs lie")
    step.set_outputs(call, out_splits)


def activation(step: StepCost, call: LayerCall) -> None:
    """A layer or operation that is an activation function: its input is kept by the layer before it."""
    by_shape(step, call)
    name = _name_of(getattr(call.layer, "activation", call.layer))
    step.keep(max(0, step.memory.tensors_of_activation(name) - 1), call.outputs[0])


def pooling(step: StepCost, call: LayerCall) -> None:
    """Pooling. Max pooling keeps the index of the element that it chose."""
    by_shape(step, call)
    if getattr(call.layer, "pool_mode", "") == "max":
        (key, *_), (output, *_) = call.inputs, call.outputs
        step.activations += step.memory.max_pool_index_bytes * step.piece(step.shape(output), step.splits[output])
        step.workspace += (
            step.memory.max_pool_gradient_bytes * len(step.shape(key)) * step.piece(step.shape(key), step.splits[key])
        )


def view(step: StepCost, call: LayerCall) -> None:
    """Another shape of the same values: a view, which takes no memory."""
    before = step.activations
    by_shape(step, call)
    step.activations = before


def _place(shape: tuple[int, ...], out: tuple[int, ...], dim: int) -> int | None:
    if len(shape) == len(out):
        return dim if shape[dim] == out[dim] else None
    if dim == 0:
        return 0 if out and out[0] == shape[0] else None
    if dim == len(shape) - 1 and out and out[-1] == shape[-1]:
        return len(out) - 1
    return None


def _cuts_freely(step: StepCost, keys: list[int], place: int | None) -> bool:
    """Whether inputs that are whole need no gradient, or are constant along the dim: cutting them is free then."""
    return all(key not in step.trained or step.shape(key)[place or 0] == 1 for key in keys)


#: class name -> function; a class that is not here has the function of the nearest class that it derives from
COST_FUNCTIONS: Mapping[str, CostFunction] = {
    "Dense": product,
    "EinsumDense": product,
    "BaseConv": product,
    "BaseConvTranspose": product,
    "BaseDepthwiseConv": by_rows,
    "BaseSeparableConv": by_rows,
    "Embedding": product,
    "MultiHeadAttention": attention,
    "GroupedQueryAttention": attention,
    "BatchNormalization": batch_normalization,
    "LayerNormalization": layer_normalization,
    "RMSNormalization": layer_normalization,
    "RNN": by_rows,
    "Bidirectional": by_rows,
    "_Between": by_shape,
    # layers that hold others only to draw numbers, or none that have weights
    "Dropout": by_shape,
    "Activation": activation,
    "ReLU": activation,
    "Gelu": activation,
    "Silu": activation,
    "Softmax": by_shape,
    "BasePooling": pooling,
    "Flatten": view,
    "Reshape": view,
}
