"""Plans that know of hosts beside plans that do not, on two hosts with a slow link between them.

    python -m benchmarks.two_hosts [--backend torch] [--rate 200mbit] [--mb 8]

Makes two network namespaces, joins them by a link of that rate (Linux `tc`; needs root), measures the links by
`keras_flow.doctor.hosts`, then runs each pair of layouts on 2 x 2 ranks by both plans, interleaved. Prints the medians'
ratio and what the topology predicted. Exit status 1 where a plan that should be quicker is above 0.7.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.launch import namespaces, programs

PAIRS = (("P,P", "B,B"), ("S(0),S(0)", "B,B"), ("P,P", "S(0),S(0)"), ("P,S(0)", "B,B"), ("P,P", "B,S(0)"))
TARGET = 0.7


def measure(topology: str, megabytes: int, repeats: int) -> None:
    """On every rank of the job."""
    import numpy as np

    import keras_flow as kf
    from keras_flow.backends.active import checked_name, tensor_engine

    kf.init()
    engine, rank = tensor_engine(), kf.env.get_rank()
    links = kf.boxing.Topology.measured(topology, checked_name())
    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("host", "rank"))
    rows = []
    for before, after in PAIRS:
        shape = (256, megabytes * 1_000_000 // (4 * 256))
        source, target = (kf.Layout(mesh, sbp, shape) for sbp in (before, after))
        plans = {"flat": kf.boxing.plan(source, target), "hosts": kf.boxing.plan(source, target, topology=links)}
        if plans["flat"].steps == plans["hosts"].steps:
            continue
        shard = engine.put(np.full(source.local_shape(rank), 1.0 + rank, "float32"), rank)
        results = [engine.as_numpy(kf.boxing.execute(plan, {rank: shard})[rank]) for plan in plans.values()]
        np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
        times: dict[str, list[float]] = {name: [] for name in plans}
        for turn in range(repeats):
            for name in list(plans) if turn % 2 else reversed(list(plans)):
                kf.comm.barrier()
                begin = time.perf_counter()
                engine.as_numpy(kf.boxing.execute(plans[name], {rank: shard})[rank])
                times[name].append(time.perf_counter() - begin)
        slowest = {
            name: [max(turn) for turn in zip(*(each[name] for each in kf.comm.all_gather_object(times)), strict=True)]
            for name in plans
        }
        medians = {name: statistics.median(each) for name, each in slowest.items()}
        rows.append(
            {
                "pair": f"{before} -> {after}",
                "flat": medians["flat"],
                "ratio": medians["hosts"] / medians["flat"],
                "predicted": plans["hosts"].time(links) / plans["flat"].time(links),
                "steps": [str(step) for step in plans["hosts"].steps],
            }
        )
    if kf.env.is_main_process():
        print(json.dumps(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--mb", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        measure(options.rank[0], int(options.rank[1]), int(options.rank[2]))
        return 0
    with namespaces.joined(options.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        found = str(Path(folder) / "links.json")
        print(_launched(hosts, options.backend, ["keras_flow.doctor.hosts", found]).strip(), file=sys.stderr)
        arguments = ["benchmarks.two_hosts", "--rank", found, str(options.mb), str(options.repeats)]
        rows = json.loads(_launched(hosts, options.backend, arguments).strip().splitlines()[-1])
    print(f"| {options.backend}, {options.mb} MB, {options.rate} | flat, ms | ratio | predicted | steps of the plan |")
    print("|---|---|---|---|---|")
    for row in rows:
        steps = "; ".join(row["steps"])
        print(f"| {row['pair']} | {row['flat'] * 1e3:.0f} | {row['ratio']:.2f} | {row['predicted']:.2f} | {steps} |")
    return any(row["ratio"] > TARGET for row in rows if row["predicted"] < TARGET)


def _launched(hosts: namespaces.Hosts, backend: str, module: list[str]) -> str:
    """What host 0 printed."""
    launchers = hosts.start(["-m", *module], backend, processes=2, timeout=200)
    outputs = [programs.finish(launcher, 400) for launcher in launchers]
    if any(code for code, _, _ in outputs):
        raise SystemExit(f"a host failed: {outputs[0][2][-2000:]}")
    return outputs[0][1]


if __name__ == "__main__":
    sys.exit(main())
