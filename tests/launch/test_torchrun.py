"""torchrun as people call it: its agent holds MASTER_PORT, and the processes find each other by its store."""

from __future__ import annotations

from pathlib import Path

import pytest

from keras_flow.launch.environment import free_port
from tests.launch import clients

pytestmark = pytest.mark.timeout(300)


def full(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("torch", []),
        ("torch", ["--standalone"]),
        ("jax", ["--standalone"]),
        full("tensorflow", ["--standalone"]),
        full("jax", []),
        full("tensorflow", []),
        full("tensorflow", ["--master_port"]),
        full("torch", ["--master_port"]),
        full("jax", ["--master_port"]),
        full("torch", ["--rdzv_backend=c10d", "--rdzv_endpoint"]),
        full("jax", ["--rdzv_backend=c10d", "--rdzv_endpoint"]),
        full("tensorflow", ["--rdzv_backend=c10d", "--rdzv_endpoint"]),
    ],
)
def test_torchrun(backend: str, options: list[str], tmp_path: Path) -> None:
    if options and options[-1] == "--master_port":
        options = [f"--master_port={free_port()}"]
    if options and options[-1] == "--rdzv_endpoint":
        options = [options[0], f"--rdzv_endpoint=localhost:{free_port()}"]
    clients.run(tmp_path, clients.torchrun(*options), backend=backend)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_nodes(backend: str, rendezvous: str, tmp_path: Path) -> None:
    port = free_port()
    shared = ["--nnodes=2", "--nproc_per_node=1"]
    commands = [
        clients.torchrun(*shared, f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}")
        if rendezvous == "static"
        else clients.torchrun(*shared, "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=7")
        for node in range(2)
    ]
    clients.run(tmp_path, *commands, backend=backend)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
@pytest.mark.parametrize("static", [False, True])
def test_max_restarts(backend: str, static: bool, tmp_path: Path) -> None:
    options = ["--max-restarts=1", *([f"--master_port={free_port()}"] if static else ["--standalone"])]
    results = clients.run(tmp_path, clients.torchrun(*options), backend=backend, seconds=250, FAILS="1")
    assert [result["attempt"] for result in results] == ["1", "1"]
