"""Operations that DTensor partitions wrongly, or not at all, along a split dim: the dim is gathered around them.

The worst is `tf.concat`: where a consumer asks for a result that is split along the joined dim, DTensor joins the local
pieces, in the wrong order and without an error (TensorFlow 2.21).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.experimental import dtensor
from tensorflow.python.framework import smart_cond

from keras_flow.backends.hooking import hook
from keras_flow.backends.tensorflow.data import batch_axis
from keras_flow.backends.tensorflow.layouts import in_step, relayout, view_of
from keras_flow.backends.tensorflow.mirrored import strategy
from keras_flow.backends.tensorflow.traced_step import rows_are_split
from keras_flow.current.distribution import Distribution, active, expected

#: so many of the largest entries at most have a gradient by one-hot matrices, which are as many times the tensor
_MOST_ONE_HOT = 64
#: characters of an error text that TensorFlow may search for names of operations
_LONGEST = 4000


def in_traced_step(*args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks on operations of a step: the distribution, while a step is traced for its mesh."""
    if tf.executing_eagerly() or not in_step():
        return None
    distribution = active()
    return distribution if distribution is not None and strategy.works_by_dtensor(distribution) else None


#: a hook on an operation, in a step that is traced for a mesh
on_operation = functools.partial(hook, when=in_traced_step)
#: the same for one that DTensor cannot split; those of TensorFlow's private modules are what its gradients call
without_rule = functools.partial(on_operation, why="has no rule, or its gradient has none")


def captured_tensor(graph: object, tensor: object, *args: object, **kwargs: object) -> tf.Tensor | None:
    """Condition of the hook on `FuncGraph.capture`: a tensor on no mesh, made before the step that is traced."""
    if isinstance(tensor, tf.Variable) or not (tf.is_tensor(tensor) and hasattr(tensor, "_numpy_internal")):
        return None
    # handles and text are no numbers that could become a constant
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or in_traced_step() is None:
        return None
    with tf.init_scope():  # it may be asked eagerly only
        return None if dtensor.is_dtensor(tensor) else cast("tf.Tensor", tensor)


@hook(
    "tensorflow.python.framework.func_graph",
    "FuncGraph.capture",
    "constants of a Functional model: `got a regular tensor ... but was expecting a DTensor`",
    when=captured_tensor,
)
def capture(
    _: object, original: Callable[..., object], graph: Any, tensor: tf.Tensor, *args: object, **kwargs: object
) -> object:
    """Hook on `FuncGraph.capture`: a plain tensor (`x + ops.arange(64)` in a Functional model) becomes a constant.

    Captured, it would be an input of the program, and DTensor takes plain tensors as inputs only if they are scalars.
    """
    # id of a tensor -> that tensor, and the constant; of the graph itself, which each constant holds
    constants = getattr(graph, "_keras_flow_constants", None)
    if constants is None:
        constants = graph._keras_flow_constants = {}
    if id(tensor) not in constants:
        with graph.as_default():
            constants[id(tensor)] = (tensor, tf.constant(tensor.numpy()))  # keeping the tensor keeps its id its own
    return constants[id(tensor)][1]


@on_operation(
    "tensorflow",
    "concat",
    "joins local pieces in the wrong order, without an error, where the result is split along the joined dim",
)
def concat(_: object, original: Callable[..., object], values: object, axis: object, name: str = "concat") -> object:
    """Hook on `tf.concat`: inputs and result are whole along the joined dim."""
    # the dim must be known to be gathered; a single tensor has nothing to be joined with
    known = known_value(axis)
    if not isinstance(values, list | tuple) or known is None:
        return original(values, axis, name=name)
    axis = int(known)
    # only along the joined dim: rows stay split where features are joined
    values = [whole_dims(value, (axis,)) for value in _tensors(values)]
    return whole_dims(original(values, axis, name=name), (axis,))


@on_operation("tensorflow", "split", "fails along a split dim; its gradient is tf.concat")
def split(
    _: object,
    original: Callable[..., list[tf.Tensor]],
    value: tf.Tensor | np.ndarray,
    num_or_size_splits: object,
    axis: object = 0,
    **kw: object,
) -> object:
    """Hook on `tf.split`: input and results are whole along the dim."""
    value = tf.convert_to_tensor(value)
    if not isinstance(axis, int):
        return original(value, num_or_size_splits, axis, **kw)
    return [whole_dims(part, (axis,)) for part in original(whole_dims(value, (axis,)), num_or_size_splits, axis, **kw)]


@on_operation(
    "tensorflow.nn",
    "sparse_softmax_cross_entropy_with_logits",
    "in float64 and bfloat16 the loss of classes that are split is zero or not a number",
)
def sparse_softmax_cross_entropy(
    _: object, original: Callable[..., object], labels: object, logits: Any, name: str | None = None
) -> object:
    """Hook on `tf.nn.sparse_softmax_cross_entropy_with_logits`: logits have all classes where DTensor errs otherwise.

    Of classes that are split, the loss is zero or not a number in float64 and bfloat16 (TensorFlow 2.21). float32 and
    float16 stay split.
    """
    logits = tf.convert_to_tensor(logits)
    if logits.dtype not in (tf.float32, tf.float16):
        logits = whole_dims(logits, (-1,))
    return original(labels=labels, logits=logits, name=name)


@on_operation("tensorflow", "tile", "fails along a split dim")
def tile(
    _: object,
    original: Callable[..., object],
    input: tf.Tensor | np.ndarray,
    multiples: object,
    name: str | None = None,
) -> object:
    """Hook on `tf.tile`: input and result are whole along the repeated dims."""
    input = tf.convert_to_tensor(input)
    known = known_value(multiples)
    dims = range(input.shape.rank) if known is None else [dim for dim, times in enumerate(known) if times != 1]
    # the gradient has two dims for each of the tensor's, and DTensor cannot cut a tensor of more than 8
    if known is None or input.shape.rank <= 4 or not input.dtype.is_floating or not input.shape.is_fully_defined():
        return whole_dims(original(whole_dims(input, dims), multiples, name=name), dims)

    @tf.custom_gradient
    def tiled(values: tf.Tensor) -> tuple[object, Callable]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            for dim in dims:
                shape, times = list(upstream.shape), int(known[dim])
                shape[dim : dim + 1] = [times, cast(int, shape[dim]) // times]
                upstream = tf.reduce_sum(tf.reshape(cast("tf.Tensor", whole_dims(upstream, (dim,))), shape), dim)
            return upstream

        return whole_dims(original(whole_dims(values, dims), multiples, name=name), dims), gradient

    return tiled(input)


@on_operation(
    "tensorflow.python.ops.nn_ops",
    "top_k",
    "needs the last dim whole; its gradient would be a ScatterNd of all rows",
    also=("tensorflow.math:top_k", "tensorflow.nn:top_k"),
)
def top_k(
    _: object,
    original: Callable[..., Any],
    input: tf.Tensor | np.ndarray,
    k: Any = 1,
    *args: Any,
    **kwargs: Any,
) -> object:
    """Hook on `tf.math.top_k`: the last dim is whole, and the gradient stays with its rows.

    TensorFlow's own gradient scatters all rows at once. Here it is a product with the one-hot matrix of the indices
    or, where all are kept (a sort), the inverse permutation.
    """
    # a sort of all entries is the case count == size
    input = tf.convert_to_tensor(input)
    size, count = input.shape[-1], k if isinstance(k, int) else smart_cond.smart_constant_value(k)
    if size is None or count is None or (count != size and int(cast(int, count)) > _MOST_ONE_HOT):
        return _ranked(original(whole_dims(input, (-1,)), k, *args, **kwargs))
    count = int(cast(int, count))

    @tf.custom_gradient
    def ranked(values: tf.Tensor) -> Any:
        best = _ranked(original(values, count, *args, **kwargs))

        def gradient(upstream: tf.Tensor, _: object = None) -> tf.Tensor:
            upstream = cast("tf.Tensor", whole_dims(upstream, (-1,)))
            if count == size:
                # the inverse of a permutation sorts it: `top_k` of the negative indices gives where each came from
                places = original(-best.indices, count).indices
                return tf.gather(upstream, whole_dims(places, (-1,)), batch_dims=upstream.shape.rank - 1)
            # [..., k, size]: a row of zeros and a one for each entry that was kept
            chosen = tf.one_hot(best.indices, size, dtype=upstream.dtype)
            return tf.reduce_sum(tf.expand_dims(upstream, -1) * chosen, -2)

        return tuple(best), gradient

    return _Ranked(*cast(Any, ranked)(whole_dims(input, (-1,))))


class _Ranked(NamedTuple):
    """The result of `tf.math.top_k`, with its names."""

    values: tf.Tensor
    indices: tf.Tensor


def _ranked(result: Sequence[tf.Tensor]) -> _Ranked:
    return _Ranked(*(cast("tf.Tensor", whole_dims(value, (-1,))) for value in result))


@on_operation("keras.layers.RNN", "call", "DTensor fails on the steps of sequences that are split by features")
def recurrent(
    _: object,
    original: Callable[..., object],
    layer: keras.layers.RNN,
    sequences: object,
    *args: object,
    **kwargs: object,
) -> object:
    """Hook on `RNN.call`: sequences and results are split by rows only; see `gathered_variables`."""
    outputs = original(layer, tree.map_structure(by_rows, sequences), *args, **kwargs)
    return tree.map_structure(lambda leaf: by_rows(leaf) if isinstance(leaf, tf.Tensor) else leaf, outputs)


@on_operation("keras:rnn", "rnn", "DTensor fails on the gradient of a loop (TensorListReserve: dimension -2^63)")
def unrolled(
    _: object,
    original: Callable[..., object],
    step_function: Callable[..., object],
    inputs: object,
    initial_states: object,
    go_backwards: bool = False,
    mask: object = None,
    *args: object,
    time_major: bool = False,
    **kwargs: object,
) -> object:
    """Hook on `rnn`: unroll it.

    Time is reversed here, because Keras's unrolled `rnn` applies a mask in the wrong order to outputs that go backwards
    (3.15: its numbers are then not those of its loop).
    """
    time_dim = 0 if time_major else 1
    if args or any(leaf.shape[time_dim] is None for leaf in tree.flatten(inputs)):
        return original(
            step_function, inputs, initial_states, go_backwards, mask, *args, time_major=time_major, **kwargs
        )
    # reversed once before the loop, instead of by Keras after it
    if go_backwards:
        inputs = tree.map_structure(lambda leaf: tf.reverse(leaf, [time_dim]), inputs)
        mask = None if mask is None else tf.reverse(mask, [time_dim])
    options = {**kwargs, "unroll": True, "time_major": time_major}
    return original(step_function, inputs, initial_states, False, mask, **options)


def half_precision(*args: object, **kwargs: object) -> tf.DType | None:
    """Condition of hooks on products: the dtype of half-precision tensors in a step.

    None where no weight may be split along the contracted dim.
    """
    distribution = in_traced_step()
    # no axis besides those of the batch: no weight is split, so nothing is summed over ranks within a product
    if distribution is None or not set(distribution.placement.axis_names) - set(distribution.batch_axes):
        return None
    leaves = (leaf for leaf in tree.flatten((args, kwargs)) if tf.is_tensor(leaf))
    return next((leaf.dtype for leaf in leaves if leaf.dtype in (tf.bfloat16, tf.float16)), None)


@hook(
    "keras:numpy",
    ("matmul", "einsum"),
    "parts of a contracted dim would be rounded to half precision before they are summed",
    when=half_precision,
)
def contract(half: tf.DType, original: Callable[..., tf.Tensor], *args: object, **kwargs: object) -> tf.Tensor:
    """Hook on `matmul` and `einsum`: a product in float32, rounded once."""

    def wide(leaf: object) -> object:
        if isinstance(leaf, keras.Variable):
            leaf = tf.convert_to_tensor(leaf)
        return tf.cast(cast("tf.Tensor", leaf), tf.float32) if tf.is_tensor(leaf) and leaf.dtype == half else leaf

    args, kwargs = cast("tuple[tuple, dict]", tree.map_structure(wide, (args, kwargs)))
    return tf.cast(original(*args, **kwargs), half)


def by_rows(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, split by rows only.

    Where the rows of the batch are split, those of the tensor are, whatever it was made of: initial states are whole,
    and DTensor fails on a convolution of whole rows whose result is split.
    """
    if not tensor.shape.rank:
        return tensor
    distribution = expected()
    view = view_of(distribution)
    axis, size = batch_axis(distribution, view)
    rows = tensor.shape[0]
    # the same decision as for the batch itself, so that a layer's rows and the batch's never differ
    splits = size > 1 and rows_are_split() and rows is not None and distribution.batch_plan(rows).divides
    specs = [axis if splits else dtensor.MATCH] + [dtensor.UNSHARDED] * (tensor.shape.rank - 1)
    return relayout(tensor, dtensor.Layout(specs, view.mesh))


def whole_dims(tensor: object, dims: Sequence[int]) -> object:
    """The tensor, whole along `dims`. One other dim keeps its layout, the rows where they are not among `dims`.

    DTensor lets one dim of a layout match what the tensor has, not several.
    """
    if not isinstance(tensor, tf.Tensor) or tensor.shape.rank in (None, 0):
        return tensor
    if _is_constant(tensor):  # whole anyway, and a shape that is made of it stays known
        return tensor
    ndim = tensor.shape.rank
    gathered = {dim % ndim for dim in dims}
    if not gathered:
        return tensor
    specs = [dtensor.UNSHARDED] * ndim
    # the rows first, since the batch is most often split by them; otherwise the features
    kept = next((dim for dim in (0, ndim - 1) if dim not in gathered), None)
    if kept is not None:
        specs[kept] = dtensor.MATCH
    return relayout(tensor, dtensor.Layout(specs, view_of(expected()).mesh))


def _is_constant(tensor: tf.Tensor) -> bool:
    """Whether a value follows from constants; of integers those that shapes are computed from, by TensorFlow itself."""
    if tensor.dtype in (tf.int32, tf.int64) and tensor.shape.rank == 1:
        return smart_cond.smart_constant_value(tensor) is not None
    return tf.get_static_value(tensor) is not None


def _tensors(values: Sequence[tf.Tensor | np.ndarray]) -> list[tf.Tensor | np.ndarray]:
    first = next((value.dtype for value in values if tf.is_tensor(value)), None)
    return [value if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype=first) for value in values]


def known_value(value: object) -> np.ndarray | None:
    """A value that is known when the step is traced, or None."""
    if value is None or any(tf.is_tensor(part) and tf.get_static_value(part) is None for part in tree.flatten(value)):
        return None
    return np.asarray(tree.map_structure(lambda part: tf.get_static_value(part) if tf.is_tensor(part) else part, value))


# ---- errors


def endless_text(message: str, *args: object) -> str | None:
    """Condition of the hook on `parse_message`: an error text that TensorFlow would search for minutes."""
    return message if len(message) > _LONGEST else None


@hook(
    "tensorflow.python.framework.error_interpolation",
    "parse_message",
    "an error of DTensor quotes the whole program; TensorFlow searches it for minutes before it raises",
    when=endless_text,
)
def parse_message(_: object, original: Callable[..., object], message: str) -> object:
    """Hook on `parse_message`: cut error texts short, of which DTensor's hold whole programs."""
    return original(message[:_LONGEST] + " [...]")
