"""Values of a job: Keras's symbolic tensors, with the number of rows that the placeholders declare.

Keras's graph leaves the rows open, so that each rank may compute its own; OneFlow's programs read them from `x.shape`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
from keras import ops, tree

from keras_flow.compat.oneflow import tracing
from keras_flow.errors import FlowError
from keras_flow.tensors.dtypes import numpy_dtype


class Blob:
    """A value in a job.

    Attributes:
        tensor: Keras's symbolic tensor, [rows, ...].
        rows: the rows that the placeholder declares: of the whole batch, in the mirrored view of a device at most;
            None where dim 0 has no rows.
        pieces: into how many `flow.unpack` has cut the batch.
    """

    def __init__(self, tensor: Any, rows: int | None, pieces: int = 1) -> None:
        self.tensor, self.rows, self.pieces = tensor, rows, pieces

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, with all rows."""
        shape = tuple(self.tensor.shape)
        return shape if self.rows is None else (self.rows // self.pieces, *shape[1:])

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        return keras.backend.standardize_dtype(self.tensor.dtype)

    def with_distribute(self, distribute: object) -> Blob:
        """This value: engines choose how operations lay what they compute."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype})"

    def __getitem__(self, key: Any) -> Blob:
        first, *others = key if isinstance(key, tuple) else (key,)
        if isinstance(first, slice) and first.indices(self.shape[0]) == (0, self.shape[0], 1):
            first = slice(None)  # all rows, of which a rank has some
        keeps = self.rows is None or first == slice(None)
        if first is Ellipsis:
            keeps = len([each for each in others if each is not None]) < len(self.shape)
        return apply(lambda x: x[(first, *others)], self, **({} if keeps else {"rows": None}))

    def __iter__(self) -> NoReturn:
        raise FlowError(f"{self!r}: a value of a job is known when the job runs, and has no items to go through")

    def __neg__(self) -> Blob:
        return apply(ops.negative, self)

    __add__, __radd__ = (lambda x, y: apply(ops.add, x, y), lambda x, y: apply(ops.add, y, x))
    __sub__, __rsub__ = (lambda x, y: apply(ops.subtract, x, y), lambda x, y: apply(ops.subtract, y, x))
    __mul__, __rmul__ = (lambda x, y: apply(ops.multiply, x, y), lambda x, y: apply(ops.multiply, y, x))
    __truediv__, __rtruediv__ = (lambda x, y: apply(ops.divide, x, y), lambda x, y: apply(ops.divide, y, x))
    __pow__, __mod__ = (lambda x, y: apply(ops.power, x, y), lambda x, y: apply(ops.mod, x, y))
    __lt__, __le__ = (lambda x, y: apply(ops.less, x, y), lambda x, y: apply(ops.less_equal, x, y))
    __gt__, __ge__ = (lambda x, y: apply(ops.greater, x, y), lambda x, y: apply(ops.greater_equal, x, y))
    __eq__, __ne__ = (lambda x, y: apply(ops.equal, x, y), lambda x, y: apply(ops.not_equal, x, y))
    __hash__ = object.__hash__


class Reduced(Blob):
    """A mean, sum, maximum or minimum over the rows, made of a value for each row.

    A job returns it from those values, and minimizes the mean of them: so rows need not meet in the graph. Another
    operation that takes it reduces there.

    Attributes:
        of_rows: a value for each row.
        name: the name of the reduction.
        keepdims: whether the dim of the rows stays.
    """

    def __init__(self, of_rows: Blob, name: str, keepdims: bool) -> None:
        self.of_rows, self.name, self.keepdims = of_rows, name, keepdims
        self.rows, self.pieces = None, 1

    @functools.cached_property
    def tensor(self) -> Any:  # type: ignore[override]
        """The tensor of Keras, reduced in the graph."""
        return getattr(ops, self.name)(self.of_rows.tensor, axis=0, keepdims=self.keepdims)

    def of(self, values: np.ndarray) -> np.ndarray:
        """The value, from those of the rows."""
        return np.asarray(getattr(np, self.name)(values, axis=0, keepdims=self.keepdims), numpy_dtype(self.dtype))


class VariableBlob(Blob):
    """A variable of `flow.get_variable`, with the layer that holds it."""

    def __init__(self, holder: keras.Layer) -> None:
        super().__init__(holder.variables[0], None)
        self.holder = holder


class WithVariables(keras.Layer):
    """An operation on tensors and variables, as a layer that has the variables."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        super().__init__()
        self._function, self._arguments = function, [None if type(each) is Blob else each for each in arguments]
        self.holders = [each.holder for each in arguments if isinstance(each, VariableBlob)]
        self.built = True

    def call(self, tensors: Sequence[Any]) -> Any:  # noqa: D102
        given, held = iter(tensors), iter(self.holders)
        found = [
            next(given) if each is None else next(held).variables[0] if isinstance(each, VariableBlob) else each
            for each in self._arguments
        ]
        return self._function(*found)


def apply(function: Callable[..., Any], *arguments: Any, rows: int | None = -1) -> Any:
    """Apply a function of keras.ops to blobs, variables and numbers; return a blob, or several.

    Args:
        function: takes and returns tensors.
        arguments: its arguments.
        rows: the number of rows of the results; -1: as many as the arguments have.
    """
    trace = tracing.current("an operation of flow")
    batched = [each for each in arguments if isinstance(each, Blob) and each.rows is not None]
    if any(isinstance(each, VariableBlob) for each in arguments):
        given = [Blob(each.tensor, None) if isinstance(each, Reduced) else each for each in arguments]
        tensors = [each.tensor for each in given if type(each) is Blob]
        result = WithVariables(function, given)(tensors or [trace.input])
    else:
        result = function(*(each.tensor if isinstance(each, Blob) else each for each in arguments))
    if rows == -1:
        rows = batched[0].rows if batched else None
    pieces = batched[0].pieces if batched and rows is not None else 1
    return tree.map_structure(lambda tensor: Blob(tensor, rows, pieces), result)


def operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors as one of blobs, whose arguments have OneFlow's order and names."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: Any, name: str | None = None, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        return apply(function, *bound.arguments.values())

    return called


def value_of(blob: object, who: str) -> Blob:
    """A blob as it is.

    Raises:
        FlowError: it is none.
    """
    if not isinstance(blob, Blob):
        raise FlowError(f"flow.{who} takes a value of the job, got {blob!r}")
    return blob
