"""Probes on JAX: what `keras-flow doctor` asks of the engine itself."""

from __future__ import annotations

import time

import jax
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_flow.backends.jax import devices
from keras_flow.errors import FlowError


def free_memory() -> int:
    """Bytes that are free on the first device here; the host's where that is a CPU, or the engine cannot say."""
    for device in jax.local_devices()[:1]:
        held = device.memory_stats() or {}  # a CPU has none
        if "bytes_limit" in held:
            return held["bytes_limit"] - held["bytes_in_use"]
    return psutil.virtual_memory().available


def devices_seen() -> list[str]:
    """The devices of JAX's default type, one text each."""
    return [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]


def all_reduce(elements: int, ranks: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` sums over the first `ranks` ranks of a float32 tensor [elements].

    Raises:
        FlowError: a sum is wrong.
    """
    mesh = Mesh(np.array(devices.rank_devices()[:ranks]), ("ranks",))
    split = NamedSharding(mesh, PartitionSpec("ranks"))
    own = np.repeat(np.arange(1, ranks + 1, dtype="float32"), elements).reshape(ranks, elements)
    value = jax.device_put(own, split)

    def total(piece: jax.Array) -> jax.Array:
        return jax.lax.psum(piece, "ranks")

    program = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=PartitionSpec("ranks"), out_specs=PartitionSpec()))
    seconds = []
    for number in range(repeats + 1):
        began = time.perf_counter()
        out = program(value).block_until_ready()
        if number:  # the first compiles
            seconds.append(time.perf_counter() - began)
        if not np.all(np.asarray(out) == ranks * (ranks + 1) / 2):
            raise FlowError(f"an all-reduce over {ranks} ranks gave a wrong sum on jax")
    return seconds
