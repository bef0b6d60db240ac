"""Runs the sweep: workers that may die, results that are kept, and a second look in float64.

    python -m tests.sweep.runner --backends jax,torch --out sweep          the whole, a file of results for each backend
    python -m tests.sweep.runner --only 'ops\\.(sort|top_k)' --out trial    some names

A run that was stopped goes on where it was: what is in the files of --out is not run again, and with --known neither
what docs/support.csv has.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.sweep import results
from tests.sweep.design import Setting, covering, grouped

BACKENDS = ("jax", "tensorflow", "torch")
#: pieces that are branches of one model
GROUP = 8
#: tasks of one worker: it starts the engine once for them
CHUNK = 20
#: seconds without a new line after which a worker hangs
HANGS = 400


@dataclass(frozen=True)
class Task:
    """Pieces that are trained together under one setting."""

    names: tuple[str, ...]
    setting: Setting

    def halves(self) -> list[Task]:
        """Two tasks of half of the pieces each."""
        middle = len(self.names) // 2
        return [Task(half, self.setting) for half in (self.names[:middle], self.names[middle:]) if half]


def tasks_of(backend: str, names: Sequence[str], group: int = GROUP) -> list[Task]:
    """All tasks of a backend; optimizers train a model alone."""
    alone = [name for name in names if name.startswith("optimizers.")]
    together = [name for name in names if name not in alone]
    tasks = [
        Task(tuple(name for name in one if setting.takes(name)), setting)
        for number, one in enumerate([*grouped(together, group), *((name,) for name in alone)])
        for setting in covering(number, mirrored=backend == "tensorflow", pipeline=True, remat=True)
    ]
    return [task for task in tasks if task.names]


class Sweep:
    """The tasks of one backend and the file of their results."""

    def __init__(
        self,
        backend: str,
        tasks: Iterable[Task],
        out: Path,
        float64: bool = False,
        known: Iterable[tuple[str, Setting]] = (),
    ):
        self.backend, self.out, self.float64 = backend, out, float64
        done = {(line["name"], Setting(**line["setting"])) for line in read(out)} | set(known)
        left = (Task(tuple(n for n in t.names if (n, t.setting) not in done), t.setting) for t in tasks)
        self.left = [task for task in left if task.names]
        self.count, self.started = len(self.left), time.monotonic()

    def run(self) -> None:
        """Run all that is left."""
        while self.left:
            chunk, rest = self.left[:CHUNK], self.left[CHUNK:]
            self.left = [*self._worker(chunk), *rest]
            minutes = (time.monotonic() - self.started) / 60
            print(
                f"{self.backend}: {self.count - len(self.left)} of {self.count} groups, {minutes:.0f} min", flush=True
            )

    def _worker(self, chunk: list[Task]) -> list[Task]:
        """Run a chunk in one worker; returns what it left, the group that killed it in halves."""
        with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
            tasks, lines = Path(folder) / "tasks.json", Path(folder) / "lines.jsonl"
            tasks.write_text(json.dumps([asdict(task) for task in chunk]))
            lines.touch()
            command = [sys.executable, "-m", "tests.sweep.worker", "--backend", self.backend]
            command += ["--tasks", str(tasks), "--out", str(lines), *(["--float64"] if self.float64 else [])]
            state, end = watched(command, lines)
            found = [json.loads(line) for line in lines.read_text().splitlines()]
        trained = [line for line in found if "name" in line]
        with open(self.out, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in trained)
        begun = [line["begins"] for line in found if "begins" in line]
        if not state:
            return []
        if not begun:
            raise RuntimeError(f"a worker of {self.backend} did not start: {end}")
        died = chunk[begun[-1]]
        rest = chunk[begun[-1] + 1 :]
        if len(died.names) > 1:
            known = {(line["name"], Setting(**line["setting"])) for line in trained}
            left = tuple(name for name in died.names if (name, died.setting) not in known)
            return [*Task(left, died.setting).halves(), *rest]
        line = {"backend": self.backend, "float64": self.float64, "name": died.names[0], "state": state, "error": end}
        with open(self.out, "a") as file:
            file.write(json.dumps({**line, "setting": asdict(died.setting)}) + "\n")
        return rest


def watched(command: Sequence[str], lines: Path) -> tuple[str, str]:
    """Run a process that adds to a file, until it ends or hangs.

    Returns:
        `"hang"`, `"abort"`, or nothing where it ended well; and the end of what it printed.
    """
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        hangs = _watch(child, lines)
        log.seek(0)
        end = log.read()[-1500:]
    return "hang" if hangs else "abort" if child.returncode else "", end


def watched_tasks(command: Sequence[str], lines: Path) -> dict:
    """Run a process that says in the file `begins` before each task.

    Returns:
        The task that it died or hangs in, with `state` and `error`; nothing where it ended well.

    Raises:
        RuntimeError: it died outside of a task.
    """
    lines.touch()
    state, end = watched(command, lines)
    if not state:
        return {}
    said = read(lines)
    if not said or "begins" not in said[-1]:
        raise RuntimeError(f"a process ended outside of a task: {' '.join(command)}: {end}")
    return {"begins": said[-1]["begins"], "state": state, "error": end}


def _watch(child: subprocess.Popen, lines: Path) -> bool:
    """Wait for the end of a worker; True if it had to be ended, because nothing new came for too long."""
    size, since = 0, time.monotonic()
    while child.poll() is None:
        time.sleep(0.5)
        if lines.stat().st_size != size:
            size, since = lines.stat().st_size, time.monotonic()
        if time.monotonic() - since > HANGS:
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            return True
    return False


def read(path: Path) -> list[dict]:
    """The results in a file; none where it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def decide(backend: str, out: Path) -> list[dict]:
    """The results, those that were off in float32 replaced by what float64 says."""
    lines = read(out)
    off = [Task((line["name"],), Setting(**line["setting"])) for line in lines if line["state"] == "wrong"]
    exact = out.with_suffix(".float64.jsonl")
    Sweep(backend, off, exact, float64=True).run()
    second = {(line["name"], Setting(**line["setting"])): line for line in read(exact)}
    return [
        second.get((line["name"], Setting(**line["setting"])), line) if line["state"] == "wrong" else line
        for line in lines
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--only", default="", help="regular expression over names of pieces")
    parser.add_argument("--settings", default="", help="regular expression over settings, `(2,2), uneven, last`")
    parser.add_argument("--group", type=int, default=GROUP, help="pieces in one model")
    parser.add_argument("--at-once", type=int, default=2, help="backends that run at the same time")
    parser.add_argument("--known", action="store_true", help="leave out what docs/support.csv has")
    parser.add_argument("--out", type=Path, default=Path("sweep-out"), help="folder of the results")
    options = parser.parse_args(arguments)
    quick_names = [name for name in all_names() if re.search(options.only, name)]
    options.out.mkdir(parents=True, exist_ok=True)
    table = results.read(results.TABLE) if options.known else []

    def one(backend: str) -> list[dict]:
        out = options.out / f"{backend}.jsonl"
        tasks = tasks_of(backend, quick_names, options.group)
        known = [(result.name, result.setting) for result in table if result.backend == backend]
        tasks = [task for task in tasks if re.search(options.settings, task.setting.name)]
        Sweep(backend, tasks, out, known=known).run()
        return decide(backend, out)

    with ThreadPoolExecutor(options.at_once) as pool:
        found = list(pool.map(one, options.backends.split(",")))
    bad = [line for lines in found for line in lines if line["state"] in ("wrong", "crash", "abort", "hang")]
    for line in bad:
        print(line["state"], line["backend"], line["name"], Setting(**line["setting"]).name, _why(line)[:200])
    print(f"{sum(map(len, found))} results, {len(bad)} wrong or crashed")
    return 1 if bad else 0


def _why(line: dict) -> str:
    return " ".join(str(line.get("over") or line.get("error", "")).split())


def all_names() -> list[str]:
    """The names of all pieces, which needs Keras but no engine of its own."""
    import os

    os.environ.setdefault("KERAS_BACKEND", "numpy")
    from tests.sweep.cases import PIECES

    return list(PIECES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
