"""Files on PyTorch: all ranks call, all take part in gathering, rank 0 writes, and its error is raised on all."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch.distributed as torch_distributed

from keras_flow.backends.torch import layouts, variables
from keras_flow.backends.torch.trainer import optimizers_of
from keras_flow.distributions.models import remembered
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

#: this rank is writing alone: nothing inside may be a collective
_alone: ContextVar[bool] = ContextVar("keras_flow_writing", default=False)


def is_shared(model: keras.Model, *args: object, **kwargs: object) -> bool:
    """The condition: the model belongs to a distribution of several processes."""
    return torch_distributed.is_initialized() and not _alone.get() and remembered(model) is not None


def callback_is_shared(callback: object, *args: object, **kwargs: object) -> bool:
    """The condition for callbacks: their model is shared."""
    model = getattr(callback, "_model", None)
    return model is not None and is_shared(model)


def save(original: Callable[..., object], model: keras.Model, *args: object, **kwargs: object) -> None:
    """Hook on functions that write a model: without it all ranks open one file, and those that fail leave the others
    waiting."""
    _on_rank_0(lambda: original(model, *args, **kwargs), _all_variables(model))


def callback_writes_model(original: Callable[..., object], callback: object, *args: object, **kwargs: object) -> None:
    """Hook on a callback's method that writes the model and other files."""
    _on_rank_0(lambda: original(callback, *args, **kwargs), _all_variables(callback._model))  # type: ignore[attr-defined]


def callback_writes(original: Callable[..., object], callback: object, *args: object, **kwargs: object) -> None:
    """Hook on a callback's method that writes files or removes them, without weights."""
    _on_rank_0(lambda: original(callback, *args, **kwargs), ())


def throw_away_logs(original: Callable[..., object], callback: object, model: keras.Model) -> object:
    """Hook on `TensorBoard.set_model`: it reads weights, a collective: all ranks log, only rank 0 to the folder."""
    if is_shared(model) and layouts.this_rank() != 0 and not getattr(callback, "_keras_flow_nowhere", False):
        callback.log_dir = tempfile.mkdtemp(prefix="keras_flow_")  # type: ignore[attr-defined]
        callback._keras_flow_nowhere = True  # type: ignore[attr-defined]
        atexit.register(shutil.rmtree, callback.log_dir, ignore_errors=True)  # type: ignore[attr-defined]
    return original(callback, model)


def _all_variables(model: keras.Model) -> list[keras.Variable]:
    found = {id(variable): variable for variable in (*model.variables, *model.metrics_variables)}
    for optimizer in optimizers_of(model):
        found.update({id(variable): variable for variable in optimizer.variables})
    return list(found.values())


def _on_rank_0(action: Callable[[], object], held: Iterable[keras.Variable]) -> None:
    writes = layouts.this_rank() == 0
    error: BaseException | None = None
    with variables.whole(held, here=writes):
        if writes:
            token = _alone.set(True)
            try:
                action()
            except Exception as raised:
                error = raised
            finally:
                _alone.reset(token)
    outcome = [None if error is None else f"{type(error).__name__}: {error}"]
    torch_distributed.broadcast_object_list(outcome, src=0)  # the others wait here until the file is complete
    if error is not None:
        raise error
    if outcome[0] is not None:
        raise FlowError(f"rank 0, which writes the files of all ranks, failed: {outcome[0]}")
