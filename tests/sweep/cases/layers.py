"""`keras.layers`, each in a model of its own branch: with its variables, options that change the program, and
gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import layers as L
from keras import ops

from tests.sweep.piece import FEATURES, Apply, Inferring, Piece

_LINE, _IMAGE, _VOLUME = (8, 4), (8, 8, 4), (4, 4, 4, 4)
_TOKENS = (6, 8)
_PICTURE = (8, 8, 3)


def _layer(name: str, make: Callable[[], Any], shape: tuple[int, ...] = (FEATURES,), kind: str = "float") -> Piece:
    return Piece(f"layers.{name}", lambda h: make()(h), shape, kind)


def _joined(name: str, connect: Callable[[Any, Any], Any], shape: tuple[int, ...] = (FEATURES,)) -> Piece:
    """A layer of several inputs: the hidden tensor and a dense function of it."""
    return Piece(f"layers.{name}", lambda h: connect(h, L.Dense(shape[-1], activation="tanh")(h)), shape)


def _of_dims(name: str, make: Callable[[type], Any]) -> list[Piece]:
    """A class that exists for 1, 2 and 3 dims."""
    shapes = {1: _LINE, 2: _IMAGE, 3: _VOLUME}
    classes = {n: getattr(L, name.replace("N", str(n))) for n in shapes if hasattr(L, name.replace("N", str(n)))}
    return [_layer(cls.__name__, lambda cls=cls: make(cls), shapes[n]) for n, cls in classes.items()]


def _convolutions() -> list[Piece]:
    return [
        *_of_dims("ConvND", lambda cls: cls(8, 3, activation="relu")),
        *_of_dims("ConvNDTranspose", lambda cls: cls(8, 3, 2)),
        *_of_dims("DepthwiseConvND", lambda cls: cls(3, padding="same")),
        *_of_dims("SeparableConvND", lambda cls: cls(8, 3, padding="same")),
        _layer("ConvLSTM1D", lambda: L.ConvLSTM1D(4, 3, padding="same"), (3, 8, 4)),
        _layer("ConvLSTM2D", lambda: L.ConvLSTM2D(4, 3, padding="same"), (3, 6, 6, 4)),
        _layer("ConvLSTM3D", lambda: L.ConvLSTM3D(4, 2, padding="same"), (2, 4, 4, 4, 4)),
        _layer("Conv2D[groups]", lambda: L.Conv2D(8, 3, groups=2), _IMAGE),
        _layer("Conv1D[groups]", lambda: L.Conv1D(8, 3, groups=4), _LINE),
        _layer("Conv2D[dilated]", lambda: L.Conv2D(8, 3, dilation_rate=2, padding="same"), _IMAGE),
        _layer("Conv1D[causal]", lambda: L.Conv1D(8, 3, padding="causal", dilation_rate=2), _LINE),
        _layer("Conv2D[strided]", lambda: L.Conv2D(8, 3, strides=2, padding="same", use_bias=False), _IMAGE),
        _layer("DepthwiseConv2D[strided]", lambda: L.DepthwiseConv2D(3, strides=2, depth_multiplier=2), _IMAGE),
    ]


def _pools() -> list[Piece]:
    return [
        *_of_dims("AveragePoolingND", lambda cls: cls(2)),
        *_of_dims("MaxPoolingND", lambda cls: cls(2)),
        *_of_dims("AdaptiveAveragePoolingND", lambda cls: cls(2)),
        *_of_dims("AdaptiveMaxPoolingND", lambda cls: cls(2)),
        *_of_dims("GlobalAveragePoolingND", lambda cls: cls()),
        *_of_dims("GlobalMaxPoolingND", lambda cls: cls()),
        *_of_dims("CroppingND", lambda cls: cls(1)),
        *_of_dims("UpSamplingND", lambda cls: cls(2)),
        *_of_dims("ZeroPaddingND", lambda cls: cls(1)),
        *_of_dims("SpatialDropoutND", lambda cls: cls(0.3, seed=3)),
        _layer("MaxPooling2D[overlapping]", lambda: L.MaxPooling2D(3, 2, "same"), _IMAGE),
        _layer("UpSampling2D[bilinear]", lambda: L.UpSampling2D(2, interpolation="bilinear"), _IMAGE),
    ]


def _dense() -> list[Piece]:
    return [
        _layer("Dense", lambda: L.Dense(8, activation="relu")),
        _layer("Dense[tokens]", lambda: L.Dense(4), _TOKENS),
        _layer("EinsumDense", lambda: L.EinsumDense("btf,fhd->bthd", (6, 2, 4), bias_axes="hd"), _TOKENS),
        _layer("Embedding", lambda: L.Embedding(12, 8), (6,), "int"),
        _layer("Embedding[masked]", lambda: _then(L.Embedding(12, 8, mask_zero=True), L.LSTM(4)), (6,), "int"),
        _layer("ReversibleEmbedding", _Tied, (6,), "int"),
        _layer("Activation", lambda: L.Activation("gelu")),
        _layer("ActivityRegularization", lambda: L.ActivityRegularization(0.01, 0.02)),
        _layer("ELU", lambda: L.ELU()),
        _layer("LeakyReLU", lambda: L.LeakyReLU()),
        _layer("PReLU", lambda: L.PReLU(alpha_initializer="glorot_uniform")),
        _layer("PReLU[shared]", lambda: L.PReLU(shared_axes=[1]), _TOKENS),
        _layer("ReLU", lambda: L.ReLU(negative_slope=0.1)),
        _layer("Softmax", lambda: L.Softmax()),
        _layer("Flatten", lambda: L.Flatten(), _TOKENS),
        _layer("Identity", lambda: L.Identity()),
        _layer("Lambda", lambda: L.Lambda(lambda x: x * x + 1.0)),
        _layer("Layer", lambda: _Scaled()),
        _layer("Masking", lambda: _then(L.Masking(), L.GRU(4)), _TOKENS),
        _layer("Permute", lambda: L.Permute((2, 1)), _TOKENS),
        _layer("RepeatVector", lambda: L.RepeatVector(3)),
        _layer("Rescaling", lambda: L.Rescaling(0.5, 1.0)),
        _layer("Reshape", lambda: L.Reshape((4, 2))),
        _layer("Wrapper", lambda: L.TimeDistributed(L.Dense(4)), _TOKENS),
        _layer("TimeDistributed", lambda: L.TimeDistributed(L.Conv1D(4, 2)), (3, 6, 4)),
        _layer("Dropout", lambda: L.Dropout(0.4, seed=3)),
        _layer("Dropout[noise_shape]", lambda: L.Dropout(0.4, noise_shape=(None, 1, 8), seed=3), _TOKENS),
        _layer("AlphaDropout", lambda: L.AlphaDropout(0.3, seed=3)),
        _layer("GaussianDropout", lambda: L.GaussianDropout(0.3, seed=3)),
        _layer("GaussianNoise", lambda: L.GaussianNoise(0.3, seed=3)),
    ]


def _normalizations() -> list[Piece]:
    return [
        _layer("BatchNormalization", lambda: L.BatchNormalization(momentum=0.7)),
        _layer("BatchNormalization[images]", lambda: L.BatchNormalization(momentum=0.7), _IMAGE),
        _layer("LayerNormalization", lambda: L.LayerNormalization()),
        _layer("LayerNormalization[axes]", lambda: L.LayerNormalization(axis=(1, 2)), _TOKENS),
        _layer("RMSNormalization", lambda: L.RMSNormalization()),
        _layer("GroupNormalization", lambda: L.GroupNormalization(2), _IMAGE),
        _layer("UnitNormalization", lambda: L.UnitNormalization()),
        _layer("Normalization", lambda: L.Normalization(mean=[0.1] * 8, variance=[2.0] * 8)),
        _layer("SpectralNormalization", lambda: L.SpectralNormalization(L.Dense(8))),
    ]


def _recurrent() -> list[Piece]:
    return [
        _layer("LSTM", lambda: L.LSTM(8, return_sequences=True), _TOKENS),
        _layer("GRU", lambda: L.GRU(8), _TOKENS),
        _layer("GRU[before]", lambda: L.GRU(8, reset_after=False), _TOKENS),
        _layer("SimpleRNN", lambda: L.SimpleRNN(8, dropout=0.2, seed=3), _TOKENS),
        _layer("RNN", lambda: L.RNN([L.GRUCell(4), L.LSTMCell(8)]), _TOKENS),
        _layer("StackedRNNCells", lambda: L.RNN(L.StackedRNNCells([L.SimpleRNNCell(4), L.GRUCell(4)])), _TOKENS),
        _layer("LSTMCell", lambda: L.RNN(L.LSTMCell(8), unroll=True), _TOKENS),
        _layer("GRUCell", lambda: L.RNN(L.GRUCell(8)), _TOKENS),
        _layer("SimpleRNNCell", lambda: L.RNN(L.SimpleRNNCell(8), go_backwards=True), _TOKENS),
        _layer("Bidirectional", lambda: L.Bidirectional(L.LSTM(4), merge_mode="sum"), _TOKENS),
    ]


def _several_inputs() -> list[Piece]:
    return [
        *(_joined(n, lambda a, b, n=n: getattr(L, n)()([a, b])) for n in ("Add", "Average", "Concatenate", "Maximum")),
        *(_joined(n, lambda a, b, n=n: getattr(L, n)()([a, b])) for n in ("Minimum", "Multiply", "Subtract")),
        _joined("Dot", lambda a, b: L.Dot(axes=2)([a, b]), _TOKENS),
        _joined("Attention", lambda a, b: L.Attention(use_scale=True)([a, b]), _TOKENS),
        _joined("AdditiveAttention", lambda a, b: L.AdditiveAttention()([a, b]), _TOKENS),
        _joined("MultiHeadAttention", lambda a, b: L.MultiHeadAttention(2, 4)(a, b), _TOKENS),
        _joined("GroupQueryAttention", lambda a, b: L.GroupQueryAttention(4, 4, 2)(a, b), _TOKENS),
    ]


def _preprocessing() -> list[Piece]:
    images: dict[str, Callable[[], Any]] = {
        "AugMix": lambda: L.AugMix(seed=3),
        "AutoContrast": lambda: L.AutoContrast((0, 1)),
        "CenterCrop": lambda: L.CenterCrop(5, 6),
        "ContrastLimitedAdaptiveHistogramEqualization": lambda: L.ContrastLimitedAdaptiveHistogramEqualization((0, 1)),
        # in a functional model its output is its input
        "Equalization": lambda: Apply(L.Equalization((0, 1))),
        "RandAugment": lambda: L.RandAugment((0, 1), seed=3),
        "RandomBrightness": lambda: L.RandomBrightness(0.3, (0, 1), seed=3),
        "RandomColorDegeneration": lambda: L.RandomColorDegeneration(0.3, (0, 1), seed=3),
        "RandomColorJitter": lambda: L.RandomColorJitter((0, 1), 0.2, 0.2, 0.2, 0.2, seed=3),
        "RandomContrast": lambda: L.RandomContrast(0.3, (0, 1), seed=3),
        # Keras 3.15 crops in training only: what follows takes any size
        "RandomCrop": lambda: _then(L.RandomCrop(6, 6, seed=3), L.GlobalAveragePooling2D()),
        "RandomElasticTransform": lambda: L.RandomElasticTransform(value_range=(0, 1), seed=3),
        "RandomErasing": lambda: L.RandomErasing(value_range=(0, 1), seed=3),
        "RandomFlip": lambda: L.RandomFlip(seed=3),
        "RandomGaussianBlur": lambda: L.RandomGaussianBlur(value_range=(0, 1), seed=3),
        "RandomGrayscale": lambda: L.RandomGrayscale(seed=3),
        "RandomHue": lambda: L.RandomHue(0.3, (0, 1), seed=3),
        "RandomInvert": lambda: L.RandomInvert(value_range=(0, 1), seed=3),
        "RandomPerspective": lambda: L.RandomPerspective(seed=3),
        "RandomPosterization": lambda: L.RandomPosterization(4, (0, 1), seed=3),
        "RandomRotation": lambda: L.RandomRotation(0.2, seed=3),
        "RandomSaturation": lambda: L.RandomSaturation(0.3, (0, 1), seed=3),
        "RandomSharpness": lambda: L.RandomSharpness(0.3, (0, 1), seed=3),
        "RandomShear": lambda: L.RandomShear(0.3, 0.3, seed=3),
        "RandomTranslation": lambda: L.RandomTranslation(0.2, 0.2, seed=3),
        "RandomZoom": lambda: L.RandomZoom(0.3, seed=3),
        "Resizing": lambda: L.Resizing(6, 5),
        "Solarization": lambda: L.Solarization(value_range=(0, 1), seed=3),
        "CutMix": lambda: _Images(L.CutMix(seed=3)),
        "MixUp": lambda: _Images(L.MixUp(seed=3)),
    }
    return [
        *(_layer(name, make, _PICTURE, "image") for name, make in images.items()),
        _layer("CategoryEncoding", lambda: L.CategoryEncoding(10, "multi_hot"), (6,), "int"),
        _layer("CategoryEncoding[count]", lambda: L.CategoryEncoding(10, "count"), (6,), "int"),
        _layer("Discretization", lambda: _then(L.Discretization([-1.0, 0.0, 1.0]), L.Embedding(4, 4))),
        _layer("Hashing", lambda: _then(L.Hashing(5), L.Embedding(5, 4)), (6,), "int"),
        Piece("layers.HashedCrossing", lambda x: L.HashedCrossing(5, output_mode="one_hot")((x, x)), (1,), "int"),
        _layer("IntegerLookup", lambda: _then(L.IntegerLookup(vocabulary=[1, 3, 5]), L.Embedding(4, 4)), (6,), "int"),
        _layer(
            "MelSpectrogram",
            lambda: _then(L.MelSpectrogram(16, 4, 8, sampling_rate=100, max_freq=50, min_freq=1), L.Rescaling(0.01)),
            (64,),
        ),
        _layer("STFTSpectrogram", lambda: L.STFTSpectrogram(frame_length=16, frame_step=8), (64, 1)),
        _layer("Pipeline", lambda: L.Pipeline([L.Rescaling(2.0), L.CenterCrop(5, 5)]), _PICTURE, "image"),
    ]


def _then(first: Any, second: Any) -> Callable[[Any], Any]:
    return lambda x: second(first(x))


class _Scaled(L.Layer):
    """A layer of a user's own, with a weight, a state and a loss."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="glorot_uniform", name="scale")
        self.seen = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="seen")

    def call(self, x: Any) -> Any:
        self.seen.assign(0.5 * self.seen + 0.5 * ops.mean(x, axis=0))
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x * self.scale


class _Tied(L.Layer):
    """Embedding and logits from one table."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.table = L.ReversibleEmbedding(12, 8)

    def call(self, x: Any) -> Any:
        return self.table(self.table(x), reverse=True)


class _Images(Inferring):
    """Augmentations that mix rows take images with their labels."""

    def __init__(self, mix: Any, **kwargs: Any):
        super().__init__(**kwargs)
        self.mix = mix

    def call(self, x: Any, training: bool = False) -> Any:
        labels = ops.reshape(ops.mean(x, axis=(1, 2)), (-1, 3))
        return self.mix({"images": x, "labels": labels}, training=training)["images"]


PIECES: tuple[Piece, ...] = (
    *_convolutions(),
    *_pools(),
    *_dense(),
    *_normalizations(),
    *_recurrent(),
    *_several_inputs(),
    *_preprocessing(),
)

WITHOUT = {
    "layers.InputLayer": "holds no computation; every model has one",
    "layers.InputSpec": "describes inputs",
    "layers.FlaxLayer": "wraps a module of another library, on JAX only",
    "layers.JaxLayer": "wraps a function of JAX: tests/beside_fit/test_engine_layers.py",
    "layers.TorchModuleWrapper": "wraps a module of torch: tests/beside_fit/test_engine_layers.py",
    "layers.TFSMLayer": "reads a SavedModel of TensorFlow: tests/beside_fit/test_engine_layers.py",
    "layers.StringLookup": "strings: docs/features.md",
    "layers.TextVectorization": "strings: docs/features.md",
    "layers.MaxNumBoundingBoxes": "works on dictionaries of boxes in input pipelines",
}
