"""Jobs of real processes that end well, fail, are killed, hang and are interrupted."""

import errno
import gzip
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest

from keras_flow import settings
from keras_flow.errors import LaunchError
from keras_flow.launch import environment
from keras_flow.launch.failure import RankError
from keras_flow.launch.job import Job, stated_timeout
from keras_flow.launch.launcher import job_folder, launch
from keras_flow.launch.processes import Interrupts
from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(60)

SLEEP = "import os, sys, time\nrank = int(os.environ['RANK'])\n"


def fail(folder: Path, text: str, *, ranks: int = 3, timeout: float = 60) -> RankError:
    """Run a program that fails; its error. The job ends within 10 s beyond its timeout."""
    script = programs.write(folder, SLEEP + text)
    command = (sys.executable, "-m", "keras_flow.launch.child", "script", str(script))
    began = time.monotonic()
    with job_folder() as job, pytest.raises(RankError) as caught:
        launch(Job(ranks, command, timeout), job)
    assert time.monotonic() - began < 10 + (timeout if timeout < 10 else 0)
    return caught.value


def test_environment_of_every_rank(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR KERAS_FLOW_DEVICES PYTHONHASHSEED PYTHONUNBUFFERED"
    script = programs.write(
        tmp_path,
        f"import os\nprint(*(os.environ[n] for n in '{names}'.split()), int(os.environ['MASTER_PORT']) > 1023, "
        "int(os.environ['OMP_NUM_THREADS']) >= 1, hash('a'))",
    )
    code, out, err = programs.launch(script, "--all-output", ranks=2)
    assert code == 0, err
    lines = sorted(out.splitlines())
    assert lines[0].startswith("[rank 0] 0 0 2 2 127.0.0.1 2 0 1 True True ")
    assert lines[1].startswith("[rank 1] 1 1 2 2 127.0.0.1 2 0 1 True True ")
    assert lines[0].split()[-1] == lines[1].split()[-1], "the same order of sets"


def test_rank_raises(tmp_path: Path) -> None:
    error = fail(tmp_path, "def inner():\n    raise ValueError('boom')\nif rank == 1: inner()\ntime.sleep(99)")
    assert (error.rank, error.exit_code) == (1, 1)
    assert "rank 1 of 3 failed: ValueError: boom (exit code 1)" in str(error)
    assert "in inner" in error.details
    assert "runpy" not in error.details, "the traceback begins in the user's program"


def test_rank_is_killed(tmp_path: Path) -> None:
    error = fail(tmp_path, "if rank == 2:\n    print('last words')\n    os.kill(os.getpid(), 9)\ntime.sleep(99)")
    assert (error.rank, error.exit_code) == (2, -9)
    assert "rank 2 of 3 failed: killed by SIGKILL" in str(error)
    assert "last words" in str(error)
    error = fail(tmp_path, "if rank == 2: os.kill(os.getpid(), 9)\ntime.sleep(99)")
    assert "its output" not in str(error), "there is none"


def test_rank_leaves_with_a_code(tmp_path: Path) -> None:
    error = fail(tmp_path, "if rank == 0: sys.exit(3)\ntime.sleep(99)")
    assert (error.rank, error.exit_code) == (0, 3)
    assert str(error) == "rank 0 of 3 left with exit code 3\nThe other ranks were ended."


@pytest.mark.parametrize(
    ("last", "status", "text"),
    [
        ("sys.exit(3)", 3, "left with exit code 3"),
        ("sys.exit('no data')", 1, "left with exit code 1: no data"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL"),
        ("raise ValueError('boom')", 1, "ValueError: boom"),
    ],
)
def test_the_status_of_a_rank_is_that_of_the_command(tmp_path: Path, last: str, status: int, text: str) -> None:
    code, _, err = programs.launch(programs.write(tmp_path, SLEEP + last), ranks=2)
    assert code == status
    assert text in err


@pytest.mark.parametrize("backend", sampling.on_one(["jax", "tensorflow"]))
def test_the_status_of_a_process_that_leaves_the_others_in_a_collective(tmp_path: Path, backend: str) -> None:
    text = "import sys, keras_flow as kf\nkf.init()\nif kf.env.get_rank() == 1: sys.exit(3)\nkf.comm.barrier()"
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", str(programs.write(tmp_path, text))]
    code, _, err = programs.finish(programs.start(command, backend))
    assert code == 3
    assert "process 1 of 2 left with exit code 3" in err or "rank 1 of 2 left with exit code 3" in err


def test_rank_that_lost_its_neighbour_is_not_blamed(tmp_path: Path) -> None:
    text = (
        "if rank == 0: raise RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1')\n"
        "time.sleep(.3)\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(99)"
    )
    assert fail(tmp_path, text).rank == 1


@pytest.mark.parametrize("raised", ["TimeoutError('the server timed out')", "ConnectionResetError('Connection reset')"])
def test_a_server_of_the_programs_that_does_not_answer_is_no_rank_that_hangs(tmp_path: Path, raised: str) -> None:
    text = f"def asks():\n    raise {raised}\nif rank == 1: asks()\ntime.sleep(99)"
    error = fail(tmp_path, text, ranks=2)
    assert error.rank == 1
    assert f"rank 1 of 2 failed: {raised.partition('(')[0]}: " in str(error)
    assert "in asks" in error.details


def test_early_exit_is_blamed_for_the_connection_that_others_lost(tmp_path: Path) -> None:
    text = (
        "if rank == 1: sys.exit(0)\ntime.sleep(1)\n"
        "raise RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer')"
    )
    error = fail(tmp_path, text)
    assert (error.rank, error.exit_code) == (1, 0)
    assert "rank 1 of 3 left early with exit code 0" in str(error)


def test_early_exit_is_fine_when_all_finish(tmp_path: Path) -> None:
    script = programs.write(tmp_path, SLEEP + "time.sleep(rank)\nprint('done', rank)")
    code, out, err = programs.launch(script, ranks=2)
    assert (code, out, err) == (0, "done 0\n", "")


def test_hang_of_all(tmp_path: Path) -> None:
    error = fail(tmp_path, "time.sleep(99)", ranks=2, timeout=2)
    assert "ranks 0, 1 of 2 hang: no progress for 2 s" in str(error)
    assert "--timeout" in str(error)
    assert "program.py" in error.details, "its stack"


def test_hang_names_the_rank_that_does_not_answer(tmp_path: Path) -> None:
    error = fail(tmp_path, "if rank == 1: os.kill(os.getpid(), 19)\ntime.sleep(99)", timeout=2)
    assert "rank 1 of 3 hangs: no progress for 2 s" in str(error)


def test_rank_that_works_does_not_hang(tmp_path: Path) -> None:
    text = "end = time.time() + 4\nif rank == 0: time.sleep(4)\nwhile time.time() < end: pass\nprint('done')"
    code, out, err = programs.launch(programs.write(tmp_path, SLEEP + text), "--timeout", "2", ranks=2)
    assert (code, out, err) == (0, "done\n", "")


LEAVING = """
if (fork := os.fork()) == 0:
    sys.exit(5)  # which is not the rank's end
os.waitpid(fork, 0)
assert os.path.isabs(__file__)
import atexit, ctypes, gzip, threading
folder = sys.argv[1]
thread = threading.Thread(target=lambda: (time.sleep(.3), print('thread')))
thread.start()
atexit.register(print, 'exit')
kept = open(folder + '/kept.txt', 'w')
kept.write('text')
packed = gzip.open(folder + '/packed.gz', 'wb')
packed.write(b'bytes')
ctypes.CDLL(None).puts(b'C')

class Holder:
    def __init__(self): self.me = self
    def __del__(self): print('freed')

holder = Holder()
"""


@pytest.mark.parametrize("last", ["", "sys.exit(0)", "sys.exit(3)", "raise ValueError"])
def test_a_rank_leaves_as_a_program_does(tmp_path: Path, last: str) -> None:
    """Though Python is not taken down: `_leave` of keras_flow.launch.child."""
    script = programs.write(tmp_path, SLEEP + LEAVING + last)
    command = ["-m", "keras_flow.launch.child", "script", os.path.relpath(script), str(tmp_path)]
    code, out, _ = programs.finish(programs.start(command, RANK="0", **{settings.JOB: str(tmp_path)}))
    assert code == {"": 0, "sys.exit(0)": 0, "sys.exit(3)": 3, "raise ValueError": 1}[last]
    assert (tmp_path / "kept.txt").read_text() == "text"
    assert (tmp_path / "failure-0.json").exists() == (code != 0)
    assert {"thread", "exit", "C"} <= set(out.split())
    if code == 0:  # a failure is kept with all that its frames hold
        assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"bytes"
        assert "freed" in out


CHILDREN = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(99)'])
open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').close()
time.sleep(99)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_launcher_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    script = programs.write(tmp_path, CHILDREN)
    command = ["-m", "keras_flow.cli.app", "launch", "--devices", "2", str(script), str(tmp_path)]
    process = programs.start(command)
    programs.wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    code = programs.interrupt_and_check(process, number)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    programs.finish(process)  # its pipes are closed


def test_ctrl_c_is_raised_where_it_does_no_harm() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        interrupts.check()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        reached.append("not raised by itself")
        interrupts.check()
        reached.append("not raised by check")
    assert reached == ["not raised by itself"]
    assert signal.getsignal(signal.SIGINT) is before


def test_children_of_ranks_end_with_a_failed_job(tmp_path: Path) -> None:
    text = CHILDREN.replace("time.sleep(99)\n", "time.sleep(1)\nraise ValueError\n")
    process = programs.start(
        ["-m", "keras_flow.cli.app", "launch", "--devices", "2", str(programs.write(tmp_path, text)), str(tmp_path)]
    )
    programs.wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    below = programs.tree(process.pid)
    assert programs.finish(process)[0] == 1
    programs.wait_until(lambda: not any(one.is_running() for one in below), 5)


def test_timeout_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERAS_FLOW_TIMEOUT", raising=False)
    assert stated_timeout(None) == 1800
    monkeypatch.setenv("KERAS_FLOW_TIMEOUT", "7")
    assert (stated_timeout(None), stated_timeout(2)) == (7, 2)
    with pytest.raises(LaunchError, match=r"-1.*above 0"):
        stated_timeout(-1)


def test_a_host_without_ports_or_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(LaunchError, match=r"none of 100 ports of 20000 to 31999 .*: Operation not permitted"):
        environment.free_port()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(LaunchError, match=r"\(TMPDIR\): .*No such file"), job_folder():
        pass
