"""Who reads the logs of a batch on PyTorch: where nobody does, metrics are summed over the ranks once in an epoch.

Keras computes the results of all metrics after each batch and hands them to callbacks. The ranks agree at the first
batch of a loop, because all of them must take part in a sum: nobody reads (`verbose` 0 or 2, no callbacks that see
batches), a progress bar reads when it prints, or a callback may read each.

Example: `verbose=0` on rank 1 and a progress bar on rank 0. Both ranks sum the metrics at the first step and then about
every 0.05 s: after so many steps as the slower of them makes in that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as torch_distributed
from keras import callbacks as keras_callbacks
from keras import tree

from keras_flow.backends.hooking import hook
from keras_flow.backends.torch import layouts
from keras_flow.backends.torch.step import RunningStep, current_step
from keras_flow.current import loops
from keras_flow.current.keras_places import is_default
from keras_flow.current.models import has_own
from keras_flow.placements import Placement

if TYPE_CHECKING:
    import keras

_NOBODY, _PROGRESS_BAR, _CALLBACK = range(3)
#: seconds between two lines of Keras's progress bar, and lines until the time of a step is measured anew
_INTERVAL, _READS_OF_A_PLAN = 0.05, 20
#: what a callback overrides to see batches
_SEES_BATCHES = tuple(
    f"on_{kind}batch_{when}" for kind in ("", "train_", "test_", "predict_") for when in ("begin", "end")
)
#: methods of a model that Keras's own logs come from: where one is the user's, its logs are made as it says
_STOCK = ("train_step", "test_step", "compute_metrics", "get_metrics_result")


class LogReaders:
    """Who reads the logs of the batches of a loop, as the ranks agreed.

    Attributes:
        due: steps until the logs are read next; None: nobody reads them before the epoch ends.
        logs: those that were read last.
    """

    def __init__(self, who: int, placement: Placement):
        self.due: int | None = 0
        self.logs: dict[str, object] | None = None
        self._who, self._placement = who, placement
        # steps since the logs were read; steps, reads and time since it was planned
        self._unread = self._steps = self._reads = 0
        self._planned = time.perf_counter()

    def results(self, model: keras.Model, compute: Callable[..., dict[str, object]]) -> dict[str, object]:
        """The results of a model's metrics where they are read now, else those of the last time."""
        self._unread += 1
        self._steps += 1
        if self.logs is None or (self.due is not None and self._unread >= self.due):
            self.logs = compute(model)
            self._unread = 0
            self._reads += 1
            self._plan()
        return dict(self.logs)

    def _plan(self) -> None:
        """After how many steps the logs are read: the same number on all ranks, now and then measured anew."""
        if self._who == _NOBODY:
            self.due = None
        elif self.due == 0 or self._reads >= _READS_OF_A_PLAN:
            now = time.perf_counter()
            self.due = max(1, int(_INTERVAL / _largest((now - self._planned) / self._steps, self._placement)))
            self._steps, self._reads, self._planned = 0, 0, now


#: loop of a model, or the callbacks that `fit` shares with its validation -> who reads its logs, as the ranks agreed;
#: None: each step's are read
_agreed: WeakKeyDictionary[object, LogReaders | None] = WeakKeyDictionary()


def of_next_step(model: keras.Model, placement: Placement) -> LogReaders | None:
    """Who reads the logs of the step that begins; None: whoever called it. A collective at a loop's first step."""
    loop = next(iter(loops.running()[-1:]), None)
    # the logs of `train_on_batch` are returned
    if loop is None or loop.model is not model or loop.name not in ("fit", "evaluate"):
        return None
    callbacks = loop.given.get("callbacks")
    of_all = callbacks if isinstance(callbacks, keras_callbacks.CallbackList) else loop
    if of_all not in _agreed:
        who = int(_largest(_who_reads(loop), placement))
        _agreed[of_all] = None if who == _CALLBACK else LogReaders(who, placement)
    return _agreed[of_all]


def reading_later(*args: object, **kwargs: object) -> RunningStep | None:
    """Condition of the hook on `Trainer.get_metrics_result`: the step, where not all logs are read."""
    step = current_step()
    return step if step is not None and step.readers is not None else None


@hook(
    "keras.Model",
    "get_metrics_result",
    "where nobody reads the logs of a batch, its metrics are not summed over the ranks",
    when=reading_later,
)
def metrics_result(
    step: RunningStep, original: Callable[..., dict[str, object]], model: keras.Model
) -> dict[str, object]:
    """Hook on `Trainer.get_metrics_result`: no result where nobody reads it, since it would have to be summed."""
    assert step.readers is not None
    return step.readers.results(model, original)


def _who_reads(loop: loops.Loop) -> int:
    if has_own(loop.model, *_STOCK):
        return _CALLBACK
    callbacks: Any = loop.given.get("callbacks")
    if isinstance(callbacks, keras_callbacks.CallbackList):
        return max(map(_reads, callbacks.callbacks), default=_NOBODY)
    listed: list[keras.callbacks.Callback] = tree.flatten(callbacks) if callbacks else []
    # Keras adds a progress bar where it is not given one
    shows = loop.given.get("verbose", "auto") in ("auto", 1)
    adds = shows and not any(isinstance(callback, keras_callbacks.ProgbarLogger) for callback in listed)
    return max([*map(_reads, listed), _PROGRESS_BAR if adds else _NOBODY])


def _reads(callback: keras.callbacks.Callback) -> int:
    if type(callback) is keras_callbacks.ProgbarLogger:
        return _PROGRESS_BAR if callback.verbose == 1 else _NOBODY
    sees = any(not is_default(getattr(callback, name)) for name in _SEES_BATCHES)
    return _CALLBACK if sees else _NOBODY


def _largest(number: float, placement: Placement) -> float:
    """The largest of a number that each rank has."""
    value = torch.tensor(number, dtype=torch.float64)
    torch_distributed.all_reduce(value, torch_distributed.ReduceOp.MAX, group=layouts.group(placement.ranks))
    return float(value)
