"""Do the rows of a batch interact in a layer or a model? Decided from what is seen of it, before it computes.

A layer acts row by row when row i of its output depends on row i of its inputs only: then a rank may compute its rows
alone. BatchNormalization and the random layers do not, but hooks make them exact. This is the one place that knows: an
engine asks for the interaction that is found, and decides by its kind what it can still do.

What is believed is proven: a class in one of the tables, whose methods are Keras's own on the class and on the layer,
with activations and a quantization that act on a row, and with no state but that which is known to be exact. Whatever
else is there mixes rows, with a reason. A layer is looked at when it is first called, and again once anything of it is
another object than before: `quantize`, `enable_lora`, another activation, policy or method. (A class of Keras that
somebody patches is looked at again as the next `fit`, `evaluate` or `predict` begins.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import keras
from keras import tree

from keras_flow.backends import leaves, looks, own_code
from keras_flow.current import keras_places, models


@dataclass(frozen=True)
class Interaction:
    """How rows may interact.

    Attributes:
        kind: `"own code"` of the user's; a `"function"` of the user's inside one of Keras's layers; `"along rows"`, an
            axis that is dimension 0; `"state"` of the batch's rows, or that a call assigns; a `"quantization"` by all
            rows; an `"added loss"` over all rows; a `"shape"` without the rows; or `"unknown"`, for what is in no
            table.
        text: who, and why, as the beginning of a sentence.
        operation: the class of the operation of a functional model, where it is one.
    """

    kind: Literal["own code", "function", "along rows", "state", "quantization", "added loss", "shape", "unknown"]
    text: str
    operation: str = ""


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
    ActivityRegularization"""
)
#: preprocessing whose random numbers, where it has some, are one for each row or one for all. Not RandomGaussianBlur
#: and RandomElasticTransform, whose draws for all rows have the shape of rows; MelSpectrogram, which scales by the
#: largest value of all rows; RandomBrightness, which writes into its input (torch: a view)
_IMAGES = _names(
    """AutoContrast CenterCrop ContrastLimitedAdaptiveHistogramEqualization RandomColorDegeneration RandomContrast
    RandomCrop RandomErasing RandomFlip RandomGrayscale RandomHue RandomInvert RandomPerspective RandomPosterization
    RandomRotation RandomSaturation RandomSharpness RandomShear RandomTranslation RandomZoom Resizing Solarization"""
)
#: preprocessing that takes a vector for one sample: a value for each row must be a column
_ENCODERS = frozenset(["CategoryEncoding", "Discretization", "Hashing"])
_PREPROCESSING = _IMAGES | _ENCODERS | {"STFTSpectrogram"}
#: wrappers that do as the layers inside them
_WRAPPERS = frozenset(["Bidirectional", "TimeDistributed", "SpectralNormalization"])
_RECURRENT = frozenset(["RNN", "SimpleRNN", "LSTM", "GRU", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "StackedRNNCells"])
_CELLS = frozenset(["SimpleRNNCell", "LSTMCell", "GRUCell", "ConvLSTMCell"])
#: layers that reduce or join along `axis`, which must not be dimension 0
_ALONG_AXIS = _names(
    """Concatenate Softmax LayerNormalization RMSNormalization UnitNormalization BatchNormalization Dot Normalization"""
)
#: layers for which a tensor of fewer dims has no rows, or takes those for something else: an image alone, queries alone
_LEAST_RANK = {**dict.fromkeys(_IMAGES, 4), "Attention": 3, "AdditiveAttention": 3}
#: how layers may be quantized and still act row by row: their weights, and inputs by the largest element of each row.
#: Not float8, which scales by the largest element of all rows, and assigns that in the backward pass
_QUANTIZATIONS = frozenset([None, "int8", "int4", "gptq", "awq"])
#: layers whose state is exact where rows are computed apart: hooks make statistics those of all rows; a vector that is
#: made of the kernel alone; and what `adapt` sets, no call
_EXACT_STATE = frozenset(["BatchNormalization", "SpectralNormalization", "Normalization"])
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

#: losses with a value for each row; not Circle, which compares rows
_LOSSES = _names(
    """BinaryCrossentropy BinaryFocalCrossentropy CTC CategoricalCrossentropy CategoricalFocalCrossentropy
    CategoricalGeneralizedCrossEntropy CategoricalHinge CosineSimilarity Dice Hinge Huber KLDivergence LogCosh
    MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError Poisson
    SparseCategoricalCrossentropy SquaredHinge Tversky"""
)
#: functions that Keras wraps as losses (`loss="mse"`), each with the class of which it is the function
_LOSSES_OF_FUNCTIONS = [(getattr(keras.losses, name)().fn, name) for name in sorted(_LOSSES)]
#: metrics whose state is a sum over rows
_METRICS = _names(
    """AUC Accuracy BinaryAccuracy BinaryCrossentropy BinaryIoU CategoricalAccuracy CategoricalCrossentropy
    CategoricalHinge ConcordanceCorrelation CosineSimilarity F1Score FBetaScore FalseNegatives FalsePositives Hinge IoU
    KLDivergence LogCoshError MeanAbsoluteError MeanAbsolutePercentageError MeanIoU MeanMetricWrapper MeanSquaredError
    MeanSquaredLogarithmicError OneHotIoU OneHotMeanIoU PearsonCorrelation Poisson Precision PrecisionAtRecall R2Score
    Recall RecallAtPrecision RootMeanSquaredError SensitivityAtSpecificity SparseCategoricalAccuracy
    SparseCategoricalCrossentropy SparseTopKCategoricalAccuracy SpecificityAtSensitivity SquaredHinge
    TopKCategoricalAccuracy TrueNegatives TruePositives"""
)


@dataclass(eq=False)
class _LayerLook(looks.Look):
    """What was seen of a layer when it was judged.

    Attributes:
        itself: the interaction in it, those inside it left out.
        whole: the interaction in it and in those inside.
        parts: the layers that this rests on, each with what was seen of it; None before it was judged as a whole.
        of_ranks: the interaction in a call with inputs of so many dims, by that number.
    """

    itself: Interaction | None = None
    whole: Interaction | None = None
    parts: list[tuple[keras.Layer, _LayerLook]] | None = None
    of_ranks: dict[int, Interaction | None] = field(default_factory=dict)


@dataclass(eq=False)
class _OwnCodeLook(looks.Look):
    """What was seen of a loss or a metric: whether what it computes is Keras's own code."""

    is_keras: bool = False


def of_model(model: keras.Model) -> Interaction | None:
    """The interaction of rows in a model's step, or None.

    A custom `train_step` sees logical tensors, so only the layers that it calls matter. Asked as a loop begins, when
    classes are looked at too.
    """
    own_code.look_at_classes()
    found = of_layer(model)
    own_step = getattr(type(model), "train_step", None) is not getattr(keras.Model, "train_step", None)
    if found is not None and own_step:
        parts = [layer for layer in model._layers if isinstance(layer, keras.Layer)]
        if parts and not _first(of_layer(layer) for layer in parts):
            return None
    return found


def of_layer(layer: keras.Layer, rank: int | None = None) -> Interaction | None:
    """The interaction of rows in a layer and those inside it, or None where it acts row by row.

    Args:
        layer: the layer, which is looked at again where it has changed.
        rank: dims of the inputs of the call that is asked for; None: of the calls that it was built for.
    """
    look = looks.last(layer)
    if look is None or look.parts is None or not all(seen.is_of(part) for part, seen in look.parts):
        look = _judged(layer)
    if rank is None or look.whole is not None:
        return look.whole
    if rank not in look.of_ranks:
        look.of_ranks[rank] = _of_rank(layer, rank)
    return look.of_ranks[rank]


def of_call(layer: keras.Layer, args: tuple[object, ...], kwargs: dict[str, object]) -> Interaction | None:
    """The interaction of rows in a call of a layer with these inputs, or None where it acts row by row."""
    first = leaves.flat(args[0] if args else kwargs)
    return of_layer(layer, max((len(getattr(leaf, "shape", ())) for leaf in first), default=0))


def of_layer_itself(layer: keras.Layer) -> Interaction | None:
    """The interaction of rows in a layer, those inside it left out."""
    return _look_at(layer).itself


def _judged(layer: keras.Layer) -> _LayerLook:
    look = _look_at(layer)
    look.whole = look.itself or _first(_inside(layer))
    if look.itself is not None:  # whatever is inside
        look.parts = [(layer, look)]
    else:  # what a layer will hold once it is built is not known yet
        look.parts = [(part, _look_at(part)) for part in layer._flatten_layers()] if layer.built else None
    return look


def _look_at(layer: keras.Layer) -> _LayerLook:
    """What is seen of a layer now."""
    look = looks.last(layer)
    if look is None or not look.is_of(layer):
        look = _LayerLook.at(layer)
        look.itself = _of_itself(layer)
    return look


def of_loss(loss: object, rank: int) -> Interaction | None:
    """The interaction of rows in a loss (an object, or a function) for predictions of so many dims.

    None: it has a value for each row.
    """
    if isinstance(loss, keras.Loss) and not _is_of_keras(loss, "losses"):
        return _by_axis("loss", loss, "", rank)
    # an object's function may be another than its class's
    function = getattr(loss, "fn", None) if isinstance(loss, keras.Loss) else loss
    name = next((name for known, name in _LOSSES_OF_FUNCTIONS if known is function), "")
    if not name and isinstance(loss, keras.Loss) and own_code.is_keras(function):
        name = type(loss).__name__
    return _by_axis("loss", loss, name, rank)


def of_metric(metric: keras.Metric, rank: int) -> Interaction | None:
    """The interaction of rows in one of `keras.metrics`, for predictions of so many dims.

    None: its state is a sum over rows.
    """
    function = getattr(metric, "_fn", None)
    is_known = _is_of_keras(metric, "metrics") and (function is None or own_code.is_keras(function))
    return _by_axis("metric", metric, type(metric).__name__ if is_known else "", rank)


def of_compiled(model: keras.Model, kind: Literal["loss", "metric"], rank: int) -> list[Interaction]:
    """The interactions in the losses or the metrics of a compiled model, for predictions of so many dims."""
    losses, metrics = getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None)
    # as `compile` was given them: Keras makes objects of names with the first batch
    given = (
        (getattr(losses, "_user_loss", None),)
        if kind == "loss"
        else (getattr(metrics, "_user_metrics", None), getattr(metrics, "_user_weighted_metrics", None))
    )
    found = []
    for leaf in tree.flatten(given):
        if leaf is None or isinstance(leaf, str):  # what has a name is Keras's own
            continue
        if kind == "loss":
            found.append(of_loss(leaf, rank))
        elif isinstance(leaf, keras.Metric):
            found.append(of_metric(leaf, rank))
        else:
            name = getattr(leaf, "__name__", str(leaf))
            found.append(Interaction("own code", f"metric {name!r} is not known to add up rows"))
    return [interaction for interaction in found if interaction is not None]


def _is_of_keras(thing: keras.Loss | keras.Metric, kind: str) -> bool:
    """Whether a loss or a metric is one of Keras's, and computes Keras's own code."""
    look = looks.last(thing)
    if look is None or not look.is_of(thing):
        look = _OwnCodeLook.at(thing)
        look.is_keras = keras_places.is_of_keras(type(thing), kind) and not own_code.replaced_method(thing)
    return look.is_keras


def _by_axis(kind: str, found: object, name: str, rank: int) -> Interaction | None:
    """The interaction in a loss or a metric of that name in Keras, from the axis along which it reduces."""
    text = f"{kind} {getattr(found, 'name', name)!r}"
    if name not in (_LOSSES if kind == "loss" else _METRICS):
        return Interaction("own code" if not name else "unknown", f"{text} is not known to add up rows")
    axis = getattr(found, "axis", getattr(found, "_fn_kwargs", {}).get("axis", -1))
    if name in ("F1Score", "FBetaScore"):
        axis = -1  # theirs is that of the sum over rows, which is their state
    # without an axis Dice and Tversky reduce all dims; and the last dim of a vector is that of its rows
    if axis is None or rank < 2 or _touches_rows(axis, rank):
        return Interaction("along rows", f"{text} works along dimension 0")
    return None


def is_recurrent(layer: keras.Layer) -> bool:
    """Whether the layer repeats its operators for each time step."""
    if type(layer).__name__ == "Bidirectional":
        return is_recurrent(layer.forward_layer)
    return type(layer).__name__ in _RECURRENT


def assigns_weights(layer: keras.Layer) -> bool:
    """Whether the layer assigns to trainable weights when it is called."""
    return type(layer).__name__ == "SpectralNormalization"


def _of_itself(layer: keras.Layer) -> Interaction | None:
    is_graph = models.is_stock_graph(layer) or _is_stock_sequence(layer)
    found = _of_class(layer) if not is_graph else None
    found = found or _of_changes(layer)
    if found is None and layer.activity_regularizer is not None:
        text = f"layer {layer.name!r} has an activity regularizer, which is a sum over all rows"
        return Interaction("added loss", text)
    return found


def _of_class(layer: keras.Layer) -> Interaction | None:
    """The interaction in what a layer's class does with its arguments."""
    name = type(layer).__name__
    # by the class alone: whatever its `call` does, it may do it along the rows
    if not keras_places.is_of_keras(type(layer), "layers"):
        kind = "a subclassed model" if isinstance(layer, keras.Model) else f"a custom layer ({name})"
        return Interaction("own code", f"{layer.name!r} is {kind}, which may mix rows")
    # a state [rows, units] belongs to the rows of the batch before
    if getattr(layer, "stateful", False):
        return Interaction("state", f"layer {layer.name!r} is stateful: its state is of the batch's rows")
    if name == "EinsumDense":
        # the first letter of an equation is the batch: it must be first again in the result
        keeps = _keeps_first_letter(layer.equation)
        return None if keeps else Interaction("along rows", f"layer {layer.name!r} contracts or moves dimension 0")
    ranks = _ranks_of(layer)
    found = _first(_of_rank(layer, rank) for rank in ranks or [None])
    if found is not None:
        return found
    # with a noise shape its mask may be one for all rows
    if name == "AlphaDropout" and layer.noise_shape is None:
        return None
    if name in _LAYERS | _PREPROCESSING | _CELLS | _ALONG_AXIS | _RECURRENT | _WRAPPERS:
        return None
    # a layer of a later Keras is unknown until somebody has looked at it
    kind = "own code" if name == "Lambda" else "unknown"
    return Interaction(kind, f"layer {layer.name!r} ({name}) is not known to act row by row")


def _of_rank(layer: keras.Layer, rank: int | None) -> Interaction | None:
    """The interaction in a call of one of Keras's layers with inputs of so many dims (None: it is not known)."""
    name = type(layer).__name__
    if rank is not None and rank < _LEAST_RANK.get(name, 0):
        return Interaction("along rows", f"layer {layer.name!r} takes a tensor of {rank} dims for one sample")
    # of the many layers with an axis, only those in the table do something along it
    axes = layer.axes if name == "Dot" else getattr(layer, "axis", None)
    if axes == 0 or (name in _ALONG_AXIS and _touches_rows(axes, rank)):
        return Interaction("along rows", f"layer {layer.name!r} works along dimension 0")
    # a vector without a batch dim is one sample, whose entries are no rows
    if name in _ENCODERS and getattr(layer, "output_mode", "int") != "int" and rank in (None, 0, 1):
        return Interaction("along rows", f"layer {layer.name!r} takes a vector for one sample")
    if name == "Rescaling" and any(_has_rows(value, rank) for value in (layer.scale, layer.offset)):
        return Interaction("along rows", f"layer {layer.name!r} has a number for each row of the batch")
    return None


def _of_changes(layer: keras.Layer) -> Interaction | None:
    """The interaction in what was made of one of Keras's layers: its methods, functions, quantization and state."""
    method = own_code.replaced_method(layer)
    if method:
        text = f"the method {method!r} of layer {layer.name!r} is not Keras's own, and may mix rows"
        return Interaction("own code", text)
    # softmax along axis 0 is an activation function too
    function = own_code.unknown_function(layer)
    if function:
        of_users = "a custom activation function" if function.endswith("activation") else f"a function ({function})"
        return Interaction("function", f"layer {layer.name!r} has {of_users}, which may mix rows")
    mode = layer.quantization_mode
    if mode not in _QUANTIZATIONS:
        text = f"layer {layer.name!r} is quantized to {mode}, which scales by the largest element of all rows"
        return Interaction("quantization", text)
    if not own_code.is_largest_of_row(getattr(layer, "inputs_quantizer", None)):
        return Interaction("quantization", f"layer {layer.name!r} has a quantizer of its own, which may mix rows")
    # assigned as "gradients" in the backward pass
    state = [v for v in layer._trainable_variables if v.overwrite_with_gradient]
    if mode is None and type(layer).__name__ not in _EXACT_STATE:
        state += [v for v in layer._non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]
    if state:
        text = f"layer {layer.name!r} has state ({state[0].path}), which a call may assign from all rows"
        return Interaction("state", text)
    return None


def of_operations(model: keras.Layer) -> Iterator[Interaction]:
    """The interactions of rows in the graph of a functional model, its layers left out; none in other layers."""
    graph = models.graph_of(model)
    if graph is None:
        return
    # an added loss is a number of the whole batch already
    if getattr(graph, "_losses_override", None) or graph._losses:
        yield Interaction("added loss", f"model {graph.name!r} calls add_loss, which is over all rows")
    # an input without dims has no rows, which differs from an unknown number of them (None)
    rows = {tensor.shape[0] if len(tensor.shape) else () for tensor in tree.flatten(graph.inputs)}
    if len(rows) > 1 or () in rows:
        yield Interaction("shape", f"the inputs of {graph.name!r} have different numbers of rows")
    for nodes in graph._nodes_by_depth.values():
        for node in nodes:
            operation = node.operation
            is_layer = isinstance(operation, keras.Layer)
            # an output that lost the batch dim has mixed the rows on the way
            if any(not len(x.shape) or x.shape[0] not in rows for x in tree.flatten(node.output_tensors)):
                text = f"the output of {operation.name!r} in {graph.name!r} has no batch dimension"
                yield Interaction("shape", text, "" if is_layer else type(operation).__name__)
            elif not is_layer and (found := _of_operation(node)) is not None:
                yield found


def _inside(layer: keras.Layer) -> Iterator[Interaction | None]:
    """The interactions inside a layer: of its graph's operations, and of each layer that it calls."""
    if models.is_stock_graph(layer) or _is_stock_sequence(layer):
        yield from of_operations(layer)
        yield from map(of_layer, layer.layers)
    else:  # cells, what is wrapped, projections of attention, an activation that is a layer
        yield from map(of_layer, layer._layers)


def _is_stock_sequence(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.Sequential) and type(layer).call is keras.Sequential.call


def _of_operation(node: object) -> Interaction | None:
    operation = node.operation  # type: ignore[attr-defined]
    name = type(operation).__name__
    tensors = node.arguments.keras_tensors  # type: ignore[attr-defined]
    rank = max((len(tensor.shape) for tensor in tensors), default=0)
    if any(len(tensor.shape) != rank for tensor in tensors):
        return Interaction("along rows", f"operation {name} joins tensors of different ranks, so rows may meet", name)
    if _constant_with_rows(node, rank):
        return Interaction("along rows", f"operation {name} has a constant with a row for each row of the batch", name)
    if name in _ELEMENTWISE or (name == "GetItem" and _keeps_all_rows(node)):
        return None
    if name in _OPERATIONS_ALONG_AXIS:
        axis = getattr(operation, "axis", None)
        if axis is None or _touches_rows(axis, rank):
            return Interaction("along rows", f"operation {name} works along dimension 0", name)
        return None
    if name == "Matmul" and rank > 2:
        return None
    return Interaction("unknown", f"operation {name} is not known to act row by row", name)


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


def _keeps_first_letter(equation: str) -> bool:
    inputs, _, output = equation.partition("->")
    first, _, second = inputs.partition(",")
    if first.startswith("...") or output.startswith("..."):
        return first.startswith("...") and output.startswith("...")
    return bool(first) and first[0] == output[:1] and first[0] not in second


def _touches_rows(axes: object, rank: int | None) -> bool:
    flat = [int(axis) for axis in tree.flatten(axes) if axis is not None]
    # without a rank only the last dim is known not to be that of the rows
    return any(axis == 0 or (axis == -rank if rank is not None else axis < -1) for axis in flat)


def _has_rows(value: object, rank: int | None) -> bool:
    shape = tuple(getattr(value, "shape", ()))
    return len(shape) >= (2 if rank is None else max(rank, 1)) and shape[:1] != (1,)


def _ranks_of(layer: keras.Layer) -> set[int]:
    """The dims of a layer's inputs in each graph that it is part of, and in what it was built for."""
    found = {max((len(tensor.shape) for tensor in node.input_tensors), default=0) for node in layer._inbound_nodes}
    shapes = [shape for shape in (layer._build_shapes_dict or {}).values() if isinstance(shape, tuple)]
    lengths = [len(shape) for shape in shapes if all(isinstance(n, int | None) for n in shape)]
    return found | {max(lengths)} if lengths else found


def _first(found: Iterable[Interaction | None]) -> Interaction | None:
    return next((interaction for interaction in found if interaction is not None), None)
