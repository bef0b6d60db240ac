"""Faults in a training job of two processes, and the seconds until its last process has ended.

    python -m tests.launch.faults [--backends jax,torch] [--write]

`--write` writes docs/failures.md. In each job one of two processes trains, then fails: it raises, leaves early, is
killed, is stopped, hangs (with `--timeout 8`), runs out of memory (of its address space), or loses its host's network.
One host has both; of two hosts each has a launcher and a process of its own, and network namespaces where it loses it.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from keras_flow.backends.engines import that_train
from keras_flow.launch.environment import free_port
from tests.launch import namespaces, programs

#: of two hosts only
NETWORK = "loses its network"
#: fault -> what the process that fails runs
FAULTS = {
    "raises": "raise ValueError('boom')",
    "leaves early": "sys.exit(0)",
    "is killed": "os.kill(os.getpid(), 9)",
    "is stopped": "os.kill(os.getpid(), 19)",
    "hangs": "time.sleep(1000)",
    "runs out of memory": "resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)); np.ones(2**31)",
    NETWORK: "pull_cable()",
}

#: seconds without progress after which a job ends
TIMEOUT = 8

PROGRAM = """
import os, resource, subprocess, sys, time
import keras_flow as kf, numpy as np
kf.init()
import keras
keras.utils.set_random_seed(0)
def pull_cable():
    link = next(name for name in os.listdir("/sys/class/net") if name.startswith("kf"))
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 10 and kf.env.process_index() == 1:
            open(sys.argv[1], "w").write(str(time.time()))
            FAULT
x, y = np.zeros((64, 8), "float32"), np.zeros((64, 1), "float32")
with kf.DataParallel().scope():
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=16, epochs=10000, verbose=0, callbacks=[Fails()])
"""


@dataclass(frozen=True)
class Ending:
    """How a job ended.

    Attributes:
        seconds: from the fault until every process had ended.
        named: whether the error of every launcher names the process that failed.
        code: the exit statuses of the launchers.
        left: processes that were left running.
        error: the error of the first launcher.
    """

    seconds: float
    named: bool
    code: tuple[int, ...]
    left: int
    error: str


def end(backend: str, fault: str, hosts: int, folder: Path) -> Ending:
    """Run a job that fails."""
    script = programs.write(folder, PROGRAM.replace("FAULT", FAULTS[fault]))
    failed = folder / "failed"
    with contextlib.ExitStack() as stack:
        if fault == NETWORK:
            made = stack.enter_context(namespaces.joined())
            launchers = made.start([str(script), str(failed)], backend, processes=1, timeout=TIMEOUT)
        else:
            launchers = _launchers(backend, hosts, [str(script), str(failed)])
        return _ending(launchers, failed, fault)


def _launchers(backend: str, hosts: int, command: list[str]) -> list[subprocess.Popen[str]]:
    """Those of so many hosts, which share this machine's network."""
    launch = ["-m", "keras_flow.launch", "--nnodes", str(hosts), "--nproc_per_node", str(2 // hosts)]
    launch += ["--master_port", str(free_port()), "--timeout", str(TIMEOUT)]
    return [
        programs.start([*launch, "--node_rank", str(node), *command], backend, KERAS_FLOW_TOKEN="secret")
        for node in range(hosts)
    ]


def _ending(launchers: list[subprocess.Popen[str]], failed: Path, fault: str) -> Ending:
    """Wait until every process of the job has ended."""
    below: list[psutil.Process] = []
    until = time.monotonic() + 100
    while any(launcher.poll() is None for launcher in launchers) and time.monotonic() < until:
        for launcher in launchers:
            if launcher.poll() is None:
                below += [child for child in programs.tree(launcher.pid) if child not in below]
        time.sleep(0.05)
    psutil.wait_procs(below, timeout=2)
    ended = time.time()
    left = [process for process in below if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    outputs = [programs.finish(launcher, 5) for launcher in launchers]
    errors = [re.sub(r"\s+", " ", err[err.rfind("keras-flow: ") :]) for _, _, err in outputs]
    assert failed.exists(), errors
    return Ending(
        seconds=ended - float(failed.read_text()),
        named=all(re.match(expected, error) for expected, error in zip(_expected(fault), errors, strict=False)),
        code=tuple(code for code, _, _ in outputs),
        left=len(left),
        error=errors[0],
    )


def _expected(fault: str) -> tuple[str, str]:
    """What the errors of the launchers begin with: who failed, or, without a network, that each lost the other."""
    if fault == NETWORK:
        return "keras-flow: host 1 .* is gone", "keras-flow: host 0 .* is gone"
    return ("keras-flow: (rank|process) 1 of 2",) * 2


def main() -> None:
    """Run the faults, print the table, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=",".join(that_train()))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    backends = options.backends.split(",")
    rows = []
    for fault in FAULTS:
        cells = []
        for backend in backends:
            for hosts in (1, 2):
                if fault == NETWORK and hosts == 1:
                    cells.append("")
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    ending = end(backend, fault, hosts, Path(folder))
                wrong = "" if ending.named and not ending.left and all(ending.code) else " (!)"
                cells.append(f"{ending.seconds:.1f}{wrong}")
                print(fault, backend, hosts, cells[-1], ending.error[:150], file=sys.stderr, flush=True)
        rows.append(f"| {fault} | " + " | ".join(cells) + " |")
    heads = [f"{backend}, {hosts} host{'s' if hosts > 1 else ''}" for backend in backends for hosts in (1, 2)]
    table = "\n".join([f"| one of two processes | {' | '.join(heads)} |", "|---|" + "---|" * len(heads), *rows])
    print(table)
    if options.write:
        root = Path(subprocess.check_output(["git", "rev-parse", "--show-toplevel"], text=True).strip())
        page = root / "docs" / "failures.md"
        text = page.read_text()
        start, stop = text.index("<!-- table -->"), text.index("<!-- end -->")
        page.write_text(f"{text[:start]}<!-- table -->\n{table}\n{text[stop:]}")


if __name__ == "__main__":
    main()
