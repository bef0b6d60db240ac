"""`make test-versions`: a small part of the parity grid in the oldest and newest versions of Keras and each engine.

Each row of `CASES` puts one package of another version in front of those of `.venv`. Its hooks are recorded in
`backends/fingerprints.json`, `keras-flow compare` trains examples/digits.py under every layout, and where a run
deviates or fails the record is taken back. `docs/versions.md` is the table of results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from keras_flow.backends import fingerprints

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "versions.md"
LAYOUTS = "1,dp4,tp4,2x2"
ENGINES = ("jax", "tensorflow", "torch")


@dataclass(frozen=True)
class Case:
    """Versions that differ from those of `.venv`; requirement -> the packages that pip installs for it."""

    engine: str
    requirements: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return ROOT / "build" / "versions" / "_".join(self.requirements).replace("==", "-")


CASES = (
    *(Case(engine) for engine in ENGINES),
    *(Case(engine, (f"keras=={version}",)) for version in ("3.13.2", "3.14.1") for engine in ENGINES),
    *(Case("jax", (f"jax=={version}", f"jaxlib=={version}")) for version in ("0.8.0", "0.9.2")),
    Case("tensorflow", ("tensorflow-cpu==2.20.0",)),
)


@dataclass(frozen=True)
class Outcome:
    """How a case ended: versions, whether it passed, the largest share of a tolerance, and what went wrong."""

    versions: dict[str, str]
    ok: bool
    share: float
    seconds: float
    failure: str = ""


def run(case: Case, steps: int) -> Outcome:
    """Install a case's packages beside the others and train in it."""
    if case.requirements and not case.folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(case.folder), *case.requirements], check=True)
    out = ROOT / "build" / "versions" / f"out-{case.engine}-{case.folder.name}"
    before = fingerprints.FILE.read_text()
    env = {**os.environ, "KERAS_BACKEND": case.engine, "PYTHONPATH": str(case.folder) if case.requirements else ""}
    command = [
        str(Path(sys.executable).with_name("keras-flow")),
        "compare",
        "examples/digits.py",
        "--backends",
        case.engine,
    ]
    began = time.monotonic()
    recorded = _finished([sys.executable, "-W", "ignore", "-m", "keras_flow.backends.fingerprints"], env)
    done = (
        recorded
        if recorded.returncode
        else _finished([*command, "--layouts", LAYOUTS, "--steps", str(steps), "--out", str(out)], env)
    )
    versions = json.loads(_finished([sys.executable, "-c", _VERSIONS, case.engine], env).stdout)
    ok, share, failure = done.returncode == 0, float("nan"), ""
    if (out / "report.json").exists() and not recorded.returncode:
        runs = json.loads((out / "report.json").read_text())["runs"]
        share = max((max(each["loss_share"] or 0, each["weights_share"] or 0) for each in runs), default=share)
    if not ok:
        fingerprints.FILE.write_text(before)
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        failure = next((line for line in reversed(lines) if "Error" in line or "FAILED" in line), (lines or ["?"])[-1])
    return Outcome(versions, ok, share, time.monotonic() - began, failure[:300])


_VERSIONS = (
    "import json, sys; from keras_flow.backends.fingerprints import installed; "
    "print(json.dumps({name: installed(name) for name in ('keras', sys.argv[1])}))"
)


def _finished(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


def page(outcomes: list[tuple[Case, Outcome]], steps: int, before: str = "") -> str:
    """The table as Markdown; of the page before, the rows of versions that were not run."""
    rows = {
        f"| {case.engine} {outcome.versions[case.engine]} | {outcome.versions['keras']} | ": (
            f"{'passes' if outcome.ok else 'fails'} | {_share(outcome.share)} | {outcome.failure.replace('|', '/')} |"
        )
        for case, outcome in outcomes
    }
    kept = [line for line in before.splitlines() if line.startswith(tuple(f"| {engine} " for engine in ENGINES))]
    lines = [next((key + rows.pop(key) for key in [*rows] if line.startswith(key)), line) for line in kept]
    lines += [key + text for key, text in rows.items()]
    return _PAGE.format(rows="\n".join(lines), steps=steps, layouts=LAYOUTS.replace(",", ", "))


def _share(share: float) -> str:
    return "-" if share != share else f"{share:.0%}"


_PAGE = """# Versions

`make test-versions` trains `examples/digits.py` for {steps} steps under the layouts {layouts} with each of these
versions and compares every loss and every final weight with one device of the same engine. It has written this table.

| engine | Keras | | most of a tolerance | what failed |
|---|---|---|---|---|
{rows}

Every hook into Keras and the engines has a fingerprint for each of these versions: the signature and a hash of the
source of what it wraps (`backends/fingerprints.json`). With other versions all hooks are compared when the first
distribution is made. Where all fit there is one warning, that the version was not tested (`keras-flow doctor` runs a
self-test, `dist.verify` checks a model); where one does not, an error names it, before anything is trained. Versions
older than the oldest are refused.

A fingerprint says that the places that keras_flow wraps are the same. It does not say that everything they call is.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose text contains this; rows of others stay")
    arguments = parser.parse_args()
    outcomes = []
    for case in CASES:
        if arguments.only in f"{case.engine} {' '.join(case.requirements)}":
            outcome = run(case, arguments.steps)
            outcomes.append((case, outcome))
            print(case, outcome, flush=True)
    PAGE.write_text(page(outcomes, arguments.steps, PAGE.read_text() if arguments.only else ""))
    return 0 if all(outcome.ok for _, outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
