"""Messages of a pipeline where one process drives all ranks: there are none, and several processes are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras

from keras_flow.backends.active import backend
from keras_flow.errors import FlowError


def send_tensors(tensors: Any, rank: int, tag: int, told: dict[object, Any], key: object) -> Callable[[], None]:
    """Refuse: other processes get nothing."""
    _refuse()


def receive_tensors(rank: int, tag: int, told: dict[object, Any], key: object) -> Callable[[], Any]:
    """Refuse: other processes send nothing."""
    _refuse()


def sum_over_processes(value: Any) -> Any:
    """Refuse: there is one process."""
    _refuse()


def sum_over_ranks(
    ranks: tuple[int, ...], given: Sequence[list[Any]], weights: Sequence[keras.Variable]
) -> Callable[[], list[Any]]:
    """Sum the gradients of a stage on its first rank."""
    if len(ranks) == 1:
        (total,) = given
        return lambda: total
    # in the order in which the lanes got there
    total, *others = [backend().on(ranks[0], each) for each in given]
    for more in others:
        total = backend().add(total, more)
    return lambda: total


def from_process_of(rank: int, value: Any, is_like: bool, ranks: tuple[int, ...] | None = None) -> Any:
    """Refuse: there is one process."""
    _refuse()


def _refuse() -> NoReturn:
    raise FlowError(
        f"a pipeline on {backend().name} runs in one process that drives all its ranks: start one, `keras-flow launch "
        "--nproc_per_node 1 --devices_per_proc N`, or use the torch backend, which has a process for each rank"
    )
