"""`hvd.elastic`: a program that fails is started again by `keras-flow launch --max_restarts`, and goes on.

What a state commits is in a file of the job, which rank 0 writes; the processes that are started again load it.
Horovod keeps the processes that are left; here all begin anew, and a job keeps its number of ranks.

>>> CommittedState(epoch=3).epoch
3
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_flow import atomic, npz, settings
from keras_flow.checkpoint import as_json
from keras_flow.errors import FlowError
from keras_flow.hvd import ranks
from keras_flow.hvd.collectives import broadcast_object
from keras_flow.hvd.variables import broadcast_variables
from keras_flow.launch.folder import own_folder


class CommittedState:
    """Numbers, texts, arrays, and containers of them, that a program commits.

    Args:
        values: values by name, which become attributes.
    """

    def __init__(self, **values: Any):
        self._names = list(values)
        self._callbacks: list[Callable[[], Any]] = []
        for name, value in values.items():
            setattr(self, name, value)
        self._keep()

    def variables(self) -> list[keras.Variable]:
        """The variables that belong to the state."""
        return []

    def commit(self) -> None:
        """Keep the values of now; rank 0 writes them into a file of the job."""
        text = json.dumps(as_json.encoded({name: getattr(self, name) for name in self._names}))
        self._keep()
        path = _file()
        if path is not None and ranks.rank() == 0:
            with atomic.beside(path) as new, new.open("wb") as file:
                npz.write(file, {"values": np.array(text), **self._committed})

    def _keep(self) -> None:
        # copies: the program goes on changing its lists in place
        self._committed_values = copy.deepcopy({name: getattr(self, name) for name in self._names})
        self._committed: dict[str, Any] = {
            str(number): keras.ops.convert_to_numpy(each) for number, each in enumerate(self.variables())
        }

    def restore(self) -> None:
        """Take back the values of the last commit."""
        for name, value in copy.deepcopy(self._committed_values).items():
            setattr(self, name, value)
        for number, variable in enumerate(self.variables()):
            variable.assign(self._committed[str(number)])

    def sync(self) -> None:
        """Give all ranks the values of rank 0, to which `restore` goes back until the next commit."""
        for name, value in broadcast_object({name: getattr(self, name) for name in self._names}, 0).items():
            setattr(self, name, value)
        broadcast_variables(self.variables(), 0)
        self._keep()

    def load(self) -> None:
        """Take what an earlier start of this job has committed, if it has: on rank 0, before `sync`."""
        path = _file()
        if path is None or not path.exists() or ranks.rank() != 0:
            return
        found = npz.read(path)
        self._committed_values = as_json.decoded(json.loads(str(found.pop("values"))))
        self._committed = found
        self.restore()

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call functions after each restart of the job, before the function of `run`."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call them."""
        for callback in self._callbacks:
            callback()

    def check_host_updates(self) -> None:
        """Do nothing: the hosts of a job stay until it is started again."""


class KerasState(CommittedState):
    """A model, its optimizer, and numbers like `batch=0, epoch=0`.

    Args:
        model: built and compiled.
        optimizer: its optimizer where that is not the model's own.
        values: as in `CommittedState`.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, **values: Any):
        self.model, self.optimizer = model, optimizer or model.optimizer
        if not model.built:
            raise FlowError("hvd.elastic.KerasState takes a built model: call it once, or model.build(shape), before")
        super().__init__(**values)

    def variables(self) -> list[keras.Variable]:
        """The weights, and the optimizer's variables."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()  # on JAX a running fit holds the values itself
        if self.optimizer is None:
            return list(self.model.weights)
        if not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        return [*self.model.weights, *self.optimizer.variables]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of a state one that goes on from the last commit after a restart.

    Args:
        func: takes the state first.
    """

    @functools.wraps(func)
    def wrapped(state: CommittedState, *args: Any, **kwargs: Any) -> Any:
        state.load()
        if int(settings.read(settings.RESTARTS) or 0):
            state.on_reset()
        state.sync()
        return func(state, *args, **kwargs)

    return wrapped


class CommitStateCallback(keras.callbacks.Callback):
    """Commit after so many batches, and after each epoch.

    Args:
        state: to commit.
        batches_per_commit: how many.
    """

    def __init__(self, state: CommittedState, batches_per_commit: int = 1):
        super().__init__()
        self.state, self.batches_per_commit, self._left = state, batches_per_commit, batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit where it is time."""
        self._left -= 1
        if self._left == 0:
            self.state.commit()
            self._left = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keep `state.batch`: the batches of the epoch that are done. Put it before `CommitStateCallback`.

    The epoch after a restart has all its batches again, unless the program leaves out the first `state.batch`.

    Args:
        state: the state whose `batch` is counted.
    """

    def __init__(self, state: Any):
        super().__init__()
        self.state, self._before = state, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the batches that were done before."""
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count."""
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin anew."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keep `state.epoch`: the epochs that are done. Put it before the commits.

    It is for `fit(initial_epoch=state.epoch)`, and for `fit(epochs=24 - state.epoch)`, whose epochs begin at 0.

    Args:
        state: the state whose `epoch` is counted.
    """

    def __init__(self, state: Any):
        super().__init__()
        self.state: Any = state
        self._before: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count anew."""
        self._before = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note how many epochs were done before those that Keras counts."""
        self._before = self.state.epoch - epoch if self._before is None else self._before

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count."""
        self.state.epoch = (self._before or 0) + epoch + 1


def _file() -> Path | None:
    """The file of commits, in the job's own folder, which its restarts see; None without a launcher."""
    folder = own_folder()
    return None if folder is None else folder.path / "hvd-commit.npz"
