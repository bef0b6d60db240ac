"""Schedules of pipelines beside each other: time of a step, idle share, and what a rank holds. Simulated, no engine.

    python -m benchmarks.schedules [--ranks 4] [--microbatches 8] [--costs 1,1.4,0.6] [--memory 6] [--message 0]
    python -m benchmarks.schedules --docs        the table of docs/schedules.md

A step's bound is m(F + I + W) + (p - 1)F / v, with v stages on each rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from keras_flow import schedules
from keras_flow.schedules import Schedule


def candidates(ranks: int, microbatches: int) -> list[Schedule]:
    """Return the published schedules."""
    return [
        schedules.gpipe(ranks, microbatches),
        schedules.one_f_one_b(ranks, microbatches),
        schedules.interleaved(ranks, microbatches),
        schedules.zb1p(ranks, microbatches),
        schedules.zb1p(ranks, microbatches, chunks=2),
        schedules.zbv(ranks, microbatches),
    ]


def table(ranks: int, microbatches: int, costs: Sequence[float], memory: Sequence[float], message: float) -> list[str]:
    """Return a table of the published schedules and of `auto` with some memories, as Markdown."""
    found = [(one.name, one) for one in candidates(ranks, microbatches)]
    for room in memory:
        best = schedules.auto(ranks, microbatches, costs, memory=room, message=message)
        found.append((f"auto, memory={room:g} ({best.name})", best))
    head = "| schedule | stages of a rank | time of a step | bound | idle | micro-batches that a rank holds |"
    lines = [head, "|---|---|---|---|---|---|"]
    for name, one in found:
        peak = max(map(one.peak, range(ranks)))
        least = schedules.bound(ranks, microbatches, costs, one.chunks)
        time, idle = one.makespan(costs, message), one.bubble(costs, message)
        lines.append(f"| {name} | {one.chunks} | {time:.2f} | {least:.2f} | {idle:.1%} | {peak:g} |")
    return lines


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--costs", default="1,1,1", help="of F, I and W for one micro-batch on a rank")
    parser.add_argument("--memory", default="", help="micro-batches that a rank may hold; p and 1.5 p by default")
    parser.add_argument("--message", type=float, default=0.0, help="how long a message is on its way")
    parser.add_argument("--docs", action="store_true", help="print the table of docs/schedules.md")
    options = parser.parse_args(arguments)
    memory = [float(room) for room in options.memory.split(",") if room] or [options.ranks, 1.5 * options.ranks]
    all_costs = ["1,1,1", "1,1.4,0.6", "1,0.7,1.3"] if options.docs else [options.costs]
    for text in all_costs:
        costs = [float(cost) for cost in text.split(",")]
        print(f"{options.ranks} ranks, {options.microbatches} micro-batches, F, I, W = {text}:\n")
        print("\n".join(table(options.ranks, options.microbatches, costs, memory, options.message)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
