"""Runs Keras's own tests in a scope, those that fail without one, too, and prints what passes without and not within.

python -m tests.keras_suite.runner --backend torch --layouts dp2,1x2 --only "trainers|models" --out keras-suite-out
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import keras

from tests.keras_suite.refusals import is_rounded, listed
from tests.keras_suite.session import NOT_COLLECTED

#: seconds for one test (torch traces some for a minute), and for the engine to start and all files to be collected
LIMIT, START = 180.0, 240.0
#: what tests no object that a distribution meets
LEFT_OUT = re.compile(
    r"^keras\.src\.(applications|backend|datasets|distribution|legacy|testing|tree|ops\.operation_utils_test)\b"
)


def modules(only: str) -> list[str]:
    """Return the modules of Keras's tests, `keras.src.models.model_test`, that a pattern is found in."""
    root = Path(keras.__file__).parent
    found = (".".join(("keras", *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*_test.py"))
    return sorted(name for name in found if re.search(only, name) and not LEFT_OUT.match(name))


def run(
    backend: str, layout: str, names: Sequence[str], out: Path, until: float = float("inf"), only: Path | None = None
) -> None:
    """Run files of tests in one process for each rank; where a test ends or stops it, another one does the rest.

    Args:
        backend: name of the engine.
        layout: a name in `tests.keras_suite.session.LAYOUTS`.
        names: of modules.
        out: file of the outcomes, a line each; what stands there is not run again.
        until: time of the clock at which no further test is waited for.
        only: file with the names of the tests that are run; None: all.
    """
    command = [sys.executable, "-m", "tests.keras_suite.session", "--backend", backend, "--layout", layout]
    command += [] if only is None else ["--tests", str(only)]
    while time.time() < until:
        before = out.read_text() if out.exists() else ""
        with (out.parent / "log.txt").open("a") as log:
            process = subprocess.Popen(
                [*command, "--out", str(out), *names], stdout=log, stderr=log, start_new_session=True
            )
            how = _watched(process, out, until)
        added = [json.loads(line) for line in out.read_text()[len(before) :].splitlines()] if out.exists() else []
        if not added or "ends" in added[-1]:
            return
        if "begins" in added[-1] and time.time() < until:
            lost = {"layout": layout, "test": added[-1]["begins"], "outcome": "failed", "error": how}
            with out.open("a") as file:
                file.write(json.dumps({**lost, "is_refusal": False}) + "\n")


def _watched(process: subprocess.Popen, out: Path, until: float) -> str:
    """Wait for the end of a process, which is ended where it has not written for a time; how it ended."""
    began = time.time()
    while process.poll() is None:
        time.sleep(0.5)
        written = out.stat().st_mtime if out.exists() else 0.0
        if time.time() > min(until, written + LIMIT if written > began else began + START):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGTERM)  # the launcher ends its processes
                process.wait(15.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return f"did not end in {LIMIT:.0f} s"
    return f"ended the process (status {process.returncode})"


def compared(lines: list[dict]) -> dict[str, list[dict]]:
    """Return, for each layout, the tests that pass on one device and not within.

    A test that fails within and has no outcome alone is among them: nothing says that it fails there, too.
    """
    outcomes: dict[str, dict[str, dict]] = collections.defaultdict(dict)
    for line in lines:
        if "test" in line:
            outcomes[line["layout"]][line["test"]] = line
    alone = outcomes.pop("1", {})

    def is_worse(line: dict) -> bool:
        if line["test"] in alone:
            return alone[line["test"]]["outcome"] == "passed" and line["outcome"] != "passed"
        return line["outcome"] == "failed"

    return {layout: [line for line in tests.values() if is_worse(line)] for layout, tests in outcomes.items()}


def on_others(lines: list[dict], out: Path) -> list[dict]:
    """Return the failures on the other processes of tests that passed on process 0, which writes the outcomes.

    Args:
        lines: outcomes of process 0.
        out: their file, beside which the other processes write theirs.
    """
    passed = {(line["layout"], line["test"]) for line in lines if line.get("outcome") == "passed"}
    files = sorted(out.parent.glob(f"{out.stem}.process*.jsonl"))
    failures = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in failures if (line["layout"], line.get("test")) in passed]


def is_uncollected(line: dict) -> bool:
    """Whether a line is of a file that could not be imported, so that none of its tests was run."""
    return line.get("error", "").startswith(NOT_COLLECTED)


def is_fault(backend: str, line: dict) -> bool:
    """Whether what is worse in a scope is no refusal that docs/features.md lists, and no matter of the last digits."""
    if line["is_refusal"]:
        return listed(backend, line["error"]) is None
    return not (is_rounded(backend, line["test"]) and "Not equal to tolerance" in line["error"])


def counts(lines: list[dict], layout: str) -> str:
    """How many tests passed in a scope, and how many of the others pass without one: refused, or a fault."""
    within = {line["test"]: line["outcome"] for line in lines if line.get("layout") == layout and "test" in line}
    alone = {line["test"]: line["outcome"] for line in lines if line.get("layout") == "1" and "test" in line}
    ran, passed = collections.Counter(within.values()), collections.Counter(alone.values())
    worse = compared(lines).get(layout, [])
    refused = sum(line["is_refusal"] for line in worse)
    return (
        f"within {ran['passed']} pass, {ran['failed']} fail, {ran['skipped']} skipped; without, {len(alone)} were run "
        f"and {passed['passed']} pass; worse within: {refused} refused, {len(worse) - refused} fail"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, choices=("jax", "tensorflow", "torch"))
    parser.add_argument("--layouts", default="dp4,2x2", help="names of tests.keras_suite.session.LAYOUTS")
    parser.add_argument("--only", default="", help="regular expression over modules")
    parser.add_argument("--all-alone", action="store_true", help="run without a scope what passes within, too")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no test after this time")
    parser.add_argument("--out", default="keras-suite-out", help="folder of the outcomes; what is there is kept")
    options = parser.parse_args(arguments)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    until = time.time() + 60 * options.minutes
    lines: list[dict] = []
    others: list[dict] = []
    layouts, names = options.layouts.split(","), modules(options.only)

    def add(layout: str, only: Path | None = None) -> None:
        out = folder / f"{options.backend}-{layout}.jsonl"
        run(options.backend, layout, names, out, until if only is None else float("inf"), only)
        lines.extend(map(json.loads, out.read_text().splitlines() if out.exists() else ()))
        others.extend(on_others(lines, out))

    for layout in layouts:
        add(layout)
    failed = folder / f"{options.backend}-failed.txt"
    failed.write_text("\n".join(sorted({line["test"] for line in lines if line.get("outcome") == "failed"})))
    if options.all_alone or failed.read_text():
        add("1", None if options.all_alone else failed)
    worse = compared(lines)
    for line in others:
        worse.setdefault(line["layout"], []).append(line)
    for text in sorted({f"{line['test']}: {line['error']}" for line in lines if is_uncollected(line)}):
        print(text)
    for layout in layouts:
        for line in sorted(worse.get(layout, ()), key=lambda line: line["test"]):
            kind = "fails"
            if not is_fault(options.backend, line):
                kind = "as listed"
            if line["is_refusal"]:
                kind = "refused" if listed(options.backend, line["error"]) else "refused, not in docs/features.md"
            print(f"{layout} {kind}: {line['test']}: {line['error'][:300]}")
    for layout in layouts:
        print(f"{options.backend}, {layout}: {counts(lines, layout)}")
    return 1 if any(is_fault(options.backend, line) for tests in worse.values() for line in tests) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
