"""A stranger at every port of a running job, ours and the engines': nothing is written, and the job goes on."""

import pickle
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from keras_flow.backends.engines import that_train
from keras_flow.launch.environment import free_port
from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import os, sys, time
import keras_flow as kf
kf.init()
kf.comm.barrier()
open(sys.argv[1] + f"/ready-{kf.env.process_index()}", "w").close()
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.1)
print(float(kf.comm.all_reduce([1.0 + kf.env.get_rank()])[0]))
"""


def _listening(pid: int) -> set[tuple[str, int]]:
    found = set()
    for process in [psutil.Process(pid), *programs.tree(pid)]:
        with suppress(psutil.NoSuchProcess):
            found |= {
                ("::1" if ":" in one.laddr.ip else "127.0.0.1", one.laddr.port)
                for one in process.net_connections("tcp")
                if one.status == psutil.CONN_LISTEN
            }
    return found


@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_a_stranger_at_every_port(backend: str, tmp_path: Path) -> None:
    script = programs.write(tmp_path, PROGRAM)
    command = ["-m", "keras_flow.launch", "--nnodes", "2", "--nproc_per_node", "1", "--timeout", "60"]
    command += ["--master_port", str(free_port())]
    launchers = [
        programs.start(
            [*command, "--node_rank", str(node), str(script), str(tmp_path)], backend, KERAS_FLOW_TOKEN="a secret"
        )
        for node in (0, 1)
    ]
    programs.wait_until(lambda: all((tmp_path / f"ready-{index}").exists() for index in (0, 1)), 60)
    ports = set.union(*(_listening(launcher.pid) for launcher in launchers))
    assert ports
    for address in sorted(ports):
        for text in (b"\x00" * 4096, b"GET / HTTP/1.0\r\n\r\n", pickle.dumps(programs.Writes(tmp_path / "written"))):
            with suppress(ConnectionError), socket.create_connection(address, timeout=5) as stranger:
                stranger.sendall(text)
    (tmp_path / "go").touch()
    outputs = [programs.finish(launcher, 60) for launcher in launchers]
    assert [code for code, _, _ in outputs] == [0, 0], (sorted(ports), outputs[0][2], outputs[1][2])
    assert outputs[0][1].split()[-1] == "3.0"  # gloo speaks before
    assert not (tmp_path / "written").exists()
