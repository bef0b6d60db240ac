"""The processes of a job's ranks: started in sessions of their own, ended as whole groups, watched by a guardian."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import psutil

from keras_flow import settings
from keras_flow.launch import guardian
from keras_flow.launch.failure import left_how
from keras_flow.launch.folder import JobFolder
from keras_flow.launch.output import RankOutput, Shown

#: seconds between asking a rank to end and killing it
_GRACE_SECONDS = 2.0
#: seconds that a killed rank may take to be gone
_GONE_SECONDS = 5.0
#: seconds in which the last lines of processes that have left are passed on
OUTPUT_SECONDS = 2.0
#: seconds that processes with `kf.on_preemption` have before they are killed, unless KERAS_FLOW_GRACE says so
_DEFAULT_GRACE = 30.0


def preemption_seconds() -> float:
    """Seconds for a checkpoint.

    Raises:
        FlowError: the variable is no number above 0.
    """
    return settings.seconds(settings.GRACE, _DEFAULT_GRACE)


class Interrupts:
    """Remembers Ctrl-C and SIGTERM until `check` raises: elsewhere they could leave a lock of `subprocess` locked.

    For SIGTERM `check` raises SystemExit(143), as a shell says it.
    """

    def __init__(self) -> None:
        self._pending: int | None = None
        self._numbers = (signal.SIGINT, signal.SIGTERM)
        self._before: dict[signal.Signals, object] = {}
        self._at_once = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if kind is None:
            self.check()

    def _note(self, number: int, frame: object) -> None:
        self._pending = number
        if self._at_once:
            self.check()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, what `check` raises is raised as the signal comes: in waits that start no process."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def note(self, number: int) -> None:
        """Take a signal that a rank was sent in place of this process."""
        self._pending = number

    def check_again(self) -> None:
        """While the job ends: raise KeyboardInterrupt for another Ctrl-C; schedulers may send SIGTERM twice."""
        number, self._pending = self._pending, None
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C came since the last call, SystemExit(143) if SIGTERM did."""
        number, self._pending = self._pending, None
        if number == signal.SIGTERM:
            raise SystemExit(128 + number)
        if number is not None:
            raise KeyboardInterrupt


class RankProcess:
    """The process of one rank, with whatever it started.

    Attributes:
        rank: the rank.
        output: what it prints.
        code: its exit code, negative for a signal; None while it runs.
    """

    def __init__(self, rank: int, command: Sequence[str], env: Mapping[str, str], shown: Shown):
        self.rank = rank
        self.output = RankOutput(rank, shown)
        stdout, stderr = self.output.targets()
        # A session of its own: Ctrl-C reaches the launcher alone, which then ends each rank with all that it started.
        self._popen = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        self.output.follow(self._popen)
        self.code: int | None = None

    @property
    def pid(self) -> int:
        """Its process number, and that of its group."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Look whether it has left."""
        if self.code is None:
            self.code = self._popen.poll()
        return self.code

    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank alone."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def send_group(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def cpu_seconds(ranks: Sequence[RankProcess]) -> dict[int, float]:
    """Processor time that each rank and its children have used, by one look at the processes of this host."""
    ranks_by_pid = {each.pid: each.rank for each in ranks}
    above = {process: process.info["ppid"] for process in psutil.process_iter(["ppid"])}
    parents = {process.pid: parent for process, parent in above.items()}
    used = dict.fromkeys(ranks_by_pid.values(), 0.0)
    for process in above:
        pid, passed = process.pid, set[int]()
        while pid in parents and pid not in ranks_by_pid and pid not in passed:
            passed.add(pid)
            pid = parents[pid]
        if pid in ranks_by_pid:
            with contextlib.suppress(psutil.Error):
                used[ranks_by_pid[pid]] += sum(process.cpu_times()[:2])
    return used


class Ranks:
    """All processes of a job. As a context manager it leaves none of them running, however the body ends.

    Attributes:
        processes: those of this host.
        unfinished: ranks that had to be killed, since they had not ended in the time that they were given.
        hurried: whether a second Ctrl-C cut that time short.
    """

    def __init__(self, interrupts: Interrupts, folder: JobFolder) -> None:
        self.processes: list[RankProcess] = []
        self._folder = folder
        self._interrupts = interrupts
        self._guardian: subprocess.Popen[bytes] | None = None
        self._grace = _GRACE_SECONDS
        self.unfinished: list[int] = []
        self.hurried = False

    def __enter__(self) -> Ranks:
        # -I -S: no site packages, which makes it start in milliseconds
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, str(self._folder.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        except KeyboardInterrupt:  # a second one: no grace
            self.hurried = True
            for process in self.processes:
                process.send_group(signal.SIGKILL)
            self.end(0)
            raise
        finally:
            self._tell_guardian("done")
            assert self._guardian is not None and self._guardian.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._guardian.stdin.close()
            self._guardian.wait()

    def start(self, rank: int, command: Sequence[str], env: Mapping[str, str], shown: Shown) -> None:
        """Start the process of `rank`."""
        process = RankProcess(rank, command, env, shown)
        self.processes.append(process)
        self._tell_guardian(str(process.pid))

    def forget(self, process: RankProcess) -> None:
        """End what a process that has left had started; the system may give its number to a stranger's later."""
        process.send_group(signal.SIGKILL)
        process.output.finish(OUTPUT_SECONDS)
        self.processes.remove(process)
        self._tell_guardian(str(-process.pid))

    def running(self) -> list[RankProcess]:
        """The ranks that have not left."""
        return [process for process in self.processes if process.poll() is None]

    def endings(self, first: int) -> dict[int, str]:
        """How each process ended, or that it runs; `first` is the one that failed first."""
        how = {
            process: "running, then ended by the launcher" if process.poll() is None else left_how(process.code or 0)
            for process in self.processes
        }
        # the first one may have written its exception down, and wait for the others as it leaves
        return {
            each.rank: (text.replace("running", "failed", 1) + " (failed first)") if each.rank == first else text
            for each, text in how.items()
        }

    def give_time(self) -> None:
        """The job is asked to end and nothing failed: processes that have `kf.on_preemption` get time for it."""
        if self._folder.asks_for_time.exists():
            self._grace = preemption_seconds()

    def end(self, grace: float | None = None) -> None:
        """Ask every rank that runs to end, kill those that have not after `grace` seconds, and their children."""
        grace = self._grace if grace is None else grace
        for process in self.running():
            # what a process has started (workers that read data) is needed for its last step
            (process.send if grace > _GRACE_SECONDS else process.send_group)(signal.SIGTERM)
            process.send_group(signal.SIGCONT)  # one that is stopped hears nothing
        until = time.monotonic() + grace
        while self.running() and time.monotonic() < until:
            self._interrupts.check_again()
            time.sleep(0.02)
        self.unfinished += [process.rank for process in self.running()]
        for process in self.processes:
            process.send_group(signal.SIGKILL)  # also what a rank that has left had started
        until = time.monotonic() + _GONE_SECONDS
        while self.running() and time.monotonic() < until:
            time.sleep(0.02)
        until = time.monotonic() + OUTPUT_SECONDS
        for process in self.processes:
            process.output.finish(until - time.monotonic())

    def _tell_guardian(self, line: str) -> None:
        assert self._guardian is not None and self._guardian.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guardian.stdin.write(f"{line}\n".encode())
            self._guardian.stdin.flush()
