"""Messages of a pipeline where one process drives all ranks: there are none, and several processes are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

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


def from_process_of(rank: int, value: Any, is_like: bool) -> Any:
    """Refuse: there is one process."""
    _refuse()


def _refuse() -> NoReturn:
    raise FlowError(
        f"a pipeline on {backend().name} runs in one process that drives all its ranks: start one, `keras-flow launch "
        "--nproc_per_node 1 --devices_per_proc N`, or use the torch backend, which has a process for each rank"
    )
