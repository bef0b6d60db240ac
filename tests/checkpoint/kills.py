"""Jobs that are killed by SIGKILL again and again, and must end as an undisturbed one does: to the last bit.

    python -m tests.checkpoint.kills torch --processes 2 --kills 200 --seed 0
    python -m tests.checkpoint.kills --kills 34  # every engine, 1 process and 2: a table of 204 kills

A job trains 24 steps and saves after each. A process kills itself at a moment that the seed chooses: inside a write, an
fsync or a rename of a checkpoint, or while a step trains. Then the whole job is ended and started again. Looked at are

    made     steps that process 0 has ended, in all lives of all jobs
    lost     steps that were made and saved, and are made again: only the last one may be, whose save was not over
    twice    updates at the end beyond one for each step
    ends     weights, logs, and what callbacks counted: equal bytes

Processes are forked from one that has imported the engine, so that a kill costs a second and no start of an engine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENGINES = ("torch", "jax", "tensorflow")
EPOCHS, STEPS = 3, 8
#: where a process is killed -> of so many events in its life one is chosen
WHERE = {"write": 40, "fsync": 20, "rename": 16, "training": 4}
HOW = ("before", "inside", "after")
#: seconds in which a life ends
LIMIT = 300.0


@dataclasses.dataclass
class Plan:
    """When one process of a job kills itself.

    Attributes:
        where: one of `WHERE`.
        event: the number of the event, from 1.
        how: before it, inside it or after it.
        delay: seconds after which it is killed, where it is inside a call.
        victim: index of the process.
        after: seconds after which the others are ended.
    """

    where: str
    event: int
    how: str
    delay: float
    victim: int
    after: float

    @classmethod
    def drawn(cls, draw: random.Random, processes: int) -> Plan:
        """Draw one."""
        where = draw.choice(list(WHERE))
        delay = draw.random() * (0.05 if where == "training" else 0.001)
        event, how = draw.randint(1, WHERE[where]), draw.choice(HOW)
        return cls(where, event, how, delay, draw.randrange(processes), draw.choice((0.0, 0.3)))


# ---- in a process of the job


def _die(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_after(seconds: float) -> None:
    threading.Thread(target=lambda: (time.sleep(seconds), _die()), daemon=True).start()


class _Events:
    """Counts events, and ends the process with one."""

    def __init__(self, plan: Plan):
        self.plan, self.seen = plan, 0

    def is_it(self) -> bool:
        self.seen += 1
        return self.seen == self.plan.event

    def around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it; the process may end before, inside or after."""
        if not self.is_it():
            return call(*args, **kwargs)
        if self.plan.how == "before":
            _die()
        if self.plan.how == "inside":
            _die_after(self.plan.delay)
        result = call(*args, **kwargs)
        if self.plan.how == "after":
            _die()
        return result


class _KillingFile:
    """A file that ends the process in the middle of a write."""

    def __init__(self, file: Any, events: _Events):
        self._file, self._events = file, events

    def write(self, data: Any) -> int:
        if self._events.is_it():
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            _die()
        return self._file.write(data)

    def __enter__(self) -> _KillingFile:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _arm(plan: Plan) -> _Events:
    """Let the calls of the plan end this process."""
    from keras_flow.checkpoint import writer

    events = _Events(plan)
    if plan.where == "write":
        made = writer.File.__init__

        def init(file: Any, *args: Any) -> None:
            made(file, *args)
            file._file = _KillingFile(file._file, events)

        writer.File.__init__ = init  # type: ignore[method-assign]
    names = {"fsync": ("fsync",), "rename": ("rename", "replace")}.get(plan.where, ())
    for name in names:
        original = getattr(os, name)
        setattr(os, name, lambda *args, original=original, **kwargs: events.around(original, *args, **kwargs))
    return events


def train(folder: Path, plan: Plan | None, asynchronous: bool) -> None:
    """Train, going on from the checkpoints of a folder; process 0 says how it ended."""
    import keras
    import numpy as np

    import keras_flow as kf
    from tests import quick

    quick.set_options(keras.config.backend())
    alone = "WORLD_SIZE" not in os.environ
    kf.init(2 if alone and keras.config.backend() != "torch" else None)
    index = kf.env.process_index()
    events = _arm(plan) if plan is not None and plan.victim == index else None
    journal = os.open(folder / f"journal-{index}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    class Journal(keras.callbacks.Callback):
        """Writes down each step; counts, as callbacks of users do."""

        def __init__(self) -> None:
            super().__init__()
            self.epoch = self.count = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            os.write(journal, f"begun {self.epoch * STEPS + batch}\n".encode())
            if events is not None and plan is not None and plan.where == "training" and events.is_it():
                _die_after(plan.delay)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.count += 1
            os.write(journal, f"ended {self.epoch * STEPS + batch}\n".encode())

    keras.utils.set_random_seed(7)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(STEPS * 4 - 1, 6)).astype("float32"), generator.integers(0, 3, STEPS * 4 - 1)
    with kf.DataParallel().scope():
        layers = keras.layers
        hidden = [layers.Dense(8, "relu"), layers.Dropout(0.3), layers.BatchNormalization()]
        model = keras.Sequential([layers.Input((6,)), *hidden, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    checkpoint = kf.callbacks.Checkpoint(
        folder / "checkpoints", save_freq=1, keep=2, asynchronous=asynchronous, save_on_signal=()
    )
    counting = Journal()
    history = model.fit(x, y, batch_size=4, epochs=EPOCHS, callbacks=[checkpoint, counting], verbose=0)
    digest = hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in model.variables)).hexdigest()
    slots = hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in model.optimizer.variables)).hexdigest()
    end = {
        "logs": {name: list(map(float, values)) for name, values in history.history.items()},
        "epochs": history.epoch,
        "weights": digest,
        "optimizer": slots,
        "updates": int(np.asarray(model.optimizer.iterations)),
        "counted": counting.count,
    }
    (folder / f"end-{index}").write_text(json.dumps(end))
    kf.comm.barrier()  # process 0 serves the others, which end in their own time


# ---- around the job


def _life(folder: Path, plan: Plan | None, processes: int, asynchronous: bool) -> bool:
    """Start the job; whether it came to its end. Otherwise it was killed as planned.

    Raises:
        RuntimeError: it ended otherwise, or not in time.
    """
    from keras_flow.launch.environment import free_port

    port, children = free_port(), {}
    for index in range(processes):
        child = os.fork()
        if not child:
            _child(folder, plan, processes, asynchronous, index, port)
        children[child] = index
    until, codes = time.monotonic() + LIMIT, {}
    try:
        while len(codes) < processes:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
                if codes and any(codes.values()) and children:
                    time.sleep(plan.after if plan else 0.0)
                    break
            elif time.monotonic() > until:
                raise RuntimeError(f"{plan}: no end in {LIMIT:.0f} s; see {folder}")
            else:
                time.sleep(0.01)
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not any(codes.values()):
        return True
    if plan is None or codes.get(plan.victim) != -signal.SIGKILL:
        said = "\n".join(path.read_text()[-2000:] for path in folder.glob("log-*"))
        raise RuntimeError(f"{plan}: processes ended with {codes}:\n{said}")
    return False


def _child(folder: Path, plan: Plan | None, processes: int, asynchronous: bool, index: int, port: int) -> None:
    """One process of the job; it does not return."""
    log = os.open(folder / f"log-{index}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if processes > 1:
        os.environ |= {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    code = 1
    try:
        train(folder, plan, asynchronous)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _steps(folder: Path, what: str, processes: int) -> list[list[int]]:
    """The steps that each process has begun, or ended."""
    paths = [folder / f"journal-{index}" for index in range(processes)]
    lines = [path.read_text().splitlines() if path.is_file() else [] for path in paths]
    return [[int(line.split()[1]) for line in each if line.startswith(what)] for each in lines]


def _ends(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("end-*"))]


def run(processes: int, kills: int, seed: int, folder: Path, each: int = 6) -> dict[str, Any]:
    """Kill jobs so many times, each at most `each` times before it comes to its end; what was seen."""
    import keras_flow as kf
    import keras_flow.checkpoint.manifest

    draw, where, jobs, done = random.Random(seed), Counter(), 0, 0
    (folder / "undisturbed").mkdir()
    assert _life(folder / "undisturbed", None, processes, False)
    expected = _ends(folder / "undisturbed")
    total = EPOCHS * STEPS
    assert len(expected) == processes and expected[0]["updates"] == total
    seen: dict[str, Any] = {"made": 0, "lost": 0, "twice": 0, "unequal": []}
    while done < kills:
        job, is_over = folder / f"job-{jobs}", False
        job.mkdir()
        jobs += 1
        asynchronous = bool(jobs % 2)
        for left in range(min(each, kills - done), -1, -1):
            before = [max(ended, default=-1) for ended in _steps(job, "ended", processes)]
            begun = [len(steps) for steps in _steps(job, "begun", processes)]
            plan = Plan.drawn(draw, processes) if left else None
            is_over = _life(job, plan, processes, asynchronous)
            found = keras_flow.checkpoint.manifest.steps(job / "checkpoints")
            if found:
                kf.checkpoint.verify(job / "checkpoints")
            for last, count, steps in zip(before, begun, _steps(job, "begun", processes), strict=True):
                # what was made before the last one was saved; a thread may be writing one more
                if steps[count:] and steps[count] < last - asynchronous:
                    seen["lost"] += last - asynchronous - steps[count]
            if is_over:
                break
            assert plan is not None
            where[plan.where] += 1
            done += 1
        seen["made"] += len(_steps(job, "ended", processes)[0])
        print(f"{processes} processes: {done} of {kills} kills, {jobs} jobs", file=sys.stderr, flush=True)
        ends = _ends(job)
        seen["twice"] += sum(end["updates"] - total for end in ends)
        if ends != expected:
            seen["unequal"].append(str(job))
    return {"kills": done, "where": dict(where), "jobs": jobs, **seen}


def table(kills: int, seed: int) -> list[dict[str, Any]]:
    """Kill on every engine, with 1 process and with 2; print a row for each as soon as it is known."""
    columns = ("engine", "processes", "kills", *WHERE, "jobs", "made", "lost", "twice", "unequal")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    rows = []
    for processes in (1, 2):
        for engine in ENGINES:
            command = [sys.executable, "-m", __spec__.name, engine, "--processes", str(processes)]
            command += ["--kills", str(kills), "--seed", str(seed)]
            # status 1 says that a job did not end as it must: its row says so too
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
            row = json.loads(out.strip().splitlines()[-1])
            row |= {"unequal": len(row["unequal"]), **{each: row["where"].get(each, 0) for each in WHERE}}
            print("| " + " | ".join(str(row[each]) for each in columns) + " |", flush=True)
            rows.append(row)
    return rows


def of_engine(engine: str, processes: int, kills: int, seed: int) -> dict[str, Any]:
    """Kill jobs of an engine, which this process imports; what was seen."""
    from tests import quick

    quick.set_environment(engine)
    os.environ.setdefault("PYTHONHASHSEED", "0")
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # once for all that are forked: the engine, and what a job imports
    import keras_flow as kf

    assert kf.DataParallel and kf.callbacks.Checkpoint and kf.checkpoint.save

    seen = {"engine": engine, "processes": processes, "seed": seed, **run(processes, kills, seed, folder)}
    print(json.dumps(seen))
    return seen


def main() -> None:
    """Kill, and print what was seen; status 1 where a job did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("engine", nargs="?", choices=ENGINES, help="default: a table of all, with 1 process and 2")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begun = time.monotonic()
    if given.engine:
        rows = [of_engine(given.engine, given.processes, given.kills, given.seed)]
    else:
        rows = table(given.kills, given.seed)
    print(f"{sum(row['kills'] for row in rows)} kills in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    sys.exit(any(row["lost"] or row["twice"] or row["unequal"] for row in rows))


if __name__ == "__main__":
    main()
