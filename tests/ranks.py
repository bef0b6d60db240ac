"""A warm pool of ranks for each engine, in which a test's functions run: starting an engine costs more than most tests.

    def test_a_sum(on_ranks):
        def program(rows: int) -> float:
            ...                                      # on every rank
        assert on_ranks("torch")(program, 12) == 66  # what the first process returned

What a function raises on any rank fails the test, with the rank and its traceback. The pool goes on where every process
has answered; where one has not (it died, hangs, or waits for a rank that raised) all are ended, and the next call
starts others. So a failure is the failure of one test.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

#: seconds for an engine to start on all its ranks, and for one call
START, CALL = 240.0, 280.0
#: seconds for the other ranks once one has failed: they may have failed too, or wait for it
_GRACE = 5.0
_KEY, _LOG = "KERAS_FLOW_TEST_KEY", "log.txt"
#: set by coverage in the processes that it measures, which write their counts as they end
_MEASURED = "COVERAGE_PROCESS_CONFIG"


class RankError(AssertionError):
    """A function failed on a rank."""


class Pool:
    """Processes in which one engine drives some ranks; they start with the first call.

    Args:
        backend: name of the engine.
        folder: of the pool's files; `tempfile` makes its own there, on every rank.
        ranks: how many.
        environment: module whose `set_environment(folder)` is called before the engine is imported.
        processes: started by the launcher, each with as many ranks; None: as the engine does it by itself.
    """

    def __init__(self, backend: str, folder: Path, ranks: int = 4, environment: str = "", processes: int | None = None):
        self.backend, self.folder, self.ranks, self.environment = backend, folder, ranks, environment
        self.processes = processes
        self._process: subprocess.Popen | None = None
        self._connections: list[Connection] = []
        self._is_busy = False

    def __call__(self, function: Callable[..., Any], *args: object, timeout: float = CALL) -> Any:
        """Run a function on every rank; what the first process returned.

        Args:
            function: of a test's module, or within a test; its arguments and result travel by cloudpickle.
            timeout: seconds.

        Raises:
            RankError: it raised, or a process died or hung.
        """
        return self.on_each(function, *args, timeout=timeout)[0]

    def on_each(self, function: Callable[..., Any], *args: object, timeout: float = CALL) -> list[Any]:
        """The same; what each process returned."""
        if self._is_busy or (self._process is not None and self._process.poll() is not None):
            self.close()  # a call was interrupted, or a process died between calls
        if self._process is None:
            self._start()
        begins = (self.folder / _LOG).stat().st_size
        message = _by_value(function, args)
        self._is_busy = True
        for connection in self._connections:
            connection.send_bytes(message)
        answers = self._answers(timeout)
        failed = {index: answer for index, answer in enumerate(answers) if answer is None or not answer[0]}
        if None not in answers:
            self._is_busy = False
        if failed:
            raise RankError(self._explained(failed, begins, timeout))
        return [answer[1] for answer in answers if answer is not None]

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        if self._process is not None:
            # processes end by themselves when their connections do; only those that are measured are waited for
            if _MEASURED in os.environ and not self._is_busy:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(30.0)
            for child in psutil.Process(self._process.pid).children(recursive=True) if self._is_running() else ():
                child.kill()
            self._process.kill()
            self._process.wait()
        self._process, self._connections, self._is_busy = None, [], False

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable]
        if self.processes is not None:
            each = ["--devices_per_proc", str(self.ranks // self.processes)]
            each = each if self.ranks > self.processes else []
            # idle ranks are no hang
            command += ["-m", "keras_flow.launch", "--nproc_per_node", str(self.processes), *each, "--timeout", "1e6"]
        command += ["-m", "tests.ranks", self.backend, str(self.ranks)]
        key = secrets.token_hex()
        with tempfile.TemporaryDirectory(prefix="ranks-") as short:  # the path of a socket has 100 characters at most
            address = os.path.join(short, "s")
            with Listener(address, authkey=key.encode()) as listener, (self.folder / _LOG).open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, address, str(self.folder), self.environment],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, _KEY: key},
                    cwd=Path(__file__).parents[1],
                )
                self._connections = self._connected(listener)

    def _connected(self, listener: Listener) -> list[Connection]:
        """The connections of all processes, in the order of their indices."""
        until, found = time.monotonic() + START, {}
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]  # `accept` alone would wait for ever
        count = 1
        while len(found) < count:
            try:
                connection = listener.accept()
            except TimeoutError:
                if not self._is_running() or time.monotonic() > until:
                    end = (self.folder / _LOG).read_text(errors="replace")[-4000:]
                    self.close()
                    raise RankError(f"{self.backend} did not start on {self.ranks} ranks:\n{end}") from None
                continue
            index, count = connection.recv()
            found[index] = connection
        return [found[index] for index in sorted(found)]

    def _answers(self, timeout: float) -> list[tuple[bool, Any] | None]:
        """Whether each process was successful, and what it returned or said; None of one that did not answer."""
        answers: list[tuple[bool, Any] | None] = [None] * len(self._connections)
        waiting = dict(zip(self._connections, range(len(answers)), strict=True))
        until = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(until - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                index = waiting.pop(connection)  # type: ignore[arg-type]
                with contextlib.suppress(EOFError, OSError):
                    answers[index] = cloudpickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                answer = answers[index]
                if answer is None or not answer[0]:
                    until = min(until, time.monotonic() + _GRACE)
        return answers

    def _explained(self, failed: dict[int, tuple[bool, Any] | None], begins: int, timeout: float) -> str:
        """Which process failed first, as far as is known: one that raised rather than one that waits or is gone."""
        said = {index: answer[1] for index, answer in failed.items() if answer is not None}
        silent = sorted(index for index in failed if index not in said)
        parts = [f"{self.backend}, process {index}:\n{text}" for index, text in list(said.items())[:1]]
        if silent:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a connection ends before its process does
                self._process.wait(1.0)  # type: ignore[union-attr]
            ended = self._process.returncode  # type: ignore[union-attr]
            how = f"ended (status {ended})" if ended is not None else f"did not answer ({timeout:.0f} s at most)"
            parts.append(f"{self.backend}, process {', '.join(map(str, silent))}: {how}")
        with (self.folder / _LOG).open("rb") as log:
            log.seek(begins)
            printed = log.read().decode(errors="replace")[-4000:].strip()
        return "\n".join([*parts, *([f"printed:\n{printed}"] if printed else [])])


def _by_value(function: Callable[..., Any], args: Sequence[object]) -> bytes:
    """The call as bytes. A function of a test module travels with its code, whose assertions pytest has rewritten."""
    module = sys.modules[function.__module__]
    if not module.__name__.rpartition(".")[2].startswith("test_"):
        return cloudpickle.dumps((function, args))
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((function, args))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


# ---- in the processes of the ranks


def main(backend: str, ranks: int, address: str, folder: str, environment: str) -> None:
    """Start the engine, then serve."""
    from tests import quick

    quick.set_environment(backend)
    if environment:
        importlib.import_module(environment).set_environment(Path(folder))
    import keras_flow as kf

    if backend == "numpy" or "WORLD_SIZE" in os.environ:  # the launcher has started the processes
        serve(backend, ranks, address, folder)
    else:  # who calls watches the clock: idle ranks are no hang
        kf.run(serve, devices=ranks, args=(backend, ranks, address, folder), timeout=1e6)


def serve(backend: str, ranks: int, address: str, folder: str) -> None:
    """Answer calls, on every rank, until the connection ends."""
    import keras

    import keras_flow as kf
    from tests import quick

    tempfile.tempdir = folder  # one for all ranks, which outlives them
    quick.set_options(backend, None)
    kf.init(ranks)
    with Client(address, authkey=os.environ[_KEY].encode()) as caller:
        caller.send((kf.env.process_index(), kf.env.process_count()))
        gc.freeze()  # Keras collects garbage for each model: not through all that was imported
        while True:
            try:
                function, args = cloudpickle.loads(caller.recv_bytes())
            except EOFError:
                return
            keras.utils.clear_session()
            try:
                answer = (True, function(*args))
            except BaseException:
                answer = (False, traceback.format_exc())
            caller.send_bytes(_dumped(answer))
            sys.stdout.flush()


def _dumped(answer: tuple[bool, object]) -> bytes:
    try:
        return cloudpickle.dumps(answer)
    except Exception:
        return cloudpickle.dumps((False, f"what the function returned cannot be sent:\n{traceback.format_exc()}"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
