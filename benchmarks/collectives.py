"""Time of `kf.comm` beside the engine's own collectives, between two processes of one host.

    python -m benchmarks.collectives [--backends jax,tensorflow,torch] [--calls all_reduce,...] [--out FILE.md]

Calls in a row, in turns, on each process; of the two processes the slower counts. A ratio is the median of those to the
engine's own two calls of the same turn. The overhead is what the calling thread computes in a call of 8 bytes beyond
the engine's own, in time of the processor: two processes of two cores lose as much again by waking each other. "Its
own, again" is the engine's own call once more, as a program of its own: how far apart the same work can be. Exit status
1 where a ratio of 1 MB and more is above 1.05, or an overhead above 50 us; but for "all_gather of any shapes", which
asks for shapes first: engines gather tensors of one shape. What is above is measured again, in as many new starts, up
to three times, and all turns count: on two cores one median of the same call can be a tenth above the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.own_collectives import ANY_SHAPES, CALLS, LISTS, MESSAGES, TENSORS, Calls, own_calls
from benchmarks.parts import measured_apart

#: largest first: after thousands of small messages JAX takes 40 ms and more for large ones, by any call (gloo over TCP)
SIZES = {"16 MB": 4_000_000, "1 MB": 250_000, "8 B": 2}
#: calls of a turn, one after the other: processes leave the barrier before them at other times
IN_A_ROW = {"8 B": 20, "1 MB": 8, "16 MB": 2}
RATIO, OVERHEAD = 1.05, 50e-6


def kf_calls(rank: int, count: int, elements: int) -> Calls:
    """As `own_calls`, by `kf.comm`."""
    import keras_flow as kf

    shape = (elements // count,)

    def moved(x: Any) -> Any:
        return kf.comm.send(x, 1, send_meta=False) if rank == 0 else kf.comm.recv(0, (elements,), "float32")

    return {
        **{name: getattr(kf.comm, name) for name in CALLS if hasattr(kf.comm, name)},
        "broadcast": lambda x: kf.comm.broadcast(x, 0),
        "reduce": lambda x: kf.comm.reduce(x, 0),
        "all_gather": lambda x: kf.comm.all_gather(x, same_shape=True),
        ANY_SHAPES: kf.comm.all_gather,
        "gather": lambda x: kf.comm.gather(x, 0, same_shape=True),
        "all_to_all": lambda x: kf.comm.all_to_all(x, same_shape=True),
        "scatter": lambda x: kf.comm.scatter(x, 0, shape=shape, dtype="float32"),
        "send and recv": moved,
        "barrier": lambda _: kf.comm.barrier(),
    }


def arrays_of(result: Any) -> list[Any]:
    """What a call gave, waited for."""
    from keras_flow.backends.active import tensor_engine

    if result is None:
        return []
    return [tensor_engine().as_numpy(each) for each in (result if isinstance(result, list) else [result])]


def measure(backend: str, calls: list[str], repeats: int) -> dict[str, list[dict[str, list[float]]]]:
    """In each process: call and size -> way -> the slower process's seconds, and those of its processor."""
    import numpy as np

    import keras_flow as kf
    from keras_flow.backends.active import tensor_engine

    engine, rank, count = tensor_engine(), kf.env.get_rank(), kf.env.get_world_size()
    found: dict[str, list[dict[str, list[float]]]] = {}
    for size, elements in SIZES.items():
        x = engine.put(np.full(elements, 1.0 + rank, "float32"), rank)
        pieces = [engine.put(np.full(elements // count, 3.0 * rank + k, "float32"), rank) for k in range(count)]
        given = {
            **dict.fromkeys(TENSORS + MESSAGES, x),
            **dict.fromkeys(LISTS, pieces),
            "scatter": pieces if rank == 0 else None,
        }
        ours = kf_calls(rank, count, elements)
        own, own_again = (own_calls(backend, rank, count, elements, again) for again in (False, True))

        for name in calls:
            if name == "barrier" and elements > 2:
                continue
            ways = {"kf.comm": ours[name], "own": own[name], "own again": own_again[name]}
            x = given[name]
            # the first call of ours looks for its members and compares, the second goes straight on
            results = [arrays_of(way(x)) for way in [ways["kf.comm"], *ways.values()]]
            for other in results[1:]:
                np.testing.assert_equal(other, results[0], err_msg=f"{name} of {size}")
            orders = list(itertools.permutations(ways))
            times: dict[str, list[float]] = {way: [] for way in ways}
            own_times: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(repeats + 3):
                # each way comes after each other one equally often
                for way in orders[turn % len(orders)]:
                    kf.comm.barrier()
                    begin, begin_own = time.perf_counter(), time.thread_time()
                    for _ in range(IN_A_ROW[size]):
                        arrays_of(ways[way](x))
                    if turn >= 3:
                        times[way].append((time.perf_counter() - begin) / IN_A_ROW[size])
                        own_times[way].append((time.thread_time() - begin_own) / IN_A_ROW[size])
            everyone = kf.comm.all_gather_object([times, own_times])
            found[f"{name}, {size}"] = [
                {way: [max(each) for each in zip(*(theirs[way] for theirs in measured), strict=True)] for way in ways}
                for measured in zip(*everyone, strict=True)
            ]
    return found


def row_of(backend: str, case: str, starts: list[list[dict[str, list[float]]]]) -> tuple[str, bool]:
    """A row of the table, and whether it is above the limits."""
    turns, used = (
        [[seconds for start in starts for seconds in start[kind][way]] for way in ("kf.comm", "own", "own again")]
        for kind in (0, 1)
    )
    own = statistics.median(turns[1] + turns[2])
    # within a turn, in which the machine is equally fast
    ratio = statistics.median(2 * ours / (one + other) for ours, one, other in zip(*turns, strict=True))
    control = statistics.median(other / one for _, one, other in zip(*turns, strict=True))
    beyond = statistics.median(used[0]) - statistics.median(used[1] + used[2])
    numbers = f"{own * 1e6:.0f} | {ratio:.2f} | {control:.2f} | {own * (ratio - 1) * 1e6:.0f} | {beyond * 1e6:.0f}"
    is_above = (case.endswith("MB") and ratio > RATIO) or (case.endswith(" B") and beyond > OVERHEAD)
    is_above = is_above and not case.startswith(ANY_SHAPES)
    return f"| {backend} | {case} | {numbers} |", is_above


def judged(backend: str, calls: list[str], options: argparse.Namespace) -> dict[str, tuple[str, bool]]:
    """Case -> its row, and whether it is above the limits. What is above is measured again."""
    found: dict[str, list[list[dict[str, list[float]]]]] = {}
    rows: dict[str, tuple[str, bool]] = {}
    for _ in range(4):
        given = ["--repeats", str(options.repeats), "--calls", ",".join(calls)]
        for _ in range(options.starts):
            start = measured_apart("benchmarks.collectives", given, backend, Path("collectives"))
            for case, times in start.items():
                found.setdefault(case, []).append(times)
        rows = {case: row_of(backend, case, starts) for case, starts in found.items()}
        calls = sorted({case.rpartition(", ")[0] for case, (_, is_above) in rows.items() if is_above})
        if not calls:
            break
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="jax,tensorflow,torch")
    parser.add_argument("--calls", default=",".join(CALLS))
    parser.add_argument("--starts", type=int, default=2, help="of the two processes: memory lies otherwise in each")
    parser.add_argument("--repeats", type=int, default=24, help="turns of each start")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    calls = options.calls.split(",")
    if options.one:
        import keras_flow as kf

        found = kf.run(measure, devices=2, processes=2, args=(options.backends, calls, options.repeats))
        Path(options.one).write_text(json.dumps(found))
        return 0
    found = [row for backend in options.backends.split(",") for row in judged(backend, calls, options).values()]
    rows, missed = [row for row, _ in found], [row for row, is_above in found if is_above]
    head = [
        "| engine | call | its own, us | kf.comm, ratio | its own again, ratio | beyond, us | of the processor |",
        "|---|---|---|---|---|---|---|",
    ]
    table = "\n".join([*head, *rows])
    print(table)
    if options.out:
        options.out.write_text(f"# kf.comm beside the engines' own\n\n`python -m benchmarks.collectives`\n\n{table}\n")
    print(f"{len(missed)} of {len(rows)} above the limits", *missed, sep="\n", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
