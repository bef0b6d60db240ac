"""Files on PyTorch: all ranks call, rank 0 writes and asks the others for their pieces, and its error is raised on all.

A split variable goes to the file block by block, so that no rank ever holds it whole.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
import torch.distributed as torch_distributed
from torch.distributed.tensor import DTensor

from keras_flow.backends.torch import gather_blocks, layouts, variables
from keras_flow.backends.torch.trainer import optimizers_of
from keras_flow.current.models import remembered
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras
    import numpy as np

    from keras_flow.current.distribution import Distribution

#: this rank is writing alone: nothing inside may be a collective; what it asks the other ranks with
_alone: ContextVar[gather_blocks.Asking | None] = ContextVar("keras_flow_writing", default=None)


def distribution_of_processes(model: keras.Model, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of hooks on functions that write a model: its distribution, where that is of several processes."""
    return remembered(model) if torch_distributed.is_initialized() and _alone.get() is None else None


def shared_model(callback: object, *args: object, **kwargs: object) -> keras.Model | None:
    """Condition of hooks on callbacks: their model, where that belongs to a distribution of several processes."""
    model = getattr(callback, "_model", None)
    return model if model is not None and distribution_of_processes(model) is not None else None


def save(_: object, original: Callable[..., object], model: keras.Model, *args: object, **kwargs: object) -> None:
    """Hook on `save_model` and `save_weights`: rank 0 writes.

    Without it all ranks open one file, and those that fail leave the others waiting.
    """
    _on_rank_0(lambda: original(model, *args, **kwargs), model)


def callback_writes_model(
    model: keras.Model, original: Callable[..., object], callback: object, *args: object, **kwargs: object
) -> None:
    """Hook on `BackupAndRestore._save_model`: rank 0 writes the model and the other files."""
    _on_rank_0(lambda: original(callback, *args, **kwargs), model)


def callback_writes(
    _: object, original: Callable[..., object], callback: object, *args: object, **kwargs: object
) -> None:
    """Hook on `BackupAndRestore.on_train_end` and methods of `CSVLogger`: rank 0 does it.

    They write or remove files without weights.
    """
    _on_rank_0(lambda: original(callback, *args, **kwargs), None)


def throw_away_logs(_: object, original: Callable[..., object], callback: object, model: keras.Model) -> object:
    """Hook on `TensorBoard.set_model`: it reads weights, a collective: all ranks log, only rank 0 to the folder."""
    is_shared = distribution_of_processes(model) is not None
    if is_shared and layouts.this_rank() != 0 and not getattr(callback, "_keras_flow_nowhere", False):
        callback.log_dir = tempfile.mkdtemp(prefix="keras_flow_")  # type: ignore[attr-defined]
        callback._keras_flow_nowhere = True  # type: ignore[attr-defined]
        atexit.register(shutil.rmtree, callback.log_dir, ignore_errors=True)  # type: ignore[attr-defined]
    return original(callback, model)


def _all_variables(model: keras.Model) -> list[keras.Variable]:
    # a layer that is shared lists its variables twice
    unique = {id(variable): variable for variable in (*model.variables, *model.metrics_variables)}
    for optimizer in optimizers_of(model):
        unique.update({id(variable): variable for variable in optimizer.variables})
    return list(unique.values())


def asking_others(*args: object, **kwargs: object) -> gather_blocks.Asking | None:
    """Condition of hooks on what writes variables: this rank writes the files of all, and asks the others."""
    return _alone.get()


def write_entry(
    asking: gather_blocks.Asking, original: Callable[..., None], store: object, key: str, value: object
) -> None:
    """Hook on `H5IOStore.__setitem__`: a split variable is written block by block."""
    tensor = getattr(value, "_value", value)
    if not asking.has(tensor):
        original(store, key, value)
        return
    if tensor.dtype == torch.bfloat16:  # numpy has none: Keras writes and marks it
        original(store, key, asking.whole(tensor))
        return
    if not store._h5_entry_initialized:  # type: ignore[attr-defined]
        store._create_h5_group(store._h5_entry_path)  # type: ignore[attr-defined]
    dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    dataset = store._h5_entry_group.create_dataset(key, tuple(tensor.shape), dtype)  # type: ignore[attr-defined]
    with contextlib.closing(asking.blocks(tensor)) as blocks:
        for index, block in blocks:
            dataset[index] = block.numpy()


def write_optimizer(
    _: object, original: Callable[..., None], optimizer: keras.optimizers.Optimizer, store: dict
) -> None:
    """Hook on `BaseOptimizer.save_own_variables`: hand the variables to the file one by one.

    Keras makes whole arrays of all first.
    """
    for number, variable in enumerate(optimizer.variables):
        store[str(number)] = variable


def to_array(
    _: object, original: Callable[..., object], tensor: DTensor, dtype: np.dtype | None = None, copy: object = None
) -> np.ndarray:
    """Hook on `DTensor.__array__`: the logical value as numpy.

    Where it is split all ranks must take part, or answer rank 0, which writes.
    """
    asking = _alone.get()
    value = (variables.to_logical(tensor.detach()) if asking is None else asking.whole(tensor)).cpu().numpy()
    return value.astype(dtype) if dtype is not None else value


def _computes(layer: keras.Layer) -> bool:
    """Whether a layer writes values that it computes: it has to find them whole."""
    # a user's method may compute with the weights, and needs whole ones
    own = not type(layer).save_own_variables.__module__.startswith("keras.src.")
    return own or bool(getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None))


def _on_rank_0(action: Callable[[], object], model: keras.Model | None) -> None:
    writes = layouts.this_rank() == 0
    error: BaseException | None = None
    stored = [] if model is None else _all_variables(model)
    computed = (
        [] if model is None else [v for layer in model._flatten_layers() if _computes(layer) for v in layer.variables]
    )
    # gathered before rank 0 goes on alone: inside, the others answer questions only
    with variables.whole(computed, here=writes):
        if writes:
            with gather_blocks.asking(stored) as asking:
                token = _alone.set(asking)
                try:
                    action()
                # kept until the others are told: raised at once, it would leave them waiting
                except Exception as raised:
                    error = raised
                finally:
                    _alone.reset(token)
        else:
            gather_blocks.answer(stored)
    outcome = [None if error is None else f"{type(error).__name__}: {error}"]
    torch_distributed.broadcast_object_list(outcome, src=0)  # the others wait here until the file is complete
    if error is not None:
        raise error
    if outcome[0] is not None:
        raise FlowError(f"rank 0, which writes the files of all ranks, failed: {outcome[0]}")
