"""`make test-versions`: the small parity grid in the oldest and newest versions of Keras and each engine.

Each row of `CASES` puts packages of other versions in front of those of `.venv`. Its hooks are recorded in
`backends/fingerprints.json`; then the cases `SMALL` of `tests/parity/support.py` are run under dp4, tp4 and 2x2 and
judged as the grid judges them, and `keras-flow compare` trains examples/digits.py as users run it: with every
optimisation of the engines, and with draws by logical index. Where a run deviates or fails the record is taken back.
`docs/versions.md` is the table of results.

`make test-canary` does the same with the newest releases and the nightly Keras, whichever they are today.

python -m tests.versions.runner [--later] [--canary] [--only "jax jax==0.8.0"]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_flow.backends import fingerprints
from keras_flow.backends.engines import ENGINES
from tests.parity import support

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "versions.md"
#: of examples/digits.py
LAYOUTS = "1,2x2"
STEPS = 20
TRAINING = ("jax", "tensorflow", "torch")
#: seconds for one command of a row
LIMIT = 900.0


@dataclass(frozen=True)
class Case:
    """Versions that differ from those of `.venv`.

    Attributes:
        engine: the engine that is run.
        requirements: what pip installs in front of the packages of `.venv`.
        is_later: a version that came after those that `.venv` may have. torch's is a build for GPUs that brings 4 GB of
            libraries along, so that it is left to `--later`.
        is_canary: the newest of its packages, installed anew for each run.
    """

    engine: str
    requirements: tuple[str, ...] = ()
    is_later: bool = False
    is_canary: bool = False

    @property
    def name(self) -> str:
        """The engine and the requirements."""
        return " ".join((self.engine, *self.requirements))

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """The requirements that are installed together; rows that need the same share the folder."""
        keras = tuple(text for text in self.requirements if text.startswith("keras"))
        return [part for part in (keras, tuple(text for text in self.requirements if text not in keras)) if part]

    @property
    def versions(self) -> dict[str, str]:
        """The versions of Keras and of the engine."""
        if self.is_canary:
            return _found_in(self)
        asked = dict(text.split("==") for text in self.requirements)
        return {
            name: next((asked[package] for package in packages if package in asked), fingerprints.installed(name))
            for name, packages in (("keras", ("keras",)), (self.engine, ENGINES[self.engine].packages))
        }


def folder_of(requirements: Sequence[str]) -> Path:
    """Where packages are installed."""
    return ROOT / "build" / "versions" / "_".join(requirements).replace("==", "-")


def jax(version: str) -> tuple[str, ...]:
    """The packages of one version of JAX."""
    return f"jax=={version}", f"jaxlib=={version}"


OLDEST = {"jax": jax("0.8.0"), "tensorflow": ("tensorflow-cpu==2.20.0",), "torch": ()}
#: the nightly Keras with the engines of `.venv`
CANARY = tuple(Case(engine, ("keras-nightly",), is_canary=True) for engine in TRAINING)
#: the newest of each together, and older engines
CASES = (
    *(Case(engine) for engine in TRAINING),
    *(Case("jax", jax(version)) for version in ("0.8.0", "0.9.2")),
    Case("tensorflow", OLDEST["tensorflow"]),
    *(Case("torch", (f"torch=={version}",), is_later=True) for version in ("2.14.1", "2.15.0")),
)


@dataclass(frozen=True)
class Outcome:
    """How a case ended: runs that were compared, the largest share of a tolerance, and what went wrong."""

    runs: int
    share: float
    seconds: float
    failure: str = ""


def run(case: Case) -> Outcome:
    """Install a case's packages beside the others, record its hooks and run the grid and the example in it."""
    install(case)
    paths = os.pathsep.join(str(folder_of(part)) for part in case.parts)
    env = {**os.environ, "KERAS_BACKEND": case.engine, "PYTHONPATH": paths}
    before = fingerprints.FILE.read_text()
    began = time.monotonic()
    recorded = _finished(["-W", "ignore", "-m", "keras_flow.backends.fingerprints"], env)
    runs, shares, failure = 0, [], _failure(recorded)
    for part in (_grid, _example):
        if not failure:
            count, share, failure = part(case, env)
            runs, shares = runs + count, [*shares, share]
    if failure:
        fingerprints.FILE.write_text(before)
    return Outcome(runs, max(shares, default=float("nan")), time.monotonic() - began, failure[:300])


def install(case: Case) -> None:
    """Install what is not there yet, and a canary's packages anew."""
    for part in case.parts:
        if case.is_canary and case.engine == TRAINING[0]:
            shutil.rmtree(folder_of(part), ignore_errors=True)
        if not folder_of(part).exists():
            alone = [] if case.is_later else ["--no-deps"]
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *alone]
            subprocess.run([*pip, "--target", str(folder_of(part)), *part], check=True)


def _found_in(case: Case) -> dict[str, str]:
    """The versions that Python finds with a case's packages in front."""
    program = (
        f"from keras_flow.backends import fingerprints as f; print(f.installed('keras'), f.installed({case.engine!r}))"
    )
    paths = os.pathsep.join(str(folder_of(part)) for part in case.parts)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    return dict(zip(("keras", case.engine), done.stdout.split(), strict=True))


def _grid(case: Case, env: Mapping[str, str]) -> tuple[int, float, str]:
    """The small grid: runs, the largest share of a tolerance, and what failed."""
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        file = Path(folder, "results.jsonl")
        command = ["-m", "tests.parity.worker", "--small", "--backend", case.engine, "--out", str(file)]
        done = _finished([*command, "--layouts", ",".join(support.LAYOUTS)], env)
        results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    # what is half a number is judged by how far one device is off
    judged = [result for result in results if not result["case"].startswith("mixed_")]
    share = max((value for result in judged for value in result.get("worst", {}).values()), default=float("nan"))
    wrong = [result for result in results if result["status"] != "ok"]
    if wrong:
        reason = "; ".join(wrong[0].get("over") or [wrong[0].get("error", "")])
        return len(results), share, f"{wrong[0]['case']}, {wrong[0]['layout']}: {reason}"
    return len(results), share, _failure(done)


def _example(case: Case, env: Mapping[str, str]) -> tuple[int, float, str]:
    """The example of the README, the same."""
    out = ROOT / "build" / "versions" / "out" / case.name.replace(" ", "_").replace("==", "-")
    command = [
        "-m",
        "keras_flow.cli.app",
        "compare",
        "examples/digits.py",
        "--backends",
        case.engine,
        "--out",
        str(out),
    ]
    done = _finished([*command, "--layouts", LAYOUTS, "--steps", str(STEPS)], env)
    if done.returncode:
        return 0, float("nan"), _failure(done)
    runs = json.loads((out / "report.json").read_text())["runs"]
    share = max(max(each["loss_share"] or 0, each["weights_share"] or 0) for each in runs)
    return len(LAYOUTS.split(",")) - 1, share, ""


def _finished(arguments: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"Error: not there after {LIMIT:.0f} seconds")


def _failure(done: subprocess.CompletedProcess[str]) -> str:
    """What a command that failed says of it; empty where it did not fail."""
    if not done.returncode:
        return ""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line or "FAILED" in line), (lines or ["?"])[-1])


def page(outcomes: Mapping[Case, Outcome], before: str = "") -> str:
    """The table as Markdown; rows of cases that were not run are those of the page before."""
    rows = []
    for case in CASES:
        key = f"| {case.engine} {case.versions[case.engine]} | {case.versions['keras']} | "
        if case in outcomes:
            rows.append(key + _cells(outcomes[case]))
        else:
            rows += [line for line in before.splitlines() if line.startswith(key)]
    names = textwrap.fill(", ".join(f"`{name}`" for name in support.SMALL), 120, break_on_hyphens=False)
    return _PAGE.format(
        rows="\n".join(rows),
        canary=_canary(outcomes, before),
        names=names,
        layouts=", ".join(support.LAYOUTS),
        steps=STEPS,
    )


def _canary(outcomes: Mapping[Case, Outcome], before: str) -> str:
    """The rows of the canary, each with its date; those of cases that were not run are those of the page before."""
    rows = []
    for case in CANARY:
        old = [line for line in before.splitlines() if line.startswith("| 20") and f" | {case.engine} " in line]
        if case in outcomes:
            today = time.strftime("%Y-%m-%d")
            key = f"| {today} | {case.engine} {case.versions[case.engine]} | {case.versions['keras']} | "
            rows.append(key + _cells(outcomes[case]))
        else:
            rows += old
    return "\n".join(rows)


def _cells(outcome: Outcome) -> str:
    share = "-" if outcome.share != outcome.share else f"{outcome.share:.0%}"
    result = "fails" if outcome.failure else "passes"
    return f"{result} | {outcome.runs} | {share} | {outcome.failure.replace('|', '/')} |"


_PAGE = """# Versions

`make test-versions` runs a small part of the parity grid (`tests/parity`) with each of these versions. These cases:

{names}

Each is run under {layouts} over 4 ranks (data, tensor and hybrid parallel), and every loss, update, weight and metric
is compared with one device of the same engine, by the tolerances of the grid. Then `keras-flow compare` trains
`examples/digits.py` for {steps} steps on one device and under 2x2, as users run it. It has written this table. (By the
rule of the grid `mixed_float16` may deviate twice as much as one device does from its own run in float32; its shares
are not in the column of tolerances.)

| engine | Keras | | runs | most of a tolerance | what failed |
|---|---|---|---|---|---|
{rows}

## The next Keras

`make test-canary` installs the nightly Keras in front and runs the same; its result is of the day:

| date | engine | Keras | | runs | most of a tolerance | what failed |
|---|---|---|---|---|---|---|
{canary}

## What is compared

torch 2.14.1 and 2.15.0 are builds for GPUs that bring 4 GB of libraries along: `python -m tests.versions.runner
--later` runs them, on the CPU as all others. JAX 0.11 needs Python 3.12, and is on no row: [gpus.md](gpus.md) has what
was seen of JAX 0.11.2.

Every hook into Keras and the engines has a fingerprint for each of these versions: the signature and a hash of the
source of what it wraps, without types and docstrings (`backends/fingerprints.json`). With other versions all hooks are
compared when the first distribution is made. Where all fit there is one warning, that the version was not tested
(`keras-flow doctor` runs a self-test, `dist.verify` checks a model). Where only sources have changed, a self-test of at
most 20 seconds runs once for these versions (what it found is kept in the user's cache folder), and training goes on
with one warning when it passes. Where a place is missing or has another signature, an error names it, before anything
is trained; `KERAS_FLOW_UNTESTED=allow` goes on at your own risk. Versions older than the oldest are refused.

A fingerprint says that the places that keras_flow wraps are the same. It does not say that everything they call is.
"""


def main() -> int:
    """Run rows and write the page; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--later", action="store_true", help="the later versions of torch too")
    parser.add_argument("--only", default="", help="the rows whose engine and requirements contain this")
    parser.add_argument("--canary", action="store_true", help="the nightly Keras alone")
    arguments = parser.parse_args()
    outcomes = {}
    for case in CANARY if arguments.canary else CASES:
        if arguments.only in case.name and (arguments.later or not case.is_later):
            outcomes[case] = run(case)
            print(case.name, outcomes[case], flush=True)
            # after each row: what was measured stays when the rest is stopped
            PAGE.write_text(page(outcomes, PAGE.read_text()))
    return 1 if any(outcome.failure for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
