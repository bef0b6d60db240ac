"""Changing the layout of a tensor: keras_flow's executors against what each engine does itself, in bytes and time.

    python -m benchmarks.boxing [--backends jax,tensorflow,torch] [--hierarchies 2x2,2x4] [--megabytes 1,16,64]
    python -m benchmarks.boxing --pairs 60 --megabytes 64 --add    # a sample, beside what was measured before
    python -m benchmarks.boxing --again --rounds 31    # a second look at pairs above 1.1x at 16 MB and more
    python -m benchmarks.boxing --only "P,P->P,B B,P->B,B"    # pairs whose programs have changed

Every pair of layouts over {S(0), S(1), B, P} on each hierarchy. The ways take turns, so that their ratios hold when the
machine's speed drifts; a time is the median of the rounds, on the slowest rank. Bytes are received bytes, summed over
ranks, counted by the engine's own means. The values that both ways give are compared. Time ratios leave out pairs
that move no byte on either side; what an engine refuses is listed. Written: a table, a plot and all figures as JSON.
With few rounds the noise of one machine puts pairs above 1.1x that are not: a second look measures these with more.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.boxing_ways import OURS
from benchmarks.parts import measured_apart, with_new

#: the classes of pairs, by where summands are
CLASSES = ("no P", "P to S, B", "to P")
#: a pair is slow that takes more than this of the engine's time
LIMIT = 1.1
#: megabytes from which on slow pairs are named
LARGE = 16
#: what an engine does unless it is told otherwise
DEFAULTS = {"jax": "jit, Shardy", "tensorflow": "dtensor.relayout", "torch": "redistribute"}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="jax,tensorflow,torch")
    parser.add_argument("--hierarchies", default="2x2,2x4")
    parser.add_argument("--megabytes", default="1,16,64", help="sizes of the logical tensor, float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=0, help="a fixed random sample of so many pairs; 0: all")
    parser.add_argument("--add", action="store_true", help="keep what --out has of others")
    parser.add_argument("--again", action="store_true", help=f"measure pairs of --out that are above {LIMIT}x again")
    parser.add_argument("--only", default="", help="measure these pairs anew; --out keeps the others")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/boxing"))
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        return measure(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    kept = options.out.with_suffix(".json")
    by_pairs = bool(options.again or options.only)
    records = json.loads(kept.read_text()) if (options.add or by_pairs) and kept.exists() else []
    for backend, hierarchy in itertools.product(options.backends.split(","), options.hierarchies.split(",")):
        one = [*arguments, "--hierarchies", hierarchy]  # an engine has one number of ranks in a process
        with tempfile.TemporaryDirectory() as folder:
            # read by TensorFlow as it is imported
            dumps = {"TF_DUMP_GRAPH_PREFIX": folder, "TF_CPP_VMODULE": "dtensor_mlir_passes=2"}
            environment = dumps if backend == "tensorflow" else {}
            found = measured_apart("benchmarks.boxing", one, backend, options.out, environment)
        if options.again:
            first = {_pair(record): _at_first(record)["seconds"] for record in records}
            found = [{**record, "at first": first[_pair(record)]} for record in found]
        records = with_new(records, found, _pair if by_pairs else _group)
        kept.write_text(json.dumps(records))
    text = table(records)
    options.out.with_suffix(".md").write_text(text)
    plot(records, options.out.with_suffix(".png"))
    print(text)
    return 0


def measure(options: argparse.Namespace) -> int:
    """One engine on one hierarchy, in processes of its own."""
    import keras_flow as kf

    sizes = tuple(int(part) for part in options.hierarchies.split("x"))
    megabytes = [float(part) for part in options.megabytes.split(",")]
    chosen = None
    if options.again:
        records = json.loads(options.out.with_suffix(".json").read_text())
        chosen = [_pair(record) for record in records if record["megabytes"] >= LARGE and _is_slow(record)]
    if options.only:
        ends = [pair.split("->") for pair in options.only.split()]
        chosen = [(options.backends, options.hierarchies, size, *pair) for size in megabytes for pair in ends]
    arguments = (
        options.backends,
        sizes,
        megabytes,
        options.rounds,
        options.pairs,
        chosen,
        Path(f"{options.one}.progress"),
    )
    Path(options.one).write_text(json.dumps(kf.run(run, devices=math.prod(sizes), args=arguments)))
    return 0


def run(
    backend: str,
    hierarchy: tuple[int, ...],
    megabytes: list[float],
    rounds: int,
    sample: int,
    chosen: list[tuple] | None,
    progress: Path,
) -> list[dict]:
    """On every rank: each pair in turn, or those that are chosen."""
    import numpy as np

    import keras_flow as kf
    from benchmarks import boxing_ways
    from keras_flow.backends.active import backend as active_backend
    from keras_flow.boxing import lower_bound, plan
    from keras_flow.layout import Layout

    engine = boxing_ways.ENGINES[backend]()
    kf.init(math.prod(hierarchy))
    here = active_backend().world().local_ranks
    placement = kf.Placement(np.arange(math.prod(hierarchy)).reshape(hierarchy))
    kinds = (kf.sbp.split(0), kf.sbp.split(1), kf.sbp.broadcast, kf.sbp.partial_sum)
    layouts = list(itertools.product(kinds, repeat=len(hierarchy)))
    pairs = [pair for pair in itertools.product(layouts, repeat=2) if pair[0] != pair[1]]
    if sample:
        pairs = random.Random(0).sample(pairs, sample)
    records = []
    work = [(size, *pair) for size in megabytes for pair in pairs]
    title = "x".join(map(str, hierarchy))
    if chosen is not None:
        names = [(backend, "x".join(map(str, hierarchy)), one[0], *map(kf.sbp.text, one[1:])) for one in work]
        work = [one for one, name in zip(work, names, strict=True) if name in chosen]
    for number, (size, before, after) in enumerate(work):
        if 0 in here:
            progress.write_text(f"{title}: {number} of {len(work)} changes of layout")
        side = math.isqrt(int(size * 2**20) // 4)
        source, target = (Layout(placement, nd_sbp, (side, side)) for nd_sbp in (before, after))
        made = plan(source, target)
        shards = {rank: engine.shard(value, rank) for rank, value in boxing_ways.source_shards(source, here).items()}
        ways = engine.ways(made, shards)
        timed: dict[str, list[float]] = {name: [] for name, way in ways.items() if not isinstance(way, str)}
        values = {name: ways[name].shards(ways[name].run()) for name in timed}
        for turn in range(rounds):
            for name in itertools.islice(itertools.cycle(timed), turn, turn + len(timed)):
                timed[name].append(boxing_ways.timed(engine, ways[name]))
        ours = values.pop(boxing_ways.OURS)
        values.pop(boxing_ways.FLOOR, None)
        seconds = {name: statistics.median(found) for name, found in timed.items()}
        record = {
            "backend": backend,
            "hierarchy": "x".join(map(str, hierarchy)),
            "megabytes": size,
            "source": kf.sbp.text(before),
            "target": kf.sbp.text(after),
            "class": _class(before, after),
            "bound": lower_bound(source, target),
            "refused": {name: way for name, way in ways.items() if isinstance(way, str)},
            "floor": seconds.pop(boxing_ways.FLOOR, None),
            "received": {name: engine.total(ways[name].received) for name in seconds},
            "seconds": seconds,
            "programs": {name: ways[name].program for name in seconds},
            "wrong": [
                name for name, value in values.items() if not engine.everywhere(_same(ours, value, target.has_partial))
            ],
        }
        records.append(record)
        del shards, ways, values, ours
        gc.collect()  # programs and what they were given refer to each other
    return records


def _class(before: Iterable, after: Iterable) -> str:
    if "P" in map(repr, after):
        return CLASSES[2]
    return CLASSES[1] if "P" in map(repr, before) else CLASSES[0]


def _same(one: dict, other: dict, partial: bool) -> bool:
    """Whether both gave the same values; of summands, which may be shared out differently, the same shapes."""
    return one.keys() == other.keys() and all(
        value.shape == other[rank].shape and (partial or (value == other[rank]).all()) for rank, value in one.items()
    )


def table(records: list[dict]) -> str:
    """What was found, as Markdown."""
    lines = [
        "# Boxing: keras_flow's executors against the engines' own",
        "",
        "Written by `python -m benchmarks.boxing`. Bytes are sums over pairs and ranks, in tensors; time is",
        "the geometric mean over pairs of keras_flow's median by the engine's, and the pairs above 1.1x. Noise: the",
        "engine's two ways by each other, where they move the same bytes. Floor: a program in which ranks meet once",
        "and write the result, by the engine. At first: before those pairs were measured again, with more rounds.",
        "",
        "Against what the engine does by default:",
        "",
        "| engine, ranks, MB | pairs | kf / engine, bytes | with a P in the source | time | over 1.1x |",
        "|---|---|---|---|---|---|",
        *(_summary(group, found) for group, found in _grouped(records)),
        *(row for backend in sorted({record["backend"] for record in records}) for row in _overall(backend, records)),
        "",
        "By classes of pairs:",
        "",
        "| engine, ranks, MB | class | against | pairs | kf / bound | kf / engine, bytes | more | time | over 1.1x |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for (backend, hierarchy, size), found in _grouped(records):
        for kind in CLASSES:
            of_kind = [record for record in found if record["class"] == kind]
            for rival in sorted(_ways(of_kind)):
                both = _both_do(of_kind, rival)
                lines.append(f"| {backend} {hierarchy} {size:g} | {kind} | {rival} | {_row(both, rival, size)} |")
        lines += [f"| {backend} {hierarchy} {size:g} | noise | {row} |" for row in _noise(found)]
        lines += [f"| {backend} {hierarchy} {size:g} | floor | {row} |" for row in _floor(found, DEFAULTS[backend])]
        for rival in sorted({name for record in found for name in record["refused"]}):
            texts = [record["refused"][rival] for record in found if rival in record["refused"]]
            reasons = "; ".join(f"{texts.count(text)} with {text!r}" for text in sorted(set(texts)))
            notes.append(f"- {backend} {hierarchy} {size:g} MB, {rival} refuses {len(texts)} pairs: {reasons}")
        for record in found:
            notes += [f"- {_name(record)}: {rival} gives other values" for rival in record["wrong"]]
            notes += [f"- {_name(record)}: {slow}" for slow in _slow(record)]
    title = "## Refused, wrong, and pairs that take over 1.1x of the engine's time at 16 MB or more"
    return "\n".join([*lines, "", title, "", *notes, ""])


def _group(record: dict) -> tuple[str, str, float]:
    return record["backend"], record["hierarchy"], record["megabytes"]


def _pair(record: dict) -> tuple[str, str, float, str, str]:
    return *_group(record), record["source"], record["target"]


def _grouped(records: list[dict]) -> list[tuple[tuple, list[dict]]]:
    return [(group, list(found)) for group, found in itertools.groupby(records, key=_group)]


def _both_do(records: list[dict], rival: str) -> list[dict]:
    return [record for record in records if rival in record["received"] and rival not in record["wrong"]]


def _summary(group: tuple, found: list[dict]) -> str:
    backend, hierarchy, size = group
    rival = DEFAULTS[backend]
    both = _both_do(found, rival)
    moved = []
    for records in (both, [record for record in both if "P" in record["source"]]):
        ours, theirs = (sum(record["received"][name] for record in records) for name in (OURS, rival))
        moved.append(_over(ours, theirs))
    time, slower = _times(_ratios(both, rival))
    first = sum(ratio > LIMIT for ratio in _ratios([_at_first(record) for record in both], rival))
    if any("at first" in record for record in found):
        slower = f"{slower} ({first} at first)"
    return f"| {backend} {hierarchy} {size:g} | {len(both)} | {moved[0]} | {moved[1]} | {time} | {slower} |"


def _overall(backend: str, records: list[dict]) -> list[str]:
    """An engine with all hierarchies and sizes, and slow pairs of the large sizes; its default way first."""
    own = [record for record in records if record["backend"] == backend]
    default = DEFAULTS[backend]
    rows = []
    for rival in sorted(_ways(own), key=lambda name: name != default):
        both = _both_do(own, rival)
        time, _ = _times(_ratios(both, rival))
        _, slower = _times(_ratios([record for record in both if record["megabytes"] >= LARGE], rival))
        name = f"{backend}, all" if rival == default else f"{backend}, all, against {rival}"
        rows.append(f"| {name} | {len(both)} | | | {time} | {slower} of {LARGE} MB and more |")
    return rows


def _ways(records: list[dict]) -> set[str]:
    """The engine's own ways."""
    return {name for record in records for name in record["received"]} - {OURS}


def _at_first(record: dict) -> dict:
    """A record as it was before a second look."""
    return {**record, "seconds": record.get("at first", record["seconds"])}


def _is_slow(record: dict) -> bool:
    return any(ratio > LIMIT for rival in _ways([record]) for ratio in _ratios([record], rival))


def _times(ratios: list[float]) -> tuple[str, str]:
    """The geometric mean of ratios, and how many are slow."""
    time = f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}" if ratios else "-"
    return time, f"{sum(ratio > LIMIT for ratio in ratios)} of {len(ratios)}"


def _row(both: list[dict], rival: str, size: float) -> str:
    ours = sum(record["received"][OURS] for record in both)
    theirs = sum(record["received"][rival] for record in both)
    bound = sum(record["bound"] for record in both)
    more = sum(record["received"][OURS] > 1.0001 * record["received"][rival] for record in both)
    time, slower = _times(_ratios(both, rival))
    unit = size * 2**20
    moved = f"{_over(ours, theirs)} ({ours / unit:.1f} / {theirs / unit:.1f})"
    return f"{len(both)} | {_over(ours, bound)} | {moved} | {more} | {time} | {slower}"


def _noise(records: list[dict]) -> list[str]:
    """The engine's two ways against each other, where they move the same bytes: what is no difference of programs."""
    rivals = sorted({name for record in records for name in record["seconds"]} - {OURS})
    if len(rivals) != 2:
        return []
    one, other = rivals
    both = [record["received"] for record in records if one in record["received"] and other in record["received"]]
    alike = [r for r in records if r["received"].get(one) == r["received"].get(other) != 0 and one in r["seconds"]]
    ratios = [record["seconds"][one] / record["seconds"][other] for record in alike]
    if not ratios:
        return []
    apart = sum(max(ratio, 1 / ratio) > LIMIT for ratio in ratios)
    time, _ = _times(ratios)
    return [f"{one} by {other} | {len(both)} | | | | {time} | {apart} of {len(ratios)} either way"]


def _floor(records: list[dict], rival: str) -> list[str]:
    """A program that meets once and writes the result, against the engine's: below it no executor can come."""
    moving = [record for record in records if record.get("floor") and _ratios([record], rival)]
    ratios = [record["floor"] / record["seconds"][rival] for record in moving]
    return [f"{rival} | {len(ratios)} | | | | {' | '.join(_times(ratios))}"] if ratios else []


def _over(one: float, other: float) -> str:
    return f"{one / other:.3f}" if other else "-"


def _ratios(records: list[dict], rival: str) -> list[float]:
    """Ratios of time over the pairs where either side moves something."""
    return [
        record["seconds"][OURS] / record["seconds"][rival]
        for record in records
        if rival in record["seconds"] and (record["received"][OURS] or record["received"][rival])
    ]


def _slow(record: dict) -> list[str]:
    found = []
    for rival in record["seconds"]:
        for ratio in _ratios([record], rival) if rival != OURS and record["megabytes"] >= LARGE else []:
            if ratio > LIMIT:
                ms = {name: f"{1000 * record['seconds'][name]:.0f} ms" for name in (OURS, rival)}
                does = {name: f": {text}" if text else "" for name, text in record.get("programs", {}).items()}
                sides = "; ".join(f"{ms[name]}{does.get(name, '')}" for name in (OURS, rival))
                found.append(f"{ratio:.2f}x of {rival} ({sides})")
    return found


def _name(record: dict) -> str:
    pair = f"{record['source']} -> {record['target']}"
    return f"{record['backend']} {record['hierarchy']} {record['megabytes']:g} MB, {pair}"


def plot(records: list[dict], path: Path) -> None:
    """Ratios of bytes and of time, pair by pair, sorted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    series: dict[tuple[str, str], list[dict]] = {}
    for record in records:
        for rival in record["received"]:
            if rival != OURS:
                series.setdefault((record["backend"], rival), []).append(record)
    for (backend, rival), found in series.items():
        moved = [one["received"][OURS] / one["received"][rival] for one in found if one["received"][rival]]
        for axes, values in ((left, moved), (right, _ratios(found, rival))):
            axes.plot(
                [k / max(1, len(values) - 1) for k in range(len(values))], sorted(values), label=f"{backend}, {rival}"
            )
    for axes, what in ((left, "bytes received"), (right, "time")):
        axes.axhline(1.0, color="black", linewidth=0.5)
        axes.set(xlabel="share of pairs", ylabel="keras_flow / engine", title=what)
        axes.legend(fontsize="small")
    right.set_yscale("log")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
