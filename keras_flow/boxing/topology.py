"""Topology: an alpha-beta model of the links between ranks: inside a host, between hosts, along axes.

A message of n bytes takes `latency + n / bandwidth` (Hockney's model). In one phase of a plan a rank handles its
messages one by one; the ranks of a host share the host's link to the others.

Example: an all-gather over two ranks, each receiving one message of 8 bytes.

    >>> from keras_flow.boxing import plan
    >>> from keras_flow.layout import Layout
    >>> pair = Placement([0, 1])
    >>> planned = plan(Layout(pair, "S(0)", (2, 2)), Layout(pair, "B", (2, 2)))
    >>> planned.time(Topology(inside=Link(latency=1.0, bandwidth=4.0)))
    3.0

Limits: phases do not overlap, links carry both ways at once, and above 64 ranks one rank on each of two hosts stands
for the others.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keras_flow.boxing.arrivals import arrivals
from keras_flow.boxing.blocks import array_of
from keras_flow.errors import FlowError
from keras_flow.placements import Placement

if TYPE_CHECKING:
    from keras_flow.boxing.spec import BoxingPlan
    from keras_flow.boxing.step import Step

#: ranks up to which each is looked at; of more, a rank on each of two hosts stands for the others
LOOKED_AT = 64


@dataclass(frozen=True)
class Link:
    """The cost of a message.

    Args:
        latency: seconds for each message.
        bandwidth: bytes per second.
    """

    latency: float
    bandwidth: float

    def __post_init__(self):
        if not (self.latency >= 0 and self.bandwidth > 0 and math.isfinite(self.latency)):
            raise FlowError(
                "a link has a latency of 0 s or more and a bandwidth above 0 bytes/s, "
                f"got {self.latency} and {self.bandwidth}"
            )

    def time(self, messages: float, bytes_: float) -> float:
        """Seconds for some messages of so many bytes together."""
        return messages * self.latency + bytes_ / self.bandwidth


@dataclass(frozen=True)
class Topology:
    """Links inside and between hosts; rank r is on host `r // ranks_per_host`.

    Args:
        ranks_per_host: ranks of one host; None means that all ranks are on one.
        inside: link between two ranks of a host.
        between: a host's link to the other hosts, shared by its ranks; None takes `inside`.
        axes: name of an axis of the placement -> each rank's own link along it. A message takes the link of the
            outermost axis on which its two ranks differ, where that axis has one.

    Example:
        >>> hosts = Topology(4, inside=Link(5e-6, 200e9), between=Link(2e-5, 12.5e9))
        >>> hosts.host(5)
        1
    """

    ranks_per_host: int | None = None
    inside: Link = Link(10e-6, 10e9)
    between: Link | None = None
    axes: Mapping[str, Link] = field(default_factory=dict[str, Link], hash=False)

    def __post_init__(self):
        if self.ranks_per_host is not None and self.ranks_per_host < 1:
            raise FlowError(f"a host has 1 rank or more, got ranks_per_host={self.ranks_per_host}")

    @classmethod
    def measured(cls, path: str | Path, backend: str) -> Topology:
        """Links as they were measured.

        Of one host by `keras-flow doctor --bandwidth --json > FILE`, with the most ranks that it did; of several by
        `keras-flow launch --nnodes ... -m keras_flow.doctor.hosts FILE`.

        Args:
            path: the file.
            backend: the engine whose links are taken.

        Raises:
            FlowError: no such file, not doctor's, or without a measured link of this backend.
        """
        try:
            report = json.loads(Path(path).read_text())
            if "hosts" in report:
                hosts = report["hosts"][backend]
                return cls(hosts["ranks_per_host"], Link(**hosts["inside"]), Link(**hosts["between"]))
            rings = [ring for engine in report["engines"] if engine["name"] == backend for ring in engine["rings"]]
            best = max(rings, key=lambda ring: ring["ranks"])
            return cls(inside=Link(best["latency"], best["bandwidth"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FlowError(
                f"{path} has no measured link of {backend!r} ({type(error).__name__}): make it with "
                "`keras-flow doctor --bandwidth --json > FILE`, or of several hosts with `keras-flow launch --nnodes "
                "... -m keras_flow.doctor.hosts FILE`"
            ) from error

    def host(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.ranks_per_host if self.ranks_per_host else 0

    def hosts(self, ranks: np.ndarray) -> np.ndarray:
        """The hosts of ranks."""
        return ranks // self.ranks_per_host if self.ranks_per_host else np.zeros_like(ranks)

    def along_axes(
        self, placement: Placement, rank: int, senders: np.ndarray, bytes_: np.ndarray
    ) -> tuple[float, np.ndarray]:
        """Seconds of the messages that `rank` receives over links of axes, and which messages take others."""
        rest = np.ones(len(senders), bool)
        seconds = 0.0
        if self.axes and len(senders) and placement.contains(rank):
            here = placement.coordinates(rank)
            coords = np.array([placement.coordinates(sender) for sender in senders.tolist()])
            # links of outer axes are the slow ones: a message that differs on several axes crosses the outermost
            outermost = np.argmax(coords != np.array(here), axis=1)
            for number, name in enumerate(placement.axis_names):
                along = outermost == number
                if name in self.axes:
                    seconds += self.axes[name].time(int(along.sum()), int(bytes_[along].sum()))
                    rest &= ~along
        return seconds, rest


def plan_time(plan: BoxingPlan, topology: Topology) -> float:
    """Modelled seconds of a plan: the phases one after the other, each as long as its slowest rank and host link."""
    return sum(step_time(step, plan.itemsize, topology, plan.ranks) for step in plan.steps)


def step_time(step: Step, itemsize: int, topology: Topology, ranks: tuple[int, ...] | None = None) -> float:
    """Modelled seconds of a step.

    Args:
        step: the step.
        itemsize: bytes of an element.
        topology: the links.
        ranks: those of the plan; None: the step's own.
    """
    if step.is_local:
        return 0.0
    looked = _looked_at(step.exchange.source.placement.ranks if ranks is None else ranks, topology)
    return sum(_phase_time(step, phase, itemsize, looked, topology) for phase in step.phases)


@functools.lru_cache(maxsize=8)
def _looked_at(ranks: tuple[int, ...], topology: Topology) -> list[tuple[np.ndarray, int]]:
    """(ranks to be timed, how many ranks the host has) for each host that is timed."""
    numbers = array_of(ranks)
    hosts = topology.hosts(numbers)
    order = np.argsort(hosts, kind="stable")
    edges = np.flatnonzero(np.diff(hosts[order], prepend=-1, append=-1))
    spans = list(itertools.pairwise(edges.tolist()))  # of each host: where its ranks are in `order`
    if len(ranks) <= LOOKED_AT:
        return [(numbers[order[start:stop]], stop - start) for start, stop in spans]
    # the first host and one in the middle: ranks at the edge of a placement may have other partners than those inside
    some = sorted({spans[0], spans[len(spans) // 2]})
    return [(numbers[order[[(start + stop) // 2]]], stop - start) for start, stop in some]


def _phase_time(
    step: Step, phase: str, itemsize: int, looked: Sequence[tuple[np.ndarray, int]], topology: Topology
) -> float:
    slowest_rank = slowest_link = 0.0
    for ranks, count in looked:
        outside_bytes = most_outside = 0
        for rank in ranks:
            senders, sizes = arrivals(step.exchange, int(rank), phase)
            seconds, rest = topology.along_axes(step.exchange.senders(phase), int(rank), senders, sizes * itemsize)
            inside = rest & (topology.hosts(senders) == topology.host(int(rank)))
            outside = rest & ~inside
            seconds += topology.inside.time(int(inside.sum()), int(sizes[inside].sum()) * itemsize)
            slowest_rank = max(slowest_rank, seconds)
            outside_bytes += int(sizes[outside].sum()) * itemsize
            most_outside = max(most_outside, int(outside.sum()))
        # ranks of a host share its link: their bytes add up, their latencies overlap
        link = topology.between or topology.inside
        slowest_link = max(slowest_link, link.time(most_outside, outside_bytes * count / len(ranks)))
    # not the larger of the two: a rank handles its messages one by one, those over the host's link among them
    return slowest_rank + slowest_link
