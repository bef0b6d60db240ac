"""The batch script of docs/parameter_servers.md, submitted to a Slurm of two nodes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keras_flow.launch.environment import free_port
from tests.launch import programs, slurm
from tests.servers.test_parameter_server import ENGINES, PROGRAM

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

PAGE = PROGRAM.parents[2] / "docs" / "parameter_servers.md"


def _script(folder: Path) -> str:
    """The page's script, with a program of the tests and ports that are free."""
    found = re.search(r'```bash title="job\.sh"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert found is not None
    text, count = re.subn(r":2000\d", lambda _: f":{free_port()}", found[1])
    assert count == 4 and text.count("python train.py") == 1
    return text.replace("python train.py", f"{sys.executable} {PROGRAM} by_hand {folder}")


def _reachable(folder: Path, path: str) -> str:
    """A PATH whose `scontrol` gives the second node, which no DNS knows, a name that is known."""
    real = shutil.which("scontrol", path=path)
    shim = folder / "bin" / "scontrol"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\n{real} "$@" | sed s/zz-second/localhost/\n')
    shim.chmod(0o755)
    return f"{shim.parent}:{path}"


@pytest.mark.parametrize("backend", ENGINES)
def test_the_batch_script_of_the_page(backend: str, tmp_path: Path) -> None:
    with slurm.cluster(tmp_path) as where:
        environment = {**programs.ENVIRONMENT, **where, "PATH": _reachable(tmp_path, where["PATH"])}
        environment |= {"KERAS_BACKEND": backend, "PYTHONPATH": str(PROGRAM.parents[2])}
        script = programs.write(tmp_path, _script(tmp_path), "job.sh")
        command = ["sbatch", "--wait", "--output=job.log", str(script)]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
    said = (tmp_path / "job.log").read_text()
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{said}"[-4000:]
    assert json.loads(said.split("FOUND ")[1].splitlines()[0])["off"] < 1e-5
