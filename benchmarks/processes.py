"""Two processes: keras_flow's `fit` under `keras-flow launch` against scripts that are written by hand.

    python -m benchmarks.processes [--backends jax,tensorflow,torch] [--families mlp,transformer] [--sizes 1,10]

By hand, around the same Keras model: torchrun and DistributedDataParallel, `jax.distributed` and a jitted step,
`TF_CONFIG` and MultiWorkerMirroredStrategy. The ways take turns, each time in new processes; a step's time is the
median of epochs, a ratio one of medians over the rounds. Start: from the command to the end of the first step. Targets:
steps at most 1.02x at 1 million parameters and more, start at most 1.1x, and on torch at most 1.5x of one process's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.progress import track

from benchmarks.parts import milliseconds
from keras_flow.launch.environment import free_port

PROGRAM = Path(__file__).with_name("processes_program.py")
OURS, MIRRORED, HAND, ONE = "keras_flow", 'keras_flow, strategy="mirrored"', "by hand", "one process"
WAYS = {"jax": (OURS, HAND, ONE), "tensorflow": (OURS, MIRRORED, HAND, ONE), "torch": (OURS, HAND, ONE)}
STEP, START, START_OF_ONE = 1.02, 1.1, 1.5

#: of one way in one round: seconds to the end of the first step, and case -> seconds of a step
Run = dict[str, object]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="jax,tensorflow,torch")
    parser.add_argument("--families", default="mlp,transformer", help="of mlp, cnn, transformer")
    parser.add_argument("--sizes", default="1,10", help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/processes"))
    options = parser.parse_args(arguments)
    kept = options.out.with_suffix(".json")
    found = json.loads(kept.read_text()) if kept.exists() else {}
    cases = [f"{family}:{size}" for family in options.families.split(",") for size in options.sizes.split(",")]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for backend in options.backends.split(","):
        turns = [
            way
            for turn in range(options.rounds)
            # the order changes, so that no way always comes first
            for way in WAYS[backend][turn % len(WAYS[backend]) :] + WAYS[backend][: turn % len(WAYS[backend])]
        ]
        new: dict[str, list[Run]] = {}
        for way in track(turns, backend, disable=not sys.stdout.isatty()):
            new.setdefault(way, []).append(once(backend, way, cases))
        found[backend] = new
        kept.write_text(json.dumps(found, indent=1))  # an engine at a time: what is measured is kept
    text = table(found)
    options.out.with_suffix(".md").write_text(text)
    print(text)
    return 0


def once(backend: str, way: str, cases: list[str]) -> Run:
    """One way, in new processes."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        program = [str(PROGRAM), way, str(result), *(cases[:1] if way == ONE else cases)]
        begun = time.time()
        if way == ONE:
            commands = [([sys.executable, *program], {})]
        elif way in (OURS, MIRRORED):
            commands = [([sys.executable, "-m", "keras_flow.launch", "--nproc_per_node", "2", *program], {})]
        elif backend == "torch":
            torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
            commands = [([sys.executable, *torchrun, *program], {})]
        else:
            addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
            commands = [([sys.executable, *program], _joins(index, addresses)) for index in range(2)]
        processes = [
            subprocess.Popen(command, env={**environment, **more}, stdout=subprocess.DEVNULL)
            for command, more in commands
        ]
        if any([process.wait(600) for process in processes]):
            raise SystemExit(f"{backend}, {way}: a process failed")
        run = json.loads(result.read_text())
    return {"start": run["first"] - begun, "steps": run["steps"]}


def _joins(index: int, addresses: list[str]) -> dict[str, str]:
    """What a script of one's own is told: TensorFlow's variable, and the same for `jax.distributed.initialize`."""
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}


def table(found: dict[str, dict[str, list[Run]]]) -> str:
    """What was found, as Markdown."""
    lines = [
        "# Two processes",
        "",
        "Written by `python -m benchmarks.processes`: medians of rounds in new processes, in brackets least and most.",
        "",
        "| engine | what | ms: keras_flow | against | ms | ratio | target |",
        "|---|---|---|---|---|---|---|",
    ]
    for backend, ways in found.items():
        for ours in (OURS, MIRRORED):
            if ours not in ways:
                continue
            name = backend if ours == OURS else f'{backend}, strategy="mirrored"'
            for case in ways[ours][0]["steps"]:  # type: ignore[attr-defined]
                family, _, size = case.partition(":")
                own, hand = ([run["steps"][case] for run in ways[way]] for way in (ours, HAND))  # type: ignore[index]
                lines.append(_row(name, f"step, {family}, {size} M", own, HAND, hand, STEP))
            starts = {way: [run["start"] for run in ways[way]] for way in (ours, HAND, ONE)}
            lines.append(_row(name, "start", starts[ours], HAND, starts[HAND], START))
            limit = START_OF_ONE if backend == "torch" else None
            lines.append(_row(name, "start", starts[ours], ONE, starts[ONE], limit))
    return "\n".join([*lines, ""])


def _row(name: str, what: str, own: list, against: str, other: list, limit: float | None) -> str:
    ratio = statistics.median(own) / statistics.median(other)
    target = "" if limit is None else f"{limit:.2f}" + (" missed" if ratio > limit else "")
    return f"| {name} | {what} | {milliseconds(own)} | {against} | {milliseconds(other)} | {ratio:.2f} | {target} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
