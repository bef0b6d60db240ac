"""The best value so far of a log that `kf.callbacks.Checkpoint` monitors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_flow.errors import FlowError, warn


class Monitor:
    """Whether an epoch is the best so far, by a log.

    Args:
        log: the log's name.
        mode: `"min"`, `"max"`, or `"auto"`: a loss is minimized, and Keras's metrics say themselves which is better.

    Attributes:
        best: the best value so far; None: there is none yet.
        step: the step of the checkpoint that has it.

    Raises:
        FlowError: `mode` is none of these.

    Example:
        >>> monitor = Monitor("val_loss", "min")
        >>> [monitor.is_better(epoch, {"val_loss": loss}) for epoch, loss in enumerate([2.0, 1.0, 1.5])], monitor.best
        ([True, True, False], 1.0)
    """

    def __init__(self, log: str | None, mode: str):
        if mode not in ("auto", "min", "max"):
            raise FlowError(f"mode={mode!r}: it is 'auto', 'min' or 'max'")
        self.log, self.mode = log, mode
        self.best: float | None = None
        self.step: int | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a `fit`: its model's metrics may be others."""
        #: whether the log is better where it is larger; None: not known yet
        self._is_max: bool | None = None if self.mode == "auto" else self.mode == "max"
        #: whether an epoch of this `fit` had the log; None: no epoch was asked for it
        self._has_come: bool | None = None

    def end(self) -> None:
        """End a `fit`.

        Raises:
            FlowError: none of its epochs had the log, so that nothing was saved.
        """
        if self._has_come is False and self.best is None:
            raise FlowError(f"Checkpoint(monitor={self.log!r}): no epoch had such a log, so that none was saved")

    def is_better(self, epoch: int, logs: Mapping[str, Any], model: keras.Model | None = None) -> bool:
        """Whether the epoch's log is better than all before; then it is the best.

        Raises:
            FlowError: the log is no number, or in mode "auto" no metric of the model says which is better.
        """
        found = logs.get(self.log or "")
        if found is None:
            if self._has_come is None:
                known = ", ".join(sorted(logs))
                warn(
                    f"Checkpoint(monitor={self.log!r}): epoch {epoch} has no such log, and is not saved; there are "
                    f"{known}. With validation_freq= of fit those of a validation come in some epochs only"
                )
                self._has_come = False
            return False
        if np.ndim(found):
            raise FlowError(
                f"Checkpoint(monitor={self.log!r}): this log has {np.size(found)} numbers; monitor one that is a number"
            )
        self._has_come = True
        if self._is_max is None:
            self._is_max = self._wants_max(model)
        value, best = float(found), self.best
        # a NaN is not better than anything, and all is better than a NaN
        if math.isnan(value):
            return False
        if best is not None and not math.isnan(best) and not (value > best if self._is_max else value < best):
            return False
        self.best = value
        return True

    def _wants_max(self, model: keras.Model | None) -> bool:
        """Whether the log is better where it is larger, as its metric says to Keras's own callbacks."""
        log = str(self.log)
        if log == "loss" or log.endswith("_loss"):  # of one of several outputs too
            return False
        asked: Any = keras.callbacks.EarlyStopping(log)
        asked.set_model(model)
        try:
            asked.on_epoch_end(0, {log: 0.0})
        except ValueError as error:
            raise FlowError(
                f"Checkpoint(monitor={log!r}, mode='auto'): no metric of Keras of this name says whether more or less "
                "of it is better; give mode='max' or mode='min'"
            ) from error
        return bool(asked.monitor_op(1.0, 0.0))
