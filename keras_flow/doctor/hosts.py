"""Links within a host and between hosts, measured by the ranks of a job on several hosts.

    keras-flow launch --nnodes 2 --node_rank R --master_addr A --nproc_per_node 4 -m keras_flow.doctor.hosts FILE

writes them to FILE on host 0, for `kf.boxing.Topology.measured` and `keras-flow boxing --measured`. All ranks of a host
talk to those of the next at once, as in a collective, so that what they measure is the link that they share.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np

import keras_flow as kf
from keras_flow import atomic
from keras_flow.backends.active import checked_name, tensor_engine
from keras_flow.doctor.links import fit
from keras_flow.errors import FlowError

#: elements (float32) of the tensors
_SIZES = (1_000, 100_000, 1_000_000)
_REPEATS = 7


def measure() -> dict[str, object]:
    """Latency (seconds) and bandwidth (bytes/s) of both links; a collective of all ranks.

    Raises:
        FlowError: the job is on one host, or a process drives several ranks.
    """
    rank, count, hosts = kf.env.get_rank(), kf.env.get_world_size(), kf.env.get_node_size()
    if hosts < 2 or count % hosts or count // hosts < 2:
        raise FlowError(
            f"this job has {count} ranks on {hosts} host(s); links are measured with 2 hosts and 2 ranks on each, or "
            "more. On one host `keras-flow doctor --bandwidth` does it."
        )
    share = count // hosts
    host, place = divmod(rank, share)
    inside = _seconds(kf.Placement([host * share, host * share + 1]), takes_part=place < 2)
    # the ranks of host 0 and those of host 1, in pairs; a link that is shared gives each its part
    between = _seconds(kf.Placement([place, share + place]), takes_part=host < 2)
    everyone = kf.comm.all_gather_object((inside, between))
    links = [_link([theirs[number] for theirs in everyone if theirs[number]]) for number in (0, 1)]
    # between hosts `Topology` has the link that the ranks of a host share
    return {
        "ranks_per_host": share,
        "inside": links[0],
        "between": {**links[1], "bandwidth": links[1]["bandwidth"] * share},
    }


def _seconds(group: kf.Placement, takes_part: bool) -> dict[int, float]:
    """Bytes -> seconds of an all-reduce over a pair of ranks."""
    engine, rank, found = tensor_engine(), kf.env.get_rank(), {}
    for elements in _SIZES:
        x = engine.put(np.ones(elements, "float32"), rank)
        times = []
        for _ in range(_REPEATS + 1):
            kf.comm.barrier()
            if takes_part:
                begin = time.perf_counter()
                engine.as_numpy(kf.comm.all_reduce(x, group=group))
                times.append(time.perf_counter() - begin)
        if takes_part:
            found[4 * elements] = statistics.median(times[1:])
    return found


def _link(found: list[dict[int, float]]) -> dict[str, float]:
    """The slowest pair's."""
    ring = fit(2, {size: max(theirs[size] for theirs in found) for size in found[0]})
    return {"latency": ring.latency, "bandwidth": ring.bandwidth}


def main() -> None:
    """Measure, and write the file on host 0."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    kf.init()
    found = measure()
    if kf.env.is_main_process():
        text = json.dumps({"hosts": {checked_name(): found}}, indent=1)
        atomic.write_text(sys.argv[1], text)
        print(text)


if __name__ == "__main__":
    main()
