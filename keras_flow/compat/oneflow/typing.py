"""`oneflow.typing`: what a job takes and returns, `import keras_flow.compat.oneflow.typing as tp`.

Example:
    >>> import keras_flow.compat.oneflow.typing as tp
    >>> tp.Numpy.Placeholder((100, 1, 28, 28))
    Placeholder(shape=(100, 1, 28, 28), dtype='float32', mirrored=False)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import numpy as np

from keras_flow.compat.oneflow.missing import refuse
from keras_flow.errors import FlowError

T = TypeVar("T")


@dataclass(frozen=True)
class Placeholder:
    """An argument of a job.

    Attributes:
        shape: the shape of the logical batch; of a list, that of each array, which may have fewer rows.
        dtype: name of the dtype.
        mirrored: whether it is a list with an array for each device.
    """

    shape: tuple[int, ...]
    dtype: str
    mirrored: bool = False

    def arrays(self, name: str, given: object, devices: int) -> list[np.ndarray]:
        """The arrays of an argument, checked: one, or of a list one for each device.

        Raises:
            FlowError: the argument's name, and both shapes or lengths.
        """
        if not self.mirrored:
            return [self._checked(name, given)]
        if not isinstance(given, list | tuple):
            raise FlowError(f"argument {name!r} is a tp.ListNumpy: give a list of {devices} arrays, got {type(given)}")
        if len(given) != devices:
            raise FlowError(f"argument {name!r} is a list with an array for each device: {devices}, got {len(given)}")
        return [self._checked(f"{name}[{number}]", each) for number, each in enumerate(given)]

    def _checked(self, name: str, given: object) -> np.ndarray:
        array = np.asarray(given)
        fits = array.shape == self.shape
        if self.mirrored and array.ndim == len(self.shape):
            fits = array.shape[1:] == self.shape[1:] and 0 < array.shape[0] <= self.shape[0]
        if not fits:
            rule = f"at most {self.shape[0]} rows of {self.shape[1:]}" if self.mirrored else f"{self.shape}"
            raise FlowError(f"argument {name!r} has the shape {array.shape}; its placeholder says {rule}")
        if array.dtype != self.dtype and not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise FlowError(f"argument {name!r} has dtype {array.dtype}; its placeholder says {self.dtype}")
        return array.astype(self.dtype, copy=False)


def _placeholder(shape: Sequence[int], dtype: str, mirrored: bool) -> Placeholder:
    found = tuple(shape)
    if not found or any(not isinstance(each, int) or each < 1 for each in found):
        raise FlowError(f"a Placeholder has the shape {shape!r}; legal are whole numbers of at least 1, rows first")
    return Placeholder(found, dtype, mirrored)


class Numpy:
    """A logical array."""

    @staticmethod
    def Placeholder(shape: Sequence[int], dtype: str = "float32") -> Placeholder:
        """An argument that is the whole batch, with exactly this shape."""
        return _placeholder(shape, dtype, False)


class ListNumpy:
    """A list with an array for each device."""

    @staticmethod
    def Placeholder(shape: Sequence[int], dtype: str = "float32") -> Placeholder:
        """An argument that is a list; an array has this shape, or fewer rows."""
        return _placeholder(shape, dtype, True)


class Callback(Generic[T]):
    """The result of a job that is called with a function, `job(x)(handler)`: the handler gets the result."""


class Bundle(Generic[T]):
    """Results in lists, tuples and dicts."""


def __getattr__(name: str) -> NoReturn:
    refuse("typing", name)
