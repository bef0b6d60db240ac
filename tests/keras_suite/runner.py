"""Runs Keras's own tests with and without a scope, and prints what passes without and not within.

python -m tests.keras_suite.runner --backend torch --layouts dp2,1x2 --only "trainers|models" --out keras-suite-out
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
from pathlib import Path

import keras

#: seconds for one file of tests
LIMIT = 900.0
#: what tests no object that a distribution meets
LEFT_OUT = re.compile(
    r"^keras\.src\.(applications|backend|datasets|distribution|legacy|testing|tree|ops\.operation_utils)\b"
)


def modules(only: str) -> list[str]:
    """Return the modules of Keras's tests, `keras.src.models.model_test`, that a pattern is found in."""
    root = Path(keras.__file__).parent
    found = (".".join(("keras", *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*_test.py"))
    return sorted(name for name in found if re.search(only, name) and not LEFT_OUT.match(name))


def run_file(backend: str, layout: str, module: str, out: Path) -> None:
    """Run one file of tests; one that ends the process, or hangs, is said of the test that began last."""
    command = [sys.executable, "-m", "tests.keras_suite.session", "--backend", backend, "--layout", layout, "--out"]
    try:
        with (out.parent / "log.txt").open("a") as log:
            subprocess.run([*command, str(out), module], stdout=log, stderr=log, timeout=LIMIT, check=False)
        ended = "ended the process"
    except subprocess.TimeoutExpired:
        ended = f"did not end in {LIMIT:.0f} s"
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if lines and "begins" in lines[-1]:
        lost = {"layout": layout, "test": lines[-1]["begins"], "outcome": "failed", "error": ended, "is_refusal": False}
        with out.open("a") as file:
            file.write(json.dumps(lost) + "\n")


def compared(lines: list[dict]) -> dict[str, list[dict]]:
    """Return, for each layout, the tests that pass on one device and not within."""
    outcomes: dict[str, dict[str, dict]] = collections.defaultdict(dict)
    for line in lines:
        if "test" in line:
            outcomes[line["layout"]][line["test"]] = line
    alone = outcomes.pop("1", {})
    passed = {test for test, line in alone.items() if line["outcome"] == "passed"}
    return {
        layout: [line for test, line in tests.items() if test in passed and line["outcome"] != "passed"]
        for layout, tests in outcomes.items()
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, choices=("jax", "tensorflow", "torch"))
    parser.add_argument("--layouts", default="dp4,2x2", help="names of tests.keras_suite.session.LAYOUTS")
    parser.add_argument("--only", default="", help="regular expression over modules")
    parser.add_argument(
        "--out", default="keras-suite-out", help="folder of the outcomes; files that are there are kept"
    )
    options = parser.parse_args(arguments)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict] = []
    for module in modules(options.only):
        for layout in ("1", *options.layouts.split(",")):
            out = folder / f"{options.backend}-{layout}-{module}.jsonl"
            if not out.exists():
                run_file(options.backend, layout, module, out)
            lines += [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    ran = collections.Counter((line["layout"], line["outcome"]) for line in lines if "test" in line)
    print(options.backend, dict(sorted(ran.items())))
    worse = compared(lines)
    for layout, tests in worse.items():
        for line in tests:
            kind = "refused" if line["is_refusal"] else "fails"
            print(f"{layout} {kind}: {line['test']}: {line['error'][:300]}")
    return 1 if any(not line["is_refusal"] for tests in worse.values() for line in tests) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
