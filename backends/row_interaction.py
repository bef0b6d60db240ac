"""Which models act row by row, so that a rank may compute its rows alone: decided from the structure, before training.

A layer acts row by row when row i of its output depends on row i of its inputs only. BatchNormalization and the random
layers do not, but their hooks make them exact. What is not in these tables is unknown, and unknown means no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import keras
from keras.src import tree
from keras.src.backend.torch.trainer import TorchTrainer
from keras.src.models.functional import Functional


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Keras's own layers that act row by row whatever their arguments
_LAYERS = _names(
    """InputLayer Dense Embedding ReversibleEmbedding Identity Masking Activation ReLU ELU LeakyReLU PReLU
    Conv1D Conv2D Conv3D Conv1DTranspose Conv2DTranspose Conv3DTranspose DepthwiseConv1D DepthwiseConv2D
    SeparableConv1D SeparableConv2D MaxPooling1D MaxPooling2D MaxPooling3D AveragePooling1D AveragePooling2D
    AveragePooling3D AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D
    AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D
    GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D
    GlobalMaxPooling2D GlobalMaxPooling3D Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D GaussianNoise
    GaussianDropout Flatten Reshape Permute RepeatVector Cropping1D Cropping2D Cropping3D UpSampling1D UpSampling2D
    UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D Add Subtract Multiply Average Maximum Minimum Attention
    AdditiveAttention MultiHeadAttention GroupedQueryAttention GroupQueryAttention GroupNormalization Rescaling
    Normalization"""
)
#: wrappers that do as the layers inside them
_WRAPPERS = frozenset(["Bidirectional", "TimeDistributed", "SpectralNormalization"])
_RECURRENT = frozenset(["RNN", "SimpleRNN", "LSTM", "GRU", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "StackedRNNCells"])
_CELLS = frozenset(["SimpleRNNCell", "LSTMCell", "GRUCell", "ConvLSTMCell"])
#: layers that reduce or join along `axis`, which must not be dimension 0
_ALONG_AXIS = _names(
    """Concatenate Softmax LayerNormalization RMSNormalization UnitNormalization BatchNormalization Dot"""
)
#: operations in functional models (`keras.ops`) that act element by element
_ELEMENTWISE = _names(
    """Abs Absolute Add Subtract Multiply Divide TrueDivide FloorDivide Mod Power Maximum Minimum Square Sqrt
    Rsqrt Exp Expm1 Log Log1p Log2 Log10 Sin Cos Tan Tanh Sinh Cosh Arcsin Arccos Arctan Arctan2 Negative Sign Floor
    Ceil Round Clip Cast Relu Relu6 Sigmoid Silu Gelu Elu Selu Softplus Softsign HardSigmoid HardSilu HardTanh LeakyRelu
    Mish LogSigmoid Celu Glu Identity Equal NotEqual Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr LogicalNot
    Where Isnan Isinf Isfinite Erf Reciprocal ZerosLike OnesLike StopGradient"""
)
#: operations along `axis`, which must be given and must not be dimension 0
_OPERATIONS_ALONG_AXIS = _names(
    """Softmax LogSoftmax Mean Sum Max Min Prod Std Var Any All Argmax Argmin Logsumexp CountNonzero
    Concatenate Cumsum Cumprod Norm Median Sort Argsort Flip Repeat Squeeze
    ExpandDims"""
)

_known: WeakKeyDictionary[keras.Layer, str | None] = WeakKeyDictionary()


def reason_against(model: keras.Model) -> str | None:
    """Why a model cannot be trained by the mirrored view, or None where it can.

    A custom `train_step` sees logical tensors, so only the layers that it calls matter.
    """
    reason = reason_of(model)
    if reason is not None and type(model).train_step is not TorchTrainer.train_step:
        parts = [layer for layer in model._layers if isinstance(layer, keras.Layer)]
        if parts and not _first(reason_of(layer) for layer in parts):
            return None
    return reason


def reason_of(layer: keras.Layer) -> str | None:
    """Why a layer does not act row by row as far as is known, or None where it does."""
    if layer in _known:
        return _known[layer]
    reason = _reason(layer)
    if layer.built:
        _known[layer] = reason
    return reason


def is_recurrent(layer: keras.Layer) -> bool:
    """Whether the layer repeats its operators for each time step."""
    if type(layer).__name__ == "Bidirectional":
        return is_recurrent(layer.forward_layer)
    return type(layer).__name__ in _RECURRENT


def assigns_weights(layer: keras.Layer) -> bool:
    """Whether the layer assigns to trainable weights when it is called."""
    return type(layer).__name__ == "SpectralNormalization"


def _reason(layer: keras.Layer) -> str | None:
    if layer.activity_regularizer is not None:
        return f"layer {layer.name!r} has an activity regularizer, which is a sum over all rows"
    if isinstance(layer, keras.Sequential) and type(layer).call is keras.Sequential.call:
        inner = getattr(layer, "_functional", None)
        return _reason_of_graph(inner) if inner is not None else _first(reason_of(part) for part in layer.layers)
    if isinstance(layer, Functional) and type(layer).call is Functional.call:
        return _reason_of_graph(layer)
    cls = type(layer)
    name = cls.__name__
    if not cls.__module__.startswith("keras.src.layers"):
        kind = "a subclassed model" if isinstance(layer, keras.Model) else f"a custom layer ({name})"
        return f"{layer.name!r} is {kind}, which may mix rows"
    if _has_unknown_function(layer):
        return f"layer {layer.name!r} has a custom activation function, which may mix rows"
    if name in _CELLS or name in _LAYERS:
        return None
    if name == "EinsumDense":
        return None if _keeps_first_letter(layer.equation) else f"layer {layer.name!r} contracts or moves dimension 0"
    if name in _ALONG_AXIS:
        axes = layer.axes if name == "Dot" else layer.axis
        return f"layer {layer.name!r} works along dimension 0" if _touches_rows(axes, _rank_of(layer)) else None
    if name in _RECURRENT:
        if getattr(layer, "stateful", False):
            return f"layer {layer.name!r} is stateful: its state is of the batch's rows"
        cells = layer.cells if name == "StackedRNNCells" else [layer.cell]
        return _first(reason_of(cell) for cell in cells)
    if name in _WRAPPERS:
        inner = [layer.forward_layer, layer.backward_layer] if name == "Bidirectional" else [layer.layer]
        return _first(reason_of(part) for part in inner)
    return f"layer {layer.name!r} ({name}) is not known to act row by row"


def _reason_of_graph(model: Functional) -> str | None:
    if getattr(model, "_losses_override", None) or model._losses:
        return f"model {model.name!r} calls add_loss, which is over all rows"
    rows = {tensor.shape[0] if len(tensor.shape) else () for tensor in tree.flatten(model.inputs)}
    if len(rows) > 1 or () in rows:
        return f"the inputs of {model.name!r} have different numbers of rows"
    (batch,) = rows
    for nodes in model._nodes_by_depth.values():
        for node in nodes:
            operation = node.operation
            for tensor in tree.flatten(node.output_tensors):
                if not len(tensor.shape) or tensor.shape[0] != batch:
                    return f"the output of {operation.name!r} in {model.name!r} has no batch dimension"
            reason = reason_of(operation) if isinstance(operation, keras.Layer) else _reason_of_operation(node)
            if reason is not None:
                return reason
    return None


def _reason_of_operation(node: object) -> str | None:
    operation = node.operation  # type: ignore[attr-defined]
    name = type(operation).__name__
    tensors = node.arguments.keras_tensors  # type: ignore[attr-defined]
    rank = max((len(tensor.shape) for tensor in tensors), default=0)
    if any(len(tensor.shape) != rank for tensor in tensors):
        return f"operation {name} joins tensors of different ranks, so rows may meet"
    if _constant_with_rows(node, rank):
        return f"operation {name} has a constant with a row for each row of the batch"
    if name in _ELEMENTWISE or (name == "GetItem" and _keeps_all_rows(node)):
        return None
    if name in _OPERATIONS_ALONG_AXIS:
        axis = getattr(operation, "axis", None)
        return f"operation {name} works along dimension 0" if axis is None or _touches_rows(axis, rank) else None
    if name == "Matmul" and rank > 2:
        return None
    return f"operation {name} is not known to act row by row"


def _constant_with_rows(node: object, rank: int) -> bool:
    arguments = (node.arguments.args, node.arguments.kwargs)  # type: ignore[attr-defined]
    for leaf in tree.flatten(arguments):
        shape: tuple[int, ...] = tuple(getattr(leaf, "shape", ()))
        if not isinstance(leaf, keras.KerasTensor) and len(shape) >= rank > 0 and shape[:1] != (1,):
            return True
    return False


def _keeps_all_rows(node: object) -> bool:
    args = node.arguments.args  # type: ignore[attr-defined]
    key = args[1] if len(args) > 1 else None
    first = key[0] if isinstance(key, tuple) and key else key
    return first is Ellipsis or (isinstance(first, slice) and first == slice(None))


def _has_unknown_function(layer: keras.Layer) -> bool:
    for name in ("activation", "recurrent_activation"):
        function = getattr(layer, name, None)
        module = getattr(function, "__module__", None) or type(function).__module__
        if isinstance(function, Callable) and not module.startswith("keras."):  # type: ignore[arg-type]
            return True
        if isinstance(function, keras.Layer) and reason_of(function) is not None:
            return True
    return False


def _keeps_first_letter(equation: str) -> bool:
    inputs, _, output = equation.partition("->")
    first, _, second = inputs.partition(",")
    if first.startswith("...") or output.startswith("..."):
        return first.startswith("...") and output.startswith("...")
    return bool(first) and first[0] == output[:1] and first[0] not in second


def _touches_rows(axes: object, rank: int | None) -> bool:
    flat = [int(axis) for axis in tree.flatten(axes) if axis is not None]
    return any(axis == 0 or (rank is not None and axis == -rank) for axis in flat)


def _rank_of(layer: keras.Layer) -> int | None:
    for node in layer._inbound_nodes:
        return max((len(tensor.shape) for tensor in node.input_tensors), default=0)
    return None


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)
