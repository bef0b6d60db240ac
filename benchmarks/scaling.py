"""Growth: time and memory of planning, rule matching and explain against the number of ranks and of variables.

    KERAS_BACKEND=jax python -m benchmarks.scaling [--ranks 1,16,256,4096,65536] [--variables 10,100,1000,10000]

Nothing is run on devices and no weight is made. Times are the least of three; memory is the peak of what Python
allocates (tracemalloc, in a run of its own). Written: a table and a plot. Exit status 1 if anything grows faster than
the ranks to the power 1.2.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

#: plans on two axes: source, target
PLANS = (("S(0),B", "B,S(1)"), ("S(0),S(1)", "B,B"), ("P,S(0)", "S(1),B"), ("P,P", "B,B"), ("B,B", "P,S(0)"))
#: what may grow with the ranks: up to this power of their number
POWER = 1.2
#: layers of a stack: Keras walks a graph by recursion, one call for each layer on the way
DEEP = 100
#: times below this are noise, seconds
FLOOR = 2e-3


def measured(action: Callable[[], object]) -> tuple[float, int]:
    """Seconds (the least of three runs) and the peak of allocated bytes."""
    seconds = math.inf
    for _ in range(3):
        start = time.perf_counter()
        action()
        seconds = min(seconds, time.perf_counter() - start)
    tracemalloc.start()
    action()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, peak


def hierarchy_of(ranks: int) -> tuple[int, int]:
    """Two axes, the inner one the larger, as hosts and ranks of a host are named."""
    outer = 1 << (ranks.bit_length() - 1) * 3 // 8
    return outer, ranks // outer


def planning(ranks: int) -> list[tuple[str, float, int]]:
    """A plan, and one rank's part of it, between layouts on so many ranks."""
    import numpy as np

    import keras_flow as kf
    from keras_flow.layout import Layout

    outer, inner = hierarchy_of(ranks)
    placement = kf.Placement(np.arange(ranks).reshape(outer, inner))
    rows = []
    for before, after in PLANS:
        source, target = (Layout(placement, nd_sbp, (ranks * 4, ranks * 8)) for nd_sbp in (before, after))
        rows.append((f"plan {before} to {after}", *measured(lambda s=source, t=target: kf.boxing.plan(s, t))))
        made = kf.boxing.plan(source, target)
        rows.append((f"for_rank {before} to {after}", *measured(lambda p=made: list(p.for_rank(ranks // 2)))))
    return rows


def matching(variables: int) -> tuple[float, int]:
    """Ten patterns over the paths of a stack of blocks."""
    from keras_flow.distributions.rules import PatternRules

    rules = PatternRules({f"block_.*/part{k}/kernel": {"model": "S(1)"} for k in range(10)})
    paths = [f"model/block_{k // 10}/part{k % 10}/kernel" for k in range(variables)]
    return measured(lambda: [rules.match(path) for path in paths])


def explaining(ranks: int, variables: int) -> tuple[float, int]:
    """Explain of stacks of Dense layers side by side, described under data and tensor parallelism."""
    import keras
    import numpy as np

    import keras_flow as kf
    from keras_flow.distributions.dry_run import dry_run

    outer, inner = hierarchy_of(ranks)
    placement = kf.Placement(np.arange(ranks).reshape(outer, inner), axis_names=("data", "model"))
    with dry_run(ranks):
        distribution = kf.ModelParallel(
            placement, batch_axes="data", rules={"odd.*/kernel": {"model": "S(0)"}, "even.*/kernel": {"model": "S(1)"}}
        )
        with distribution.scope():
            names = [f"{('even', 'odd')[k % 2]}{k}" for k in range(max(2, variables // 2))]
            inputs, ends = keras.layers.Input((inner,)), []
            for start in range(0, len(names), DEEP):
                x = inputs
                for name in names[start : start + DEEP]:
                    x = keras.layers.Dense(inner, name=name)(x)
                ends.append(x)
            model = keras.Model(inputs, keras.layers.Add()(ends) if ends[1:] else ends[0])
            model.compile("sgd", "mse")
        return measured(lambda: distribution.explain(model, 4 * ranks))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,16,256,4096,65536")
    parser.add_argument("--variables", default="10,100,1000,10000")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scaling"))
    options = parser.parse_args(arguments)
    ranks = [int(part) for part in options.ranks.split(",")]
    variables = [int(part) for part in options.variables.split(",")]
    series: dict[str, list[tuple[int, float, int]]] = {}
    for count in ranks:
        for name, seconds, peak in planning(count):
            series.setdefault(name, []).append((count, seconds, peak))
        series.setdefault("explain, 100 variables", []).append((count, *explaining(count, 100)))
        print(f"{count} ranks done", file=sys.stderr)
    by_variables: dict[str, list[tuple[int, float, int]]] = {}
    for count in variables:
        by_variables.setdefault("match 10 rules", []).append((count, *matching(count)))
        by_variables.setdefault("explain, 64 ranks", []).append((count, *explaining(64, count)))
        print(f"{count} variables done", file=sys.stderr)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    too_fast = [name for name, points in series.items() if power(points) > POWER]
    text = "\n".join(
        [
            "# Growth",
            "",
            "Written by `python -m benchmarks.scaling`: milliseconds (least of three), peak of allocations in MB.",
            "",
            *table("ranks", series),
            "",
            *table("variables", by_variables),
            "",
            f"Faster than ranks to the power {POWER}: {', '.join(too_fast) or 'none'}.",
            "",
        ]
    )
    options.out.with_suffix(".md").write_text(text)
    plot({"ranks": series, "variables": by_variables}, options.out.with_suffix(".png"))
    print(text)
    return 1 if too_fast else 0


def power(points: list[tuple[int, float, int]]) -> float:
    """The power of the number that the time grows by, over the last step; 0 where it is too short to say."""
    if len(points) < 2:
        return 0.0
    (count, seconds, _), (more, later, _) = points[-2:]
    return math.log(later / max(seconds, FLOOR)) / math.log(more / count) if later > FLOOR else 0.0


def table(what: str, series: dict[str, list[tuple[int, float, int]]]) -> list[str]:
    counts = [count for count, *_ in next(iter(series.values()))]
    head = f"| {what} | " + " | ".join(f"{count:,}" for count in counts) + " |"
    lines = [head, "|---" * (len(counts) + 1) + "|"]
    for name, points in series.items():
        cells = " | ".join(f"{1000 * seconds:.2f} ms, {peak / 1e6:.2f}" for _, seconds, peak in points)
        lines.append(f"| {name} | {cells} |")
    return lines


def plot(groups: dict[str, dict[str, list[tuple[int, float, int]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(2, 2, figsize=(13, 9))
    for axes, (what, series) in zip(rows, groups.items(), strict=True):
        for name, points in series.items():
            counts = [count for count, *_ in points]
            axes[0].plot(counts, [seconds for _, seconds, _ in points], marker="o", markersize=3, label=name)
            axes[1].plot(counts, [peak / 1e6 for *_, peak in points], marker="o", markersize=3, label=name)
        axes[0].set(xscale="log", yscale="log", xlabel=what, ylabel="seconds")
        axes[1].set(xscale="log", yscale="log", xlabel=what, ylabel="peak of allocations, MB")
        axes[0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
