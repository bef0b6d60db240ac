"""The handle of a collective that was begun and not waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keras_flow.backends.collective_engine import Pending


class Work:
    """A collective that runs while the program goes on (`async_op=True`).

    On torch it runs beside the program. JAX's arrays are such handles by themselves, so there it has been sent off
    already; on TensorFlow it has ended.

    Example:
        >>> import keras_flow as kf
        >>> ranks = kf.init(4)
        >>> work = kf.comm.all_reduce({rank: [1.0 * rank] for rank in range(4)}, async_op=True)
        >>> work.wait()[0]
        Array([6.], dtype=float32)
    """

    def __init__(self, pending: Pending, finish: Callable[[Mapping[int, Any]], Any]):
        """A handle; collectives make them."""
        self._pending = pending
        self._finish = finish
        self._result: Any = None
        self._is_done = False

    def wait(self) -> Any:
        """Wait for the collective and return its result; a later call returns the same."""
        if not self._is_done:
            self._result, self._is_done = self._finish(self._pending.results()), True
            self._pending = Pending(dict)  # what it had to keep until now
        return self._result

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_done or self._pending.is_completed()
