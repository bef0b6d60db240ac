"""Layers of the consistent view with split weights, on plain tensors, with explicit collectives.

As in Shoeybi et al., 2019, "Megatron-LM", section 3. A layer that is split by columns (a dim of its output) computes
its columns from the whole input; the gradient of the input is a partial sum. One that is split by rows (a dim of its
input) has a partial sum as its output; the gradient passes as it is. Each sum is reduced once. What the ranks hand to
each other are DTensors, so that whatever comes between two such layers sees logical tensors.

Example: `y = x K` on two ranks, K of 2x2. By columns rank 0 has K's left column and the left column of y. By rows it
has K's upper row and the left column of x, whose product is one of two summands of y.

A layer that is not understood here, or whose inputs lie otherwise, is computed by DTensor's operators.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import keras
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from keras_flow.backends.hooking import hook
from keras_flow.backends.row_wise import row_interaction
from keras_flow.backends.torch import data, gathered_weights, layouts, local_tensors, variables
from keras_flow.backends.torch.rows import consistent_calls
from keras_flow.backends.torch.step import RunningStep, computing, current_step
from keras_flow.current.keras_places import in_stateless_scope
from keras_flow.sbp import Split, partial_sum
from keras_flow.signatures.layers import product_of

if TYPE_CHECKING:
    from keras_flow.backends.torch.layouts import TorchPlacements

#: activations that act element by element: a rank may apply them to its columns
_ELEMENTWISE = frozenset(
    getattr(keras.activations, name)
    for name in (
        "celu elu exponential gelu hard_shrink hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu linear "
        "log_sigmoid mish relu relu6 selu sigmoid silu soft_shrink softplus softsign sparse_plus sparse_sigmoid "
        "squareplus swish tanh tanh_shrink threshold"
    ).split()
)
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_ATTENTION = keras.layers.MultiHeadAttention
_NORMALIZATION = keras.layers.BatchNormalization
_LINEAR = (keras.layers.Dense, keras.layers.EinsumDense, *_CONVOLUTIONS)

#: layer -> layouts of the input and the weights -> how it is computed, or None where DTensor has to
_known: WeakKeyDictionary[keras.Layer, dict[object, SplitLayer | None]] = WeakKeyDictionary()
_MOST_KNOWN = 64


@dataclass(frozen=True)
class SplitLayer:
    """How a linear layer is computed on plain tensors, for an input of one layout.

    Attributes:
        rows: the layout of the rows alone: split by rows or not at all.
        output: the layout of the output.
        input_gradient: the layout of the gradient that this rank's columns and rows give the input.
        bias: the layout in which a bias is added; a whole one is cut for that.
    """

    rows: TorchPlacements
    output: TorchPlacements
    input_gradient: TorchPlacements
    bias: TorchPlacements = ()

    @property
    def sums(self) -> list[int]:
        """Axes of the mesh over which the output is a partial sum."""
        return [axis for axis, part in enumerate(self.output) if part.is_partial()]


def _step_of_variables() -> RunningStep | None:
    """Return the running step; None in `stateless_call`, whose given values would hide a rank's parts of weights."""
    return None if in_stateless_scope() else current_step()


def step_with_split(layer: keras.Layer, inputs: object, *args: object, **kwargs: object) -> tuple | None:
    """Condition of the hooks on the `call` of linear layers: the step, and how the layer is computed in it."""
    step = _step_of_variables()
    # by own rows, or with whole weights: nothing is split
    if step is None or not step.consistent or step.inside is not None or not isinstance(inputs, DTensor):
        return None
    split = _how(layer, inputs.shape, inputs.device_mesh, inputs.placements)
    return None if split is None else (step, split)


def step_with_channels(
    layer: keras.Layer, inputs: object, training: bool | None = None, mask: object = None
) -> tuple | None:
    """Condition of the hook on `BatchNormalization.call`: the step, and the layout where channels are split."""
    step = _step_of_variables()
    if step is None or not step.consistent or step.inside is not None or not isinstance(inputs, DTensor):
        return None
    if type(layer) is not _NORMALIZATION or mask is not None or layer._remat_mode or getattr(layer, "renorm", False):
        return None
    channels, values = layer.axis % inputs.ndim, [variable._value for variable in layer.variables]
    if not values or not all(isinstance(value, DTensor) for value in values):
        return None
    if any(map(gathered_weights.is_held_split, layer.variables)):  # moving statistics are assigned
        return None
    laid, rows = values[0].placements, []
    for of_input, of_value in zip(inputs.placements, laid, strict=True):
        if of_value == Shard(0) and of_input == Shard(channels):
            rows.append(Replicate())
        elif of_value.is_replicate() and (of_input.is_replicate() or of_input == Shard(0)):
            rows.append(of_input)
        else:
            return None
    everything = [inputs, *values]
    if any(value.placements != laid for value in values) or not any(part.is_shard() for part in laid):
        return None
    if not all(layouts.divides(each.shape, each.device_mesh, each.placements) for each in everything):
        return None
    return step, SplitLayer(tuple(rows), inputs.placements, inputs.placements)


#: a hook on `call` of a kind of layers
_with_split_weights = functools.partial(
    hook,
    names="call",
    why="layers with split weights on plain tensors, without DTensor's time for each operator",
    when=step_with_split,
)


@_with_split_weights("keras.layers.Dense")
@_with_split_weights("keras.layers.EinsumDense")
@_with_split_weights("keras.layers.Conv2D")  # that of all convolutions but Conv1D's
@_with_split_weights("keras.layers.Conv1D")
@hook(
    "keras.layers.BatchNormalization",
    "call",
    "split channels on plain tensors, without DTensor's time for each operator",
    when=step_with_channels,
)
def call(
    found: tuple[RunningStep, SplitLayer],
    original: Callable[..., torch.Tensor],
    layer: keras.Layer,
    inputs: DTensor,
    *args: object,
    **kwargs: object,
) -> DTensor:
    """Hook on the `call` of linear layers: compute this rank's part."""
    step, split = found
    with _local(step, split, inputs, [(layer, split)]):
        local = original(layer, local_tensors.to_local(inputs, split.input_gradient), *args, **kwargs)
    return _of_mesh(local, split, inputs.device_mesh)


@contextlib.contextmanager
def _local(
    step: RunningStep, split: SplitLayer, inputs: DTensor, layers: Sequence[tuple[keras.Layer, SplitLayer]]
) -> Iterator[None]:
    """Compute rows of these inputs, with this rank's parts of the weights of layers."""
    mesh, held = inputs.device_mesh, []
    rows = consistent_calls.rows_of(mesh, split.rows, inputs.shape[0])
    of_weights = tuple(Partial() if part.is_shard() else None for part in split.rows)
    for layer, each in layers:
        for variable in _weights(layer):
            value, laid = variable._value, gathered_weights.placements_of_use(variable)
            is_bias = each.bias and variable is layer.bias
            if is_bias and laid != each.bias:
                value, laid = value.redistribute(mesh, each.bias), each.bias
            gradient = tuple(part or own for part, own in zip(of_weights, laid, strict=True))
            if value.placements == laid:
                plain = local_tensors.to_local(value, gradient)
            else:
                sums = [axis for axis, part in enumerate(gradient) if part.is_partial()]
                plain = gathered_weights.plain(step, variable, sums)
            # added before the sum, so by one of the ranks alone
            if each.sums and is_bias:
                plain = _OnOneRank.apply(plain, not any(mesh.get_local_rank(axis) for axis in each.sums))
            held.append((variable, plain))
    with computing(step, rows), variables.holding(held), _own_filters(layers[0][0]):
        yield


@contextlib.contextmanager
def _own_filters(layer: keras.Layer) -> Iterator[None]:
    """A convolution reshapes its bias by the number of its filters: here those of this rank."""
    filters, bias = getattr(layer, "filters", None), getattr(layer, "bias", None)
    if filters is None or bias is None or len(bias._value) == filters:
        yield
        return
    layer.filters = len(bias._value)
    try:
        yield
    finally:
        layer.filters = filters


def _of_mesh(local: torch.Tensor, split: SplitLayer, mesh: DeviceMesh) -> DTensor:
    """The output of which this rank computed its columns or summands; a sum is reduced by who called the layer."""
    shape = list(local.shape)
    for axis, part in enumerate(split.output):
        if isinstance(part, Shard):
            shape[part.dim] *= mesh.size(axis)
    return local_tensors.from_local(local, shape, mesh, split.output)


def _weights(layer: keras.Layer) -> list[keras.Variable]:
    if type(layer) is _NORMALIZATION:
        return layer.variables
    return [variable for variable in (layer.kernel, layer.bias) if variable is not None]


def _how(layer: keras.Layer, shape: torch.Size, mesh: DeviceMesh, placements: TorchPlacements) -> SplitLayer | None:
    """How a layer computes its part for an input of this layout; None where DTensor has to."""
    # the second run of `remat` has no plain weights, LoRA's kernel is a sum, and that of a quantized layer no number
    if type(layer) not in _LINEAR or layer._remat_mode is not None:
        return None
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None) is not None:
        return None
    weights = [variable._value for variable in _weights(layer)]
    if len(shape) < 2 or not all(isinstance(value, DTensor) for value in weights):
        return None
    # asked in each call: it may have been changed since
    if row_interaction.of_layer(layer) is not None:
        return None
    key = (shape, mesh, placements, layer.activation, *map(gathered_weights.placements_of_use, _weights(layer)))
    known = _known.setdefault(layer, {})
    if key not in known:
        if len(known) == _MOST_KNOWN:  # data may have any number of rows
            known.clear()
        known[key] = _split(layer, shape, mesh, placements)
    return known[key]


def _split(
    layer: keras.Layer, shape: Sequence[int], mesh: DeviceMesh, placements: TorchPlacements
) -> SplitLayer | None:
    product, weights = product_of(layer, len(shape)), _weights(layer)
    parts = [gathered_weights.placements_of_use(variable) for variable in weights]
    laid = [(shape, placements), *((variable.shape, each) for variable, each in zip(weights, parts, strict=True))]
    if product is None or not all(layouts.divides(each, mesh, of_each) for each, of_each in laid):
        return None
    rows, output, gradient, biases = [], [], [], []
    for axis, (of_x, of_kernel) in enumerate(zip(placements, parts[0], strict=True)):
        of_bias = parts[1][axis] if len(weights) > 1 else None
        is_whole = of_bias is None or of_bias.is_replicate()
        x, w = (part.dim if isinstance(part, Shard) else None for part in (of_x, of_kernel))
        found = None if of_x.is_partial() or of_kernel.is_partial() else product.output_of(x, w)
        if w is None and x in (None, 0) and found is not None and is_whole:
            found_parts = of_x, of_x, of_x, Replicate()
        elif x is None and isinstance(found, Split):
            dim = product.bias_dim(found.dim)
            of_columns = Replicate() if dim is None else Shard(dim)
            # a bias that is the same along the columns, or lies otherwise
            if len(weights) > 1 and (dim is None or not (is_whole or of_bias == of_columns)):
                return None
            found_parts = Replicate(), Shard(found.dim), Partial(), of_columns
        elif x is not None and found == partial_sum and is_whole:
            found_parts = Replicate(), Partial(), of_x, Replicate()
        else:
            return None
        for each, part in zip((rows, output, gradient, biases), found_parts, strict=True):
            each.append(part)
    if len(weights) > 1 and not layouts.divides(weights[1].shape, mesh, tuple(biases)):
        return None
    has_columns = any(part.is_shard() and part != Shard(0) for part in output)
    has_sums = any(part.is_partial() for part in output)
    activation = layer.activation or keras.activations.linear
    # an activation of summands is not one of their sum
    if (has_columns and activation not in _ELEMENTWISE) or (has_sums and activation is not keras.activations.linear):
        return None
    return SplitLayer(tuple(rows), tuple(output), tuple(gradient), tuple(biases) if len(weights) > 1 else ())


# ---- attention


def step_with_heads(
    layer: keras.Layer, query: object, value: object, key: object = None, *args: object, **kwargs: object
) -> tuple | None:
    """Condition of the hook on `MultiHeadAttention.call`: the step, and how it is computed where heads are split."""
    step = _step_of_variables()
    if step is None or not step.consistent or step.inside is not None or type(layer) is not _ATTENTION:
        return None
    # masks of dropout, and scores that are handed back, have a dim of heads; more by place is for DTensor's operators
    if args or (layer._dropout and kwargs.get("training")) or kwargs.get("return_attention_scores"):
        return None
    # who replaced the `call` of a part expects logical tensors, and the second run of `remat` has no plain weights
    if any("call" in vars(part) or part._remat_mode is not None for part in layer._flatten_layers()):
        return None
    inputs = [query, value, value if key is None else key]
    if not all(isinstance(each, DTensor) for each in inputs) or consistent_calls.layout_of(inputs, kwargs) is None:
        return None
    mask = kwargs.get("attention_mask")
    has_heads = len(getattr(mask, "shape", ())) == 4
    # a plain mask cannot be cut by heads; with more axes of attention the second dim is one of positions
    if has_heads and (not isinstance(mask, DTensor) or query.ndim != 3):  # type: ignore[attr-defined]
        return None
    heads = _heads(layer, *inputs)  # type: ignore[arg-type]
    return None if heads is None else (step, heads)


@hook(
    "keras.layers.MultiHeadAttention",
    "call",
    "split heads on plain tensors, without DTensor's time for each operator",
    when=step_with_heads,
)
def attention(
    found: tuple[RunningStep, list[tuple[keras.Layer, SplitLayer]]],
    original: Callable[..., torch.Tensor],
    layer: keras.Layer,
    query: DTensor,
    value: DTensor,
    key: DTensor | None = None,
    **kwargs: object,
) -> DTensor:
    """Hook on `MultiHeadAttention.call`: compute this rank's heads."""
    step, heads = found
    (_, first), (_, last) = heads[0], heads[-1]
    mask = kwargs.get("attention_mask")
    # one for each head: [rows, heads, ...]
    if isinstance(mask, DTensor) and mask.ndim == 4 and mask.shape[1] == layer.num_heads:
        of_heads = [Shard(1) if axis in last.sums else part for axis, part in enumerate(mask.placements)]
        kwargs["attention_mask"] = mask.redistribute(mask.device_mesh, of_heads)
    local = functools.partial(consistent_calls.to_local, grad_placements=first.input_gradient)
    inputs, kwargs = data.map_call(local, (query, value, key), kwargs)
    with _local(step, first, query, heads):
        output = original(layer, *inputs, **kwargs)
    return _of_mesh(output, last, query.device_mesh)


def _heads(
    layer: keras.Layer, query: DTensor, value: DTensor, key: DTensor
) -> list[tuple[keras.Layer, SplitLayer]] | None:
    """The projections of an attention layer whose heads are split, that of its output last; None where they are not."""
    reads = [(layer.query_dense, query), (layer.key_dense, key), (layer.value_dense, value)]
    reads += [(layer._gate_dense, query)] if getattr(layer, "_use_gate", False) else []
    last = layer.output_dense
    weights = {id(variable) for part in (*(part for part, _ in reads), last) for variable in _weights(part)}
    # what a later Keras may add
    if any(isinstance(each._value, DTensor) and id(each) not in weights for each in layer.variables):
        return None
    splits = [(part, _how(part, x.shape, x.device_mesh, x.placements)) for part, x in reads]
    # [rows, ..., heads, features of a head]
    heads = query.ndim - 1
    by_heads = splits[0][1].output if splits[0][1] is not None else ()
    if not all(part in (Replicate(), Shard(0), Shard(heads)) for part in by_heads):
        return None
    if any(split is None or split.output != by_heads for _, split in splits):
        return None
    shape = [*query.shape[:-1], layer.num_heads, last.kernel.shape[-2]]
    split = _how(last, torch.Size(shape), query.device_mesh, by_heads)
    # the gradient of the heads is that of this rank's, with nothing to sum
    if split is None or not split.sums or split.input_gradient != by_heads:
        return None
    return [*splits, (last, split)]  # type: ignore[list-item]


class _OnOneRank(torch.autograd.Function):
    """The value on one of the ranks that are summed, zeros on the others; all have the gradient of the sum."""

    @staticmethod
    def forward(ctx, value, is_first):
        ctx.is_first = is_first
        return value.view_as(value) if is_first else torch.zeros_like(value)

    @staticmethod
    def backward(ctx, grad):
        return _OfOneRank.apply(grad, ctx.is_first), None


class _OfOneRank(torch.autograd.Function):
    """The value, which is equal on the ranks that are summed; its gradient is that of one of them."""

    @staticmethod
    def forward(ctx, value, is_first):
        ctx.is_first = is_first
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return _OnOneRank.apply(grad, ctx.is_first), None
