"""Seconds of a training step: keras_flow's `fit` against one device and against what each engine offers.

    python -m benchmarks.fit [--backends jax,tensorflow,torch] [--families mlp,cnn,transformer] [--sizes 0.1,1,10]

Around the same Keras model, data and tensor parallel over two ranks: (a) plain `fit` on one device; (b) the engine's
own way (a jitted step with shardings and `keras.distribution` on JAX, `MirroredStrategy` on TensorFlow, loops with
DistributedDataParallel and with explicit collectives on torch); (c) on torch the same in plain modules. The ways take
turns in one run, so that their ratios hold when the machine's speed drifts; medians of the rounds. Targets, at 0.1, 1
and 10 million parameters: data parallel at most 1.15x, 1.00x and 1.00x of (b) on torch, 1.3x, 1.02x and 1.02x on JAX,
1.3x, 1.00x and 1.00x on TensorFlow; tensor parallel at most 1.3x, 1.25x and 1.1x; a placement of one rank within 2 % of
a plain `fit`, or within the spread of two plain ones.

The CNN's loops on torch are two: with BatchNormalization's statistics of all rows, as one device and keras_flow have
them, and with those of each rank's own, as DistributedDataParallel has them and `batch_statistics="replica"`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

from benchmarks.parts import measured_apart, milliseconds, torch_operations, with_new

#: ways that are printed without a target
UNTARGETED = ("DDP, plain modules", "collectives, plain modules")
#: (kind, engine or "") -> ratio at 0.1 million parameters, at 1 and at 10
TARGETS = {
    ("data", "torch"): (1.15, 1.0, 1.0),
    ("data", "jax"): (1.3, 1.02, 1.02),
    ("data", "tensorflow"): (1.3, 1.0, 1.0),
    ("tensor", ""): (1.3, 1.25, 1.1),
}
PLAIN, AGAIN, OURS = "one device", "one device, again", "keras_flow"
#: a model with BatchNormalization, each rank with the statistics of its own rows: another model than one device's
OF_OWN_ROWS, OURS_OF_OWN_ROWS = "DDP, statistics of own rows", 'keras_flow, batch_statistics="replica"'


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="jax,tensorflow,torch")
    parser.add_argument("--families", default="mlp,cnn,transformer")
    parser.add_argument("--sizes", default="0.1,1,10", help="millions of parameters")
    parser.add_argument("--kinds", default="one,data,tensor", help="one: a placement of one rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="about what an epoch on one device takes")
    parser.add_argument("--add", action="store_true", help="keep what --out has of other cases")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fit"))
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        return worker(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    kept = options.out.with_suffix(".json")
    records = json.loads(kept.read_text()) if options.add and kept.exists() else []
    for backend in options.backends.split(","):
        records = with_new(records, measured_apart("benchmarks.fit", arguments, backend, options.out), _case_of)
        kept.write_text(json.dumps(records, indent=1))
    text = table(records, options.ranks)
    options.out.with_suffix(".md").write_text(text)
    print(text)
    return 0


def worker(options: argparse.Namespace) -> int:
    """One engine, in processes of its own."""
    import keras_flow as kf

    sizes = [float(size) for size in options.sizes.split(",")]
    found = []
    kinds = options.kinds.split(",")
    # on torch one rank is a process of its own; elsewhere all ranks are devices of one process
    jobs = (
        [(1, {"one"}), (options.ranks, {"data", "tensor"})] if options.backends == "torch" else [(options.ranks, kinds)]
    )
    for ranks, of_job in jobs:
        chosen = [kind for kind in kinds if kind in of_job]
        cases = list(itertools.product(options.families.split(","), sizes, chosen))
        if cases:
            found += kf.run(run, devices=ranks, args=(options.backends, cases, options.rounds, options.seconds))
    Path(options.one).write_text(json.dumps(found))
    return 0


def run(backend: str, cases: list[tuple], rounds: int, seconds: float) -> list[dict]:
    """On every rank: each case in turn."""
    import keras
    from rich.progress import track

    import keras_flow as kf
    from keras_flow.backends.active import backend as active_backend

    kf.init(kf.env.get_world_size())
    here = 0 in active_backend().world().local_ranks
    records = []
    for family, size, kind in track(cases, f"{backend}, {kf.env.get_world_size()} ranks", disable=not here):
        keras.utils.clear_session(free_memory=True)
        records.append(_case(backend, family, size, kind, rounds, seconds))
    return records


def _case(backend: str, family: str, size: float, kind: str, rounds: int, seconds: float) -> dict:
    import contextlib

    from benchmarks import fit_ways
    from benchmarks.fit_models import data

    size = int(size) if size == int(size) else size
    steps = _agreed(backend, lambda: _steps(family, size, seconds))
    x, y = data(family, steps)

    def plain():
        return fit_ways.fit(family, size, x, y, contextlib.nullcontext())

    if kind == "one":
        ways = {PLAIN: plain(), AGAIN: plain(), OURS: fit_ways.one_rank(family, size, x, y)}
    else:
        ways = {PLAIN: _alone(backend, plain), **fit_ways.WAYS[backend](family, size, kind, x, y)}
        ways[OURS] = fit_ways.ours(family, size, kind, x, y)
        if OF_OWN_ROWS in ways:
            ways[OURS_OF_OWN_ROWS] = fit_ways.ours(family, size, kind, x, y, batch_statistics="replica")
    for epoch in ways.values():  # compiled, and warm
        epoch()
        epoch()
    timed: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in itertools.islice(itertools.cycle(ways), turn, turn + len(ways)):
            _settle(backend)
            start = time.perf_counter()
            ways[name]()
            _settle(backend)
            timed[name].append((time.perf_counter() - start) / steps)
    record = {"backend": backend, "family": family, "size": size, "kind": kind, "steps": steps, "seconds": timed}
    if kind != "one":
        profiled = _operations if _has_peers(backend) else _functions
        record["profile"] = {name: profiled(epoch, steps) for name, epoch in ways.items() if name != PLAIN}
    return record


def _functions(epoch, steps: int) -> dict[str, float]:
    """Python function -> milliseconds of a step, what it calls left out. What waits for a device has its time in it."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.runcall(epoch)
    times: dict[str, float] = {}
    for (file, _, name), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        where = name if file == "~" else f"{Path(file).stem}.{name}"
        times[where] = times.get(where, 0.0) + 1000 * own / steps
    return _largest(times)


def _largest(times: dict[str, float]) -> dict[str, float]:
    return dict(sorted(times.items(), key=lambda item: -item[1])[:40])


def _operations(epoch, steps: int) -> dict[str, float]:
    """Operation -> milliseconds of a step on rank 0."""
    return _largest({name: time / steps for name, time in torch_operations(epoch).items()})


def _steps(family: str, size: float, seconds: float) -> int:
    """Steps of about so many seconds on one device."""
    import contextlib

    from benchmarks import fit_ways
    from benchmarks.fit_models import data

    epoch = fit_ways.fit(family, size, *data(family, 4), contextlib.nullcontext())
    epoch()
    start = time.perf_counter()
    epoch()
    return max(3, min(200, round(seconds / ((time.perf_counter() - start) / 4))))


def _alone(backend: str, make):
    """On torch rank 0 alone trains, with all cores; the others wait."""
    if not _has_peers(backend):
        return make()
    import torch
    import torch.distributed as dist

    if dist.get_rank():
        return lambda: None
    own, cores = torch.get_num_threads(), os.cpu_count() or 1
    epoch = make()

    def with_all_cores():
        torch.set_num_threads(cores)
        try:
            return epoch()
        finally:
            torch.set_num_threads(own)

    return with_all_cores


def _agreed(backend: str, find) -> int:
    """What rank 0 finds."""
    if not _has_peers(backend):
        return find()
    import torch.distributed as dist

    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


def _settle(backend: str) -> None:
    """Every rank waits for the others."""
    if _has_peers(backend):
        import torch.distributed as dist

        dist.barrier()


def _has_peers(backend: str) -> bool:
    """Whether other processes run this too."""
    import keras_flow as kf

    return backend == "torch" and kf.env.get_world_size() > 1


def _case_of(record: dict) -> tuple:
    return record["backend"], record["kind"], record["family"], record["size"]


def table(records: list[dict], ranks: int) -> str:
    """What was found, as Markdown."""
    lines = [
        "# Training steps",
        "",
        f"Written by `python -m benchmarks.fit`: {ranks} ranks, medians of interleaved rounds, milliseconds of a step;",
        "in brackets least and most. A ratio is keras_flow's median by the other's; beside statistics of own rows that",
        'of `kf.DataParallel(batch_statistics="replica")`.',
        "",
        "| engine, model, parameters | kind | ms: keras_flow | against | ms | ratio | target |",
        "|---|---|---|---|---|---|---|",
    ]
    missed, compared = [], 0
    for record in records:
        times = dict(record["seconds"])
        case = f"{record['backend']}, {record['family']}, {record['size']:g} M"
        if record["kind"] != "one":
            limits = TARGETS.get((record["kind"], record["backend"])) or TARGETS[record["kind"], ""]
            limit = limits[0 if record["size"] < 1 else 1 if record["size"] < 10 else 2]
        else:
            again = statistics.median(times.pop(AGAIN)) / statistics.median(times[PLAIN])
            limit = max(1.02, again, 1 / again)
        ours, of_own_rows = times.pop(OURS), times.pop(OURS_OF_OWN_ROWS, [])
        for name, values in times.items():
            # torch's own BatchNormalization has those of own rows, too
            own = of_own_rows if of_own_rows and name in (OF_OWN_ROWS, "DDP, plain modules") else ours
            ratio = statistics.median(own) / statistics.median(values)
            target = ""
            if record["kind"] == "one" or name not in (PLAIN, *UNTARGETED):
                compared += 1
                target = f"{limit:.2f}"
                if ratio > limit:
                    target += " missed"
                    missed.append(f"{case}, {record['kind']}, {name}: {ratio:.2f}, at most {limit:.2f}")
                    missed[-1] += _where(record.get("profile", {}), name)
            took, others = milliseconds(own), milliseconds(values)
            lines.append(f"| {case} | {record['kind']} | {took} | {name} | {others} | {ratio:.2f} | {target} |")
    lines += ["", f"Targets missed: {len(missed)} of {compared}.", "", *(f"- {one}" for one in missed), ""]
    return "\n".join(lines)


def _where(profiles: dict[str, dict[str, float]], name: str) -> str:
    """The operations or functions in which a step takes longest beyond the other way's."""
    if name not in profiles:
        return ""
    ours, theirs = profiles[OURS_OF_OWN_ROWS if name == OF_OWN_ROWS else OURS], profiles[name]
    more = sorted(((ours[one] - theirs.get(one, 0.0), one) for one in ours), reverse=True)[:4]
    return "; more time in " + ", ".join(f"{one} ({ms:+.1f} ms)" for ms, one in more)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
