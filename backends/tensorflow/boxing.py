"""Boxing on TensorFlow: plain operations on each rank's device, in one cached function for each plan.

DTensor's relayout holds neither uneven nor partial tensors; raw collectives have no reduce-scatter on CPU, and one that
fails poisons those after it. Plain operations move what the plan says and no more.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import tensorflow as tf

from keras_flow.backends.tensorflow.devices import rank_devices
from keras_flow.boxing.functional import run_step
from keras_flow.boxing.spec import BoxingPlan


def redistribute(plan: BoxingPlan, shards: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
    """Run a plan; shards by rank, all ranks of this host."""
    if not plan.steps:
        return dict(shards)
    devices = rank_devices()
    ordered = [shards[rank] for rank in plan.source.placement.ranks]
    results = program(plan, ordered[0].dtype)(*ordered)
    out = {}
    for rank, value in zip(plan.target.placement.ranks, results, strict=True):
        with tf.device(devices[rank]):  # a function's results come back on the first device
            out[rank] = tf.identity(value)
    return out


@functools.lru_cache(maxsize=256)
def program(plan: BoxingPlan, dtype: tf.DType):
    """The function of a plan: shards in the order of the source's ranks to shards in that of the target's."""
    ops = _Ops(rank_devices())
    ranks = plan.source.placement.ranks

    def run(*shards):
        held = dict(zip(ranks, shards, strict=True))
        for step in plan.steps:
            held = run_step(ops, step, held)
        return tuple(held[rank] for rank in plan.target.placement.ranks)

    # not tf.function: it passes every output through the first device, which moves all results twice more
    return tf.compat.v1.wrap_function(run, [tf.TensorSpec(plan.source.local_shape(rank), dtype) for rank in ranks])


class _Ops:
    """Each operation on the device of the rank that it is for; TensorFlow copies what comes from another one."""

    def __init__(self, devices: tuple[str, ...]):
        self.devices = devices

    def cut(self, shard, slices, start, stop, rank):
        with tf.device(self.devices[rank]):
            return tf.reshape(shard[slices] if slices else shard, [-1])[start:stop]

    def send(self, values, sender, receiver):
        with tf.device(self.devices[receiver]):
            return tf.identity(values)

    def add(self, one, other, rank):
        with tf.device(self.devices[rank]):
            return tf.logical_or(one, other) if one.dtype == tf.bool else one + other

    def zeros(self, size, like, rank):
        with tf.device(self.devices[rank]):
            return tf.zeros([size], like.dtype)

    def join(self, values, dim, rank):
        with tf.device(self.devices[rank]):
            return tf.concat(values, dim)

    def shape(self, values, shape, rank):
        with tf.device(self.devices[rank]):
            return tf.reshape(values, shape)
