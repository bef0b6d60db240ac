"""Operators of `keras.ops` as the functions that a rank runs: their arguments, and Keras's own mistakes put right.

A function here does two things, like those of `keras.ops`: given arrays it computes, given `KerasTensor`s it describes
shape and dtype of the result. Dispatch lays out results by the description, so the two must agree; where those of Keras
3.15 do not, `_CORRECTED` has a function in its place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_flow.layout import itemsize


def function_of(name: str) -> Callable[..., Any] | None:
    """The function for an operator of `keras.ops`; None where Keras has no operator of that name."""
    return _CORRECTED[name](name) if name in _CORRECTED else getattr(keras.ops, name, None)


# ---- arguments

#: parameters of tensors, for which a list of numbers may stand
_TENSORS = frozenset(
    ["x", "x1", "x2", "y", "condition", "indices", "values", "target", "output", "gamma", "beta", "scale", "offset"]
)
#: parameters of whole numbers, for which an array may stand
_NUMBERS = frozenset("axis axes newshape shape repeats pad_width shift indices_or_sections source destination".split())


def arguments_by_name(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Parameter -> argument of a call, defaults included.

    Lists of numbers that stand for tensors become arrays, and arrays that stand for numbers become lists.
    """
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    # None means the global setting, on which the signature depends
    if "data_format" in bound.arguments:
        bound.arguments["data_format"] = bound.arguments["data_format"] or keras.config.image_data_format()
    return {name: _as_taken(name, value) for name, value in bound.arguments.items()}


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call with arguments by parameter, the inverse of `arguments_by_name`; parameters left out keep their defaults."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in _signature(function).parameters.items():
        # Keras's own default
        if name not in arguments:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += arguments[name]
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs |= arguments[name]
        elif parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[name] = arguments[name]
        else:
            args.append(arguments[name])
    return function(*args, **kwargs)


def _as_taken(name: str, value: Any) -> Any:
    if name in _NUMBERS and isinstance(value, np.ndarray):
        return value.tolist()
    # `ops.take(x, [0, 2])`: numbers only, as a list of tensors is several arguments
    is_sequence = name in _TENSORS and isinstance(value, (list, tuple))
    if is_sequence and all(isinstance(leaf, (int, float, np.generic)) for leaf in tree.flatten(value)):
        return np.asarray(value)
    return value


@functools.cache  # inspecting takes longer than a small operator
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


# ---- where Keras 3.15 describes something else than it computes


def _conv(
    inputs: Any,
    kernel: Any,
    strides: Any = 1,
    padding: str = "valid",
    data_format: str | None = None,
    dilation_rate: Any = 1,
) -> Any:
    """`keras.ops.conv`, which computes with kernels of groups but does not describe the result."""
    # only described: nothing is computed
    if isinstance(inputs, keras.KerasTensor):
        channels = inputs.shape[1 if data_format == "channels_first" else -1]
        if channels % kernel.shape[-2] == 0:
            # a kernel of one group has the output's spatial shape and channels too
            kernel = keras.KerasTensor((*kernel.shape[:-2], channels, kernel.shape[-1]), kernel.dtype)
    return keras.ops.conv(inputs, kernel, strides, padding, data_format, dilation_rate)


def wide_indices(indices: Any) -> Any:
    """Indices in at least 32 bits: in 8 bits, as JAX counts classes, the class 300 has the number 44."""
    if itemsize(keras.backend.standardize_dtype(indices.dtype)) >= 4:
        return indices
    return keras.ops.cast(indices, "int32")


def _one_hot(x: Any, num_classes: int, axis: int = -1, dtype: Any = None, sparse: bool = False) -> Any:
    """`keras.ops.one_hot`, which puts the classes along any dim but describes only axes from -1 up to `ndim - 1`."""
    ndim = len(x.shape)
    if -1 <= axis <= ndim or not -ndim - 1 <= axis:  # an axis out of range stays so, for Keras to refuse
        # the new last dim is axis ndim, which Keras computes and does not describe
        axis = -1 if axis == ndim else axis
    else:
        axis += ndim + 1
    return keras.ops.one_hot(wide_indices(x), num_classes, axis, dtype, sparse)


def _repeat(x: Any, repeats: Any, axis: int | None = None) -> Any:
    """`keras.ops.repeat`, which on JAX takes no list of counts."""
    return keras.ops.repeat(x, np.asarray(repeats) if isinstance(repeats, (list, tuple)) else repeats, axis)


def _hstack(xs: Sequence[Any]) -> Any:
    """`keras.ops.hstack`, which does not describe its result for tensors of one dim."""
    return keras.ops.concatenate(xs, axis=0 if len(xs[0].shape) == 1 else 1)


def _vstack(xs: Sequence[Any]) -> Any:
    """`keras.ops.vstack`, which describes tensors of one dim as joined end to end instead of as rows."""
    rows = [keras.ops.expand_dims(x, 0) if len(x.shape) == 1 else x for x in xs]
    return keras.ops.concatenate(rows, axis=0)


def _categorical_crossentropy(target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Any:
    """`keras.ops.categorical_crossentropy`, which is described as if classes were always the last dim."""
    if -len(output.shape) <= axis < -1:
        axis += len(output.shape)  # on TensorFlow no negative axis works but -1
    result = keras.ops.categorical_crossentropy(target, output, from_logits, axis)
    if not isinstance(result, keras.KerasTensor):
        return result
    # the classes are summed over, wherever they are
    kept = list(output.shape)
    del kept[axis]
    return keras.KerasTensor(kept, result.dtype)


@functools.cache
def _bitwise(name: str) -> Callable[..., Any]:
    """An operator on bits, which Keras describes with the shape of the first argument, not the broadcast one."""
    operator = getattr(keras.ops, name)

    def function(x: Any, y: Any) -> Any:
        result = operator(x, y)
        if not isinstance(result, keras.KerasTensor):
            return result
        both: Any = keras.ops.add(x, y)
        return keras.KerasTensor(both.shape, result.dtype)

    return functools.update_wrapper(function, operator)


@functools.cache
def _on_a_copy(name: str) -> Callable[..., Any]:
    """An operator that on numpy writes into its first argument, given a copy: global tensors share their shards."""
    operator = getattr(keras.ops, name)

    def function(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        is_described = isinstance(inputs, keras.KerasTensor)
        return operator(inputs if is_described else keras.ops.copy(inputs), *args, **kwargs)

    return functools.update_wrapper(function, operator)


def scatter_update(target: Any, indices: Any, updates: Any) -> Any:
    """`keras.ops.scatter_update`, which never writes into `target`."""
    return _on_a_copy("scatter_update")(target, indices, updates)


def _documented(function: Callable[..., Any]) -> Callable[[str], Callable[..., Any]]:
    """Gives a function the name and the docstring of Keras's operator."""
    return lambda name: functools.update_wrapper(function, getattr(keras.ops, name))


#: operator -> function of its name that returns what is run in its place
_CORRECTED: dict[str, Callable[[str], Callable[..., Any]]] = {
    "conv": _documented(_conv),
    "one_hot": _documented(_one_hot),
    "repeat": _documented(_repeat),
    "hstack": _documented(_hstack),
    "vstack": _documented(_vstack),
    "categorical_crossentropy": _documented(_categorical_crossentropy),
    **dict.fromkeys(
        "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift left_shift right_shift".split(),
        _bitwise,
    ),
    "scatter_update": _on_a_copy,
    "slice_update": _on_a_copy,
}
