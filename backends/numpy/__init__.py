"""numpy, the reference: all ranks in this process, as arrays. It has no gradients and trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from keras_flow.backends.active import announced_devices
from keras_flow.backends.interface import World
from keras_flow.boxing.simulate import simulate
from keras_flow.boxing.spec import BoxingPlan
from keras_flow.errors import FlowError
from keras_flow.layout import Layout

_NO_GRADIENTS = (
    "the numpy backend has no gradients; set KERAS_BACKEND to jax, tensorflow or torch, which give the same values"
)


class NumpyEngine:
    """The functions that global tensors need."""

    name = "numpy"
    _world: World | None = None

    def init(self, devices: int | None, type: str | None) -> World:
        """Any number of ranks."""
        if type not in (None, "cpu"):
            raise FlowError(f"kf.init was asked for devices of type {type!r}; on numpy ranks are of type 'cpu'")
        if devices is not None or self._world is None:
            count = devices or announced_devices() or 1
            self._world = World(size=count, type="cpu", local_ranks=tuple(range(count)))
        return self._world

    def world(self) -> World:
        """The ranks of `init`, one without it."""
        return self._world or self.init(None, None)

    def redistribute(self, plan: BoxingPlan, shards: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """By the reference executor."""
        return simulate(plan, shards)

    def note_call(self, text: str) -> None:
        """One process drives all ranks: they cannot differ."""

    def agree_on(self, facts: Mapping[int, Any]) -> dict[int, Any]:
        """All ranks are in this process."""
        return dict(facts)

    def put(self, value: np.ndarray, rank: int) -> np.ndarray:
        """The value itself."""
        return np.asarray(value)

    def as_numpy(self, value: np.ndarray) -> np.ndarray:
        """The array itself."""
        return np.asarray(value)

    def on_rank(self, rank: int) -> AbstractContextManager[object]:
        """There is one device."""
        return nullcontext()

    def vjp(self, function: Callable[..., list], values: Sequence[Any]) -> tuple[list, Callable[..., list]]:
        """Raises: there are none."""
        raise FlowError(_NO_GRADIENTS)

    def to_engine(self, layout: Layout, shards: Mapping[int, np.ndarray]) -> Any:
        """Raises: numpy has none."""
        raise FlowError("numpy has no distributed array of its own; x.numpy() gives the logical tensor")

    def from_engine(self, value: Any) -> None:
        """numpy has none."""


BACKEND = NumpyEngine()
