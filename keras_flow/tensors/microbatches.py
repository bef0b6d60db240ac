"""`kf.unpack` and `kf.pack`: the rows of a tensor as micro-batches, and back; names and meaning of OneFlow."""

from __future__ import annotations

from typing import Any, TypeVar

import keras

from keras_flow.errors import FlowError
from keras_flow.tensors import ops
from keras_flow.tensors.global_tensor import GlobalTensor

Tensor = TypeVar("Tensor")


def unpack(x: Tensor, n: int) -> Tensor:
    """Cut the rows of a tensor into micro-batches: [rows, ...] becomes [n, rows / n, ...]. `pack` is its inverse.

    Args:
        x: a global tensor, or an array of the engine or of NumPy.
        n: how many micro-batches.

    Returns:
        A tensor of the kind of `x`; a tensor of the engine where it is NumPy's.

    Raises:
        FlowError: the rows do not divide by `n`, or there are none.

    Example:
        Gradients of four micro-batches, one at a time:

        >>> import numpy as np, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> x = kf.tensor(np.arange(8.0), placement=kf.Placement([0, 1]), sbp="S(0)")
        >>> kf.unpack(x, 4).shape
        (4, 2)
        >>> bool((kf.pack(kf.unpack(x, 4), 4).numpy() == x.numpy()).all())
        True
    """
    shape = _shape(x)
    if not isinstance(n, int) or n < 1 or not shape or shape[0] % n:
        rows = f"the {shape[0]} rows of shape {list(shape)}" if shape else "a scalar"
        raise FlowError(f"kf.unpack: {rows} cannot be cut into {n} micro-batches of as many rows; take a divisor")
    return _reshaped(x, (n, shape[0] // n, *shape[1:]))


def pack(x: Tensor, n: int) -> Tensor:
    """Join micro-batches to one batch: [n, rows, ...] becomes [n * rows, ...]; `pack(unpack(x, n), n) == x`.

    Args:
        x: as `unpack` gives it.
        n: how many micro-batches there are.

    Returns:
        A tensor of the kind of `x`.

    Raises:
        FlowError: there are others than `n` micro-batches.

    Example:
        >>> import numpy as np, keras_flow as kf
        >>> kf.pack(np.ones((4, 2, 3)), 4).shape
        (8, 3)
    """
    shape = _shape(x)
    if len(shape) < 2 or shape[0] != n:
        raise FlowError(f"kf.pack: shape {list(shape)} is not that of {n} micro-batches, [{n}, rows, ...]")
    return _reshaped(x, (shape[0] * shape[1], *shape[2:]))


def _shape(x: object) -> tuple[int, ...]:
    found: Any = x.shape if isinstance(x, GlobalTensor) else keras.ops.shape(x)
    return tuple(found)


def _reshaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    reshape: Any = ops.reshape if isinstance(x, GlobalTensor) else keras.ops.reshape
    return reshape(x, shape)
