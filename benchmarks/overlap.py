"""How much of the gradients' all-reduces is hidden behind the backward pass, on torch under `kf.DataParallel`.

    python -m benchmarks.overlap [--families mlp,transformer] [--sizes 1,10] [--ranks 2] [--steps 30]

Of each step: the all-reduces of gradients; the share of their bytes that is reduced when the backward pass ends, which
is when a rank first waits for one; and the share of the time between the first all-reduce's start and the last one's
end that lies before it. Medians of the steps, on rank 0. The waiting for slower ranks counts as communication.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any
from unittest import mock


def main(arguments: list[str]) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default="mlp,transformer")
    parser.add_argument("--sizes", default="1,10", help="millions of parameters")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    os.environ["KERAS_BACKEND"] = "torch"
    import keras_flow as kf

    cases = [(family, int(size)) for family in options.families.split(",") for size in options.sizes.split(",")]
    lines = kf.run(run, devices=options.ranks, args=(cases, options.steps))
    print(
        f"{options.ranks} ranks\n\n| model, parameters | all-reduces | bytes hidden | time hidden |\n|---|---|---|---|"
    )
    print("\n".join(lines))
    return 0


def run(cases: list[tuple[str, int]], steps: int) -> list[str]:
    """On every rank: each case in turn."""
    import keras
    import torch.distributed as dist

    from benchmarks import fit_ways
    from benchmarks.fit_models import data

    lines = []
    for family, size in cases:
        keras.utils.clear_session(free_memory=True)
        epoch = fit_ways.ours(family, size, "data", *data(family, steps))
        epoch()  # warm
        watch = _Watch(dist.all_reduce)
        with mock.patch.object(dist, "all_reduce", watch):
            epoch()
        found = [_shares(step) for step in watch.steps[1:]]
        bytes_hidden, time_hidden = (statistics.median(share[place] for share in found) for place in (0, 1))
        count = statistics.median(len(step) for step in watch.steps)
        lines.append(f"| {family}, {size} M | {count:g} | {100 * bytes_hidden:.0f} % | {100 * time_hidden:.0f} % |")
    return lines


class _Watch:
    """In the place of `all_reduce`: notes those of gradients, which alone are asynchronous, step by step."""

    def __init__(self, original: Any):
        self.original = original
        self.steps: list[list[_Message]] = []

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op"):
            return self.original(tensor, *args, **kwargs)
        if not self.steps or self.steps[-1][-1].ended:
            self.steps.append([])
        message = _Message(self.steps[-1], tensor.nbytes, self.original(tensor, *args, **kwargs))
        self.steps[-1].append(message)
        return message


class _Message:
    """One all-reduce that a rank waits for."""

    def __init__(self, step: list[_Message], size: int, work: Any):
        self.step, self.size, self.work = step, size, work
        self.began, self.waited, self.ended, self.was_done = time.perf_counter(), 0.0, 0.0, False

    def wait(self) -> None:
        # the first wait of a step is the end of its backward pass
        if not any(message.waited for message in self.step):
            for message in self.step:
                message.was_done = message.work.is_completed()
        self.waited = time.perf_counter()
        self.work.wait()
        self.ended = time.perf_counter()


def _shares(step: list[_Message]) -> tuple[float, float]:
    """Of bytes and of time."""
    backward = min(message.waited for message in step)
    began, ended = step[0].began, max(message.ended for message in step)
    hidden = sum(message.size for message in step if message.was_done) / sum(message.size for message in step)
    return hidden, (backward - began) / (ended - began)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
