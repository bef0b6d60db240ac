"""The worker processes of a notebook: engines of ipyparallel, started as the launcher starts ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_flow.backends.engines import ENGINES
from keras_flow.current import last_call
from keras_flow.errors import FlowError, LaunchError, warn
from keras_flow.launch import environment
from keras_flow.launch.failure import left_how, tail
from keras_flow.launch.folder import JobFolder
from keras_flow.launch.job import Job, stated_timeout
from keras_flow.launch.output import Shown
from keras_flow.launch.processes import Interrupts, RankProcess, Ranks
from keras_flow.notebook import worker
from keras_flow.notebook.output import label
from keras_flow.progress import working
from keras_flow.units import counted

if TYPE_CHECKING:
    import ipyparallel

#: seconds in which the workers must have started: engines are imported on few cores
_START_SECONDS = 300.0
_LOOK_SECONDS = 0.05
#: what is installed for notebooks
EXTRA = "keras-flow[notebook]"


class Workers:
    """Processes that drive the ranks of a notebook's job; they end with the kernel, also when it is killed.

    Args:
        devices: number of ranks.
        processes: number of processes, which divides the ranks.
        engine: name of the Keras backend.

    Attributes:
        times_rejoined: how often the process groups were made anew.
    """

    def __init__(self, devices: int, processes: int, engine: str) -> None:
        self.devices, self.count, self.engine = devices, processes, engine
        self.times_rejoined = 0
        self.folder = JobFolder(tempfile.mkdtemp(prefix="keras-flow-"))
        self._exits = contextlib.ExitStack()
        self._exits.callback(shutil.rmtree, self.folder.path, ignore_errors=True)
        self._ranks: Ranks | None = None
        self._client: ipyparallel.Client | None = None
        self._ids: list[int] = []

    def start(self) -> None:
        """Start the processes, join them to a job and initialise the engine.

        Raises:
            FlowError: ipyparallel is missing, or the versions of kernel and workers differ.
            LaunchError: a worker did not start.
        """
        try:
            require_ipyparallel()
            _warn_of_cores(self.count)
            with working(f"starting {self.count} worker processes for {self.engine}"):
                self._start()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        for rank in range(self.count):
            os.mkfifo(self.folder.path / f"orders-{rank}", 0o600)
        # Each is the leader of a session and watched by a guardian, which ends it when this process is gone
        interrupts = Interrupts()
        services = self._exits.enter_context(Ranks(interrupts, self.folder))
        profile = self.folder.path / "ipython"
        controller = [sys.executable, "-m", "ipyparallel.controller", "--ip=127.0.0.1", f"--profile-dir={profile}"]
        services.start(0, [*controller, "--log-level=ERROR"], dict(os.environ), Shown(hidden=True))
        files = [profile / "security" / f"ipcontroller-{name}.json" for name in ("engine", "client")]
        self._wait(lambda: all(map(_is_written, files)), services.processes, "the controller of ipyparallel")
        self._ranks = self._exits.enter_context(Ranks(interrupts, self.folder))
        command = (sys.executable, "-m", "ipyparallel.engine", f"--file={files[0]}", "--log-level=ERROR")
        job = Job(
            processes=self.count,
            command=(*command, "--IPEngine.enable_nanny=False"),
            timeout=stated_timeout(None),
            env={
                "KERAS_BACKEND": self.engine,
                "IPYTHONDIR": str(profile),
                # Keras loads TensorFlow where it finds it, whose own lines would stand in the cells
                "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
            },
            devices=self.each,
        )
        port, token = environment.free_port(), secrets.token_hex(32)
        for local in range(self.count):
            env = environment.of_process(job, self.folder, local, port, 0, token)
            self._ranks.start(local, job.command, env, Shown(hidden=True))
        self._connect(files[1])

    def _connect(self, file: Path) -> None:
        import ipyparallel

        client = self._client = ipyparallel.Client(str(file), timeout=60)
        self._exits.callback(client.close)
        self._wait(lambda: len(client.ids) == self.count, self.processes, "the workers")
        ranks = client[:].apply_async(worker.index)
        self._wait(ranks.ready, self.processes, "the workers")
        self._ids = [engine for _, engine in sorted(zip(ranks.get(), client.ids, strict=True))]
        here = worker.facts(self.engine)
        for rank, answer in enumerate(self.apply(worker.prepare, sys.path, self.devices, self.engine)):
            _require_equal(here, answer["facts"], rank)

    @property
    def client(self) -> ipyparallel.Client:
        """The connection to the workers.

        Raises:
            FlowError: they have ended.
        """
        if self._client is None:
            raise FlowError("the workers have ended: kf.notebook.restart() starts new ones")
        return self._client

    @property
    def processes(self) -> list[RankProcess]:
        """The worker processes, in the order of their index."""
        return [] if self._ranks is None else self._ranks.processes

    def view(self, indices: Sequence[int]) -> ipyparallel.DirectView:
        """Return ipyparallel's view of some of the workers, in this order: it runs code on them."""
        targets = [self._ids[index] for index in indices]
        return self.client.direct_view(targets)  # pyright: ignore[reportArgumentType]  # its stub knows "all" only

    def apply(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """Call a function of a module in every worker; what each returned.

        Raises:
            FlowError: what it raised in a worker.
            LaunchError: a worker died.
        """
        return self.apply_each(function, [args] * self.count)

    def apply_each(self, function: Callable[..., Any], args: Sequence[Sequence[object]]) -> list[Any]:
        """Call a function of a module in every worker, each with arguments of its own; what each returned."""
        from ipyparallel import error

        answers = [self.view([index]).apply_async(function, *each) for index, each in enumerate(args)]
        try:
            self._wait(lambda: all(answer.ready() for answer in answers), self.processes, "the workers")
            return [answer.get()[0] for answer in answers]
        except error.CompositeError as several:
            raise FlowError(str(several.elist[0][1])) from None
        except error.RemoteError as one:
            raise FlowError(str(one.evalue)) from None

    def order(self, indices: Sequence[int], do: str, **what: object) -> None:
        """Tell workers something that they hear while a cell runs."""
        for index in indices:
            # not blocking: a worker that is gone reads nothing
            with contextlib.suppress(OSError):
                pipe = os.open(self.folder.path / f"orders-{index}", os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, (json.dumps({"do": do, **what}) + "\n").encode())
                os.close(pipe)

    def rejoin(self) -> bool:
        """Begin anew after a cell that no rank runs any more; False where the workers cannot be used on."""
        if self.count == 1:
            return True
        self.times_rejoined += 1
        rejoined = self.apply(worker.rejoin, self.times_rejoined)
        # an engine that forms no group anew has left none: nothing was cut
        return all(rejoined) or not ENGINES[self.engine].rejoins

    def interrupt(self, indices: Sequence[int]) -> None:
        """Send SIGINT to workers."""
        for index in indices:
            self.processes[index].send(signal.SIGINT)

    def dead(self) -> list[RankProcess]:
        """The workers that have left."""
        return [process for process in self.processes if process.poll() is not None]

    def died(self) -> list[RankProcess]:
        """The workers that have left by themselves."""
        return [] if self._client is None else self.dead()

    @property
    def alive(self) -> bool:
        """Whether all workers run."""
        return self._client is not None and not self.dead()

    @property
    def each(self) -> int:
        """How many ranks a process drives."""
        return self.devices // self.count

    def label(self, indices: Sequence[int]) -> str:
        """The ranks of processes in few words."""
        return label(indices, self.each)

    def ended(self, process: RankProcess) -> str:
        """How a worker ended, and the end of what it wrote."""
        return f"{self.label([process.rank])}: {_ended(process)}"

    def last_call(self, index: int) -> str:
        """Return the last call of a process that waits for others; empty where it made none."""
        return last_call.read(self.folder.last_call(index))

    def end(self) -> None:
        """End all processes."""
        self._client = None
        self._exits.close()

    def _wait(self, until: Callable[[], bool], processes: Sequence[RankProcess], what: str) -> None:
        end = time.monotonic() + _START_SECONDS
        while not until():
            if gone := [process for process in processes if process.poll() is not None]:
                raise LaunchError(f"{what} died while something was asked of them: {_ended(gone[0])}")
            if time.monotonic() > end:
                raise LaunchError(f"{what} did not answer within {_START_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)


def _ended(process: RankProcess) -> str:
    process.output.finish(0.5)
    said = tail(process.output.kept(), 15)
    return left_how(process.code or 0) + (f"; its last words:\n{said}" if said else "")


def require_ipyparallel() -> None:
    """Check that ipyparallel is there.

    Raises:
        FlowError: it is not installed.
    """
    if importlib.util.find_spec("ipyparallel") is None:
        raise FlowError(
            "kf.notebook starts worker processes through ipyparallel, which is not installed. Install it with "
            f"`pip install '{EXTRA}'`. (On JAX and TensorFlow kf.init(devices=4) needs no workers.)"
        )


def _is_written(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads(path.read_text()))
    return False


def _warn_of_cores(count: int) -> None:
    cores = os.cpu_count() or 1
    if count > cores:
        warn(
            f"kf.notebook.start: {count} worker processes share {counted(cores, 'core')}: steps take "
            "longer than with fewer; layouts and numbers are the real ones"
        )


def _require_equal(here: dict[str, str], there: dict[str, str], rank: int) -> None:
    differ = [
        f"{name} is {here[name]} in the kernel and {there[name]} in it" for name in here if here[name] != there[name]
    ]
    if differ:
        raise FlowError(
            f"worker {rank} has other versions than the notebook's kernel: {'; '.join(differ)}. A package was "
            "installed after the kernel had loaded it: restart the kernel."
        )
