"""Calls of operators, small: name, tensors (arrays, or lists of them) and other arguments by parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

_random = np.random.default_rng(7)


def floats(*shape: int) -> np.ndarray:
    """Away from zero and from each other, so that no operator is at a kink."""
    return (_random.permutation(np.prod(shape, dtype=int)).reshape(shape) / 8 - 2.03).astype("float32")


def positive(*shape: int) -> np.ndarray:
    return np.abs(floats(*shape)) + 0.5


def numbers(high: int, *shape: int) -> np.ndarray:
    return _random.integers(0, high, shape).astype("int32")


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        name: in `keras.ops`.
        tensors: parameter -> array or list of arrays.
        options: parameter -> value.
        rows: at least so many signatures on one axis of 2 ranks, the one of all broadcast included.
        smooth: it has gradients by all of its float tensors.
    """

    name: str
    tensors: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 2
    smooth: bool = True

    def __str__(self) -> str:
        shapes = [np.shape(one) if isinstance(one, np.ndarray) else len(one) for one in self.tensors.values()]
        return f"{self.name} {shapes} {self.options}"


def _one(name: str, x: np.ndarray, rows: int = 2, smooth: bool = True, **options: Any) -> Case:
    return Case(name, {"x": x}, options, rows, smooth)


def _two(name: str, x1: np.ndarray, x2: np.ndarray, rows: int = 2, smooth: bool = True) -> Case:
    return Case(name, {"x1": x1, "x2": x2}, {}, rows, smooth)


CASES = [
    _one("exp", floats(4, 6), 3),
    _one("relu", floats(4, 6), 3),
    _one("negative", floats(4, 6), 4),
    _one("cast", floats(4, 6), 3, dtype="float16"),
    _one("clip", floats(4, 6), 3, x_min=-1.0, x_max=1.0),
    _two("add", floats(4, 6), floats(4, 6), 4),
    _two("add", floats(4, 6), floats(6), 4),
    _two("subtract", floats(4, 6), floats(4, 1), 4),
    _two("multiply", floats(4, 6), floats(4, 6), 5),
    _two("divide", floats(4, 6), positive(6), 3),
    Case("divide", {"x1": floats(4, 6)}, {"x2": 3.0}, 4),
    _two("maximum", floats(4, 6), floats(4, 6), 3),
    _two("power", positive(4, 6), floats(4, 6), 3),
    _two("less", floats(4, 6), floats(4, 6), 3, smooth=False),
    Case("where", {"condition": numbers(2, 4, 6) > 0, "x1": floats(4, 6), "x2": floats(6)}, {}, 4),
    _two("matmul", floats(4, 6), floats(6, 8), 6),
    _two("matmul", floats(2, 4, 6), floats(2, 6, 8), 7),
    _two("matmul", floats(2, 4, 6), floats(6, 8), 7),
    _two("matmul", floats(6), floats(6, 8), 5),
    Case("einsum", {"operands": [floats(4, 6, 2), floats(6, 2, 8)]}, {"subscripts": "abc,bcd->ad"}, 7),
    _one("sum", floats(4, 6, 2), 5, axis=1),
    _one("sum", floats(4, 6), 4, axis=(0, 1), keepdims=True),
    _one("mean", floats(4, 6, 2), 3, axis=(0, 2)),
    _one("max", floats(4, 6, 2), 3, axis=1, keepdims=True),
    _one("min", floats(4, 6), 2, axis=0),
    _one("prod", positive(4, 6), 2, axis=0),
    _one("var", floats(4, 6), 2, axis=1),
    _one("std", floats(4, 6), 2, axis=1),
    _one("any", numbers(2, 4, 6) > 0, 2, smooth=False, axis=1),
    _one("logsumexp", floats(4, 6), 2, axis=1),
    _one("norm", floats(4, 6), 2, axis=1),
    _one("argmax", floats(4, 6), 2, smooth=False, axis=1),
    _one("softmax", floats(4, 6, 2), 3, axis=1),
    _one("log_softmax", floats(4, 6), 2),
    _one("sort", floats(4, 6), 2),
    _one("argsort", floats(4, 6), 2, smooth=False),
    _one("top_k", floats(4, 6), 2, k=3),
    _one("cumsum", floats(4, 6), 3, axis=0),
    _one("cumprod", positive(4, 6), 2, axis=0),
    _one("reshape", floats(4, 6, 2), 4, newshape=(8, 3, 2)),
    _one("reshape", floats(4, 6), 3, newshape=(24,)),
    _one("reshape", floats(24), 3, newshape=(4, 6)),
    _one("transpose", floats(4, 6, 2), 5, axes=(1, 2, 0)),
    _one("swapaxes", floats(4, 6), 4, axis1=0, axis2=1),
    _one("expand_dims", floats(4, 6), 4, axis=1),
    _one("squeeze", floats(4, 1, 6), 4, axis=1),
    _one("broadcast_to", floats(4, 1), 4, shape=(2, 4, 6)),
    _one("repeat", floats(4, 6), 3, repeats=2, axis=1),
    _one("tile", floats(4, 6), 3, repeats=(1, 2)),
    _one("flip", floats(4, 6), 3, axis=1),
    _one("roll", floats(4, 6), 3, shift=2, axis=1),
    _one("pad", floats(4, 6), 3, pad_width=((1, 2), (0, 0))),
    _one("split", floats(4, 6), 3, indices_or_sections=3, axis=1),
    Case("concatenate", {"xs": [floats(4, 6), floats(4, 2)]}, {"axis": 1}, 3),
    Case("stack", {"x": [floats(4, 6), floats(4, 6)]}, {"axis": 1}, 4),
    Case("take", {"x": floats(8, 6), "indices": numbers(8, 4, 2)}, {"axis": 0}, 6),
    Case("take", {"x": floats(4, 8, 2), "indices": numbers(8, 6) - 2}, {"axis": 1}, 5),
    Case("take_along_axis", {"x": floats(4, 6), "indices": numbers(6, 4, 2)}, {"axis": 1}, 3),
    Case("one_hot", {"x": numbers(6, 4, 2)}, {"num_classes": 6}, 4, smooth=False),
    Case("layer_normalization", {"x": floats(4, 6), "gamma": floats(6), "beta": floats(6)}, {"epsilon": 1e-3}, 2),
    Case("rms_normalization", {"x": floats(4, 6), "scale": floats(6)}, {"epsilon": 1e-3}, 2),
    Case(
        "batch_normalization",
        {"x": floats(4, 2, 6), "mean": floats(6), "variance": positive(6), "offset": floats(6), "scale": floats(6)},
        {"axis": -1},
        4,
    ),
    Case("conv", {"inputs": floats(4, 6, 4), "kernel": floats(3, 4, 4)}, {"padding": "same"}, 6),
    Case("conv", {"inputs": floats(4, 5, 5, 4), "kernel": floats(2, 2, 4, 4)}, {"strides": 2}, 6),
    Case("conv", {"inputs": floats(4, 3, 4, 4, 4), "kernel": floats(2, 2, 2, 4, 4)}, {}, 6),
    Case("max_pool", {"inputs": floats(4, 6, 6, 2)}, {"pool_size": 2, "strides": 2}, 3),
    Case("average_pool", {"inputs": floats(4, 6, 2)}, {"pool_size": 2, "strides": 2}, 4),
    Case(
        "dot_product_attention",
        {"query": floats(4, 3, 2, 5) / 9, "key": floats(4, 6, 2, 5) / 9, "value": floats(4, 6, 2, 5) / 9},
        {},
        3,
    ),
    Case(
        "categorical_crossentropy",
        {"target": np.eye(6, dtype="float32")[numbers(6, 4)], "output": floats(4, 6)},
        {"from_logits": True},
        2,
        smooth=False,
    ),
    Case(
        "sparse_categorical_crossentropy",
        {"target": numbers(6, 4), "output": floats(4, 6)},
        {"from_logits": True},
        2,
        smooth=False,
    ),
    Case(
        "sparse_categorical_crossentropy",
        {"target": numbers(6, 4), "output": positive(4, 6) / 7},
        {"from_logits": False},
        2,
        smooth=False,
    ),
    Case("binary_crossentropy", {"target": positive(4, 6) / 9, "output": positive(4, 6) / 9}, {}, 3, smooth=False),
    _one("squeeze", floats(2, 1, 4), 4),
    Case("conv", {"inputs": floats(4, 6, 8), "kernel": floats(3, 2, 4)}, {}, 5),
    _one("take", floats(4, 6), 4, indices=-2, axis=0),
    Case("take", {"x": floats(4, 6), "indices": numbers(24, 5)}, {}, 2),
]


def _each(names: str, *arrays: np.ndarray, rows: int = 3, parameters: str = "x1 x2", **options: Any) -> list[Case]:
    """A case for each name."""
    tensors = {"x": arrays[0]} if len(arrays) == 1 else dict(zip(parameters.split(), arrays, strict=True))
    return [Case(name, tensors, options, rows) for name in names.split()]


_whole, _other = numbers(9, 4, 6) - 4, numbers(9, 4, 6) - 4

#: the names of the table that `CASES` leaves out; numpy runs them
EVERY_NAME = [
    *_each("abs absolute arcsinh arctan ceil celu cos cosh elu erf exp2 expm1 floor gelu hard_shrink", floats(4, 6)),
    *_each("hard_sigmoid hard_silu hard_swish hard_tanh isfinite leaky_relu log_sigmoid", floats(4, 6)),
    *_each("ones_like relu6 round selu sigmoid sign silu sin sinh soft_shrink softplus softsign", floats(4, 6)),
    *_each("sparse_plus square squareplus swish tan tanh tanh_shrink trunc zeros_like", floats(4, 6)),
    *_each("arccos arcsin arctanh erfinv", floats(4, 6) / 2.1),
    *_each("arccosh log log10 log1p log2 reciprocal rsqrt sqrt", positive(4, 6) + 0.6),
    *_each("isinf isnan nan_to_num", np.where(floats(4, 6) < 0, np.array([np.nan, np.inf, 1] * 2, "float32"), -np.inf)),
    *_each("logical_not", numbers(2, 4, 6) > 0),
    *_each("real imag conj", floats(4, 6), rows=4),
    Case("stop_gradient", {"variable": floats(4, 6)}, {}, 4, smooth=False),
    *_each("glu median", floats(4, 6), rows=2, axis=1),
    *_each("full_like", floats(4, 6), fill_value=7.5),
    *_each("arctan2 minimum", floats(4, 6), floats(4, 6)),
    *_each("floor_divide mod", floats(4, 6), positive(6)),
    *_each("floor_divide mod", _whole, np.abs(_other) + 1),
    *_each("true_divide", floats(4, 6), positive(6), rows=3),
    *_each("equal not_equal greater greater_equal less_equal", _whole, _other),
    *_each("logical_and logical_or logical_xor", _whole > 0, _other > 0),
    *_each("bitwise_and bitwise_or bitwise_xor", _whole, _other, parameters="x y"),
    *_each("dot", floats(4, 6), floats(6, 8), rows=6),
    *_each("dot", floats(2, 4, 6), floats(6), rows=5),
    *_each("all", numbers(9, 4, 6) > 0, rows=2, axis=1),
    *_each("amax amin argmin count_nonzero", _whole, rows=2, axis=1),
    *_each("moments", floats(4, 6), rows=1, axes=(1,)),
    *_each("normalize", floats(4, 6), rows=2, axis=1),
    *_each("array_split", floats(4, 6), indices_or_sections=4, axis=1),
    *_each("mean", _whole.astype("uint8"), rows=2, axis=1),
    *_each("sum", _whole.astype("uint8"), rows=3, axis=1),
    *_each("sum", _whole > 0, rows=3, axis=1),
    *_each("cumsum", _whole.astype("int8"), rows=2, axis=1),
    *_each("cumsum", _whole > 0, rows=2, axis=1),
    *_each("cast", _whole, dtype="float32"),
    *_each("cast", _whole > 0, dtype="int32"),
    *_each("cast", floats(4, 6), rows=4, dtype="float64"),
    *_each("add", _whole.astype("uint8"), floats(6)),
    *_each("subtract multiply", _whole.astype("uint8"), _other.astype("uint8"), rows=4),
    *_each("multiply divide", _whole.astype("int16"), positive(6)),
    *_each("matmul", _whole.astype("int8"), _other.T.astype("int8"), rows=4),
]
