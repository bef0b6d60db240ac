"""Operators along a split dim, made of others: each entry looks at the arguments and returns a composition, or None."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras_flow import sbp as _sbp
from keras_flow.sbp import Split
from keras_flow.signatures.call import dims_of
from keras_flow.tensors import explanation
from keras_flow.tensors.global_tensor import GlobalTensor, summed

Composition = Callable[[], Any]


#: name and arguments, tensors by their layouts -> whether the composition costs less
_decided: dict[tuple[str, str], bool] = {}


def cheaper(name: str, arguments: Mapping[str, Any], composition: Composition, plain: Composition) -> Any:
    """The result of that which receives fewer bytes, or holds less on a rank where these are equal."""
    from keras import tree

    parts = tree.map_structure(
        lambda leaf: (leaf.layout, leaf.dtype) if isinstance(leaf, GlobalTensor) else leaf, dict(arguments)
    )
    key = (name, repr(parts))
    if key not in _decided:
        _decided[key] = explanation.cost_of(composition) < explanation.cost_of(plain)
    return composition() if _decided[key] else plain()


def _cuts(x: GlobalTensor, dims: Sequence[int]) -> bool:
    return any(isinstance(part, Split) and part.dim in dims for part in x.sbp)


def _over(name: str, default: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A composition for when a dim that `axis` names is split."""

    def wrap(made: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Composition | None]:
        def look(arguments: Mapping[str, Any]) -> Composition | None:
            x = arguments[name]
            axis = arguments.get("axis", default)
            if not isinstance(x, GlobalTensor):
                return None
            dims = tuple(sorted(dims_of(axis, x.ndim)))
            return functools.partial(made, dict(arguments), dims) if _cuts(x, dims) else None

        return look

    return wrap


def _as(x: GlobalTensor, dtype: str) -> GlobalTensor:
    from keras_flow.tensors import ops

    return x if x.dtype == dtype else ops.cast(x, dtype)


def _precise(x: GlobalTensor) -> GlobalTensor:
    """In float32 at least, which is what Keras computes statistics in."""
    import keras

    return _as(x, keras.backend.result_type(x.dtype, "float32"))


def _float(dtype: str) -> str:
    """The dtype of statistics of a tensor."""
    import keras

    return keras.backend.result_type(dtype, float)


@_over("x")
def _mean(arguments: dict, dims: tuple[int, ...]) -> Any:
    from keras_flow.tensors import ops

    x = _precise(arguments["x"])
    count = math.prod(x.shape[dim] for dim in dims)
    mean = ops.divide(ops.sum(x, axis=dims, keepdims=arguments["keepdims"]), float(count))
    return _as(mean, _float(arguments["x"].dtype))


@_over("x")
def _var(arguments: dict, dims: tuple[int, ...]) -> Any:
    from keras_flow.tensors import ops

    x = _precise(arguments["x"])
    off = x - _whole(ops.mean(x, axis=dims, keepdims=True))
    variance = ops.mean(ops.square(off), axis=dims, keepdims=arguments["keepdims"])
    return _as(variance, _float(arguments["x"].dtype))


@_over("x")
def _std(arguments: dict, dims: tuple[int, ...]) -> Any:
    from keras_flow.tensors import ops

    return ops.sqrt(ops.var(arguments["x"], axis=dims, keepdims=arguments["keepdims"]))


def _extreme(name: str) -> Any:
    @_over("x")
    def made(arguments: dict, dims: tuple[int, ...]) -> Any:
        """The extremes of the shards, one for each rank, gathered."""
        from keras_flow.tensors import ops
        from keras_flow.tensors.blocks import per_block
        from keras_flow.tensors.running import run

        operator = getattr(ops, name)
        return run(name, operator._function, {**arguments, "x": per_block(name, arguments["x"], dims), "axis": dims})

    return made


@_over("x")
def _logsumexp(arguments: dict, dims: tuple[int, ...]) -> Any:
    from keras_flow.tensors import ops

    x = arguments["x"]
    top = _still(ops.max(x, axis=dims, keepdims=True))
    top = ops.where(ops.isfinite(top), top, 0.0)  # where all are -inf, so is the result
    total = ops.log(ops.sum(ops.exp(x - top), axis=dims, keepdims=True)) + top
    return total if arguments["keepdims"] else ops.squeeze(total, dims)


@_over("x", -1)
def _softmax(arguments: dict, dims: tuple[int, ...]) -> Any:
    from keras_flow.tensors import ops

    x = arguments["x"]
    parts = ops.exp(x - _still(ops.max(x, axis=dims, keepdims=True)))
    return parts / _whole(ops.sum(parts, axis=dims, keepdims=True))


@_over("x", -1)
def _log_softmax(arguments: dict, dims: tuple[int, ...]) -> Any:
    from keras_flow.tensors import ops

    x = arguments["x"]
    off = x - _still(ops.max(x, axis=dims, keepdims=True))
    return off - ops.log(ops.sum(ops.exp(off), axis=dims, keepdims=True))


def _still(x: GlobalTensor) -> GlobalTensor:
    """Without a gradient: what is subtracted for range cancels."""
    return GlobalTensor(x.layout, x.dtype, x._shards)


def _whole(x: GlobalTensor) -> GlobalTensor:
    """The sum itself where it is partial: it is read more than once, and is reduced once."""
    return x.to_global(sbp=summed(x.sbp))


@_over("x")
def _norm(arguments: dict, dims: tuple[int, ...]) -> Any:
    from keras_flow.tensors import ops

    x, order = _as(arguments["x"], _float(arguments["x"].dtype)), arguments.get("ord")
    if order is None or (order in (2, "fro") and (len(dims) == 1 or order == "fro")):
        return ops.sqrt(ops.sum(ops.square(x), axis=dims, keepdims=arguments["keepdims"]))
    if order == 1 and len(dims) == 1:
        return ops.sum(ops.absolute(x), axis=dims, keepdims=arguments["keepdims"])
    if len(dims) == 1 and order in (math.inf, -math.inf):
        return (ops.max if order > 0 else ops.min)(ops.absolute(x), axis=dims, keepdims=arguments["keepdims"])
    from keras_flow.tensors.running import run

    return run("norm", ops.norm._function, arguments)


@_over("x")
def _moments(arguments: dict, dims: tuple[int, ...]) -> Any:
    from keras_flow.tensors import ops

    x, keep, dtype = _precise(arguments["x"]), arguments["keepdims"], arguments["x"].dtype
    found = ops.mean(x, axis=dims, keepdims=keep), ops.var(x, axis=dims, keepdims=keep)
    if dtype == "float16":  # as `keras.ops`: what is too large for it becomes its largest number
        found = tuple(ops.clip(one, -65504.0, 65504.0) for one in found)
    return tuple(_as(one, _float(dtype)) for one in found)


def _by_axes(arguments: Mapping[str, Any]) -> Composition | None:
    """`moments` calls its dims `axes`."""
    return _moments({**arguments, "axis": arguments["axes"]})


@_over("x", -1)
def _rms_normalization(arguments: dict, dims: tuple[int, ...]) -> Any:
    x, scale = _precise(arguments["x"]), arguments["scale"]
    result = _scaled(x, x, dims, arguments["epsilon"])
    return _as(result if scale is None else result * scale, arguments["x"].dtype)


@_over("x", -1)
def _layer_normalization(arguments: dict, dims: tuple[int, ...]) -> Any:
    from keras_flow.tensors import ops

    x, gamma, beta = _precise(arguments["x"]), arguments["gamma"], arguments["beta"]
    off = x - _whole(ops.mean(x, axis=dims, keepdims=True))
    is_rms = arguments.get("kwargs", {}).get("rms_scaling", False)  # Keras's older argument, which knows no beta
    result = _scaled(x if is_rms else off, off, dims, arguments["epsilon"])
    if gamma is not None:
        result = result * _along(gamma, x, dims)
    if beta is not None and not is_rms:
        result = result + _along(beta, x, dims)
    return _as(result, arguments["x"].dtype)


def _scaled(x: GlobalTensor, off: GlobalTensor, dims: Sequence[int], epsilon: float | None) -> GlobalTensor:
    """`x` by the root of the mean square of `off`."""
    import keras

    from keras_flow.tensors import ops

    square = _whole(ops.mean(ops.square(off), axis=dims, keepdims=True))
    return x * ops.rsqrt(square + (keras.config.epsilon() if epsilon is None else epsilon))


def _along(vector: GlobalTensor, x: GlobalTensor, dims: Sequence[int]) -> GlobalTensor:
    from keras_flow.tensors import ops

    return ops.reshape(_as(_beside(x, vector), x.dtype), [x.shape[dim] if dim in dims else 1 for dim in range(x.ndim)])


def _beside(x: GlobalTensor, value: Any) -> GlobalTensor:
    """An array, whole on every rank of `x`."""
    from keras_flow.tensors.creation import tensor

    if isinstance(value, GlobalTensor):
        return value
    return tensor(value, placement=x.placement, sbp=(_sbp.broadcast,) * x.placement.ndim)


def _categorical_crossentropy(arguments: Mapping[str, Any]) -> Composition | None:
    output = arguments["output"]
    axis = _class_axis(arguments)
    if axis is None:
        return None

    def made() -> Any:
        from keras_flow.tensors import ops

        target = _beside(output, arguments["target"])
        return ops.negative(ops.sum(target * _log_probabilities(arguments, axis), axis=axis))

    return made


def _sparse_categorical_crossentropy(arguments: Mapping[str, Any]) -> Composition | None:
    output = arguments["output"]
    axis = _class_axis(arguments)
    if axis is None:
        return None

    def made() -> Any:
        from keras_flow.tensors import ops
        from keras_flow.tensors.running import run

        classes = _beside(output, arguments["target"])
        if classes.ndim == output.ndim and classes.shape[-1] == 1:
            classes = ops.squeeze(classes, -1)
        chosen = run(
            "one_hot",
            ops.one_hot._function,
            {
                "x": classes,
                "num_classes": output.shape[axis],
                "axis": axis,
                "dtype": output.dtype,
                "sparse": False,
            },
        )
        return ops.negative(ops.sum(chosen * _log_probabilities(arguments, axis), axis=axis))

    return made


def _class_axis(arguments: Mapping[str, Any]) -> int | None:
    """The dim of the classes, where it is split."""
    output = arguments["output"]
    if not isinstance(output, GlobalTensor):
        return None
    axis = int(arguments["axis"]) % output.ndim
    return axis if _cuts(output, (axis,)) else None


def _log_probabilities(arguments: Mapping[str, Any], axis: int) -> Any:
    """As `keras.ops` has it: probabilities are made to sum to one and clipped."""
    import keras

    from keras_flow.tensors import ops

    output = arguments["output"]
    if arguments["from_logits"]:
        return ops.log_softmax(output, axis=axis)
    epsilon = keras.config.epsilon()
    output = output / _whole(ops.sum(output, axis=axis, keepdims=True))
    return ops.log(ops.clip(output, epsilon, 1.0 - epsilon))


#: operator -> the look at its arguments
COMPOSED: dict[str, Callable[[Mapping[str, Any]], Composition | None]] = {
    "mean": _mean,
    "var": _var,
    "std": _std,
    "max": _extreme("max"),
    "min": _extreme("min"),
    "amax": _extreme("max"),
    "amin": _extreme("min"),
    "logsumexp": _logsumexp,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "norm": _norm,
    "moments": _by_axes,
    "rms_normalization": _rms_normalization,
    "layer_normalization": _layer_normalization,
    "categorical_crossentropy": _categorical_crossentropy,
    "sparse_categorical_crossentropy": _sparse_categorical_crossentropy,
}
