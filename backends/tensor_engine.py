"""The part of an engine that global tensors and `kf.comm` use; numpy, the reference, has no more than this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from keras_flow.backends.collective_engine import CollectiveEngine

if TYPE_CHECKING:
    from keras_flow.boxing.spec import BoxingPlan
    from keras_flow.current.world import World
    from keras_flow.layout import Layout


class TensorEngine(CollectiveEngine, Protocol):
    """An engine that moves and computes tensors, with and without gradients.

    Attributes:
        name: Keras's name of the backend.
    """

    name: str

    # ---- devices.py
    def init(self, devices: int | None, type: str | None) -> World:
        """Make `devices` ranks (virtual CPU devices where the engine has them), or take the real ones."""
        ...

    def simulate(self, devices: int) -> World:
        """Make `devices` ranks on the CPU in this process: virtual devices, or ranks that it simulates."""
        ...

    def world(self) -> World:
        """The ranks as they are now. Initialises the engine with its defaults when `init` was not called."""
        ...

    # ---- boxing.py
    def redistribute(self, plan: BoxingPlan, shards: Mapping[int, Any]) -> Mapping[int, Any]:
        """Run a boxing plan on the engine's arrays, rank -> shard, for the ranks that this process drives.

        Ranks receive the bytes that the plan says, and no padding.
        """
        ...

    # ---- tensors.py
    def agree_on(self, facts: Mapping[int, Any]) -> dict[int, Any]:
        """Facts by rank, of this process's ranks, together with those of all other processes; a collective."""
        ...

    def put(self, value: np.ndarray, rank: int) -> Any:
        """The engine's array with this value, on the device of a rank of this process."""
        ...

    def as_numpy(self, value: Any) -> np.ndarray:
        """The value of an engine's array."""
        ...

    def on_rank(self, rank: int) -> AbstractContextManager[object]:
        """Inside, operators compute on the device of `rank`."""
        ...

    def vjp(self, function: Callable[..., Any], values: Sequence[Any]) -> tuple[list[Any], Callable[..., list[Any]]]:
        """Return the results of `function(*values)`, a list, and the function that computes cotangents.

        That function takes one cotangent for each result, and returns one for each value.

        Raises:
            FlowError: the engine has no gradients.
        """
        ...

    def to_engine(self, layout: Layout, shards: Mapping[int, Any]) -> Any:
        """The engine's own distributed array of these shards, not copied.

        Raises:
            FlowError: it cannot hold the layout.
        """
        ...

    def from_engine(self, value: Any) -> tuple[Layout, dict[int, Any]] | None:
        """Layout and shards of the engine's own distributed array; None where it is none."""
        ...
