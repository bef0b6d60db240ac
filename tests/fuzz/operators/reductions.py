"""Reductions, statistics, and operators along one dim."""

from __future__ import annotations

import math

import numpy as np

from tests.fuzz.drawing import Drawing
from tests.fuzz.operators.registry import any_float, any_tensor, axes_of, axis_of, other, smooth


def _apart(array: np.ndarray) -> bool:
    """Whether rounding cannot change the order of elements."""
    return array.dtype != "float32" or array.size < 2 or bool(np.diff(np.sort(array.ravel())).min() > 1e-3)


@smooth
def reduction(d: Drawing) -> None:
    x = any_float(d)
    name = d.random.choice(("sum", "sum", "mean", "max", "min", "logsumexp", "var", "prod"))
    if d.array(x).size == 0 and name in ("mean", "var", "logsumexp"):
        return
    d.note(name, (x,), axis=axes_of(d, d.array(x).ndim), keepdims=d.array(x).ndim > 0 and d.random.random() < 0.4)


@other
def reduction_of_any(d: Drawing) -> None:
    x = any_tensor(d)
    array = d.array(x)
    if array.dtype == "float32":
        d.note("count_nonzero", (d.note("operator.ge", (x, 0.321)),), axis=axes_of(d, array.ndim))
        return
    names = (
        ("sum", "any", "all", "count_nonzero", "max", "min", "prod") if array.dtype != "bool" else ("sum", "any", "all")
    )
    name = d.random.choice(names)
    d.note(name, (x,), axis=axes_of(d, array.ndim))


@other
def place_of_extreme(d: Drawing) -> None:
    x = d.any_of(lambda a: a.ndim > 0 and a.dtype != "bool" and _apart(a)) or d.tensor(d.shape(2))
    axis = None if d.random.random() < 0.2 else axis_of(d, d.array(x).ndim)
    d.note(d.random.choice(("argmax", "argmin")), (x,), axis=axis, keepdims=d.random.random() < 0.3)


@other
def norm(d: Drawing) -> None:
    x = any_float(d, 1, nonempty=True)
    order = d.random.choice((None, 1, 2, math.inf))
    axis = axis_of(d, d.array(x).ndim)
    d.note("norm", (x,), ord=order, axis=axis, keepdims=d.random.random() < 0.5)


@smooth
def softmax(d: Drawing) -> None:
    x = any_float(d, 1, nonempty=True)
    name = d.random.choice(("softmax", "log_softmax"))
    d.note(name, (x,), axis=d.random.choice((-1, axis_of(d, d.array(x).ndim))))


@other
def normalization(d: Drawing) -> None:
    x = any_float(d, 1, nonempty=True)
    name = d.random.choice(("rms_normalization", "layer_normalization"))
    d.note(name, (x,), axis=axis_of(d, d.array(x).ndim), epsilon=0.5)


@smooth
def cumulative(d: Drawing) -> None:
    x = any_float(d, 1)
    d.note("cumsum", (x,), axis=d.random.choice((None, axis_of(d, d.array(x).ndim))))


@other
def cumulative_product(d: Drawing) -> None:
    x = any_float(d, 1)
    d.note("cumprod", (x,), axis=d.random.choice((None, axis_of(d, d.array(x).ndim))))


@smooth
def sort(d: Drawing) -> None:
    x = any_float(d, 1)
    d.note("sort", (x,), axis=axis_of(d, d.array(x).ndim))


@other
def order(d: Drawing) -> None:
    x = d.any_of(lambda a: a.ndim > 0 and a.dtype == "float32" and _apart(a)) or d.tensor(d.shape(2))
    d.note("argsort", (x,), axis=axis_of(d, d.array(x).ndim))


@other
def of_any_kind(d: Drawing) -> None:
    x = d.any_of(lambda a: a.dtype != "bool") or d.tensor(d.shape(2))
    name = d.random.choice(("isfinite", "zeros_like", "ones_like", "full_like", "nan_to_num", "sign", "power", "copy"))
    args = {"full_like": (x, 2), "power": (x, 2)}.get(name, (x,))
    d.note(name, args)


@other
def stacked(d: Drawing) -> None:
    x = any_float(d, 1)
    y = d.tensor(d.array(x).shape, ranks=d.ranks(x))
    d.note(d.random.choice(("vstack", "hstack")), ([x, y],))
    d.note("array_split", (x, d.random.choice((2, 3))), axis=axis_of(d, d.array(x).ndim))


@other
def top_k(d: Drawing) -> None:
    x = d.any_of(lambda a: a.ndim > 0 and a.dtype == "float32" and _apart(a) and a.shape[-1] > 0)
    if x is not None:
        d.note("top_k", (x, d.random.randint(1, d.array(x).shape[-1])))


@other
def statistics(d: Drawing) -> None:
    x = any_float(d, 1, nonempty=True)
    ndim = d.array(x).ndim
    name = d.random.choice(("moments", "median", "quantile", "diff", "average"))
    if name == "moments":
        d.note(name, (x,), axes=[axis_of(d, ndim) % ndim], keepdims=d.random.random() < 0.5)
    elif name == "quantile":
        d.note(name, (x, 0.3), axis=axis_of(d, ndim))
    else:
        d.note(name, (x,), axis=axis_of(d, ndim))


@other
def batch_normalization(d: Drawing) -> None:
    x = any_float(d, 2, nonempty=True)
    array = d.array(x)
    axis = axis_of(d, array.ndim)
    vector = (array.shape[axis],)
    mean, gamma = d.tensor(vector, ranks=d.ranks(x)), d.tensor(vector, ranks=d.ranks(x))
    square = d.note("square", (d.tensor(vector, ranks=d.ranks(x)),))
    d.note("batch_normalization", (x, mean, square, axis), gamma=gamma, epsilon=0.5)


@other
def crossentropy(d: Drawing) -> None:
    x = any_float(d, 1, nonempty=True)
    array = d.array(x)
    kind = d.random.random()
    if kind < 0.4:
        y = d.tensor(array.shape, ranks=d.ranks(x))
        d.note("categorical_crossentropy", (y, x), from_logits=True, axis=d.random.choice((-1, axis_of(d, array.ndim))))
    elif kind < 0.8:
        classes = d.note("operator.mod", (d.tensor(array.shape[:-1], "int32", d.ranks(x)), array.shape[-1]))
        if classes is not None:
            d.note("sparse_categorical_crossentropy", (classes, x), from_logits=True)
    else:
        y = d.note("sigmoid", (d.tensor(array.shape, ranks=d.ranks(x)),))
        d.note("binary_crossentropy", (y, x), from_logits=True)
