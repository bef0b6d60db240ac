"""Topology: an alpha-beta model of the links between ranks, on two levels (inside a host, between hosts).

A message of n bytes takes `latency + n / bandwidth` (Hockney's model). In one phase of a plan a rank handles its
messages one by one; the ranks of a host share the host's link to the others.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keras_flow.errors import FlowError

if TYPE_CHECKING:
    from keras_flow.boxing.spec import BoxingPlan, Step

#: ranks up to which each is looked at; of more, evenly spaced hosts stand for the others
LOOKED_AT = 64


@dataclass(frozen=True)
class Link:
    """What a message costs.

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

    Example:
        >>> hosts = Topology(4, inside=Link(5e-6, 200e9), between=Link(2e-5, 12.5e9))
        >>> hosts.host(5)
        1
    """

    ranks_per_host: int | None = None
    inside: Link = Link(10e-6, 10e9)
    between: Link | None = None

    @classmethod
    def measured(cls, path: str | Path, backend: str) -> Topology:
        """Of one host, as `keras-flow doctor --bandwidth --json > FILE` measured it, with the most ranks that it did.

        Args:
            path: the file.
            backend: of which engine.

        Raises:
            FlowError: no such file, not doctor's, or without a measured link of this backend.
        """
        try:
            report = json.loads(Path(path).read_text())
            rings = [ring for engine in report["engines"] if engine["name"] == backend for ring in engine["rings"]]
            best = max(rings, key=lambda ring: ring["ranks"])
            return cls(inside=Link(best["latency"], best["bandwidth"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FlowError(
                f"{path} has no measured link of {backend!r} ({type(error).__name__}): make it with "
                "`keras-flow doctor --bandwidth --json > FILE`"
            ) from error

    def host(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.ranks_per_host if self.ranks_per_host else 0


def plan_time(plan: BoxingPlan, topology: Topology) -> float:
    """Modelled seconds of a plan: the phases one after the other, each as long as its slowest rank and host link."""
    return sum(_step_time(step, plan, topology) for step in plan.steps)


def _step_time(step: Step, plan: BoxingPlan, topology: Topology) -> float:
    hosts: dict[int, list[int]] = defaultdict(list)
    for rank in plan.ranks:
        hosts[topology.host(rank)].append(rank)
    numbers = sorted(hosts)
    if len(plan.ranks) > LOOKED_AT:
        wanted = max(1, LOOKED_AT // max(len(ranks) for ranks in hosts.values()))
        numbers = sorted({numbers[len(numbers) * k // wanted] for k in range(wanted)} | {numbers[0], numbers[-1]})
    seconds = 0.0
    for phase in step.phases:
        slowest_inside = slowest_link = 0.0
        for number in numbers:
            outside_bytes = most_outside = 0
            ranks = hosts[number]
            looked = ranks[:: max(1, len(ranks) // LOOKED_AT)]
            for rank in looked:
                inside, outside = [0, 0], [0, 0]
                for part in step.exchange.receives(rank, phase):
                    if part.sender != rank:
                        level = inside if topology.host(part.sender) == number else outside
                        level[0] += 1
                        level[1] += part.piece.size * plan.itemsize
                slowest_inside = max(slowest_inside, topology.inside.time(*inside))
                outside_bytes += outside[1]
                most_outside = max(most_outside, outside[0])
            link = topology.between or topology.inside
            slowest_link = max(slowest_link, link.time(most_outside, outside_bytes * len(ranks) / len(looked)))
        seconds += slowest_inside + slowest_link
    return seconds
