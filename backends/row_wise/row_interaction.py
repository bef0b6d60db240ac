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

import keras

from keras_flow.backends import leaves
from keras_flow.backends.row_wise import looks, own_code, row_operations
from keras_flow.backends.row_wise.row_operations import Interaction, touches_rows
from keras_flow.current import keras_places, models
from keras_flow.sbp import Split
from keras_flow.signatures.layers import product_of


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
    AdditiveAttention MultiHeadAttention GroupedQueryAttention GroupQueryAttention Rescaling ActivityRegularization"""
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
    """Concatenate Softmax LayerNormalization RMSNormalization UnitNormalization BatchNormalization GroupNormalization
    Dot Normalization"""
)
#: KerasHub's layers that act row by row, of the models in tests/backends/row_wise/hub_rows.py. Not its mixtures of
#: experts, whose losses are of all rows
_HUB = _names(
    """AlibiBias BloomAttention BloomDecoder CachedGemmaAttention CachedMistralAttention CachedMultiHeadAttention
    FalconAttention FalconTransformerDecoder GPTNeoXAttention GPTNeoXDecoder GemmaDecoderBlock LlamaAttention
    LlamaLayerNorm LlamaRotaryEmbedding LlamaTransformerDecoder MLP MistralLayerNormalization
    MistralTransformerDecoder Phi3Attention Phi3Decoder Phi3LayerNorm PositionEmbedding Qwen3Attention Qwen3LayerNorm
    Qwen3TransformerDecoder QwenAttention QwenLayerNorm QwenTransformerDecoder RMSNormalization RotaryEmbedding
    TokenAndPositionEmbedding TransformerDecoder TransformerEncoder ViTEncoder ViTEncoderBlock
    ViTPatchingAndEmbedding"""
)
#: regularizers of activities whose sum over the parts of a batch is that of all rows
_SUMS_OF_ROWS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
#: layers for which a tensor of fewer dims has no rows, or takes those for something else: an image alone, queries alone
_LEAST_RANK = {**dict.fromkeys(_IMAGES, 4), "Attention": 3, "AdditiveAttention": 3}
#: how layers may be quantized and still act row by row: their weights, and inputs by the largest element of each row.
#: Not float8, which scales by the largest element of all rows, and assigns that in the backward pass
_QUANTIZATIONS = frozenset([None, "int8", "int4", "gptq", "awq"])
#: layers whose state is exact where rows are computed apart: hooks make statistics those of all rows; a vector that is
#: made of the kernel alone; and what `adapt` sets, no call
_EXACT_STATE = frozenset(["BatchNormalization", "SpectralNormalization", "Normalization"])


@dataclass(eq=False)
class _LayerLook(looks.Look):
    """A look at a layer, with the judgement: how its rows interact.

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


def of_model(model: keras.Model) -> Interaction | None:
    """The interaction of rows in a model's step, or None.

    A custom `train_step` sees logical tensors, so only the layers that it calls matter. Asked as a loop begins, when
    classes are looked at too.
    """
    own_code.look_at_classes()
    found = of_layer(model)
    if found is not None and models.has_own(model, "train_step"):
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
    found = of_layer(layer, max((len(getattr(leaf, "shape", ())) for leaf in first), default=0))
    names = row_operations.without_rows(layer, args, kwargs) if found is None else ()
    return Interaction("shape", f"{names[0]!r} of layer {layer.name!r} has no rows") if names else found


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
    """Return the last look at a layer, or a new one where it has changed."""
    look = looks.last(layer)
    if look is None or not look.is_of(layer):
        look = _LayerLook.at(layer)
        look.itself = _of_itself(layer)
    return look


def is_recurrent(layer: keras.Layer) -> bool:
    """Whether the layer repeats its operators for each time step."""
    if type(layer).__name__ == "Bidirectional":
        return is_recurrent(layer.forward_layer)
    return type(layer).__name__ in _RECURRENT


def assigns_weights(layer: keras.Layer) -> bool:
    """Whether the layer assigns to trainable weights when it is called."""
    return type(layer).__name__ == "SpectralNormalization"


def _of_itself(layer: keras.Layer) -> Interaction | None:
    found = _of_class(layer) if not models.has_stock_class(layer) else None
    found = found or _of_changes(layer)
    regularizer = layer.activity_regularizer
    if found is not None or regularizer is None:
        return found
    who = f"layer {layer.name!r} has an activity regularizer"
    if type(regularizer) in _SUMS_OF_ROWS:
        return Interaction("added loss", f"{who}, which is a sum over all rows")
    return Interaction("unknown", f"{who} that is not known to be a sum over rows")


def _of_class(layer: keras.Layer) -> Interaction | None:
    """The interaction in what a layer's class does with its arguments."""
    name = type(layer).__name__
    unknown = Interaction("unknown", f"layer {layer.name!r} ({name}) is not known to act row by row")
    if type(layer).__module__.startswith("keras_hub.src.") and not isinstance(layer, keras.Model):
        return _first(_of_rank(layer, rank) for rank in _ranks_of(layer) or [None]) if name in _HUB else unknown
    # by the class alone: whatever its `call` does, it may do it along the rows
    if not keras_places.is_of_keras(type(layer), "layers"):
        kind = "a subclassed model" if isinstance(layer, keras.Model) else f"a custom layer ({name})"
        return Interaction("own code", f"{layer.name!r} is {kind}, which may mix rows")
    # a state [rows, units] belongs to the rows of the batch before
    if getattr(layer, "stateful", False):
        return Interaction("state", f"layer {layer.name!r} is stateful: its state is of the batch's rows")
    if name == "EinsumDense":
        # dims that the equation leaves out count as one: the first dim must be first again in the result
        product = product_of(layer, len(layer.equation.partition(",")[0].replace("...", ".")))
        keeps = product is not None and product.output_of(0, None) == Split(0)
        return None if keeps else Interaction("along rows", f"layer {layer.name!r} contracts or moves dimension 0")
    found = _first(_of_rank(layer, rank) for rank in _ranks_of(layer) or [None])
    if found is not None:
        return found
    # with a noise shape its mask may be one for all rows
    if name == "AlphaDropout" and layer.noise_shape is None:
        return None
    if name in _LAYERS | _PREPROCESSING | _CELLS | _ALONG_AXIS | _RECURRENT | _WRAPPERS:
        return None
    # a layer of a later Keras is unknown until somebody has looked at it
    return Interaction("own code", unknown.text) if name == "Lambda" else unknown


def _of_rank(layer: keras.Layer, rank: int | None) -> Interaction | None:
    """The interaction in a call of one of Keras's layers with inputs of so many dims (None: it is not known)."""
    name = type(layer).__name__
    if rank is not None and rank < _LEAST_RANK.get(name, 0):
        return Interaction("along rows", f"layer {layer.name!r} takes a tensor of {rank} dims for one sample")
    # of the many layers with an axis, only those in the table do something along it
    axes = layer.axes if name == "Dot" else getattr(layer, "axis", None)
    always = [getattr(layer, axes, None) for axes in ("attention_axes", "sequence_axis", "feature_axis")]
    always += [axes] if name in _ALONG_AXIS else []
    always += [-1] if own_code.is_along_last_dim(getattr(layer, "activation", None)) else []
    if axes == 0 or touches_rows(always, rank):
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
    # softmax along axis 0 is also an activation function
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


def _inside(layer: keras.Layer) -> Iterator[Interaction | None]:
    """The interactions inside a layer: of its graph's operations, and of each layer that it calls."""
    if models.has_stock_class(layer):
        yield from row_operations.of_operations(layer)
        yield from map(of_layer, layer.layers)
    else:  # cells, what is wrapped, projections of attention, an activation that is a layer
        yield from map(of_layer, layer._layers)


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
