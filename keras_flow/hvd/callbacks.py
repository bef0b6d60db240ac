"""Callbacks of Horovod for Keras.

>>> BroadcastGlobalVariablesCallback(0).root_rank
0
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_flow.current.models import is_built, optimizers_of
from keras_flow.errors import FlowError
from keras_flow.hvd import ranks
from keras_flow.hvd.collectives import allgather_object, allreduce
from keras_flow.hvd.ranks import ProcessSet, global_process_set
from keras_flow.hvd.variables import broadcast_variables


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Give all ranks the weights and the optimizer's state of one, before the first batch.

    Those that some rank does not have yet, because its first batch makes them, follow after it (in Horovod all do).

    Args:
        root_rank: the rank whose values all ranks get.
        device: not needed.
        local_variables: variables that each rank keeps for itself, or one.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = ()):
        super().__init__()
        self.root_rank = root_rank
        is_one = isinstance(local_variables, keras.Variable)
        #: ids of the variables that stay as they are: local ones, and those that were sent
        self._kept = {id(each) for each in ([local_variables] if is_one else local_variables or ())}
        self._is_done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Send the values that all ranks have."""
        model: Any = self.model
        if self._is_done:
            return
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built and is_built(model):
            optimizer.build(model.trainable_variables)
        known = [(tuple(each.shape), each.dtype) for each in self._left()]
        # a rank that has loaded its model is built before the others
        if len(set(allgather_object(zlib.crc32(repr(known).encode())))) == 1:
            self._send()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Send what the first batch has made."""
        if not self._is_done:
            self._is_done = True
            self._send()

    def _left(self) -> list[keras.Variable]:
        model: Any = self.model
        every = [*model.weights, *(each for one in optimizers_of(model) for each in one.variables)]
        return [each for each in every if id(each) not in self._kept]

    def _send(self) -> None:
        model: Any = self.model
        left = self._left()
        if left and hasattr(model, "jax_state_sync"):
            model.jax_state_sync()  # on JAX a running fit holds the values itself
        broadcast_variables(left, self.root_rank)
        self._kept.update(map(id, left))


class MetricAverageCallback(keras.callbacks.Callback):
    """Make each log of an epoch the mean of the ranks', each counting alike; put it before callbacks that read logs.

    Args:
        device: not needed.
        process_set: the ranks.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set):
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the logs."""
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        if logs and names and self.process_set.size() > 1:
            values = np.array([float(logs[name]) for name in names], "float32")
            told = allreduce(values, ", ".join(names), process_set=self.process_set)
            means: Any = keras.ops.convert_to_numpy(told)
            logs.update(zip(names, map(float, means), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiply an initial learning rate, from one epoch to another.

    Args:
        initial_lr: the rate.
        multiplier: a factor, or a function of the epoch: a fraction of one where `staircase` is False.
        start_epoch: the first epoch that it is for.
        end_epoch: the first that it is not for any more; None: all.
        staircase: change the rate at the begin of an epoch only, not at each batch.
        momentum_correction: scale the velocities of SGD when the rate changes (Goyal et al. 2017, remark 3). Horovod
            scales the momentum in that step, which is the same without `nesterov`.
        steps_per_epoch: batches; None: what `fit` says.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ):
        super().__init__()
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else lambda epoch: multiplier
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Find how many batches an epoch has."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise FlowError(f"{type(self).__name__}: fit does not know its batches; give steps_per_epoch=")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._set(epoch)
        elif not self.staircase:
            self._set(epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate."""
        if logs is not None:
            logs["lr"] = _rate(self.model)

    def _set(self, epoch: float) -> None:
        new = self.initial_lr * self.multiplier(epoch)
        model: Any = self.model
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()  # on JAX a running fit holds the values itself
        optimizer, old = model.optimizer, _rate(model)
        if old == new:
            return
        optimizer.learning_rate = new
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a loss scale, which has no velocities
        if self.momentum_correction and getattr(inner, "momentum", 0) and old > 0:
            for velocity in getattr(inner, "momentums", None) or ():
                velocity.assign(velocity.value * (new / old))


def _rate(model: Any) -> float:
    return float(np.asarray(keras.ops.convert_to_numpy(model.optimizer.learning_rate)))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the rate, batch by batch, from that of one rank to that of all (Goyal et al. 2017).

    Args:
        initial_lr: the rate at the end: that of one rank times `hvd.size()`.
        warmup_epochs: how long.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: see there.
        verbose: say when it has ended.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ):
        def multiplier(epoch: float) -> float:
            # a batch on, so that an epoch ends at a round number
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / ranks.size() * (epoch * (ranks.size() - 1) / warmup_epochs + 1)

        end = int(np.ceil(warmup_epochs))
        super().__init__(initial_lr, multiplier, 0, end, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate, and say that it has its end."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose and ranks.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self.initial_lr:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Save the best model, on rank 0; logs are the same on all ranks after `MetricAverageCallback`.

    Args:
        filepath: the path of the file.
        monitor: and the others as in `keras.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ):
        super().__init__(filepath, monitor, verbose, save_best_only=True, mode=mode, save_freq=save_freq)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save, on rank 0, where it is time."""
        if ranks.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, on rank 0, what is better than all before."""
        if ranks.rank() == 0:
            super().on_epoch_end(epoch, logs)
