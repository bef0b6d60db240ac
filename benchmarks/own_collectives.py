"""The engines' own collectives between processes of one rank each, as users write them: what `kf.comm` is beside.

Tensors are vectors of float32. Where an engine has no such call, what its users put together in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: which kf.comm asks for; an engine's own call gathers tensors of one shape
ANY_SHAPES = "all_gather of any shapes"
#: how a call is given: a rank's tensor, or a list with one for each rank
TENSORS = (
    "all_reduce",
    "all_gather_into_tensor",
    "broadcast",
    "reduce_scatter_tensor",
    "reduce",
    "all_gather",
    ANY_SHAPES,
    "gather",
)
LISTS = ("reduce_scatter", "all_to_all", "scatter")
MESSAGES = ("send and recv", "barrier")
CALLS = (*TENSORS, *LISTS, *MESSAGES)

Calls = dict[str, Callable[[Any], Any]]


def own_calls(backend: str, rank: int, count: int, elements: int, again: bool) -> Calls:
    """Call -> function of what this process gives; of `dst` and `src` 0.

    Args:
        backend: the engine.
        rank: that of this process.
        count: number of processes.
        elements: of a tensor; those of a list have 1 / count of it.
        again: the second such programs of a process.
    """
    if backend == "torch":
        return _torch(rank, count, elements)
    return _jax(rank, count, elements) if backend == "jax" else _tensorflow(rank, count, elements, again)


def _torch(rank: int, count: int, elements: int) -> Calls:
    import torch
    import torch.distributed as dist

    Tensor = torch.Tensor
    part = elements // count

    def copied(run: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            result = x.clone()
            run(result)
            return result

        return call

    def filled(shape: int, run: Callable[[Tensor, Any], object]) -> Callable[[Any], Tensor]:
        def call(x: Any) -> Tensor:
            result = torch.empty(shape)
            run(result, x)
            return result

        return call

    def lists(length: int, run: Callable[[list[Tensor], Any], object]) -> Callable[[Any], list[Tensor]]:
        def call(x: Any) -> list[Tensor]:
            results = [torch.empty(length) for _ in range(count)]
            run(results, x)
            return results

        return call

    def moved(x: Tensor) -> Tensor | None:
        if rank == 0:
            dist.send(x, 1)
            return None
        result = torch.empty(elements)
        dist.recv(result, 0)
        return result

    first, reduced = rank == 0, copied(lambda x: dist.reduce(x, 0))
    return {
        "all_reduce": copied(dist.all_reduce),
        "all_gather_into_tensor": filled(count * elements, dist.all_gather_single),
        "broadcast": copied(lambda x: dist.broadcast(x, 0)),
        "reduce_scatter_tensor": filled(part, dist.reduce_scatter_single),
        # it leaves parts of sums in the tensors of the others
        "reduce": reduced if first else lambda x: (reduced(x), x)[1],
        **dict.fromkeys(["all_gather", ANY_SHAPES], lists(elements, dist.all_gather)),
        "gather": lists(elements, lambda out, x: dist.gather(x, out, 0)) if first else lambda x: dist.gather(x),
        "reduce_scatter": filled(part, dist.reduce_scatter),
        "all_to_all": lists(part, dist.all_to_all),
        "scatter": filled(part, lambda out, x: dist.scatter(out, x, 0)),
        "send and recv": moved,
        "barrier": lambda _: dist.barrier(),
    }


def _jax(rank: int, count: int, elements: int) -> Calls:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    axis = "ranks"
    mesh = Mesh(np.array(jax.devices()), (axis,))
    spec = PartitionSpec(axis)
    sharding = NamedSharding(mesh, spec)
    one = jnp.ones(1, "int32")

    def local(result: jax.Array) -> jax.Array:
        return result.addressable_shards[0].data

    def program(body: Callable) -> Callable[..., Any]:
        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

        def call(*given: jax.Array) -> Any:
            result = run(*(jax.make_array_from_single_device_arrays((count * x.size,), sharding, [x]) for x in given))
            return [local(each) for each in result] if isinstance(result, tuple) else local(result)

        return call

    def listed(run: Callable[..., Any]) -> Callable[[Sequence[jax.Array]], Any]:
        return lambda given: run(*given)

    def from_first(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, axis, [(0, 1)])

    gathered = program(lambda x: tuple(lax.all_gather(x, axis)))
    # of two ranks; those that give nothing have to give arrays of that shape, too
    scattered = program(lambda x, y: jnp.where(lax.axis_index(axis) == 0, x, from_first(y)))
    summed, moved = program(lambda x: lax.psum(x, axis)), program(from_first)
    zeros = [jnp.zeros(elements // count, "float32")] * count

    return {
        "all_reduce": summed,
        "all_gather_into_tensor": program(lambda x: lax.all_gather(x, axis, tiled=True)),
        # it has no broadcast: the sum of one and of zeros
        "broadcast": program(lambda x: lax.psum(jnp.where(lax.axis_index(axis) == 0, x, 0.0), axis)),
        "reduce_scatter_tensor": program(lambda x: lax.psum_scatter(x, axis, tiled=True)),
        # nor anything to one rank
        "reduce": summed if rank == 0 else lambda x: (summed(x), x)[1],
        **dict.fromkeys(["all_gather", ANY_SHAPES], gathered),
        "gather": gathered if rank == 0 else lambda x: (gathered(x), None)[1],
        "reduce_scatter": listed(program(lambda *parts: lax.psum_scatter(jnp.stack(parts), axis))),
        "all_to_all": listed(program(lambda *parts: tuple(lax.all_to_all(jnp.stack(parts), axis, 0, 0)))),
        "scatter": lambda given: scattered(*(given or zeros)),
        "send and recv": moved if rank else lambda x: (moved(x), None)[1],
        "barrier": lambda _: (summed(one).block_until_ready(), None)[1],
    }


def _tensorflow(rank: int, count: int, elements: int, again: bool) -> Calls:
    import tensorflow as tf

    raw, part = tf.raw_ops, elements // count

    def keys(call: str) -> dict[str, Any]:
        number = 0x2000_0000 + 2 * len(CALLS) * elements + len(CALLS) * again + CALLS.index(call)
        keys = {"group_size": count, "group_key": 0x2000_0000, "instance_key": number}
        # without a time limit: with one TensorFlow keeps two threads for each operation until it is over
        return {**keys, "communication_hint": "ring"}

    def wrapped(body: Callable, length: int = elements, tensors: int = 1) -> Callable[..., Any]:
        return tf.compat.v1.wrap_function(body, [tf.TensorSpec([length], tf.float32)] * tensors)

    ordered = {"ordering_token": [], "is_stateless": False}

    def summed(x: tf.Tensor, call: str) -> tf.Tensor:
        return raw.CollectiveReduceV2(input=x, merge_op="Add", final_op="Id", **ordered, **keys(call))

    def gathered(x: tf.Tensor, call: str) -> list[tf.Tensor]:
        return tf.unstack(tf.reshape(raw.CollectiveGatherV2(input=x, **ordered, **keys(call)), [count, -1]))

    def exchanged(rows: tf.Tensor, call: str) -> tf.Tensor:
        return raw.CollectiveAllToAllV2(input=rows, **ordered, **keys(call))

    def moved(x: tf.Tensor | None, call: str, length: int = elements) -> tf.Tensor:
        if x is not None:
            return raw.CollectiveBcastSendV2(input=x, **keys(call))
        return raw.CollectiveBcastRecvV2(T=tf.float32, shape=[length], **keys(call))

    first = rank == 0
    reduced, collected = wrapped(lambda x: summed(x, "reduce")), wrapped(lambda x: gathered(x, "gather"))
    waited, one = wrapped(lambda x: summed(x, "barrier"), 1), tf.ones(1)

    def scattered(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([moved(y, "scatter")]):
            return tf.identity(x)

    if first:
        scatter, message = wrapped(scattered, part, 2), wrapped(lambda x: moved(x, "send and recv"))
    else:
        scatter = tf.compat.v1.wrap_function(lambda: moved(None, "scatter", part), [])
        message = tf.compat.v1.wrap_function(lambda: moved(None, "send and recv"), [])
    reduce_scatter = wrapped(lambda *parts: tf.reduce_sum(exchanged(tf.stack(parts), "reduce_scatter"), 0), part, count)
    all_to_all = wrapped(lambda *parts: tf.unstack(exchanged(tf.stack(parts), "all_to_all")), part, count)
    return {
        "all_reduce": wrapped(lambda x: summed(x, "all_reduce")),
        "all_gather_into_tensor": wrapped(
            lambda x: raw.CollectiveGatherV2(input=x, **ordered, **keys("all_gather_into_tensor"))
        ),
        "broadcast": wrapped(
            lambda x: (
                moved(x, "broadcast")
                if first
                else raw.CollectiveBcastRecvV2(T=x.dtype, shape=tf.shape(x), **keys("broadcast"))
            )
        ),
        # its reduce-scatter is NCCL's alone
        "reduce_scatter_tensor": wrapped(
            lambda x: tf.reduce_sum(exchanged(tf.reshape(x, [count, -1]), "reduce_scatter_tensor"), 0)
        ),
        # it has nothing to one rank
        "reduce": reduced if first else lambda x: (reduced(x), x)[1],
        **{name: wrapped(lambda x, name=name: gathered(x, name)) for name in ("all_gather", ANY_SHAPES)},
        "gather": collected if first else lambda x: (collected(x), None)[1],
        "reduce_scatter": lambda given: reduce_scatter(*given),
        "all_to_all": lambda given: all_to_all(*given),
        "scatter": (lambda given: scatter(*given)) if first else lambda _: scatter(),
        "send and recv": (lambda x: (message(x), None)[1]) if first else lambda _: message(),
        "barrier": lambda _: (waited(one), None)[1],
    }
