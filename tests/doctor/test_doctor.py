"""`keras-flow doctor` as a user meets it: engines in processes of their own, one broken, others checked."""

import json
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from keras_flow.doctor import worker
from keras_flow.doctor.report import Check, EngineReport, Report, Ring
from keras_flow.doctor.runner import examine
from keras_flow.doctor.show import show
from keras_flow.errors import FlowError
from tests.launch import programs

pytestmark = pytest.mark.timeout(200)


def doctor(*options: str, backend: str = "jax", **variables: str) -> tuple[int, str, str]:
    return programs.finish(programs.start(["-m", "keras_flow.cli.app", "doctor", *options], backend, **variables), 190)


def test_a_broken_backend_is_shown_and_the_others_are_checked(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open shared object')")
    code, out, err = doctor("--backends", "torch,jax", "--json", PYTHONPATH=str(tmp_path))
    assert code == 1, err
    report = json.loads(out)
    torch, jax = report["engines"]
    assert [(check["name"], check["state"]) for check in torch["checks"]] == [("import", "failed")]
    assert report["failures"] == ["torch: import: ImportError: libtorch_cpu.so: cannot open shared object"]
    assert [(check["name"], check["state"]) for check in jax["checks"]] == [
        ("import", "ok"),
        ("collective", "ok"),
        ("training", "ok"),
    ]
    assert jax["capabilities"]["uneven_batches"] == "parallel"
    assert jax["environment"]["NPROC"].endswith("each virtual device needs its own inside a collective")


@pytest.mark.full
def test_ranks_in_processes_of_their_own() -> None:
    code, out, err = doctor("--backends", "torch", backend="torch")
    assert code == 0, (out, err)
    assert "all-reduce over 2 ranks" in out
    assert "everything that was checked works" in out


def test_a_process_that_takes_too_long_is_ended() -> None:
    code, out, _ = doctor("--backends", "jax", "--timeout", "1", "--json")
    assert code == 1
    assert json.loads(out)["failures"][0].startswith("jax: import: no result after 1 s (--timeout)")


def test_an_interrupt_ends_every_process() -> None:
    process = programs.start(["-m", "keras_flow.cli.app", "doctor", "--backends", "jax,torch"])
    deadline = time.monotonic() + 60
    while len(programs.tree(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    started = programs.tree(process.pid)
    assert len(started) >= 2
    process.send_signal(signal.SIGINT)
    assert programs.finish(process)[0] == 130
    assert not [child for child in started if child.is_running() and child.status() != "zombie"]


def test_an_unknown_backend() -> None:
    with pytest.raises(FlowError, match=r"no backend 'mxnet': legal are jax, tensorflow, torch"):
        examine(["mxnet"])
    with pytest.raises(FlowError, match="the numpy backend trains nothing: legal are jax, tensorflow, torch"):
        examine(["numpy"])


def test_a_self_test_that_hangs_leaves_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []

    def run(function: object, devices: int, args: object, timeout: float) -> object:
        seconds.append(timeout)
        raise FlowError("stuck")

    monkeypatch.setattr("keras_flow.run", run)
    assert worker.test(100, 2, [2]) == {name: {"error": "stuck"} for name in ("collective", "training", "bandwidth")}
    assert len(seconds) == 4 and sum(seconds) < 100


def test_no_engine_is_a_failure() -> None:
    report = Report({}, {}, {}, {}, [], [EngineReport("jax", None, checks=[Check("import", "absent")])])
    assert report.failures == ["no engine is installed: pip install 'keras-flow[jax]', or [tensorflow], [torch], [all]"]


def test_text_of_a_report() -> None:
    engine = EngineReport(
        "jax",
        "0.10.2",
        devices=["cpu:0"],
        capabilities={
            "drives_all_ranks": True,
            "uneven_batches": "parallel",
            "whole_variables": {"Conv": [["kernel"], "why"]},
            "refused": {"jit_compile=True": "why"},
        },
        environment={"NPROC": "8: threads"},
        checks=[Check("import", "ok"), Check("training", "failed", "loss [1] differs")],
        rings=[Ring(2, 1e-5, 2e9, {4: 1.0})],
    )
    console = Console(width=100)
    with console.capture() as captured:
        show(Report({"jax": "0.10.2"}, {}, {}, {}, [Check("shared memory", "warning", "none")], [engine]), console)
    text = captured.get()
    for line in (
        "shared memory   warning  none",
        "ranks           devices of one process",
        "odd batches     exact, in parallel",
        "not available   jit_compile=True",
        "Link(latency=1e-05, bandwidth=2e+09)",
        "failed jax: training: loss [1] differs",
        "1 failed",
    ):
        assert line in text, text
    for internal in ("drives_all_ranks", "Conv", "NPROC", "why"):
        assert internal not in text, "--json has it"
