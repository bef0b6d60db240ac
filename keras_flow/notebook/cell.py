"""Runs a cell on the ranks: shows its output live, and ends it on all of them when one fails or it is interrupted."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from keras_flow.backends.engines import ENGINES
from keras_flow.launch import hang
from keras_flow.launch.failure import Failure
from keras_flow.notebook import show, stacks
from keras_flow.notebook.errors import CellError, CellInterrupted
from keras_flow.notebook.output import Printed
from keras_flow.notebook.workers import Workers

_LOOK_SECONDS = 0.05
#: seconds that other ranks may take to end by themselves, once one has failed
_GRACE_SECONDS = 2.0
#: seconds that a rank may take after SIGINT, then after its connections were cut
_SIGNAL_SECONDS, _CUT_SECONDS = 2.0, 8.0
#: seconds for a step that has begun, when all are to stop before the next one
_STEP_SECONDS = 20.0
#: seconds for the output of a cell that has ended to arrive, which a busy machine delays
_OUTPUT_SECONDS = 20.0
#: seconds for the workers' threads to answer
_ANSWER_SECONDS = 2.0

RESTART = "kf.notebook.restart() starts new workers; their variables are gone."


class CellRun:
    """One cell on some workers.

    Args:
        workers: the processes.
        indices: which of them run it.
        source: the cell.
        quiet: show nothing unless it fails.
        timeout: seconds without progress after which it counts as deadlocked.
    """

    def __init__(self, workers: Workers, indices: Sequence[int], source: str, quiet: bool, timeout: float) -> None:
        self._workers, self._indices, self._timeout = workers, list(indices), timeout
        self._source, self._quiet = source, quiet
        self._messages: dict[int, str] = {}
        self._found: dict[int, Any] = {}
        self._shown = show.Live(self._indices[0], workers.each)

    def run(self) -> None:
        """Run it to its end.

        Raises:
            CellError: a rank raised, died or made no progress.
            CellInterrupted: the user stopped it. The workers stay usable, or the text says that they do not.
        """
        workers = self._workers
        workers.order(range(workers.count), "open")
        answers = workers.view(self._indices).execute(self._source, silent=False, block=False)
        self._messages = dict(zip(self._indices, answers.msg_ids, strict=True))
        # of the answers: the client forgets its own records once results are there, for a short cell at once
        self._found = dict(zip(self._indices, answers.metadata, strict=True))
        said: BaseException | None = None
        try:
            said = self._watch()
        except KeyboardInterrupt:
            said = self._interrupted()
        if workers.alive:
            answers.wait_for_output(_OUTPUT_SECONDS)
        failed = isinstance(said, CellError)
        if not self._quiet or failed:
            self._shown.finish({index: self._printed(index) for index in self._indices})
        if said is not None:
            raise said from None

    def _watch(self) -> BaseException | None:
        watch, failed_at = hang.HangWatch(self._timeout), None
        while pending := self._pending():
            self._show()
            if self._workers.dead():
                return self._died()
            if failed_at is None and self._failures():
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > _GRACE_SECONDS:
                return self._failed(stuck=pending)
            running = [self._workers.processes[index] for index in self._indices]
            if watch.expired(running):
                return self._deadlocked(pending)
            time.sleep(_LOOK_SECONDS)
        self._show()
        return self._failed(stuck=[]) if self._failures() else None

    def _show(self) -> None:
        if not self._quiet:
            self._shown.show(self._printed(self._indices[0]).stdout)

    def _pending(self) -> list[int]:
        outstanding = self._workers.client.outstanding
        return [index for index, message in self._messages.items() if message in outstanding]

    def _printed(self, index: int) -> Printed:
        found = self._found[index]
        results = [found.execute_result] if found.execute_result else []
        return Printed(found.stdout or "", found.stderr or "", [*(found.outputs or []), *results])

    def _failures(self) -> dict[int, Failure]:
        """The exceptions of the processes, by their number."""
        found = {}
        for index, record in self._found.items():
            if record.status == "error":
                summary = f"{record.error.ename}: {record.error.evalue}" if record.error else "an error"
                trace = record.error.traceback if record.error else ""
                found[index] = Failure(_seconds(record.completed), summary, trace or "")
        return found

    def _failed(self, stuck: Sequence[int]) -> CellError:
        """The error of a cell that raised somewhere, once no rank runs it any more."""
        failures = self._failures()
        own = {index: failure for index, failure in failures.items() if not failure.lost_neighbour} or failures
        first = min(own, key=lambda index: own[index].time)
        alike = [index for index in own if own[index].summary == own[first].summary]
        # one that was left out, or that went on, counts other calls than those that failed
        apart = len(alike) < self._workers.count
        note = self._freed(stuck, apart)
        label, each = self._workers.label, self._workers.each
        text = f"{label([first])} failed first: {own[first].summary}"
        if len(alike) == len(self._indices) > 1:
            text = f"{label(alike)} failed alike, {label([first])} first: {own[first].summary}"
        elif stuck:
            were = "were" if len(stuck) * each > 1 else "was"
            text += f"\n{label(stuck).capitalize()} waited for it and {were} stopped."
        return CellError(text + _hint(own[first].summary) + note, first * each, own[first].trace)

    def _interrupted(self) -> BaseException:
        try:
            at = self._stop_before_a_step()
            note = self._freed(self._pending())
        except KeyboardInterrupt:
            self._workers.end()
            return CellInterrupted(f"pressed twice: the workers were ended. {RESTART}")
        where = f" before step {at + 1}, the same on all of them" if at is not None else ""
        return CellInterrupted(f"the cell was stopped on {self._workers.label(self._indices)}{where}.{note}")

    def _stop_before_a_step(self) -> int | None:
        """Stop loops of Keras before the same step on all ranks; the number of steps done, None outside of loops."""
        workers, pending = self._workers, self._pending()
        number = time.monotonic_ns()
        workers.order(pending, "hold", number=number)
        files = [workers.folder.path / f"held-{index}-{number}" for index in pending]
        if not self._until(lambda: all(file.exists() for file in files), _ANSWER_SECONDS):
            return None
        steps = max((int(file.read_text()) for file in files), default=0)
        if steps == 0:
            workers.order(pending, "open")
            return None
        workers.order(pending, "stop_after", steps=steps)
        return steps if self._until(lambda: not self._pending(), _STEP_SECONDS) else None

    def _freed(self, stuck: Sequence[int], apart: bool = False) -> str:
        """Free ranks that still run the cell, and begin anew; a note for the error where something was lost.

        Args:
            stuck: the ranks.
            apart: begin anew also where there are none.
        """
        workers = self._workers
        if not stuck and not apart:
            return ""
        workers.interrupt(stuck)
        ended_well = self._until(lambda: not self._pending(), _SIGNAL_SECONDS)
        if not ended_well and ENGINES[workers.engine].rejoins:
            pids = [process.pid for process in workers.processes]
            for index in self._pending():
                workers.order([index], "cut", peers=[pid for other, pid in enumerate(pids) if other != index])
            ended_well = self._until(lambda: not self._pending(), _CUT_SECONDS)
        if ended_well and workers.rejoin():
            return (
                ""
                if not stuck
                else (
                    "\nThe workers are usable, with their variables; weights of a model that was being trained may be "
                    "a step apart: build it again, or load them."
                )
            )
        workers.end()
        return f"\nThe others could not be freed, and all workers were ended. {RESTART}"

    def _deadlocked(self, pending: Sequence[int]) -> CellError:
        workers = self._workers
        running = [workers.processes[index] for index in pending]
        suspects, found = hang.find_suspects(running, workers.folder)
        done = [index for index in range(workers.count) if index not in pending]
        states = {index: stacks.where(found.get(index, "")) for index in pending}
        states |= {index: "has finished the cell" if index in self._indices else "was left out" for index in done}
        lines = []
        for index, state in sorted(states.items()):
            entered = workers.last_call(index)
            lines.append(f"  {workers.label([index])}: {state}" + (f"; last entered: {entered}" if entered else ""))
        note = self._freed(pending)
        text = f"the cell made no progress for {self._timeout:g} s (%%ranks --timeout SECONDS). Where the ranks are:\n"
        return CellError(text + "\n".join(lines) + note, (done or suspects or list(pending))[0] * workers.each)

    def _died(self) -> CellError:
        first, *_ = self._workers.dead()
        text = f"{self._workers.ended(first)}\nThe other workers were ended. {RESTART}"
        self._workers.end()
        return CellError(f"a worker died. {text}", first.rank * self._workers.each)

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self._workers.dead():
                return False
            self._show()
            sys.stdout.flush()
            time.sleep(_LOOK_SECONDS)
        return True


def _hint(summary: str) -> str:
    """Return a hint where ranks miss a name that the notebook has; otherwise an empty text."""
    missing = re.match(r"NameError: name '(\w+)' is not defined", summary)
    if missing is None or missing[1] not in vars(sys.modules["__main__"]):
        return ""
    name = missing[1]
    return (
        f"\n{name} is a variable of the notebook, and the ranks are processes of their own: "
        f"kf.notebook.push({name}={name}) gives it to them, or define it in a cell that begins with %%ranks."
    )


def _seconds(moment: datetime | str | None) -> float:
    """A moment in a record of ipyparallel, as seconds since the epoch."""
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment.replace("Z", "+00:00"))
    return moment.timestamp() if moment is not None else time.time()
