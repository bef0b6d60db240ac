"""Holds the workers of a notebook where a step begins, so that all ranks stop before the same step.

An interrupt reaches each process at another point of its program. A rank that stopped one step before the others would
leave them waiting for it, with other weights than its own. Only workers of notebooks have a gate.
"""

from __future__ import annotations

import threading


class Gate:
    """A gate that the main thread passes before each step, and that another thread may close.

    Attributes:
        begun: steps that have passed since `open`.

    Example:
        >>> gate = Gate()
        >>> gate.pass_through()
        >>> gate.hold()  # the next step waits
        1
        >>> gate.stop_after(1)  # and is stopped
        >>> try:
        ...     gate.pass_through()
        ... except KeyboardInterrupt as stop:
        ...     print(stop)
        stopped before step 2
    """

    def __init__(self) -> None:
        self.begun = 0
        self._limit: int | None = None
        self._stops = False
        self._changed = threading.Condition()

    def pass_through(self) -> None:
        """Wait while the gate is held; called before each step.

        Raises:
            KeyboardInterrupt: the steps are to stop here.
        """
        with self._changed:
            while self._limit is not None and self.begun >= self._limit:
                if self._stops:
                    raise KeyboardInterrupt(f"stopped before step {self.begun + 1}")
                self._changed.wait(0.1)  # with a limit, so that a signal is seen
            self.begun += 1

    def hold(self) -> int:
        """Let no further step begin; returns how many have."""
        with self._changed:
            self._limit, self._stops = self.begun, False
            return self.begun

    def stop_after(self, steps: int) -> None:
        """Let steps begin until there were so many, and stop the next one."""
        with self._changed:
            self._limit, self._stops = steps, True
            self._changed.notify_all()

    def open(self) -> None:
        """Count from the start, and hold nothing."""
        with self._changed:
            self.begun, self._limit, self._stops = 0, None, False
            self._changed.notify_all()


#: of this process, where it is a worker of a notebook
_gate: Gate | None = None


def set_gate(gate: Gate | None) -> None:
    """Let every step pass through a gate; None: through none."""
    global _gate
    _gate = gate


def gate_of(*args: object, **kwargs: object) -> Gate | None:
    """Condition of the hook on the begin of a batch: this process's gate."""
    return _gate
