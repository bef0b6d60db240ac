"""Randomness on PyTorch: all ranks draw what one device would draw for the logical tensor, and take their part."""

from __future__ import annotations

import pickle
import random as python_random
import warnings
import zlib
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
import torch.distributed as torch_distributed
from keras.src.backend.common import global_state
from keras.src.random import seed_generator as keras_seeds
from torch.distributed.tensor import DTensor, Replicate

from keras_flow.backends.torch.step import OwnRows, RunningStep, computing
from keras_flow.backends.torch.variables import from_logical
from keras_flow.errors import FlowWarning

_WHAT = ("Python's random", "NumPy's", "torch's", "Keras's seed generator")


def align() -> None:
    """Give all ranks rank 0's random states, with a warning where they differed. A collective of the whole job."""
    if not torch_distributed.is_initialized():
        return
    # checksums first: states are kilobytes, and ranks that were seeded alike need send none
    states = _states()
    sums = [zlib.crc32(pickle.dumps(state)) for state in states]
    everyone = torch.zeros(torch_distributed.get_world_size(), len(sums), dtype=torch.int64)
    everyone[torch_distributed.get_rank()] = torch.tensor(sums)
    torch_distributed.all_reduce(everyone)
    differ = [what for column, what in enumerate(_WHAT) if bool((everyone[:, column] != everyone[0, column]).any())]
    if not differ:
        return
    box = [states]
    torch_distributed.broadcast_object_list(box, src=0)
    _set_states(box[0])
    warnings.warn(
        f"random states differed between the ranks ({', '.join(differ)}): all take rank 0's. Call "
        "keras.utils.set_random_seed(...) at the start of the program to choose them",
        FlowWarning,
        stacklevel=3,
    )


def _states() -> list[object]:
    seeds = global_state.get_global_attribute(keras_seeds.GLOBAL_SEED_GENERATOR)
    numpy_state = np.random.get_state(legacy=True)
    return [
        python_random.getstate(),
        (numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:]),  # type: ignore[index]
        torch.get_rng_state().numpy().tobytes(),
        None if seeds is None else [int(part) for part in seeds.state.numpy()],
    ]


def _set_states(states: list[object]) -> None:
    python_random.setstate(states[0])  # type: ignore[arg-type]
    name, keys, *rest = states[1]  # type: ignore[misc]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(states[2]), dtype=torch.uint8))  # type: ignore[arg-type]
    if states[3] is None:
        global_state.set_global_attribute(keras_seeds.GLOBAL_SEED_GENERATOR, None)
    else:
        generator = global_state.get_global_attribute(keras_seeds.GLOBAL_SEED_GENERATOR)
        if generator is None:
            generator = keras_seeds.SeedGenerator()
            python_random.setstate(states[0])  # type: ignore[arg-type]  # making one draws from it
            global_state.set_global_attribute(keras_seeds.GLOBAL_SEED_GENERATOR, generator)
        generator.state.assign(np.asarray(states[3]))


def dropout(
    step: RunningStep,
    original: Callable[..., torch.Tensor],
    inputs: torch.Tensor,
    rate: float,
    noise_shape: tuple[int | None, ...] | None = None,
    seed: object = None,
) -> torch.Tensor:
    """Hook on `random.dropout`: the mask of one device, of which this rank takes its part.

    Unseeded layers draw from torch's own generator, so a mask of the local shape would be another one.
    """
    if not 0.0 < rate < 1.0:
        return original(inputs, rate, noise_shape, seed)
    if isinstance(inputs, DTensor):
        mask = original(
            torch.ones(tuple(inputs.shape), dtype=inputs.dtype, device=inputs.device), rate, noise_shape, seed
        )
        placements = tuple(part if part.is_shard() else Replicate() for part in inputs.placements)
        return inputs * from_logical(mask, inputs.device_mesh, placements)
    if step.inside is None:
        return original(inputs, rate, noise_shape, seed)
    # the mask of all rows, of which this rank takes its own
    shape = (step.inside.logical(inputs.shape[0]), *inputs.shape[1:])
    if noise_shape is not None and noise_shape[0] == inputs.shape[0]:
        noise_shape = (shape[0], *noise_shape[1:])
    mask = original(torch.ones(shape, dtype=inputs.dtype, device=inputs.device), rate, noise_shape, seed)
    return inputs * mask[step.inside.own(shape[0])]


def draw(
    step: RunningStep, original: Callable[..., torch.Tensor], shape: tuple[int, ...], *args: object, **kwargs: object
) -> object:
    """Hook on `random.normal` and the like, inside a layer that computes this rank's rows.

    Draws for all rows, and keeps this rank's. The layers that are known to act row by row draw tensors of their input's
    rows only.
    """
    rows = cast("OwnRows", step.inside)  # a layer computes this rank's rows
    # one number for all rows
    if not len(shape):
        return original(shape, *args, **kwargs)
    with computing(step, None):  # a draw may be made of another (truncated_normal)
        value = original((rows.logical(int(shape[0])), *shape[1:]), *args, **kwargs)
    return value[rows.own(value.shape[0])]
