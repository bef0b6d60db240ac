"""The command line: light to load, and clear about what it is given."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import typer

from tests.launch import programs

pytestmark = pytest.mark.timeout(60)


def run(*arguments: str, backend: str = "torch", **variables: str) -> tuple[int, str, str]:
    return programs.finish(programs.start(["-m", "keras_flow.cli.app", *arguments], backend, **variables))


COMMANDS = ("boxing", "checkpoint", "compare", "doctor", "explain", "init", "launch", "verify")


@pytest.mark.parametrize("command", [[], *([each] for each in COMMANDS)], ids=str)
def test_help_is_whole_on_80_columns_and_loads_no_engine(command: list[str]) -> None:
    program = (
        "import sys\nfrom keras_flow.cli.app import app\n"
        f"try: app({[*command, '--help']!r})\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'keras', 'jax', 'tensorflow', 'torch'} & set(sys.modules)"
    )
    code, out, err = programs.finish(programs.start(["-c", program], COLUMNS="80"))
    assert code == 0, err
    assert "Usage" in out
    assert "…" not in out


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_one_process_with_the_number_of_devices(tmp_path: Path, backend: str) -> None:
    script = programs.write(
        tmp_path, "import os, sys\nprint(os.environ['KERAS_FLOW_DEVICES'], sys.argv[1:])\nsys.exit(7)"
    )
    code, out, _ = run("launch", "--devices", "4", str(script), "--epochs", "2", backend=backend)
    assert (code, out) == (7, "4 ['--epochs', '2']\n")


def test_arguments_reach_the_script_on_torch(tmp_path: Path) -> None:
    script = programs.write(tmp_path, "import sys\nprint(sys.argv[1:], __name__)")
    code, out, _ = run("launch", "--nproc_per_node", "2", str(script), "--devices", "9")
    assert (code, out) == (0, "['--devices', '9'] __main__\n")


@pytest.mark.parametrize(
    ("backend", "options", "count", "ranks"),
    [
        ("jax", ["--devices", "4"], 1, "4"),
        ("jax", ["--nproc_per_node", "2"], 2, None),
        ("tensorflow", ["--nproc_per_node", "2", "--devices_per_proc", "3"], 2, "6"),
        ("tensorflow", ["--devices", "6", "--devices_per_proc", "3"], 2, "6"),
        ("torch", ["--devices", "3"], 3, "3"),
        ("torch", ["--nproc_per_node", "3"], 3, "3"),
    ],
)
def test_processes_and_ranks(tmp_path: Path, backend: str, options: list[str], count: int, ranks: str | None) -> None:
    script = programs.write(tmp_path, "import os\nprint(os.environ.get('KERAS_FLOW_DEVICES'))")
    code, out, err = run("launch", *options, "--all-output", str(script), backend=backend)
    assert code == 0, err
    assert [line.rpartition(" ")[2] for line in out.splitlines()] == [str(ranks)] * count


def test_mistakes(tmp_path: Path) -> None:
    code, _, err = run("launch", "--devices", "2", str(tmp_path / "none.py"))
    assert (code, "none.py, which does not exist" in err) == (1, True)
    script = str(programs.write(tmp_path, ""))
    code, _, err = run("launch", "--devices", "2", str(programs.write(tmp_path, "# Notes", "notes.md")))
    assert (code, "launch runs Python, and" in err and "Traceback" not in err) == (1, True)
    code, _, err = run("launch", "--devices", "4", "--devices_per_proc", "8", script, backend="jax")
    assert (code, "--devices_per_proc 8 is more than --devices 4" in err) == (1, True)
    code, _, err = run("launch", script)
    assert (code, "give --devices N" in err) == (1, True)
    code, _, err = run("launch", "--devices", "2", script, backend="mxnet")
    assert (code, "no backend 'mxnet': legal are jax, tensorflow, torch" in err) == (1, True)
    code, _, err = run("compare", str(tmp_path / "none.py"))
    assert (code, "none.py, which does not exist" in err) == (1, True)


def test_a_script_without_a_command(tmp_path: Path) -> None:
    code, out, err = run("train.py", "--epochs", "2")
    assert (code, out) == (1, "")
    assert err.startswith(
        "keras-flow: train.py is no command. A script is started on several ranks by `keras-flow launch "
    )
    assert err.count("\n") == 1


def test_where_the_output_is(tmp_path: Path) -> None:
    script = programs.write(tmp_path, "print('hello')")
    logs = tmp_path / "logs"
    code, out, err = run(
        "launch", "--nproc_per_node", "2", "--redirect-stdout-and-stderr", "--logdir", str(logs), str(script)
    )
    assert (code, out) == (0, "")
    assert err == f"keras-flow: output is in {logs}/local_rank_0..1/stdout and stderr\n"
    assert [(logs / f"local_rank_{rank}" / "stdout").read_text() for rank in (0, 1)] == ["hello\n"] * 2


def test_console_script_is_this() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="keras-flow")
    assert script.value == "keras_flow.cli.app:main"
    assert Path(sys.executable).with_name("keras-flow").exists()


def test_a_command_that_is_terminated_leaves_no_engine_running() -> None:
    program = Path(__file__).parents[1] / "compare" / "tiny.py"
    command = [sys.executable, "-m", "keras_flow.cli.app", "verify", str(program), "--layout", "dp2"]
    with subprocess.Popen([*command, "--backends", "jax"], stderr=subprocess.DEVNULL) as job:
        until = time.monotonic() + 60
        while not (children := psutil.Process(job.pid).children(recursive=True)) and time.monotonic() < until:
            time.sleep(0.05)
        job.terminate()
        assert job.wait(30) == 143
    alive = psutil.wait_procs(children, timeout=10)[1]
    # in a container the first process may not collect those that have ended
    assert children and not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_the_process_that_becomes_the_scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is told the number of ranks and the timeout, which is checked."""
    from keras_flow.cli.launch import launch
    from keras_flow.errors import FlowError
    from keras_flow.launch import noise

    became: list[dict[str, str]] = []
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setattr(noise, "filter_stderr", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "execvpe", lambda _, __, env: became.append(env))
    script = programs.write(tmp_path, "")
    with pytest.raises(typer.Exit):
        launch(script, devices=3, timeout=7)
    assert (became[0]["KERAS_FLOW_DEVICES"], float(became[0]["KERAS_FLOW_TIMEOUT"])) == ("3", 7.0)
    with pytest.raises(FlowError, match="above 0"):
        launch(script, devices=3, timeout=-1)
