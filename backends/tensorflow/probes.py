"""Probes on TensorFlow: what `keras-flow doctor` asks of the engine itself."""

from __future__ import annotations

import time

import numpy as np
import psutil
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_flow.backends.tensorflow import devices
from keras_flow.backends.tensorflow.layouts import on_mesh
from keras_flow.backends.tensorflow.mesh_values import pack
from keras_flow.backends.tensorflow.variables import to_host
from keras_flow.errors import FlowError


def free_memory() -> int:
    """Bytes that are free on the first device here; the host's where that is a CPU, or the engine cannot say."""
    return psutil.virtual_memory().available  # TensorFlow 2.21 says how much of a GPU is used, not how much it has


def devices_seen() -> list[str]:
    """The physical devices that TensorFlow may use, one text each."""
    physical = tf.config.list_physical_devices("GPU") or tf.config.list_physical_devices("CPU")
    texts = []
    for number, device in enumerate(physical):
        name = tf.config.experimental.get_device_details(device).get("device_name", "")
        texts.append(f"{device.device_type.lower()}:{number} {name}".strip())
    return texts


def all_reduce(elements: int, ranks: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` sums over the first `ranks` ranks of a float32 tensor [elements].

    Raises:
        FlowError: a sum is wrong.
    """
    names = [device.rpartition("/device:")[2] for device in devices.rank_devices()[:ranks]]
    # a mesh of its own: the distribution's may have several axes, and the sum is to go over all ranks at once
    mesh = dtensor.create_mesh([("ranks", ranks)], devices=names)
    # rank r holds r + 1, so the sum is ranks * (ranks + 1) / 2 only if each rank counts once
    rows = [np.full((1, elements), rank + 1, "float32") for rank in range(ranks)]
    value = pack(rows, dtensor.Layout(["ranks", dtensor.UNSHARDED], mesh))
    total = tf.function(lambda rows: tf.reduce_sum(rows, 0))
    seconds = []
    with on_mesh(mesh):
        for number in range(repeats + 1):
            began = time.perf_counter()
            out = to_host(total(value))
            if number:  # the first compiles
                seconds.append(time.perf_counter() - began)
            if not np.all(out == ranks * (ranks + 1) / 2):
                raise FlowError(f"an all-reduce over {ranks} ranks gave a wrong sum on tensorflow")
    return seconds
