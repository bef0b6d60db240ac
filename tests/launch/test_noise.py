"""Known lines of the engines are left out, whole lines only; a program's own never are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from keras_flow.launch import terminal
from keras_flow.launch.noise import Noise, is_known
from tests.launch import programs

ONEDNN = "I0000 00:00:1795726634.020782    6998 port.cc:153] oneDNN custom operations are on. You may see slightly"
MATRIX = "E0000 00:00:1795729850.048907   16553 op_level_cost_estimator.cc:1126] Incompatible Matrix dimensions"
ABSL = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"


@pytest.mark.parametrize(
    "line",
    [
        ABSL,
        ONEDNN,
        "2026-11-26 21:03:22.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. You may",
        "I0000 00:00:1795729605.555226   15389 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use",
        "E0000 00:00:1795729850.048907   16553 op_level_cost_estimator.cc:1126] Incompatible Matrix dimensions",
        "I0000 00:00:1795729885.307674   15389 dtensor_device.cc:1622] DTensor cache key lookup missed for __inf",
        "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the appropriate "
        "compiler flags.",
        "I0000 00:00:1795742136.217687   28760 coordination_service.h:529] /job:worker/task:1 has connected to x",
        "I0000 00:00:1795742136.217757   28760 coordination_service.cc:502] Waiting for 0/2 tasks to connect.",
        "I0000 00:00:1795742136.220711   28760 coordination_service.cc:1472] Barrier(W::0) has passed with status: OK",
        "I0000 00:00:1795848217.598497   19898 coordination_service.cc:221] Initializing CoordinationService",
        "I0000 00:00:1795848217.599747   19898 grpc_server_lib.cc:467] Started server with target: grpc://127.0.0.1:3888",
        "I0000 00:00:1795848217.721753   19969 coordination_service.cc:505] Example stragglers:",
        "/job:worker/replica:0/task:0",
        "I0000 00:00:1795848217.755363   19898 coordination_service_agent.cc:245] Coordination agent has successfully "
        "connected.",
        "[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3",
        "[rank0]:[W1129 12:24:14.206928795 reducer.cpp:1529] Warning: find_unused_parameters=True was specified in DDP "
        "constructor, but did not find any unused parameters in the forward pass. This flag results in an extra",
    ],
)
def test_what_is_left_out(line: str) -> None:
    assert is_known(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "WARNING: my own",
        "I0000 of my log: oneDNN custom operations are on.",
        "E0000 00:00:1795726634.020782    6998 my.cc:1] something else",
        f"my log: {ABSL}",
        f"{ABSL} and more",
        "[Gloo] Rank 0 is connected to 3 peer ranks",
        "/job:worker/replica:0/task:0 is mine",
        "[rank0]:[W1129 12:24:14.206928795 reducer.cpp:1529] Warning: something else",
    ],
)
def test_what_is_shown(line: str) -> None:
    assert not is_known(line)


def passed(*pieces: str) -> list[str]:
    noise = Noise()
    return [*(noise.pass_on(piece) for piece in pieces), noise.pass_on("", last=True)]


def test_pieces_of_lines() -> None:
    assert passed("one\ntw", "o\n") == ["one\ntw", "o\n", ""]
    assert passed(f"one\n{ABSL[:20]}", ABSL[20:] + "\ntwo\n") == ["one\n", "two\n", ""]
    assert passed("Epoch 1\r", "Epoch 2\r", "done\n") == ["Epoch 1\r", "Epoch 2\r", "done\n", ""], "bars go on moving"
    assert passed(f"my {ABSL}\n", "no end") == [f"my {ABSL}\n", "no end", ""]
    assert passed(f"my own: {ABSL[:3]}", f"{ABSL}\n") == [f"my own: {ABSL[:3]}", f"{ABSL}\n", ""], "one line, shown"
    assert passed("I0000 unfinished") == ["", "I0000 unfinished"]


PROGRAM = """
import os, sys, time
print("out"); print("err", file=sys.stderr)
print({absl!r}, file=sys.stderr)
sys.stderr.flush()
os.write(2, {onednn!r}.encode() + b"\\n")
os.write(2, {matrix!r}.encode() + b"\\n")
print("last", file=sys.stderr)
"""


def launched(folder: Path, *options: str, more: str = "") -> tuple[int, str, str]:
    script = folder / "program.py"
    script.write_text(PROGRAM.format(absl=ABSL, onednn=ONEDNN, matrix=MATRIX) + more)
    command = [sys.executable, "-m", "keras_flow.cli.app", "launch", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("options", [("--devices", "1"), ("--nproc_per_node", "2")], ids=["one", "two"])
def test_a_job_shows_the_lines_of_the_program(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert launched(tmp_path, *options) == (0, "out\n", "err\nlast\n")


def test_every_process_shown(tmp_path: Path) -> None:
    _, out, err = launched(tmp_path, "--nproc_per_node", "2", "--all-output")
    assert sorted(out.splitlines()) == ["[rank 0] out", "[rank 1] out"] or "process" in out
    assert len(err.splitlines()) == 4 and "absl" not in err and "oneDNN" not in err


@pytest.mark.parametrize("options", [("--devices", "1"), ("--nproc_per_node", "2")], ids=["one", "two"])
def test_after_a_failure_the_engines_errors_are_told(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, _, err = launched(tmp_path, *options, more="raise ValueError('boom')")
    assert code == 1
    assert MATRIX in err and "ValueError: boom" in err
    assert ABSL not in err and ONEDNN not in err, "they say nothing of a failure"


@pytest.mark.parametrize("failing", [0, 1])
def test_the_failed_ranks_errors_are_told_and_no_others(tmp_path: Path, failing: int) -> None:
    more = f"""
rank = int(os.environ["RANK"])
os.write(2, {MATRIX!r}.replace("16553", f"1000{{rank}}").encode() + b"\\n")
if rank != {failing}: time.sleep(60)
time.sleep(1)
raise ValueError("boom")
"""
    _, _, err = launched(tmp_path, "--nproc_per_node", "2", more=more)
    assert MATRIX.replace("16553", f"1000{failing}") in err and "ValueError: boom" in err
    assert f"1000{1 - failing}" not in err


TERMINAL = """
import os, signal, sys
if os.environ.get("RANK") == "1": sys.exit()  # whose output is not shown
print(sys.stderr.isatty(), os.get_terminal_size(2), signal.getsignal(signal.SIGPIPE).name, file=sys.stderr)
print({absl!r}, file=sys.stderr)
print("bar 1", end="\\r", file=sys.stderr); print("bar 2", file=sys.stderr)
"""


@pytest.mark.parametrize("options", [("--devices", "1"), ("--nproc_per_node", "2")], ids=["one", "two"])
def test_a_program_finds_the_terminal(tmp_path: Path, options: tuple[str, ...]) -> None:
    script = tmp_path / "program.py"
    script.write_text(TERMINAL.format(absl=ABSL))
    reading, writing = os.openpty()
    termios.tcsetwinsize(writing, (33, 77))
    command = [sys.executable, "-m", "keras_flow.cli.app", "launch", *options, str(script)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=writing, timeout=100)
    os.close(writing)
    shown = b""
    while part := terminal.read(reading):
        shown += part
    os.close(reading)
    assert done.returncode == 0
    start = "keras-flow: 2 processes start; the output of process 0 follows\n" if "2" in options else ""
    expected = f"{start}True os.terminal_size(columns=77, lines=33) SIG_IGN\nbar 1\rbar 2\n"  # Python ignores SIGPIPE
    assert shown.decode().replace("\r\n", "\n") == expected


def test_a_program_gets_the_default_of_sigpipe() -> None:
    program = ["sh", "-c", "grep SigIgn /proc/$$/status"]
    command = [sys.executable, "-m", "keras_flow.cli.app", "launch", "--devices", "1", "--no_python", *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert not int(done.stdout.split()[1], 16) & 1 << (signal.SIGPIPE - 1)


RUN = """
import os, sys
import keras_flow as kf
def main():
    print({absl!r}, file=sys.stderr)
    print("own", file=sys.stderr)
if __name__ == "__main__":
    kf.run(main, devices=1)
    here = os.readlink("/proc/self/fd/2")
    kf.run(main, devices=1)
    assert os.readlink("/proc/self/fd/2") == here, "once"
"""


def test_kf_run_in_one_process_leaves_them_out(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(RUN.format(absl=ABSL))
    environment = {**programs.ENVIRONMENT, "KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=100)
    assert (done.returncode, done.stderr) == (0, "own\nown\n")


def test_without_the_process_between_nothing_is_lost() -> None:
    program = "import sys; from keras_flow.launch import noise; sys.executable = sys.argv[1]; "
    program += "noise.filter_stderr_of_engine(); print('own', file=sys.stderr)"
    for python in ("/bin/false", "/none"):
        done = subprocess.run([sys.executable, "-c", program, python], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "own\n")
