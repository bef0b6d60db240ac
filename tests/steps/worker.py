"""What a training step costs in counts, which do not depend on the clock; of one layout on every rank."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends import hooking, keras_hooks
from keras_flow.backends.active import backend
from tests.hooks import wrapped

BATCH = 8
SHORT, LONG = 3, 11

#: while something is counted: what happened how often
_counts: Counter[str] = Counter()


@keras.saving.register_keras_serializable()
class Traced(keras.layers.Dense):
    """A layer that notes when its Python code runs: on JAX and TensorFlow while a step is traced."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        _counts["python calls of a layer"] += 1
        return super().call(inputs, training)


RULES = {"up/kernel": {"model": kf.sbp.split(1)}, "down/kernel": {"model": kf.sbp.split(0)}}
#: layout -> its distribution on so many ranks
LAYOUTS: dict[str, Callable[[int], kf.DataParallel | kf.ModelParallel]] = {
    "data parallel": lambda ranks: kf.DataParallel(kf.Placement(range(ranks), axis_names=("data",))),
    "tensor parallel": lambda ranks: kf.ModelParallel(kf.Placement(range(ranks), axis_names=("model",)), rules=RULES),
    "one rank": lambda ranks: kf.DataParallel(kf.Placement([0], axis_names=("data",))),
}


def counts(layout: str) -> dict[str, float]:
    """Count -> how often in a step, or in all epochs after the first."""
    with counting():
        return measured(LAYOUTS[layout](kf.env.get_world_size()))


def measured(distribution: kf.DataParallel | kf.ModelParallel) -> dict[str, float]:
    """Counts of one layout: those of a long epoch less those of a short one, by step; and those that must not grow."""
    with distribution.scope():
        keras.utils.set_random_seed(0)
        # on torch a layer of a user's own class would train by the consistent view, and nothing is traced
        dense = keras.layers.Dense if keras.backend.backend() == "torch" else Traced
        model = keras.Sequential(
            [keras.layers.Input((16,)), dense(32, activation="relu", name="up"), keras.layers.Dense(4, name="down")]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    x, y = random.standard_normal((LONG * BATCH, 16)).astype("float32"), random.integers(0, 4, LONG * BATCH)

    def epochs(steps: int, number: int = 1) -> Counter[str]:
        _counts.clear()
        rows = slice(0, steps * BATCH)
        model.fit(x[rows], y[rows], batch_size=BATCH, epochs=number, verbose=0, shuffle=False)
        return Counter(_counts)

    epochs(SHORT, 2)  # all is made
    short, long = epochs(SHORT), epochs(LONG)
    found = {name: (long[name] - short[name]) / (LONG - SHORT) for name in sorted(short | long)}
    later = epochs(SHORT, 3)
    found["compilations in later epochs"] = later["compilations"]
    if keras.backend.backend() != "torch":
        found["traces in later epochs"] = later["python calls of a layer"]
    return {name: value for name, value in found.items() if name not in ("compilations", "python calls of a layer")}


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Count calls of hooks, and what the engine compiles, copies between host and devices, and communicates."""
    kf.DataParallel(kf.Placement([0], axis_names=("data",)))  # installs the hooks
    with contextlib.ExitStack() as stack:
        every = [one for hook in (*backend().hooks(), *keras_hooks.hooks()) for one in wrapped(hook)]
        for hook in {id(one): one for one in every}.values():  # several hooks may share a target
            stack.enter_context(_counted(hook))
        {"jax": _of_jax, "tensorflow": _of_tensorflow, "torch": _of_torch}[keras.backend.backend()](stack)
        yield


@contextlib.contextmanager
def _counted(hook: hooking.Hook) -> Iterator[None]:
    replacement = hook.replacement

    @functools.wraps(replacement)  # what is installed is known by its name
    def counted(*args: Any, **kwargs: Any) -> object:
        _counts["hook calls"] += 1
        return replacement(*args, **kwargs)

    object.__setattr__(hook, "replacement", counted)
    try:
        yield
    finally:
        object.__setattr__(hook, "replacement", replacement)


def _patch(stack: contextlib.ExitStack, owner: object, name: str, note: str) -> None:
    original: Callable[..., object] = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> object:
        _counts[note] += 1
        return original(*args, **kwargs)

    stack.enter_context(mock.patch.object(owner, name, counted))


def _of_jax(stack: contextlib.ExitStack) -> None:
    import jax
    import jax.monitoring

    def compiled(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            _counts["compilations"] += 1

    jax.monitoring.register_event_duration_secs_listener(compiled)
    for name in ("device_put", "make_array_from_callback", "make_array_from_single_device_arrays"):
        _patch(stack, jax, name, "arrays to devices")
    array = type(jax.numpy.zeros(1))
    value = array._value

    def read(self: Any) -> object:
        _counts["arrays to host"] += 1
        return value.fget(self)

    stack.enter_context(mock.patch.object(array, "_value", property(read)))


def _of_tensorflow(stack: contextlib.ExitStack) -> None:
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    _patch(stack, dtensor, "pack", "arrays to devices")
    _patch(stack, dtensor, "copy_to_mesh", "arrays to devices")
    _patch(stack, type(tf.constant(0)), "numpy", "arrays to host")


def _of_torch(stack: contextlib.ExitStack) -> None:
    import torch
    import torch.distributed as dist

    from keras_flow.backends.torch import doubling

    for name in ("all_reduce", "all_gather_single", "all_to_all_single", "broadcast", "all_gather_object", "barrier"):
        _patch(stack, dist, name, "collectives called from Python")
    _patch(stack, doubling, "_by_doubling", "collectives called from Python")
    _patch(stack, torch.Tensor, "item", "arrays to host")
    _patch(stack, torch.Tensor, "numpy", "arrays to host")
