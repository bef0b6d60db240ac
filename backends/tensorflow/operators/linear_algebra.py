"""Linear algebra of small matrices, by operations that DTensor splits by rows.

DTensor has rules for Cholesky and Qr alone, and none for what their gradients need.
"""

# pyright: reportArgumentType=false
# (the stubs of tf.Tensor know no ellipsis and no None in a slice)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from keras_flow.backends.tensorflow.operators.operations import known_value, whole_dims, without_rule

#: larger systems are left to TensorFlow: a step would have several operations for each of their columns
_MOST_COLUMNS = 8


@without_rule("tensorflow.python.ops.array_ops", "matrix_diag_part", also=("tensorflow.linalg:diag_part",))
def diag_part(_: object, original: Callable[..., tf.Tensor], input: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Hook on `tf.linalg.diag_part`: the sum of each row's one element on the diagonal of a square matrix."""
    input = tf.convert_to_tensor(input)
    size, numbers = _size(input), input.dtype.is_floating or input.dtype.is_integer
    if args or kwargs or not numbers or size is None:
        return original(input, *args, **kwargs)
    # a choice and a sum: DTensor has rules for both, forward and backward, and none for MatrixDiagPart
    chosen = tf.where(tf.constant(np.eye(size, dtype=bool)), input, tf.zeros((), input.dtype))
    return tf.reduce_sum(chosen, -1)


@without_rule("tensorflow.python.ops.array_ops", "matrix_band_part", also=("tensorflow.linalg:band_part",))
def band_part(
    _: object, original: Callable[..., tf.Tensor], input: Any, num_lower: Any, num_upper: Any, name: str | None = None
) -> tf.Tensor:
    """Hook on `tf.linalg.band_part`: a choice by a constant mask."""
    input, lower, upper = tf.convert_to_tensor(input), known_value(num_lower), known_value(num_upper)
    if lower is None or upper is None or None in input.shape[-2:].as_list():
        return original(input, num_lower, num_upper, name)
    # below[i, j] = i - j: how far an element is under the diagonal
    below = np.subtract.outer(*map(np.arange, input.shape[-2:].as_list()))
    inside = ((lower < 0) | (below <= lower)) & ((upper < 0) | (-below <= upper))
    return tf.where(tf.constant(inside), input, tf.zeros((), input.dtype))


@without_rule("tensorflow.python.ops.array_ops", "matrix_diag", also=("tensorflow.linalg:diag",))
def diag(_: object, original: Callable[..., tf.Tensor], diagonal: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Hook on `tf.linalg.diag`: for the main diagonal, a choice by a constant mask."""
    diagonal = tf.convert_to_tensor(diagonal)
    size = diagonal.shape[-1] if diagonal.shape.rank else None
    if size is None or args or any(name != "k" or known_value(k) != 0 for name, k in kwargs.items() if name != "name"):
        return original(diagonal, *args, **kwargs)
    return tf.where(np.eye(size, dtype=bool), tf.expand_dims(diagonal, -1), tf.zeros((), diagonal.dtype))


@without_rule("tensorflow.python.ops.array_ops", "matrix_set_diag", also=("tensorflow.linalg:set_diag",))
def set_diag(
    _: object, original: Callable[..., tf.Tensor], input: Any, diagonal: Any, *args: Any, **kwargs: Any
) -> tf.Tensor:
    """Hook on `tf.linalg.set_diag`: for square matrices, a choice by a constant mask."""
    input, diagonal = tf.convert_to_tensor(input), tf.convert_to_tensor(diagonal)
    size = _size(input)
    if args or kwargs or size is None:
        return original(input, diagonal, *args, **kwargs)
    return tf.where(np.eye(size, dtype=bool), tf.expand_dims(diagonal, -1), input)


@without_rule(
    "tensorflow.python.ops.linalg_ops", "matrix_triangular_solve", also=("tensorflow.linalg:triangular_solve",)
)
def triangular_solve(
    _: object,
    original: Callable[..., tf.Tensor],
    matrix: Any,
    rhs: Any,
    lower: bool = True,
    adjoint: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """Hook on `tf.linalg.triangular_solve`: by substitution, one row after the other.

    The gradient is that of TensorFlow.
    """
    matrix, rhs = tf.convert_to_tensor(matrix), tf.convert_to_tensor(rhs)
    if not _is_small(matrix) or not rhs.shape.is_fully_defined():
        return original(matrix, rhs, lower=lower, adjoint=adjoint, name=name)

    @tf.custom_gradient
    def solved(matrix: tf.Tensor, rhs: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        result = _substituted(matrix, rhs, lower, adjoint)

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            # by this function again: the gradient of TensorFlow's own solve has operations without a rule
            of_rhs = triangular_solve(_, original, matrix, upstream, lower, not adjoint)
            of_matrix = -tf.matmul(*((result, of_rhs) if adjoint else (of_rhs, result)), transpose_b=True)
            return tf.linalg.band_part(of_matrix, *((-1, 0) if lower else (0, -1))), of_rhs

        return result, gradient

    return cast("tf.Tensor", solved(*_with_one_batch(matrix, rhs)))


def _substituted(matrix: tf.Tensor, rhs: tf.Tensor, lower: bool, adjoint: bool) -> tf.Tensor:
    matrix = tf.linalg.matrix_transpose(matrix) if adjoint else matrix
    size = cast(int, matrix.shape[-1])
    # the transpose of a lower matrix is an upper one, whose last row has one unknown
    order = range(size) if lower != adjoint else reversed(range(size))
    rows: dict[int, tf.Tensor] = {}
    for row in order:
        # what is left of the equation when the unknowns that are known are taken over to the right
        rest = rhs[..., row, :]
        for known, value in rows.items():
            rest = rest - matrix[..., row, known, None] * value
        rows[row] = rest / matrix[..., row, row, None]
    return tf.stack([rows[row] for row in range(size)], -2)


class _Eliminated(NamedTuple):
    """The result of Gauss-Jordan elimination.

    Attributes:
        solution: the solution for each right-hand side, [..., size, columns].
        pivots: the number that each column was divided by.
        sign: 1 or -1 by the number of rows that changed places, [...].
    """

    solution: tf.Tensor
    pivots: list[tf.Tensor]
    sign: tf.Tensor


def _eliminated(matrix: tf.Tensor, rhs: tf.Tensor) -> _Eliminated:
    """Gauss-Jordan elimination with partial pivoting (Golub and Van Loan, Matrix Computations, 3.4).

    Column by column: the row with the largest number in it, of those that are left, changes places with the column's
    own, is divided by that number, and taken from all others so often that zeros are left there.
    """
    size = cast(int, matrix.shape[-1])
    work = tf.concat([matrix, rhs], -1)
    sign, pivots = tf.ones_like(matrix[..., 0, 0]), []
    for column in range(size):
        candidates = tf.abs(work[..., column])
        # rows above were pivots already; -1 is below every absolute value
        candidates = tf.where(np.arange(size) < column, -tf.ones((), work.dtype), candidates)
        best = tf.argmax(candidates, -1, tf.int32)
        is_best, is_own = tf.equal(tf.range(size), best[..., None])[..., None], (np.arange(size) == column)[:, None]
        # a sum over a choice picks the row without a gather, which DTensor splits wrongly by rows
        row = tf.reduce_sum(tf.where(is_best, work, tf.zeros((), work.dtype)), -2, keepdims=True)
        own = work[..., column : column + 1, :]
        work = tf.where(is_own, row, tf.where(is_best, own, work))
        pivot = row[..., column : column + 1]
        pivots.append(pivot[..., 0, 0])
        # a swap of two rows changes the sign of the determinant
        sign = tf.where(tf.equal(best, column), sign, -sign)
        row = row / pivot
        work = tf.where(is_own, row, work - work[..., column : column + 1] * row)
    return _Eliminated(work[..., size:], pivots, sign)


@without_rule("tensorflow.python.ops.linalg_ops", "matrix_solve", also=("tensorflow.linalg:solve",))
def solve(
    _: object, original: Callable[..., tf.Tensor], matrix: Any, rhs: Any, adjoint: bool = False, name: str | None = None
) -> tf.Tensor:
    """Hook on `tf.linalg.solve`: by elimination.

    A singular matrix gives infinities or no numbers, as on JAX, and no error.
    """
    matrix, rhs = tf.convert_to_tensor(matrix), tf.convert_to_tensor(rhs)
    if not _is_small(matrix) or not rhs.shape.is_fully_defined():
        return original(matrix, rhs, adjoint=adjoint, name=name)

    @tf.custom_gradient
    def solved(matrix: tf.Tensor, rhs: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        result = _eliminated(tf.linalg.matrix_transpose(matrix) if adjoint else matrix, rhs).solution

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            # by the transposed system, as in `tf.linalg.solve`'s own gradient: the inverse is never made
            of_rhs = solve(_, original, matrix, upstream, not adjoint)
            return -tf.matmul(*((result, of_rhs) if adjoint else (of_rhs, result)), transpose_b=True), of_rhs

        return result, gradient

    return cast("tf.Tensor", solved(*_with_one_batch(matrix, rhs)))


@without_rule("tensorflow.python.ops.linalg_ops", "matrix_inverse", also=("tensorflow.linalg:inv",))
def inverse(
    _: object, original: Callable[..., tf.Tensor], input: Any, adjoint: bool = False, name: str | None = None
) -> tf.Tensor:
    """Hook on `tf.linalg.inv`: solve for the identity."""
    input = tf.convert_to_tensor(input)
    if not _is_small(input):
        return original(input, adjoint=adjoint, name=name)
    return tf.linalg.solve(input, np.eye(cast(int, input.shape[-1]), dtype=input.dtype.as_numpy_dtype), adjoint)


@without_rule("tensorflow.python.ops.linalg_ops", "matrix_determinant", also=("tensorflow.linalg:det",))
def determinant(_: object, original: Callable[..., tf.Tensor], input: Any, name: str | None = None) -> tf.Tensor:
    """Hook on `tf.linalg.det`: the product of the pivots; the gradient is that of TensorFlow."""
    input = tf.convert_to_tensor(input)
    if not _is_small(input):
        return original(input, name=name)

    @tf.custom_gradient
    def result(matrix: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        # no right-hand sides: only the pivots are wanted
        eliminated = _eliminated(matrix, matrix[..., :0])
        # after elimination the matrix is triangular up to swaps: its determinant is the product of the diagonal
        value = math.prod(eliminated.pivots, start=eliminated.sign)
        return value, lambda upstream: (upstream * value)[..., None, None] * tf.linalg.inv(matrix, adjoint=True)

    return cast("tf.Tensor", result(_whole_matrix(input)))


@without_rule("tensorflow.python.ops.gen_linalg_ops", "log_matrix_determinant", also=("tensorflow.linalg:slogdet",))
def log_determinant(_: object, original: Callable[..., Any], input: Any, name: str | None = None) -> Any:
    """Hook on `tf.linalg.slogdet`: the sign, and the sum of the logarithms of the pivots."""
    input = tf.convert_to_tensor(input)
    if not _is_small(input):
        return original(input, name=name)

    @tf.custom_gradient
    def result(matrix: tf.Tensor) -> Any:
        eliminated = _eliminated(matrix, matrix[..., :0])
        # the sign by itself: the logarithm is of absolute values
        sign = math.prod(map(tf.sign, eliminated.pivots), start=eliminated.sign)
        value = tf.add_n([tf.math.log(tf.abs(pivot)) for pivot in eliminated.pivots])

        def gradient(_: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
            return upstream[..., None, None] * tf.linalg.inv(matrix, adjoint=True)

        return (sign, value), gradient

    return _LogDeterminant(*cast(Any, result)(_whole_matrix(input)))


class _LogDeterminant(NamedTuple):
    """The result of `tf.linalg.slogdet`, with its names."""

    sign: tf.Tensor
    log_abs_determinant: tf.Tensor


def _size(matrix: tf.Tensor) -> int | None:
    """The size of square matrices; None of others."""
    rows, columns = matrix.shape[-2:].as_list() if (matrix.shape.rank or 0) >= 2 else (None, None)
    return rows if rows == columns else None


def _is_small(matrix: tf.Tensor) -> bool:
    # complex numbers and half precision are left to TensorFlow: no pivoting by size, or too few digits
    known = matrix.dtype in (tf.float32, tf.float64) and matrix.shape.is_fully_defined()
    return known and 0 < (_size(matrix) or 0) <= _MOST_COLUMNS


def _whole_matrix(matrix: tf.Tensor) -> tf.Tensor:
    return cast("tf.Tensor", whole_dims(matrix, (-2, -1)))


def _with_one_batch(matrix: tf.Tensor, rhs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Both with the same dims before those of the matrices, which are whole."""
    batch = tf.broadcast_static_shape(matrix.shape[:-2], rhs.shape[:-2])

    def spread(part: tf.Tensor) -> tf.Tensor:
        return _whole_matrix(part if part.shape[:-2] == batch else tf.broadcast_to(part, batch + part.shape[-2:]))

    return spread(matrix), spread(rhs)
