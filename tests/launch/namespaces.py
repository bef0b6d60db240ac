"""Two hosts on one machine: two network namespaces that a pair of virtual interfaces joins. Needs root and `ip`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from keras_flow.launch.environment import free_port
from tests.launch import programs


@dataclass(frozen=True)
class Hosts:
    """Two hosts.

    Attributes:
        names: of their namespaces.
        links: of the interface of each, which begins with `kf`.
        addresses: of each.
    """

    names: tuple[str, str]
    links: tuple[str, str]
    addresses: tuple[str, str]

    def start(self, command: Sequence[str], backend: str, processes: int, timeout: int) -> list[subprocess.Popen[str]]:
        """A job with so many processes on each host: both launchers, with their output kept.

        Args:
            command: what `keras-flow launch` starts, `-m` before a module.
            backend: the engine.
            processes: on each host.
            timeout: seconds without progress after which the job ends.
        """
        launch = ["-m", "keras_flow.launch", "--nnodes", "2", "--nproc_per_node", str(processes)]
        launch += ["--timeout", str(timeout), "--master_addr", self.addresses[0], "--master_port", str(free_port())]
        return [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *launch, "--node_rank", str(node), *command],
                env={**programs.ENVIRONMENT, "KERAS_BACKEND": backend, "KERAS_FLOW_TOKEN": "a secret"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node, name in enumerate(self.names)
        ]

    def set_link(self, node: int, state: str) -> None:
        """The interface of a host `"up"` or `"down"`."""
        _run("ip", "-n", self.names[node], "link", "set", self.links[node], state)


@contextmanager
def joined(rate: str = "") -> Iterator[Hosts]:
    """Two hosts; with a rate (`"200mbit"`) the link between them sends no faster.

    Raises:
        OSError, subprocess.CalledProcessError: namespaces are not permitted here.
    """
    number = os.getpid()
    hosts = Hosts((f"kf-{number}-0", f"kf-{number}-1"), (f"kf{number}a", f"kf{number}b"), ("10.77.0.1", "10.77.0.2"))
    try:
        for name in hosts.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", hosts.links[0], "type", "veth", "peer", "name", hosts.links[1])
        for node, (name, link, address) in enumerate(zip(hosts.names, hosts.links, hosts.addresses, strict=True)):
            _run("ip", "link", "set", link, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            hosts.set_link(node, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if rate:
                limits = ("rate", rate, "burst", "256kb", "latency", "1s")
                _run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *limits)
        yield hosts
    finally:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def joined_or_skipped() -> Iterator[Hosts]:
    """Two hosts; where namespaces cannot be made, the test is skipped."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(joined())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not permitted here ({error})")
        yield made


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
