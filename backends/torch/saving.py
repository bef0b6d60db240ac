"""Files on PyTorch: all ranks call, rank 0 writes and asks the others for their pieces, and its error is raised on all.

A split variable goes to the file block by block, so that no rank ever holds it whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from keras_flow.backends.files import shared_files
from keras_flow.backends.hooking import always, hook
from keras_flow.backends.rendezvous import agreement, meeting
from keras_flow.backends.torch import gather_blocks, layouts, variables
from keras_flow.backends.torch.operators import reading_dtensors
from keras_flow.current.keras_places import engine_core as core
from keras_flow.current.variable_layout import stage_rank

if TYPE_CHECKING:
    import keras

#: this rank is writing alone: nothing inside may be a collective; what it asks the other ranks with
_alone: ContextVar[gather_blocks.Asking | None] = ContextVar("keras_flow_asking", default=None)


def asking_others(*args: object, **kwargs: object) -> gather_blocks.Asking | None:
    """Condition of hooks on what writes variables: this rank writes the files of all, and asks the others."""
    return _alone.get()


@hook(
    "keras:saving_lib",
    "H5IOStore.__setitem__",
    "a split variable is written block by block; Keras makes a whole array of it first",
    when=asking_others,
)
def write_entry(
    asking: gather_blocks.Asking, original: Callable[..., None], store: object, key: str, value: object
) -> None:
    """Hook on `H5IOStore.__setitem__`: a split variable is written block by block."""
    tensor = getattr(value, "_value", value)
    if not asking.has(tensor) or tensor.dtype == torch.bfloat16:  # numpy has none: Keras writes and marks it
        original(store, key, value)
        return
    if not store._h5_entry_initialized:  # type: ignore[attr-defined]
        store._create_h5_group(store._h5_entry_path)  # type: ignore[attr-defined]
    dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    dataset = store._h5_entry_group.create_dataset(key, tuple(tensor.shape), dtype)  # type: ignore[attr-defined]
    with contextlib.closing(asking.blocks(tensor)) as blocks:
        for index, block in blocks:
            dataset[index] = block.numpy()


@hook(
    "keras:core",
    "convert_to_numpy",
    "Keras makes float32 of bfloat16 first: a split tensor that is no variable's, which others do not have",
    when=asking_others,
)
def to_numpy(asking: gather_blocks.Asking, original: Callable[..., np.ndarray], value: object) -> np.ndarray:
    """Hook on `convert_to_numpy`: the others are asked for a split variable as it is."""
    tensor = getattr(value, "_value", value)
    return original(asking.whole(tensor) if asking.has(tensor) else value)


@hook(
    "keras.Optimizer",
    "save_own_variables",
    "a split slot is written block by block; Keras makes a whole array of it first",
    when=asking_others,
)
def write_optimizer(
    _: object, original: Callable[..., None], optimizer: keras.optimizers.Optimizer, store: dict
) -> None:
    """Hook on `BaseOptimizer.save_own_variables`: hand the variables to the file one by one."""
    for number, variable in enumerate(optimizer.variables):
        store[str(number)] = variable


@hook(
    "torch.distributed.tensor",
    "DTensor.__array__",
    "numpy(), get_weights and saving of DTensors: `.numpy() is not supported for tensor subclasses`",
    when=always,  # torch itself can only raise here
)
def to_array(
    _: object, original: Callable[..., object], tensor: DTensor, dtype: np.dtype | None = None, copy: object = None
) -> np.ndarray:
    """Hook on `DTensor.__array__`: the logical value as numpy.

    Where it is split all ranks must take part, or answer rank 0, which writes.
    """
    asking = _alone.get()
    if asking is None:
        reading_dtensors.meet_to_read(tensor)
    value = (variables.to_logical(tensor.detach()) if asking is None else asking.whole(tensor)).cpu().numpy()
    # NumPy 2 leaves it to this method: the value may be in the memory of a weight, which is trained further
    return np.array(value, dtype) if copy else np.asarray(value, dtype)


def of_stage(value: object, *args: object, **kwargs: object) -> int | None:
    """Condition of hooks on what reads variables: the rank of the pipeline's stage that one belongs to."""
    return stage_rank(value) if layouts.has_peers() else None


@hook(
    "keras.Variable",
    "__array__",
    "numpy(), get_weights and saving of a pipeline's weights, of which one rank has the values",
    when=of_stage,
)
def read_stage(
    rank: int,
    original: Callable[..., object],
    variable: keras.Variable,
    dtype: np.dtype | None = None,
    copy: object = None,
) -> np.ndarray:
    """Hook on `Variable.__array__`: the value that one rank has, on all; a collective."""
    asking = _alone.get()
    if asking is None:
        meeting.meet(meeting.READS)
        value = variables.from_rank(variable, rank)
    else:
        value = asking.whole(variable._value)
    array = np.asarray(core.convert_to_numpy(value))
    return array if dtype is None else array.astype(dtype)


def write_alone(action: Callable[[], object], model: keras.Model | None, name: str) -> None:
    """Rank 0 calls `action`; the others wait, answer it when it asks for their pieces, and get its error."""
    if not shared_files.is_split(model):
        return shared_files.write_here(action, name)
    meeting.meet(shared_files.WRITES)
    writes = layouts.this_rank() == 0
    error: BaseException | None = None
    stored = [] if model is None else list(shared_files.saved_variables(model))
    computing = [] if model is None else shared_files.computing_layers(model)
    computed = [variable for layer in computing for variable in layer.variables]
    # gathered before rank 0 goes on alone: inside, the others answer questions only
    with variables.whole(computed, here=writes):
        if writes:
            with gather_blocks.asking(stored) as asking:
                token = _alone.set(asking)
                try:
                    error = shared_files.written(action)
                finally:
                    _alone.reset(token)
        else:
            gather_blocks.answer(stored)
    # the others wait here until the file is complete
    shared_files.told(error, agreement.first_says)
