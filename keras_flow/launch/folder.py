"""The private folder of a job, through which its ranks tell the launcher what a process's exit code cannot say."""

from __future__ import annotations

import os
from pathlib import Path

from keras_flow import settings


class JobFolder:
    """Names of the files in the folder of a job. The folder is made with mode 0700 and removed by the launcher."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)

    @property
    def payload(self) -> Path:
        """The file in which `kf.run` sends `main` and its arguments to the ranks."""
        return self.path / "payload"

    @property
    def result(self) -> Path:
        """The file with rank 0's result."""
        return self.path / "result"

    def failure(self, rank: int) -> Path:
        """The file with the exception that ended a rank."""
        return self.path / f"failure-{rank}.json"

    def left(self, rank: int) -> Path:
        """A file that exists once a rank's program has ended well; what runs at exit may still wait for others."""
        return self.path / f"left-{rank}"

    def stack(self, rank: int) -> Path:
        """The file in which a rank writes its stack when it is sent SIGUSR1; it exists once the rank can."""
        return self.path / f"stack-{rank}"

    def last_call(self, rank: int) -> Path:
        """The file in which a rank keeps what it last entered that waits for others."""
        return self.path / f"call-{rank}"

    @property
    def asks_for_time(self) -> Path:
        """A file that exists once a process has something to do before the job ends (`kf.on_preemption`)."""
        return self.path / "asks-for-time"

    def asked(self, rank: int) -> Path:
        """The file with the number of a signal by which one process, and not its launcher, was asked to end."""
        return self.path / f"asked-{rank}"

    def saved(self, rank: int) -> Path:
        """The files that the callback of `kf.on_preemption` wrote; exists once it has ended."""
        return self.path / f"saved-{rank}"

    def clear(self) -> None:
        """Forget what the ranks of an attempt that failed wrote; what was sent to them stays."""
        of_ranks = (
            path
            for name in ("failure", "left", "stack", "call", "asked", "saved")
            for path in self.path.glob(f"{name}-*")
        )
        for path in (self.asks_for_time, *of_ranks):
            path.unlink(missing_ok=True)


def own_folder() -> JobFolder | None:
    """The folder of the job that this process is a rank of; None where no launcher of keras_flow started it."""
    path = settings.read(settings.JOB)
    return JobFolder(path) if path else None
