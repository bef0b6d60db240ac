"""Time of `kf.comm` beside the engine's own collectives, between two processes of one host.

    python -m benchmarks.collectives [--backends jax,tensorflow,torch] [--repeats 40] [--out FILE.md]

Calls in a row, in turns, on each process; of the two processes the slower counts. A ratio is the median of those to the
engine's own two calls of the same turn. The overhead is what the calling thread computes in a call of 4 bytes beyond
the engine's own, in time of the processor: two processes of two cores lose as much again by waking each other. "Its
own, again" is the engine's own call once more, as a program of its own: how far apart the same work can be. Exit status
1 where a ratio of 1 MB and more is above 1.05, or an overhead above 50 us.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.parts import measured_apart

SIZES = {"4 B": 1, "4 KB": 1_000, "1 MB": 250_000, "16 MB": 4_000_000}
#: calls of a turn, one after the other: processes leave the barrier before them at other times
IN_A_ROW = {"4 B": 20, "4 KB": 20, "1 MB": 8, "16 MB": 2}
CALLS = ("all_reduce", "all_gather_into_tensor", "broadcast")
RATIO, OVERHEAD = 1.05, 50e-6


def own_calls(backend: str, count: int, elements: int, again: bool) -> dict[str, Callable[[Any], Any]]:
    """The engine's own, of a tensor of this process; what it gives is a tensor of its own too.

    Args:
        backend: the engine.
        count: number of processes.
        elements: of the tensor, float32.
        again: the second such programs of a process.
    """
    return {"torch": _torch, "jax": _jax, "tensorflow": _tensorflow}[backend](count, elements, again)


def _torch(count: int, elements: int, _: bool) -> dict[str, Callable[[Any], Any]]:
    import torch
    import torch.distributed as dist

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        dist.all_reduce(result)
        return result

    def gather(x: torch.Tensor) -> torch.Tensor:
        result = torch.empty(count * elements)
        dist.all_gather_single(result, x)
        return result

    def broadcast(x: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        dist.broadcast(result, 0)
        return result

    return {"all_reduce": all_reduce, "all_gather_into_tensor": gather, "broadcast": broadcast}


def _jax(count: int, elements: int, _: bool) -> dict[str, Callable[[Any], Any]]:
    import jax
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    spec = PartitionSpec("ranks")

    def program(body: Callable) -> Callable[[Any], Any]:
        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        sharding = NamedSharding(mesh, spec)

        def call(x: jax.Array) -> jax.Array:
            whole = jax.make_array_from_single_device_arrays((count * elements,), sharding, [x])
            return run(whole).addressable_shards[0].data

        return call

    return {
        "all_reduce": program(lambda block: lax.psum(block, "ranks")),
        "all_gather_into_tensor": program(lambda block: lax.all_gather(block, "ranks", tiled=True)),
        # it has no broadcast: the sum of one and of zeros
        "broadcast": program(
            lambda block: lax.psum(jax.numpy.where(lax.axis_index("ranks") == 0, block, 0.0), "ranks")
        ),
    }


def _tensorflow(count: int, elements: int, again: bool) -> dict[str, Callable[[Any], Any]]:
    import tensorflow as tf

    import keras_flow as kf

    first = kf.env.is_main_process()

    def keys(instance: int) -> dict[str, Any]:
        number = 0x2000_0000 + 16 * elements + len(CALLS) * again + instance
        keys = {"group_size": count, "group_key": 0x2000_0000, "instance_key": number}
        # without a time limit: with one TensorFlow keeps two threads for each operation until it is over
        return {**keys, "communication_hint": "ring"}

    def wrapped(body: Callable) -> Callable[[Any], Any]:
        return tf.compat.v1.wrap_function(body, [tf.TensorSpec([elements], tf.float32)])

    ordered = {"ordering_token": [], "is_stateless": False}
    return {
        "all_reduce": wrapped(
            lambda x: tf.raw_ops.CollectiveReduceV2(input=x, merge_op="Add", final_op="Id", **ordered, **keys(0))
        ),
        "all_gather_into_tensor": wrapped(lambda x: tf.raw_ops.CollectiveGatherV2(input=x, **ordered, **keys(1))),
        "broadcast": wrapped(
            lambda x: (
                tf.raw_ops.CollectiveBcastSendV2(input=x, **keys(2))
                if first
                else tf.raw_ops.CollectiveBcastRecvV2(T=x.dtype, shape=tf.shape(x), **keys(2))
            )
        ),
    }


def measure(backend: str, repeats: int) -> dict[str, list[dict[str, list[float]]]]:
    """In each process: call and size -> way -> the slower process's seconds, and those of its processor."""
    import numpy as np

    import keras_flow as kf
    from keras_flow.backends.active import tensor_engine

    engine, rank, count = tensor_engine(), kf.env.get_rank(), kf.env.get_world_size()
    found: dict[str, list[dict[str, list[float]]]] = {}
    for size, elements in SIZES.items():
        x = engine.put(np.full(elements, 1.0 + rank, "float32"), rank)
        own, own_again = (own_calls(backend, count, elements, again) for again in (False, True))
        for name in CALLS:
            ways = {
                "kf.comm": (lambda x: kf.comm.broadcast(x, 0)) if name == "broadcast" else getattr(kf.comm, name),
                "own": own[name],
                "own again": own_again[name],
            }
            results = [engine.as_numpy(way(x)) for way in ways.values()]
            np.testing.assert_array_equal(results[0], results[1], err_msg=f"{name} of {size}")
            orders = list(itertools.permutations(ways))
            times: dict[str, list[float]] = {way: [] for way in ways}
            own_times: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(repeats + 3):
                # each way comes after each other one equally often
                for way in orders[turn % len(orders)]:
                    kf.comm.barrier()
                    begin, begin_own = time.perf_counter(), time.thread_time()
                    for _ in range(IN_A_ROW[size]):
                        engine.as_numpy(ways[way](x))[0]
                    if turn >= 3:
                        times[way].append((time.perf_counter() - begin) / IN_A_ROW[size])
                        own_times[way].append((time.thread_time() - begin_own) / IN_A_ROW[size])
            everyone = kf.comm.all_gather_object([times, own_times])
            found[f"{name}, {size}"] = [
                {way: [max(each) for each in zip(*(theirs[way] for theirs in measured), strict=True)] for way in ways}
                for measured in zip(*everyone, strict=True)
            ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="jax,tensorflow,torch")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import keras_flow as kf

        found = kf.run(measure, devices=2, processes=2, args=(options.backends, options.repeats))
        Path(options.one).write_text(json.dumps(found))
        return 0
    rows, missed = [], []
    for backend in options.backends.split(","):
        found = measured_apart(
            "benchmarks.collectives", ["--repeats", str(options.repeats)], backend, Path("collectives")
        )
        for case, measured in found.items():
            turns, used = ([times[way] for way in ("kf.comm", "own", "own again")] for times in measured)
            own = statistics.median(turns[1] + turns[2])
            # within a turn, in which the machine is equally fast
            ratio = statistics.median(2 * ours / (one + other) for ours, one, other in zip(*turns, strict=True))
            control = statistics.median(other / one for _, one, other in zip(*turns, strict=True))
            beyond = statistics.median(used[0]) - statistics.median(used[1] + used[2])
            numbers = (
                f"{own * 1e6:.0f} | {ratio:.2f} | {control:.2f} | {own * (ratio - 1) * 1e6:.0f} | {beyond * 1e6:.0f}"
            )
            rows.append(f"| {backend} | {case} | {numbers} |")
            if (case.endswith("MB") and ratio > RATIO) or (case.endswith(" B") and beyond > OVERHEAD):
                missed.append(rows[-1])
    head = [
        "| engine | call | its own, us | kf.comm, ratio | its own again, ratio | beyond, us | of the processor |",
        "|---|---|---|---|---|---|---|",
    ]
    table = "\n".join([*head, *rows])
    print(table)
    if options.out:
        options.out.write_text(f"# kf.comm beside the engines' own\n\n`python -m benchmarks.collectives`\n\n{table}\n")
    print(f"{len(missed)} of {len(rows)} above the limits", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
