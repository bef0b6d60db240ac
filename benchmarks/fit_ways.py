"""The ways of training that `benchmarks/fit.py` compares: an epoch of each is a function without arguments.

`fit` is Keras's, with or without a scope. What an engine offers is written by hand around the same Keras model: a
jitted step with shardings and `keras.distribution` on JAX, `MirroredStrategy` on TensorFlow, loops with
DistributedDataParallel and with explicit collectives on torch; on torch the same in plain modules, too.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable

import keras
import numpy as np

import keras_flow as kf
from benchmarks.fit_models import BATCH, RULES, Parts, build

Epoch = Callable[[], object]
#: name -> the epoch
Ways = dict[str, Epoch]

_strategies = itertools.count(1)


def fit(family: str, size: float, x: np.ndarray, y: np.ndarray, scope: contextlib.AbstractContextManager) -> Epoch:
    """`model.fit`, built under a scope."""
    with scope:
        model = build(family, size)
    return lambda: _finished(model, model.fit(x, y, batch_size=BATCH[family], shuffle=False, verbose=0))


def ours(family: str, size: float, kind: str, x: np.ndarray, y: np.ndarray, **options: str) -> Epoch:
    """`fit` under a scope of keras_flow, on all ranks; `options` of `kf.DataParallel`."""
    ranks = range(kf.env.get_world_size())
    if kind == "data":
        return fit(family, size, x, y, kf.DataParallel(kf.Placement(ranks, axis_names=("data",)), **options).scope())
    rules = {pattern: {"model": kf.sbp.split(dim)} for pattern, dim in RULES[family].items()}
    mesh = kf.Placement(ranks, axis_names=("model",))
    return fit(family, size, x, y, kf.ModelParallel(mesh, rules=rules).scope())


def one_rank(family: str, size: float, x: np.ndarray, y: np.ndarray) -> Epoch:
    """`fit` under a scope of one rank."""
    return fit(family, size, x, y, kf.DataParallel(kf.Placement([0], axis_names=("data",))).scope())


def _finished(model: keras.Model, history: object) -> object:
    """Wait for what is still being computed."""
    if keras.backend.backend() == "jax":
        import jax

        jax.block_until_ready([variable.value for variable in model.variables])
    return history


# ---- JAX


def jax_ways(family: str, size: float, kind: str, x: np.ndarray, y: np.ndarray) -> Ways:
    """A jitted step with shardings, and `keras.distribution`."""
    return {
        "jit by hand": _jax_by_hand(family, size, kind, x, y),
        "keras.distribution": _keras_distribution(family, size, kind, x, y),
    }


def _jax_by_hand(family: str, size: float, kind: str, x: np.ndarray, y: np.ndarray) -> Epoch:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from benchmarks.fit_jax import jitted_step

    model = build(family, size)
    model.optimizer.build(model.trainable_variables)
    mesh = Mesh(np.array(jax.devices()[: kf.env.get_world_size()]), ("ranks",))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("ranks"))

    def put(variables):
        return [jax.device_put(one.value, _sharding(one)) for one in variables]

    def _sharding(variable):
        dim = _split_dim(family, variable.path) if kind == "tensor" else None
        if dim is None or dim >= len(variable.shape):
            return whole
        return NamedSharding(mesh, PartitionSpec(*[None] * dim, "ranks"))

    slots = [one for one in model.optimizer.variables]
    state = (put(model.trainable_variables), put(model.non_trainable_variables), put(slots))
    batch = rows if kind == "data" else whole

    compiled = jitted_step(model)
    held = {"state": state}
    size_of_batch = BATCH[family]

    def epoch():
        for start in range(0, len(x), size_of_batch):
            inputs, labels = (jax.device_put(part[start : start + size_of_batch], batch) for part in (x, y))
            held["state"], loss = compiled(held["state"], inputs, labels)
        return jax.block_until_ready((held["state"], loss))

    return epoch


def _split_dim(family: str, path: str) -> int | None:
    """The dim of a variable, or of an optimizer's slot of it, that a rule splits."""
    path = path.replace("_kernel", "/kernel").replace("_bias", "/bias").replace("norm_", "norm/")
    path = re.sub(r"attention_(query|key|value|attention_output)", r"attention/\1", path)
    return next((dim for pattern, dim in RULES[family].items() if re.search(pattern, path)), None)


def _keras_distribution(family: str, size: float, kind: str, x: np.ndarray, y: np.ndarray) -> Epoch:
    from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, list_devices

    ranks = kf.env.get_world_size()
    devices = list_devices()[:ranks]
    if kind == "data":
        distribution = DataParallel(device_mesh=DeviceMesh((ranks,), ("batch",), devices))
    else:
        layout = LayoutMap(DeviceMesh((1, ranks), ("batch", "model"), devices))
        for pattern, dim in RULES[family].items():
            layout[pattern] = (*[None] * dim, "model")
        distribution = ModelParallel(layout_map=layout, batch_dim_name="batch")
    with distribution.scope():
        epoch = fit(family, size, x, y, contextlib.nullcontext())

    def scoped():
        with distribution.scope():
            return epoch()

    return scoped


# ---- TensorFlow


def tensorflow_ways(family: str, size: float, kind: str, x: np.ndarray, y: np.ndarray) -> Ways:
    """`MirroredStrategy`; TensorFlow has no tensor parallelism around a Keras model."""
    import tensorflow as tf

    if kind == "tensor":
        return {}
    # collectives of two strategies in one process are told apart by this number only
    base = {"_collective_key_base": 1000 * next(_strategies)}
    made = type("MirroredStrategy", (tf.distribute.MirroredStrategy,), base)
    strategy = made([f"CPU:{rank}" for rank in range(kf.env.get_world_size())])
    return {"MirroredStrategy": fit(family, size, x, y, strategy.scope())}


# ---- torch


def torch_ways(family: str, size: float, kind: str, x: np.ndarray, y: np.ndarray) -> Ways:
    """DistributedDataParallel, or explicit collectives, around the Keras model and around plain modules."""
    from benchmarks.fit_torch import StatisticsOfAllRows, data_parallel, plain_module, tensor_parallel

    if kind == "data":
        parts = Parts(norm=StatisticsOfAllRows)
        ways = {
            "DDP by hand": data_parallel(build(family, size, parts), family, x, y),
            "DDP, plain modules": data_parallel(plain_module(family, size, Parts()), family, x, y),
        }
        if family == "cnn":
            ways["DDP, statistics of own rows"] = data_parallel(build(family, size), family, x, y)
        return ways
    return {
        "collectives by hand": tensor_parallel(lambda parts: build(family, size, parts), family, x, y),
        "collectives, plain modules": tensor_parallel(lambda parts: plain_module(family, size, parts), family, x, y),
    }


WAYS = {"jax": jax_ways, "tensorflow": tensorflow_ways, "torch": torch_ways}
