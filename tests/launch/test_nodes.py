"""Jobs on several hosts, here several launchers on one: they begin together and end together."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from keras_flow.launch import nodes
from keras_flow.launch.failure import RankError
from keras_flow.launch.job import Job
from keras_flow.launch.nodes import nodes_of
from tests.launch import programs

pytestmark = pytest.mark.timeout(90)

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
SAYS = f"import os\nprint(*(os.environ[n] for n in {NAMES.split()}))\n"
WAITS = "import os, sys, time\nrank = int(os.environ['RANK'])\nopen(f'{sys.argv[1]}/{rank}', 'w').close()\n"


def node(script: Path, number: int, port: int, *arguments: str, nodes: int = 2, **variables: str):
    """Start the launcher of a host; a script's arguments follow `--`."""
    options = list(arguments)
    rest = options[options.index("--") + 1 :] if "--" in options else []
    options = options[: options.index("--")] if "--" in options else options
    named = ["--nnodes", str(nodes), "--node_rank", str(number), "--master_port", str(port)]
    if "--nproc_per_node" not in options:
        named += ["--nproc_per_node", "2"]
    command = ["-m", "keras_flow.launch", *named, *options, str(script), *rest]
    return programs.start(command, **{"KERAS_FLOW_TOKEN": "a secret", **variables})


def port() -> int:
    from keras_flow.launch.environment import free_port

    return free_port()


def test_ranks_of_two_hosts(tmp_path: Path) -> None:
    """Without a secret, which the ranks must then not seem to have; both write output to a folder that they share."""
    script, at = programs.write(tmp_path, SAYS + "print(os.environ.get('KERAS_FLOW_TOKEN') or 'no secret')\n"), port()
    options, logs = ["--tee", "--logdir", str(tmp_path / "log")], tmp_path / "log"
    launchers = [node(script, number, at, *options, KERAS_FLOW_TOKEN="") for number in (1, 0)]
    outputs = [programs.finish(launcher) for launcher in launchers]
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    said = {0: "0 0 4 2 0 2", 1: "1 1 4 2 0 2", 2: "2 0 4 2 1 2", 3: "3 1 4 2 1 2"}
    for ranks, (_, out, err) in zip(((2, 3), (0, 1)), outputs, strict=True):
        lines = [f"[rank {rank}] {line}" for rank in ranks for line in (said[rank], "no secret")]
        assert sorted(out.splitlines()) == sorted(lines)
        assert f"output is in {logs}/rank_{ranks[0]}..{ranks[1]}/stdout and stderr" in err
    assert {rank: (logs / f"rank_{rank}" / "stdout").read_text() for rank in said} == {
        rank: f"{line}\nno secret\n" for rank, line in said.items()
    }


def is_connected(launcher: subprocess.Popen[str]) -> bool:
    return any(each.status == psutil.CONN_ESTABLISHED for each in psutil.Process(launcher.pid).net_connections())


def test_ctrl_c_while_hosts_are_awaited() -> None:
    """It is obeyed at once, and told to those that have come. Of a program that is no file."""
    at = port()
    launchers = [node(Path("true"), number, at, "--no_python", "--timeout", "30", nodes=3) for number in (0, 1)]
    programs.wait_until(lambda: is_connected(launchers[1]), 20)
    time.sleep(0.3)
    launchers[0].send_signal(signal.SIGINT)
    for launcher in launchers:
        code, _, err = programs.finish(launcher, 8)
        assert code == 130, err
        assert err.splitlines()[-1].startswith("keras-flow: interrupted"), err


def test_a_host_that_is_ended_before_the_others_come(tmp_path: Path) -> None:
    """Its launcher is started again, and the job begins."""
    script, at = programs.write(tmp_path, SAYS), port()
    first, gone = (node(script, number, at, nodes=3) for number in (0, 1))
    programs.wait_until(lambda: is_connected(gone), 20)
    time.sleep(0.3)
    gone.send_signal(signal.SIGTERM)
    assert programs.finish(gone, 8)[0] == 143
    launchers = [first, *(node(script, number, at, nodes=3) for number in (1, 2))]
    outputs = [programs.finish(launcher) for launcher in launchers]
    assert [code for code, _, _ in outputs] == [0, 0, 0], outputs


@pytest.mark.parametrize("failing", [0, 3])
def test_a_rank_that_fails_ends_the_job_on_every_host(tmp_path: Path, failing: int) -> None:
    fails = f"time.sleep(1)\nif rank == {failing}: sys.exit(7)\ntime.sleep(99)"
    script, at = programs.write(tmp_path, WAITS + fails), port()
    began = time.monotonic()
    launchers = [node(script, number, at, "--", str(tmp_path)) for number in (0, 1)]
    for launcher in launchers:
        code, _, err = programs.finish(launcher, 30)
        assert code == 7
        assert re.search(rf"rank {failing} of 4 \(host {failing // 2}, .*\) left with exit code 7", err)
    assert time.monotonic() - began < 20


def test_a_host_that_is_gone(tmp_path: Path) -> None:
    """Its launcher is killed, and the guardian with it: as if the host had lost its power."""
    script, at = programs.write(tmp_path, WAITS + "time.sleep(99)"), port()
    launchers = [node(script, number, at, "--", str(tmp_path)) for number in (0, 1)]
    programs.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)))
    for process in (psutil.Process(launchers[1].pid), *programs.tree(launchers[1].pid)):
        process.kill()
    began = time.monotonic()
    code, _, err = programs.finish(launchers[0], 30)
    assert time.monotonic() - began < 10
    assert code == 1
    assert "with ranks 2 to 3 is gone" in err
    programs.finish(launchers[1])


def test_a_host_that_is_silent(tmp_path: Path) -> None:
    """A launcher that is stopped keeps its connection, and gives no sign of life."""
    script, at = programs.write(tmp_path, WAITS + "time.sleep(99)"), port()
    launchers = [node(script, number, at, "--", str(tmp_path)) for number in (0, 1)]
    programs.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)))
    launchers[1].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        _, _, err = programs.finish(launchers[0], 30)
        assert time.monotonic() - began < 12
        assert "no sign of life for 6 s" in err
    finally:
        launchers[1].send_signal(signal.SIGCONT)
    code, _, _ = programs.finish(launchers[1])
    assert code != 0


def test_ctrl_c_on_one_host(tmp_path: Path) -> None:
    script, at = programs.write(tmp_path, WAITS + "time.sleep(99)"), port()
    launchers = [node(script, number, at, "--", str(tmp_path)) for number in (0, 1)]
    programs.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)))
    launchers[1].send_signal(signal.SIGINT)
    assert programs.finish(launchers[1], 15)[0] == 130
    code, _, err = programs.finish(launchers[0], 15)
    assert code == 130
    assert "keras-flow: interrupted at host" in err


def test_all_hosts_start_again(tmp_path: Path) -> None:
    """The rank that fails in the first attempt does not in the second."""
    script = programs.write(
        tmp_path,
        "import os, sys, time\nattempt, rank = os.environ['KERAS_FLOW_RESTARTS'], os.environ['RANK']\n"
        "print(f'rank {rank} attempt {attempt}')\n"
        "if (rank, attempt) == ('2', '0'): sys.exit(3)\ntime.sleep(1 if attempt == '1' else 99)",
    )
    at = port()
    launchers = [node(script, number, at, "--all-output", "--max_restarts", "1") for number in (0, 1)]
    outputs = [programs.finish(launcher, 40) for launcher in launchers]
    # all of what they said, which pytest shortens
    assert [code for code, _, _ in outputs] == [0, 0], "\n".join(f"{code}\n{out}\n{err}" for code, out, err in outputs)
    for _, out, err in outputs:
        assert len(re.findall("attempt 1", out)) == 2
        assert "restart 1 of 1" in err


def test_no_attempt_begins_without_a_host(tmp_path: Path) -> None:
    """A rank fails while another host is silent: its launcher would be waited for, whether processes may restart."""
    fails = "if rank == 0:\n    while not os.path.exists(f'{sys.argv[1]}/go'): time.sleep(0.1)\n    sys.exit(3)\n"
    script, at = programs.write(tmp_path, WAITS + fails + "time.sleep(99)"), port()
    options = ["--max_restarts", "2", "--timeout", "60", "--", str(tmp_path)]
    launchers = [node(script, number, at, *options, nodes=3) for number in (0, 1, 2)]
    programs.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(6)))
    launchers[1].send_signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    began = time.monotonic()
    try:
        for launcher in (launchers[0], launchers[2]):
            code, _, err = programs.finish(launcher, 30)
            assert code != 0 and "with ranks 2 to 3 is gone: no sign of life for 6 s" in err, err
        assert time.monotonic() - began < 15
    finally:
        launchers[1].send_signal(signal.SIGCONT)
    assert programs.finish(launchers[1])[0] != 0


def test_the_name_of_the_first_host_may_be_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a pod, which runs before its name is published."""
    stock, asked = socket.create_server, []

    def create(address: tuple[str, int], **options: Any) -> socket.socket:
        asked.append(address)
        if len(asked) == 1:
            raise socket.gaierror(-2, "Name or service not known")
        return stock(("127.0.0.1", address[1]), **options)

    monkeypatch.setattr(socket, "create_server", create)
    at = port()
    job = Job(1, ["true"], 60.0, nodes=2, node=0, host="job-host-0-0.job", port=at)
    with ThreadPoolExecutor(2) as threads, nodes_of(job, b"a secret") as first:
        begun = threads.submit(first.begin, 4000)
        with nodes_of(replace(job, node=1, host="127.0.0.1"), b"a secret") as other:
            assert other.begin(0) == begun.result(20) == 4000
    assert len(asked) == 2


def test_host_0_says_of_all_at_once_what_the_others_did() -> None:
    """What it passes on grows with the hosts, not with their square."""
    at = port()
    jobs = [Job(1, ["true"], 60.0, nodes=4, node=number, host="127.0.0.1", port=at) for number in range(4)]
    sent: list[dict[str, Any]] = []
    with ThreadPoolExecutor(4) as threads, contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(nodes_of(job, b"a secret")) for job in jobs]
        assert [each.result(20) for each in [threads.submit(host.begin, 4000) for host in hosts]] == [4000] * 4
        stock = nodes.Channel.send
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nodes.Channel, "send", lambda self, said: (sent.append(said), stock(self, said))[1])
            for host in hosts[1:]:
                host.left_well([host.job.first])
                host.done()
            time.sleep(0.5)
            hosts[0].look()
            hosts[0].left_well([0])
            hosts[0].done()
            time.sleep(0.5)
            for host in hosts[1:]:
                host.look()
        assert all(host.all_done() for host in hosts)
        assert [host.left for host in hosts] == [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]
    told = [said for said in sent if "alive" not in said]
    assert len(told) == 6 + 3 + 3 + 3, told


def test_a_host_that_is_quicker_to_start_again() -> None:
    """What it says of its failure, and that it is ready, are read in one look: neither is lost."""
    at = port()
    jobs = [Job(2, ["true"], 60.0, nodes=2, node=number, host="127.0.0.1", port=at) for number in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        with nodes_of(jobs[0], b"a secret") as first, nodes_of(jobs[1], b"a secret") as other:
            for attempt in range(3):
                if attempt:
                    other.fail(RankError("rank 2 failed", 2))
                begun = threads.submit(other.begin, 0)
                if attempt:
                    time.sleep(0.5)
                    with pytest.raises(RankError, match="rank 2 failed"):
                        first.look()
                assert threads.submit(first.begin, 4000 + attempt).result(20) == begun.result(20) == 4000 + attempt


def test_a_host_that_stood_still_does_not_blame_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own time without a look, as of a machine that was suspended, is no silence of another host."""
    monkeypatch.setattr(nodes, "_GONE_SECONDS", 1.5)
    monkeypatch.setattr(nodes, "_ALIVE_SECONDS", 0.5)
    at = port()
    jobs = [Job(2, ["true"], 60.0, nodes=2, node=number, host="127.0.0.1", port=at) for number in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        # the other one is not entered: it gives no sign of life
        first, other = (nodes_of(job, b"a secret") for job in jobs)
        with first:
            begun = threads.submit(other.begin, 0)
            first.begin(4000)
            begun.result(20)
            first.look()
            time.sleep(2)
            first.look()
            with pytest.raises(RankError, match="no sign of life"):
                for _ in range(40):
                    time.sleep(0.1)
                    first.look()
        with other:
            pass


def test_output_that_stays_open_on_one_host(tmp_path: Path) -> None:
    """A process that is left behind keeps the output open: the launcher waits for it once, and the host is not lost."""
    script = programs.write(
        tmp_path,
        "import os, subprocess, sys\n"
        "if os.environ['GROUP_RANK'] == '1':\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'], start_new_session=True)\n",
    )
    at = port()
    arguments = ["--nproc_per_node", "3", "--max_restarts", "0"]
    launchers = [node(script, number, at, *arguments) for number in (0, 1)]
    began = time.monotonic()
    outputs = [programs.finish(launcher, 40) for launcher in launchers]
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    # twelve seconds where each process's streams were waited for one after the other
    assert time.monotonic() - began < 10


def test_hosts_that_differ(tmp_path: Path) -> None:
    at = port()
    first = node(programs.write(tmp_path, SAYS, "a.py"), 0, at)
    second = node(programs.write(tmp_path, SAYS + "\n", "b.py"), 1, at, "--nproc_per_node", "3", backend="jax")
    for launcher in (first, second):
        code, _, err = programs.finish(launcher)
        assert code == 1
        assert "--nproc_per_node: 2 on host 0, 3 there" in err
        assert "KERAS_BACKEND: torch on host 0, jax there" in err
        assert "script:" in err


def test_two_hosts_with_one_rank(tmp_path: Path) -> None:
    script, at = programs.write(tmp_path, SAYS), port()
    launchers = [node(script, number, at, nodes=3) for number in (0, 1, 1)]
    outputs = [programs.finish(launcher) for launcher in launchers]
    assert all(code == 1 for code, _, _ in outputs)
    assert "two hosts said --node_rank 1" in outputs[0][2]


@pytest.mark.parametrize(
    ("number", "text"), [(0, r"hosts \[1\] of 2 did not come"), (1, "could not reach host 0 at 127.0.0.1")]
)
def test_a_host_that_never_comes(tmp_path: Path, number: int, text: str) -> None:
    launcher = node(programs.write(tmp_path, SAYS), number, port(), "--timeout", "2")
    began = time.monotonic()
    code, _, err = programs.finish(launcher)
    assert time.monotonic() - began < 10
    assert code == 1
    assert re.search(text, err)


@pytest.mark.full  # it waits
def test_host_0_says_for_whom_it_waits(tmp_path: Path) -> None:
    launcher = node(programs.write(tmp_path, SAYS), 0, port(), "--timeout", "12")
    code, _, err = programs.finish(launcher)
    assert code == 1
    assert re.search(r"waiting at 127.0.0.1:\d+ for hosts \[1\] of 2: start the launcher there, with --node_rank", err)
    assert "No other machine reaches 127.0.0.1: --master_addr takes one of this host's." in err
    assert err.count("waiting at") == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nproc_per_node", "0"], "greater than or equal to 1"),
        (["--nnodes", "2", "--node_rank", "2", "--nproc_per_node", "1"], "is no host of --nnodes 2"),
        (["--nproc_per_node", "2", "--master_port", "70000"], "65535"),
        (["--nproc_per_node", "2", "-m", "--no_python"], "exclude each other"),
        (["--devices", "3", "--nproc_per_node", "2"], "disagree"),
        (["--nproc_per_node", "1000000"], "1000000 processes were asked for on this host. Each takes 100 MB or more"),
        ([], "give --devices N or --nproc_per_node N"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: list[str], text: str) -> None:
    script = programs.write(tmp_path, SAYS)
    code, _, err = programs.finish(programs.start(["-m", "keras_flow.launch", *options, str(script)]))
    assert code != 0
    assert text in " ".join(re.sub("[│╭╮╰╯─]", " ", err).split())


def test_modules_programs_logs_and_names_that_are_not_ascii(tmp_path: Path) -> None:
    folder = tmp_path / "größe"
    folder.mkdir()
    (folder / "modül.py").write_text("import sys\nprint('out', *sys.argv[1:])\nprint('err', file=sys.stderr)\n")
    logs = folder / "logs"
    command = ["launch", "--nproc_per_node", "2", "--redirect_stdout_and_stderr", "--logdir", str(logs)]
    run = [sys.executable, "-m", "keras_flow.cli.app"]
    environment = {**programs.ENVIRONMENT, "PYTHONUTF8": "1"}
    done = subprocess.run(
        [*run, *command, "-m", "modül", "é"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for local in (0, 1):
        assert (logs / f"local_rank_{local}" / "stdout").read_text() == "out é\n"
        assert (logs / f"local_rank_{local}" / "stderr").read_text() == "err\n"
    done = subprocess.run(
        [*run, "launch", "--nproc_per_node", "2", "--tee", "--logdir", str(logs), "--no_python", "echo", "hello"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(done.stdout.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]
    assert (logs / "local_rank_1" / "stdout").read_text() == "hello\n"
    assert os.listdir(folder)
