"""`flow.layers`: Keras's, by name: a predict job computes with the layers of the train job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_flow import sbp
from keras_flow.compat.oneflow import variables
from keras_flow.compat.oneflow.blobs import Blob, apply, value_of
from keras_flow.compat.oneflow.initializers import own_draws
from keras_flow.compat.oneflow.missing import Names, listed
from keras_flow.compat.oneflow.operations import images, padding_of
from keras_flow.compat.oneflow.variables import Distribute
from keras_flow.errors import FlowError

Activation = Callable[[Blob], Blob]
_OF_JOB = "_regularizer"
_TRAINED = "use_bias kernel_initializer bias_initializer kernel_regularizer bias_regularizer trainable name "


def _by_name(
    kind: type[keras.Layer],
    name: str,
    options: Mapping[str, Any],
    layouts: Mapping[str, sbp.SbpSpec] | None = None,
    **call: Any,
) -> Callable[[Any], Any]:
    """A function of a tensor that calls the layer of a name, which the first call of the session makes."""
    given = {key: own_draws(value) for key, value in options.items() if value is not None}
    trainable = given.pop("trainable", True)
    regularizers = {
        key.removesuffix(_OF_JOB): keras.regularizers.get(each) for key, each in given.items() if key.endswith(_OF_JOB)
    }
    # initial values are those of the first job
    asked = {key: value for key, value in given.items() if not key.endswith(("initializer", _OF_JOB))}

    def called(tensor: Any) -> Any:
        dtype, shape = keras.backend.standardize_dtype(tensor.dtype), tuple(tensor.shape)
        layer = variables.layer_named(
            *(name, lambda name: kind(name=name, dtype=dtype, **given), (kind.__name__, asked, shape)),
            *(shape, layouts, regularizers, trainable),
        )
        return layer(tensor, **call)

    return called


def _activated(result: Blob, activation: Activation | None) -> Blob:
    return result if activation is None else activation(result)


@listed("layers.dense", f"inputs units activation {_TRAINED} model_distribute")
def dense(
    inputs: Blob,
    units: int,
    activation: Activation | None = None,
    *,
    name: str = "Dense",
    model_distribute: Distribute | None = None,
    **options: Any,
) -> Blob:
    """`keras.layers.Dense`.

    Args:
        inputs: [rows, ..., features].
        units: how many outputs.
        activation: a function of blobs, `flow.nn.relu`.
        name: the name by which jobs share the layer.
        model_distribute: `flow.distribute.split(0)` splits the outputs over the devices. OneFlow keeps a kernel as
            [units, features], Keras as [features, units]: `kf.layout_of(kernel)` says S(1), of the bias S(0).
        options: of Keras's layer: `use_bias`, `kernel_initializer` (zeros where none is given, as in OneFlow) ...

    Raises:
        FlowError: a split along another dim, or of inputs with more than two.
    """
    axis = model_distribute.axis if model_distribute else None
    if axis not in (None, 0) or (axis == 0 and len(value_of(inputs, "layers.dense").shape) != 2):
        raise FlowError(
            f"flow.layers.dense {name!r}: model_distribute is broadcast(), auto(), or split(0) of inputs with two "
            f"dims; got axis {axis} and inputs {inputs.shape}"
        )
    layouts: dict[str, sbp.SbpSpec] = {"kernel": sbp.split(1), "bias": sbp.split(0)} if axis == 0 else {}
    if not options.get("use_bias", True):
        layouts.pop("bias", None)
    given = {"units": units, **options, "kernel_initializer": options.get("kernel_initializer") or "zeros"}
    return _activated(apply(_by_name(keras.layers.Dense, name, given, layouts), inputs), activation)


@listed(
    "layers.conv2d",
    "inputs filters kernel_size strides padding data_format dilation_rate groups activation "
    f"{_TRAINED} !weight_name !bias_name",
)
def conv2d(
    inputs: Blob,
    filters: int,
    kernel_size: Any = 1,
    strides: Any = 1,
    padding: str = "VALID",
    data_format: str = "NCHW",
    dilation_rate: Any = None,
    groups: int = 1,
    activation: Activation | None = None,
    *,
    name: str = "Conv2d",
    **options: Any,
) -> Blob:
    """`keras.layers.Conv2D` of images [rows, channels, height, width], or with the channels last."""
    given = {"filters": filters, "kernel_size": kernel_size, "strides": strides, "padding": padding_of(padding)}
    given |= {"data_format": "channels_last", "dilation_rate": dilation_rate, "groups": groups, **options}
    return _activated(images(_by_name(keras.layers.Conv2D, name, given), inputs, data_format), activation)


@listed(
    "layers.batch_normalization",
    "inputs axis momentum epsilon center scale beta_initializer gamma_initializer beta_regularizer gamma_regularizer "
    "moving_mean_initializer moving_variance_initializer trainable training name "
    "!gamma_name !beta_name !moving_mean_name !moving_variance_name",
)
def batch_normalization(
    inputs: Blob, axis: int = -1, *, training: bool = True, name: str = "BatchNorm", **options: Any
) -> Blob:
    """`keras.layers.BatchNormalization` of the logical batch, in either view; a predict job takes moving statistics."""
    is_training = None if training else False
    given = {"axis": axis, **options}
    return apply(_by_name(keras.layers.BatchNormalization, name, given, training=is_training), inputs)


def layer_norm(
    inputs: Blob,
    center: bool = True,
    scale: bool = True,
    trainable: bool = True,
    begin_norm_axis: int = 1,
    begin_params_axis: int = -1,
    epsilon: float = 1e-5,
    name: str = "LayerNorm",
    **options: Any,
) -> Blob:
    """`keras.layers.LayerNormalization` over all dims from one on; with the defaults `GroupNormalization` of one group.

    Args:
        inputs: [rows, ...].
        center: whether an offset, beta, is added.
        scale: whether values are multiplied by a scale, gamma.
        trainable: whether train jobs update these.
        begin_norm_axis: the first of the dims over which values are normalized.
        begin_params_axis: the first of the dims along which gamma and beta are.
        epsilon: what is added to the variance.
        name: the name by which jobs share the layer.
        options: of Keras's layer: `gamma_initializer` ...

    Raises:
        FlowError: Keras has no layer for these dims.
    """
    ndim = len(value_of(inputs, "layers.layer_norm").shape)
    # counted from 0
    norm, params = (first + ndim if first < 0 else first for first in (begin_norm_axis, begin_params_axis))
    given = {"center": center, "scale": scale, "trainable": trainable, "epsilon": epsilon, **options}
    if 0 < norm == params < ndim:
        layer = _by_name(keras.layers.LayerNormalization, name, {"axis": list(range(norm, ndim)), **given})
    elif (norm, params) == (1, ndim - 1):  # a group of all channels: each channel has its gamma
        layer = _by_name(keras.layers.GroupNormalization, name, {"groups": 1, **given})
    else:
        raise FlowError(
            f"flow.layers.layer_norm {name!r}: begin_norm_axis={begin_norm_axis} and "
            f"begin_params_axis={begin_params_axis} of inputs {inputs.shape}; legal are one dim for both, from 1 to "
            f"{ndim - 1}, or begin_norm_axis=1 with begin_params_axis=-1"
        )
    return apply(layer, inputs)


layers = Names("layers", dense=dense, conv2d=conv2d, batch_normalization=batch_normalization, layer_norm=layer_norm)
