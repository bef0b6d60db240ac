"""Runs test files of Keras under one layout, on every rank, and writes a line for each test.

python -m tests.keras_suite.session --backend jax --layout dp4 --out results.jsonl keras.src.models.model_test
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import quick

#: layout -> number of ranks; `1` is stock Keras
LAYOUTS = {"1": 1, "dp4": 4, "2x2": 4, "dp2": 2, "1x2": 2}


class Recorder:
    """A plugin of pytest: each test runs in the layout's scope, and its outcome is written down.

    Args:
        layout: a name in `LAYOUTS`.
        out: file to which outcomes are added; None on ranks that do not write.
        done: tests that are not run again.
        only: the tests that are run; None: all.
    """

    #: whether a test has taken the engine's devices away
    is_broken = False

    def __init__(self, layout: str, out: Path | None, done: set[str], only: set[str] | None):
        self.done, self.only = done, only
        self.layout, self.out = layout, out
        self.begun = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what has an outcome, of a session before that was ended."""
        items[:] = [
            item for item in items if item.nodeid not in self.done and (self.only is None or item.nodeid in self.only)
        ]

    def pytest_sessionfinish(self) -> None:
        """Say that no test is left."""
        if not self.is_broken:
            self._write({"ends": True})

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Say which test begins, so that one that ends the process is known."""
        self._write({"begins": item.nodeid})
        self.begun = time.monotonic()
        yield
        if self.layout != "1" and "_reset_context()" in inspect.getsource(item.function):  # type: ignore[attr-defined]
            # TensorFlow has forgotten the ranks: another process does the rest
            self.is_broken, item.session.shouldstop = True, "the engine was reset"

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Hold the scope while a test's own code runs; what its set-up makes is made before the scope."""
        with scope(self.layout):
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        """Write a test's outcome."""
        report = (yield).get_result()
        if report.when == "call" or report.outcome != "passed":
            if report.when == "teardown":
                return
            error = call.excinfo.value if call.excinfo is not None and report.outcome == "failed" else None
            self._write(
                {
                    "test": item.nodeid,
                    "outcome": report.outcome,
                    "error": f"{type(error).__name__}: {error}"[:1500] if error is not None else "",
                    "trace": "".join(traceback.format_exception(error))[-3000:] if error is not None else "",
                    "is_refusal": any(kind.__name__ == "FlowError" for kind in type(error).__mro__),
                    "seconds": round(time.monotonic() - self.begun, 2),
                }
            )

    def _write(self, line: dict[str, Any]) -> None:
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps({"layout": self.layout, **line}) + "\n")


@contextlib.contextmanager
def scope(layout: str) -> Iterator[None]:
    """Hold a new distribution of a layout; nothing for one device."""
    if layout == "1":
        yield
        return
    import keras_flow as kf

    number = LAYOUTS[layout]
    if layout.startswith("dp"):
        distribution: Any = kf.DataParallel(kf.Placement(range(number), axis_names=("data",)))
    else:
        rows = 2 if layout == "2x2" else 1
        ranks = [[rank * 2, rank * 2 + 1] for rank in range(rows)]
        # every kernel that divides: rules that match nothing, or a split that does not fit, are no error of a test
        rules = {r"kernel$": {"model": kf.sbp.split(-1)}}
        mesh = kf.Placement(ranks, axis_names=("data", "model"))
        distribution = kf.ModelParallel(mesh, rules=rules, batch_axes="data")
        distribution.check = lambda model: None
    with distribution.scope():
        yield


def run(layout: str, modules: list[str], out: str, done: set[str], only: set[str] | None) -> None:
    """Run on every rank."""
    import keras

    from keras_flow.runtime import env

    quick.set_options(keras.backend.backend())
    writes = layout == "1" or env.process_index() == 0
    paths = [importlib.util.find_spec(module).origin for module in modules]  # type: ignore[union-attr]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "-c",
        os.devnull,
        "--rootdir",
        str(Path(keras.__file__).parent),
        "-W",
    ]
    pytest.main(
        [*options, "ignore", "--tb=no", "--no-header", *map(str, paths)],
        [Recorder(layout, Path(out) if writes else None, done, only)],
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, choices=("jax", "tensorflow", "torch"))
    parser.add_argument("--layout", required=True, choices=LAYOUTS)
    parser.add_argument("--out", required=True, help="file to which a line for each test is added")
    parser.add_argument("modules", nargs="+", help="modules of Keras's tests: keras.src.models.model_test")
    parser.add_argument("--tests", help="file with the names of the tests that are run, a line each")
    options = parser.parse_args(arguments)
    only = set(Path(options.tests).read_text().splitlines()) if options.tests else None
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    quick.set_environment(options.backend)
    lines = Path(options.out).read_text().splitlines() if Path(options.out).exists() else []
    # before ranks start, of which the first one adds to it
    done = {line["test"] for line in map(json.loads, lines) if "test" in line}
    if options.layout == "1":
        run(options.layout, options.modules, options.out, done, only)
        return 0
    import keras_flow as kf

    kf.run(run, devices=LAYOUTS[options.layout], args=(options.layout, options.modules, options.out, done, only))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
