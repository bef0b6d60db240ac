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
import re
import sys
import tempfile
import time
import traceback
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import quick

#: layout -> number of ranks; `1` is stock Keras
LAYOUTS = {"1": 1, "dp4": 4, "2x2": 4, "dp2": 2, "1x2": 2}
#: tests that write files by functions of their own, not as a model is saved: each process has a folder of its own
OWN_FOLDERS = re.compile(
    r"IOStore|weights_h5_|save_load_weights_only|save_weights_subclassed|weights_sharding|exception_raised"
    r"|\.utils\.\w+_test\."  # data sets in folders, archives
)
#: how the error of a file begins that cannot be imported
NOT_COLLECTED = "not collected"
PRIVATE_WRITERS = re.compile(r"saving_lib\._?save_|save_model_to_hdf5|h5py\.File\(|export_lib|export_\w+\(model")
PUBLIC_WRITERS = re.compile(r"\.save\(|\.save_weights\(|saving_api\.save|\.export\(")


def name_of(item: pytest.Item) -> str:
    """Return a test's name, the same in each process: scikit-learn's checks print the address of a function in theirs.

    Args:
        item: the test, as pytest collects it.
    """
    return re.sub(r"0x[0-9a-f]+", "0x", item.nodeid)


class Recorder:
    """A plugin of pytest: each test runs in the layout's scope, and its outcome is written down.

    Args:
        layout: a name in `LAYOUTS`.
        out: file to which outcomes are added.
        done: tests that are not run again.
        only: the tests that are run; None: all.

    Attributes:
        only_failures: nothing else is written.
        begin_together: waits for the other processes before a test, which it is told the name of.
        end_together: tells those that wait in a test that it has ended here, with an error or None.
    """

    #: whether a test has taken the engine's devices away
    is_broken = False
    only_failures = False

    def __init__(self, layout: str, out: Path, done: set[str], only: set[str] | None):
        self.done, self.only = done, only
        self.layout, self.out = layout, out
        self.begun = 0.0
        self.begin_together: Callable[[str], None] = lambda name: None
        self.end_together: Callable[[BaseException | None], None] = lambda error: None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what has an outcome, of a session before that was ended."""
        items[:] = [
            item
            for item in items
            if name_of(item) not in self.done and (self.only is None or name_of(item) in self.only)
        ]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write down a file that cannot be imported: none of its tests is run, which nobody would see."""
        if report.failed and report.nodeid not in self.done:
            why = (report.longreprtext.strip().splitlines() or [""])[-1].removeprefix("E").strip()
            self._write(
                {"test": report.nodeid, "outcome": "failed", "error": f"{NOT_COLLECTED}: {why}", "is_refusal": False}
            )

    def pytest_sessionfinish(self) -> None:
        """Say that no test is left."""
        if not self.is_broken:
            self._write({"ends": True})

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Say which test begins, so that one that ends the process is known."""
        name = name_of(item)
        self.begin_together(name)
        # data that a test makes before the scope are the same on all processes
        np.random.seed(zlib.crc32(name.encode()))
        self._write({"begins": name})
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
            self.end_together(error)
            self._write(
                {
                    "test": name_of(item),
                    "outcome": report.outcome,
                    "error": f"{type(error).__name__}: {error}"[:1500] if error is not None else "",
                    "trace": "".join(traceback.format_exception(error))[-3000:] if error is not None else "",
                    "is_refusal": any(kind.__name__ == "FlowError" for kind in type(error).__mro__),
                    "seconds": round(time.monotonic() - self.begun, 2),
                }
            )

    def _write(self, line: dict[str, Any]) -> None:
        if not self.only_failures or line.get("outcome") == "failed":
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


def stand_in_for_conftest() -> None:
    """Give tests what they import from Keras's own `conftest`, which its wheel does not have."""
    import keras

    def skip_if_backend(given_backend: str, reason: str) -> pytest.MarkDecorator:
        return pytest.mark.skipif(keras.backend.backend() == given_backend, reason=reason)

    module: Any = types.ModuleType("conftest")
    module.skip_if_backend = skip_if_backend
    sys.modules["conftest"] = module


def waiting_for_all(root: Path, processes: int, limit: float = 100.0) -> Callable[[str], None]:
    """Return a function that waits until all processes have called it with a name.

    A test that fails on one process only would else leave the next ones out of step.

    Args:
        root: folder of the marks that processes leave.
        processes: how many.
        limit: seconds, after which no process is waited for.
    """

    def wait(name: str) -> None:
        mark = root / f"begins-{zlib.crc32(name.encode())}"
        with mark.open("a") as file:
            file.write(".")
        until = time.monotonic() + limit
        while mark.stat().st_size < processes and time.monotonic() < until:
            time.sleep(0.02)

    return wait


def meet_at_the_end(error: BaseException | None) -> None:
    """Meet the other processes after a test; who still waits inside it is told, and raises there.

    Args:
        error: of the test; None where it passed.
    """
    from keras_flow import FlowError
    from keras_flow.backends.rendezvous import meeting

    if not (isinstance(error, FlowError) and "needs all ranks" in str(error)):  # then the others were told
        with contextlib.suppress(FlowError):
            meeting.meet("the end of a test")


def writes_privately(test: Any) -> bool:
    """Whether a test writes files with private functions of Keras or with h5py, all processes at once."""
    source = inspect.getsource(getattr(test, test._testMethodName))
    return bool(PRIVATE_WRITERS.search(source)) and not PUBLIC_WRITERS.search(source)


def share_folders(root: Path) -> None:
    """Give the processes of a test one folder for its files: all of them save under one path.

    Args:
        root: in which the folders are made; whoever started the processes removes it.
    """
    from keras.src.testing import TestCase

    own = TestCase.get_temp_dir

    def folder(test: Any) -> str:
        if OWN_FOLDERS.search(test.id()) or writes_privately(test):
            return own(test)
        test.folders = getattr(test, "folders", 0) + 1  # a test may ask for several
        path = root / f"{zlib.crc32(test.id().encode())}-{test.folders}"
        path.mkdir(exist_ok=True)
        return str(path)

    remove = os.remove

    def kept(path: Any, *args: Any, **kwargs: Any) -> None:
        """Leave a file that the other processes may still read."""
        if not str(path).startswith(str(root)):
            remove(path, *args, **kwargs)

    TestCase.get_temp_dir = folder
    os.remove = kept


def run(layout: str, modules: list[str], out: str, done: set[str], only: set[str] | None, folder: str) -> None:
    """Run on every rank."""
    import keras

    from keras_flow.runtime import env

    quick.set_options(keras.backend.backend())
    stand_in_for_conftest()
    recorder = Recorder(layout, Path(out), done, only)
    if layout != "1" and env.process_count() > 1:
        share_folders(Path(folder))
        recorder.begin_together = waiting_for_all(Path(folder), env.process_count())
        recorder.end_together = meet_at_the_end
        if env.process_index() > 0:  # what another process raises is often why process 0 waits
            recorder.out = recorder.out.with_suffix(f".process{env.process_index()}.jsonl")
            recorder.only_failures = True
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
        [recorder],
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
    with tempfile.TemporaryDirectory(prefix="keras-suite-") as folder:
        args = (options.layout, options.modules, options.out, done, only, folder)
        if options.layout == "1":
            run(*args)
        else:
            import keras_flow as kf

            kf.run(run, devices=LAYOUTS[options.layout], args=args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
