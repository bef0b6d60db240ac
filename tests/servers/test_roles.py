"""Who is chief, worker or server, and what is said of a job that is not whole."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from keras_flow.backends.mail import calls
from keras_flow.current import processes
from keras_flow.errors import FlowError
from keras_flow.launch import roles
from keras_flow.launch.environment import free_port
from keras_flow.parallel import parameter_server
from keras_flow.servers import counting

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def _config(job: str, index: int, **cluster: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": {**CLUSTER, **cluster}, "task": {"type": job, "index": index}})}


def test_who_it_is() -> None:
    found = roles.find(_config("ps", 0))
    assert found is not None and (found.job, found.index, found.name) == ("ps", 0, "parameter server 0")
    assert found.cluster["worker"] == ("b:1", "c:1")
    assert roles.find(_config("worker", 1, ps=[])) is None
    assert roles.find({}) is None


def test_the_chief_trains_alone() -> None:
    assert processes.find(_config("chief", 0)).count == 1
    assert processes.find(_config("worker", 1, ps=[])).count == 3
    by_srun = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "a"}
    by_mpi = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert [processes.find(_config("chief", 0) | started).count for started in (by_srun, by_mpi)] == [1, 1]
    assert [processes.find(started).count for started in (by_srun, by_mpi)] == [4, 2]


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG cannot be read"),
        (_config("worker", 2), "this process is worker 2; its cluster has 1 chief, 2 worker, 1 ps"),
        (_config("evaluator", 0), "this process is evaluator 0"),
        (_config("chief", 0, worker=[]), "names parameter servers and no worker"),
    ],
)
def test_what_cannot_be(environment: dict[str, str], text: str) -> None:
    with pytest.raises(FlowError, match=text):
        roles.find(environment)


def test_a_server_that_nobody_starts_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        there, missing = f"127.0.0.1:{listener.getsockname()[1]}", f"127.0.0.1:{free_port()}"
        role = roles.Role("chief", 0, {"chief": ("127.0.0.1:1",), "worker": (there,), "ps": (there, missing)})
        began = time.monotonic()
        with pytest.raises(FlowError) as error:
            roles.await_others(role, 0.5)
    assert f"nobody listens as parameter server 1 ({missing}) after 0.5 s" in str(error.value)
    assert time.monotonic() - began < 5.0


def test_an_address_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chief, and workers and servers of torch; the next test has those of TensorFlow."""
    monkeypatch.setenv("KERAS_FLOW_TOKEN", "of this test")
    with _held() as address:
        role = roles.Role("chief", 0, {"chief": (address,), "worker": ("b:1",), "ps": ("c:1",)})
        with pytest.raises(FlowError, match=f"gives the chief {address}, where it cannot listen: Address already in"):
            roles.listen(role)
        with pytest.raises(FlowError, match=f"gives this process {address}, where it cannot listen: Address already"):
            calls.answer(address, lambda told, value: None)


@pytest.mark.full
@pytest.mark.parametrize("job", ["worker", "ps"])
def test_an_address_in_use_is_named_by_tensorflow(job: str) -> None:
    with _held() as address:
        config = _config(job, 0, **{job: [address]})
        environment = {**os.environ, **config, "KERAS_BACKEND": "tensorflow", "KERAS_FLOW_TIMEOUT": "3"}
        command = [sys.executable, "-m", "keras_flow.servers"]
        result = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)
    assert result.returncode == 1
    assert f"gives this process {address}, where it cannot listen: Could not start" in result.stderr


@contextmanager
def _held() -> Iterator[str]:
    """An address at which something listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("given", [0, 3, True, "half", "min_size:0KiB", "min_size:1kb"])
def test_a_partition_that_is_none(given: str | int) -> None:
    with pytest.raises(FlowError, match=re.escape(f"partition={given!r}: legal is") + ".* from 1 to 2, the servers"):
        parameter_server._Partition(given, 2)


def test_the_others_end_with_the_chief() -> None:
    with socket.socket() as chief:
        chief.bind(("127.0.0.1", 0))
        chief.listen()
        address = f"127.0.0.1:{chief.getsockname()[1]}"
        role = roles.Role("worker", 0, {"chief": (address,), "worker": ("b:1",), "ps": ("c:1",)})
        waiting = threading.Thread(target=roles.await_chief, args=(role, 5.0), daemon=True)
        waiting.start()
        connection = chief.accept()[0]
        waiting.join(0.3)
        assert waiting.is_alive()
        connection.close()
        waiting.join(5.0)
        assert not waiting.is_alive()
    with pytest.raises(FlowError, match=r"worker 0 waited 0\.2 s for the chief"):
        roles.await_chief(role, 0.2)


def test_a_host_that_is_silent_is_asked() -> None:
    with socket.socket() as connection:
        roles._keep_asking(connection)
        asked = [
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            *(connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in roles._ASKING),
        ]
    assert asked == [1, 10, 5, 3]


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("workers", [2, 4])
def test_no_gradient_is_staler_than_the_bound(bound: int, workers: int) -> None:
    import random

    order, ledger, away = random.Random(bound), counting.Ledger(bound, workers), []
    for number in range(200):
        while not ledger.may_send():
            ledger.came_back(away.pop(order.randrange(len(away)) if len(away) > 1 else 0), 0)
        ledger.sent((0, number))
        away.append((0, number))
    while away:
        ledger.came_back(away.pop(), 1)
    assert (ledger.statistics.updates, ledger.statistics.dropped) == (200, 0)
    assert ledger.statistics.staleness <= bound
    assert bound == 0 or ledger.statistics.staleness > 0


def test_a_batch_counts_once() -> None:
    ledger = counting.Ledger(None, 4)
    for key in ((0, 0), (0, 1), (1, 0)):
        ledger.sent(key)
    assert [ledger.came_back(key, 0) for key in ((0, 1), (0, 1), (1, 0), (0, 0), (1, 0))] == [
        True,
        False,
        True,
        True,
        False,
    ]
    assert (ledger.statistics.updates, ledger.statistics.dropped) == (3, 2)
