"""Global tensors on numpy: an array for each rank; gradients by central differences."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from keras_flow.backends.engines import in_words, that_train
from keras_flow.current.keras_places import BIT64_TO_BIT32_DTYPE
from keras_flow.errors import FlowError
from keras_flow.layout import Layout

#: elements of an operator's inputs, on one rank, up to which its gradient is taken: each costs two evaluations
DIFFERENTIATED = 20_000


def agree_on(facts: Mapping[int, Any]) -> dict[int, Any]:
    """The facts themselves: all ranks are in this process."""
    return dict(facts)


def put(value: np.ndarray, rank: int) -> np.ndarray:
    """The value itself."""
    return np.asarray(value)


def as_numpy(value: np.ndarray) -> np.ndarray:
    """The array itself."""
    return np.asarray(value)


def on_rank(rank: int) -> AbstractContextManager[object]:
    """Nothing to choose: there is one device."""
    return nullcontext()


def vjp(function: Callable[..., list], values: Sequence[Any]) -> tuple[list, Callable[..., list]]:
    """Use central differences: numpy differentiates nothing, and a reference should not do it as the engines do."""
    # a trial run in float64 tells the dtypes of the results, before anything is refused
    with _keeping_float64():
        in64 = function(*(np.asarray(value, "float64") for value in values))
    halves = sorted({str(one.dtype) for one in in64 if np.asarray(one).dtype.itemsize < 4})
    if halves:
        raise FlowError(
            f"the numpy backend takes gradients by differences, which {halves} would round away: differentiate in "
            f"float32, or set KERAS_BACKEND to {in_words(that_train())}"
        )
    count = sum(np.size(value) for value in values)
    if count > DIFFERENTIATED:
        raise FlowError(
            f"the numpy backend takes gradients by differences, element by element, of up to {DIFFERENTIATED:,} "
            f"elements on a rank; an operator here has {count:,}. Set KERAS_BACKEND to {in_words(that_train())}"
        )
    results = function(*values)

    def pullback(*cotangents: np.ndarray) -> list[np.ndarray]:
        with _keeping_float64():
            return _by_differences(function, values, cotangents)

    return results, pullback


def to_engine(layout: Layout, shards: Mapping[int, np.ndarray]) -> Any:
    """numpy has no distributed array.

    Raises:
        FlowError: always.
    """
    raise FlowError("numpy has no distributed array of its own; x.numpy() gives the logical tensor")


def from_engine(value: Any) -> None:
    """None: numpy has no distributed array."""


@contextmanager
def _keeping_float64() -> Iterator[None]:
    """Inside, Keras's operators leave float64 as it is.

    On every engine but TensorFlow Keras makes float32 of it, by a table of its own (private: there is no setting); its
    numpy backend computes convolutions and pooling by JAX.
    """
    table = BIT64_TO_BIT32_DTYPE
    before = table["float64"]
    table["float64"] = "float64"
    try:
        with sys.modules["jax"].enable_x64(True) if "jax" in sys.modules else nullcontext():
            yield
    finally:
        table["float64"] = before


def _by_differences(
    function: Callable[..., list], values: Sequence[Any], cotangents: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Gradients of `sum(cotangent * result)`, computed in float64.

    Each element is moved both ways by about the cube root of float64's rounding unit, where the errors of truncation
    and of rounding meet (Press et al., Numerical Recipes, section 5.7). The step is a power of two, so that a result in
    float32 does not round it. At a kink the gradient is the mean of both sides.
    """
    moved = [np.array(value, "float64") for value in values]
    weights = [np.asarray(one, "float64") for one in cotangents]

    def weighted() -> float:
        return sum(float(np.vdot(w, one)) for w, one in zip(weights, function(*moved), strict=True))

    gradients = []
    for value, given in zip(moved, values, strict=True):
        gradient = np.empty(value.shape)
        for place in np.ndindex(value.shape):
            before = value[place]
            # relative to the element, because a step below its rounding unit would change nothing
            step = 2.0 ** (math.frexp(max(1.0, abs(before)))[1] - 18)
            ends = []
            for end in (before + step, before - step):
                value[place] = end
                ends.append(weighted())
            value[place] = before
            gradient[place] = (ends[0] - ends[1]) / (2 * step)
        gradients.append(gradient.astype(np.asarray(given).dtype))
    return gradients
