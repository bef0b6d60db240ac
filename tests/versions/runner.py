"""`make test-versions`: the small parity grid in the oldest and newest versions of Keras and each engine.

Each row of `CASES` puts packages of other versions in front of those of `.venv`. Its hooks are recorded in
`backends/fingerprints.json`; then the cases `SMALL` of `tests/parity/support.py` are run under dp4, tp4 and 2x2 and
judged as the grid judges them, and `keras-flow compare` trains examples/digits.py as users run it: with every
optimisation of the engines, and with draws by logical index. Where a run deviates or fails the record is taken back.
`docs/versions.md` is the table of results.

`make test-canary` does the same with today's nightly Keras. `--pythons` does it with later versions of Python, each in
an environment of its own with the engine's newest release.

python -m tests.versions.runner [--later] [--canary] [--pythons] [--only "jax jax==0.8.0"]
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
LIMIT = 1800.0


@dataclass(frozen=True)
class Case:
    """Versions that differ from those of `.venv`.

    Attributes:
        engine: the engine that is run.
        requirements: what pip installs in front of the packages of `.venv`.
        is_later: a version that came after those that `.venv` may have. torch's is a build for GPUs that brings 4 GB of
            libraries along, so that it is left to `--later`.
        is_canary: the newest of its packages, installed anew for each run.
        python: another version of Python, which has an environment of its own instead of packages in front.
    """

    engine: str
    requirements: tuple[str, ...] = ()
    is_later: bool = False
    is_canary: bool = False
    python: str = ""

    @property
    def name(self) -> str:
        """The engine, the requirements and the other Python."""
        return " ".join((self.engine, *self.requirements, *([f"python{self.python}"] if self.python else [])))

    @property
    def interpreter(self) -> str:
        """The program that runs it."""
        return str(folder_of((self.name,)) / "bin" / "python") if self.python else sys.executable

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """The requirements that are installed together; rows that need the same share the folder."""
        keras = tuple(text for text in self.requirements if text.startswith("keras"))
        return [part for part in (keras, tuple(text for text in self.requirements if text not in keras)) if part]

    @property
    def versions(self) -> dict[str, str]:
        """The versions of Keras and of the engine."""
        if self.is_canary or self.python:
            return _found_in(self)
        asked = dict(text.split("==") for text in self.requirements)
        return {
            name: next((asked[package] for package in packages if package in asked), fingerprints.installed(name))
            for name, packages in (("keras", ("keras",)), (self.engine, ENGINES[self.engine].packages))
        }


def folder_of(requirements: Sequence[str]) -> Path:
    """Where packages are installed."""
    return ROOT / "build" / "versions" / "_".join(requirements).replace("==", "-").replace(" ", "_")


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
#: later versions of Python
PYTHONS = tuple(Case(engine, python="3.13") for engine in TRAINING)
#: what the grid and the example need beside an engine
NEEDED = ("pytest<9.2", "hypothesis", "scikit-learn")


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
    recorded = _finished(case, ["-W", "ignore", "-m", "keras_flow.backends.fingerprints"], env)
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
    if case.python and not Path(case.interpreter).exists():
        subprocess.run([f"python{case.python}", "-m", "venv", str(folder_of((case.name,)))], check=True)
        pip = [case.interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-e", f".[{case.engine}]", *NEEDED], cwd=ROOT, check=True)
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
    command = [case.interpreter, "-c", program]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    return dict(zip(("keras", case.engine), done.stdout.split(), strict=True))


def _grid(case: Case, env: Mapping[str, str]) -> tuple[int, float, str]:
    """The small grid: runs, the largest share of a tolerance, and what failed."""
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        file = Path(folder, "results.jsonl")
        command = ["-m", "tests.parity.worker", "--small", "--backend", case.engine, "--out", str(file)]
        done = _finished(case, [*command, "--layouts", ",".join(support.LAYOUTS)], env)
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
    done = _finished(case, [*command, "--layouts", LAYOUTS, "--steps", str(STEPS)], env)
    if done.returncode:
        return 0, float("nan"), _failure(done)
    runs = json.loads((out / "report.json").read_text())["runs"]
    share = max(max(each["loss_share"] or 0, each["weights_share"] or 0) for each in runs)
    return len(LAYOUTS.split(",")) - 1, share, ""


def _finished(case: Case, arguments: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [case.interpreter, *arguments]
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
    """The page as Markdown; rows of cases that were not run are those of the page before."""
    names = textwrap.fill(", ".join(f"`{name}`" for name in support.SMALL), 120, break_on_hyphens=False)
    return _PAGE.format(
        rows="\n".join(row for case in CASES for row in _rows(case, outcomes, before, "")),
        pythons="\n".join(row for case in PYTHONS for row in _rows(case, outcomes, before, _today())),
        canary="\n".join(row for case in CANARY for row in _rows(case, outcomes, before, _today())),
        names=names,
        layouts=", ".join(support.LAYOUTS),
        steps=STEPS,
    )


def _today() -> str:
    return time.strftime("| %Y-%m-%d ")


def _rows(case: Case, outcomes: Mapping[Case, Outcome], before: str, date: str) -> list[str]:
    """The row of a case, with its date where the packages are those of a day."""
    if case in outcomes:
        return [f"{date}{_key(case)}{_cells(outcomes[case])}"]
    if date:
        mark = f" | {case.python} |" if case.python else ".dev"
        return [
            row for row in before.splitlines() if row.startswith("| 20") and f" | {case.engine} " in row and mark in row
        ]
    return [row for row in before.splitlines() if row.startswith(_key(case))]


def _key(case: Case) -> str:
    python = f"{case.python} | " if case.python else ""
    return f"| {case.engine} {case.versions[case.engine]} | {python}{case.versions['keras']} | "


def _cells(outcome: Outcome) -> str:
    share = "-" if outcome.share != outcome.share else f"{outcome.share:.0%}"
    result = "fails" if outcome.failure else "passes"
    return f"{result} | {outcome.runs} | {share} | {outcome.failure.replace('|', '/')} |"


_PAGE = """# Versions

`make test-versions` trains a small part of the parity grid (`tests/parity`) with each version in the tables, and writes
the tables. The cases are:

{names}

Each case runs under {layouts} (data, tensor and hybrid parallel) over 4 ranks. Every loss, update, weight and metric is
compared with one device of the same engine. Then `keras-flow compare` trains `examples/digits.py` for {steps} steps on
one device and under 2x2. A row counts these runs. "Largest share" is the largest deviation that was seen, as a
share of what the grid tolerates. It leaves out `mixed_float16`, which is compared with its own run in float32.

| engine | Keras | result | runs | largest share | what failed |
|---|---|---|---|---|---|
{rows}

All rows ran on Python 3.11, Linux, x86-64. torch 2.14.1 and 2.15.0 are builds for GPUs that install 4 GB of
libraries. `python -m tests.versions.runner --later` runs them, on the CPU.

## Later versions of Python

`python -m tests.versions.runner --pythons` installs the newest release of each engine for another Python, and runs the
same cases there:

| date | engine | Python | Keras | result | runs | largest share | what failed |
|---|---|---|---|---|---|---|---|
{pythons}

On Python 3.12 the same cases ran with JAX 0.11.2, on a CPU and on a GPU ([GPUs](gpus.md)). macOS and Windows are not
tested. keras_flow needs POSIX (it starts processes and renames files as POSIX does), so Windows needs WSL.

## The next Keras

`make test-canary` installs today's nightly build of Keras, and runs the same cases:

| date | engine | Keras | result | runs | largest share | what failed |
|---|---|---|---|---|---|---|
{canary}

## What happens with other versions

keras_flow wraps functions of Keras and of the engines ([hooks](hooks.md)). For the versions in the tables, the file
`backends/fingerprints.json` records the signature of wrapped functions and a hash of their source, without types and
docstrings. All hooks that have no record for an installed version are compared with those of other versions when the
first distribution is made:

- **All are equal.** One warning says that the version was not tested. `keras-flow doctor` runs a self-test, and
  `dist.verify` checks a model.
- **Some source code has changed.** A self-test decides. It takes up to 20 seconds, on a busy machine up to 180. It
  runs once for these versions: its result is kept in the user's
  cache folder. If it passes, training goes on with one warning.
- **A function is missing, or takes other arguments.** An error names it before anything is trained.
  `KERAS_FLOW_UNTESTED=allow` goes on at your own risk.
- **The version is older than the oldest in the tables.** It is refused.

Equal fingerprints show that the wrapped functions are unchanged. They do not show that everything these functions call
is unchanged.
"""


def main() -> int:
    """Run rows and write the page; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--later", action="store_true", help="the later versions of torch too")
    parser.add_argument("--only", default="", help="the rows whose engine and requirements contain this")
    parser.add_argument("--canary", action="store_true", help="the nightly Keras alone")
    parser.add_argument("--pythons", action="store_true", help="later versions of Python alone")
    arguments = parser.parse_args()
    outcomes = {}
    for case in CANARY if arguments.canary else PYTHONS if arguments.pythons else CASES:
        if arguments.only in case.name and (arguments.later or not case.is_later):
            outcomes[case] = run(case)
            print(case.name, outcomes[case], flush=True)
            # after each row: what was measured stays when the rest is stopped
            PAGE.write_text(page(outcomes, PAGE.read_text()))
    return 1 if any(outcome.failure for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
