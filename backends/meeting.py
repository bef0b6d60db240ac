"""Do all processes make the calls that need all? A call that some make alone ends with an error on all of them.

Each process numbers what it enters that needs all: `fit`, each of its steps, `evaluate`, a save of split weights. Under
one number all must have entered the same. Before `fit`, `evaluate` and the like they meet in the job's store, so that
none is inside a collective with a process that is elsewhere: an engine would wait without end, or abort.

Who waits for another process asks now and then where that one is. A process that stays under one number for two looks
tells it, from a thread, with the last names before. The error needs proof: another name under one's own number, or a
higher number. A process that is busy with Python of its own has no new number, and is waited for.

Example: process 0 saves in a callback, and the others go on.

    process 0: 1 fit, 2 step, 3 step, 4 save         waits for all
    process 1: 1 fit, 2 step, 3 step, 4 step         told when it had been there for two looks: 4 is no save
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from keras_flow.backends.active import tensor_engine
from keras_flow.current import joining, last_call
from keras_flow.errors import FlowError, is_of_user

if TYPE_CHECKING:
    from keras_flow.backends.interface import Backend

#: entries whose names are kept, and told
_KEPT = 50
#: seconds between two looks at the own number, and between two questions where another process is
_LOOK_SECONDS = 1.0
#: seconds of a question for a text that may be missing
_ASK_SECONDS = 0.02
#: meetings after which process 0 removes what it wrote for them: no other one is so far behind
_LAG = 1000
#: name of a read of what is split over processes
READS = "reading a split variable or tensor"
#: name of a call by the program itself that reads what is split over processes
CALLS = "calling a model or layer with split weights"
#: name of what a process enters that comes to its end
_END = "the end of the program"


@dataclass(frozen=True)
class Entry:
    """What a process entered.

    Attributes:
        number: of the entries of this process, from 1.
        name: what it is, the same on all processes.
        place: the line of the user's program, for messages.
    """

    number: int
    name: str
    place: str

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


_entries: deque[Entry] = deque([Entry(0, "the beginning", "")], _KEPT)
#: methods of models that run: their steps have their names
_running: list[Entry] = []
#: keys that process 0 will remove
_written: deque[str] = deque()
_watching: threading.Event | None = None
_begun_anew = 0
#: all processes have met, and make the same calls
_are_together = False
#: number of the entry under which process 0 told something last, and how often of each thing
_told: tuple[int, Counter[str]] = (0, Counter())


def now() -> Entry:
    """What this process entered last."""
    return _entries[-1]


def enter(name: str, place: str | None = None, said: str = "") -> None:
    """All processes enter this, and none waits here for the others.

    Args:
        name: what it is.
        place: the line of the user's program; None: the line that is running.
        said: more for people, for whoever asks after a failure.
    """
    global _watching
    _entries.append(Entry(now().number + 1, name, _place() if place is None else place))
    last_call.enter(f"{said}{now()}")
    if _watching is None and tensor_engine().world().process_count > 1:
        _watching = threading.Event()
        threading.Thread(target=_watch, args=(_watching,), daemon=True, name="keras_flow-meeting").start()
        atexit.register(_leave)


def step(batch: int) -> None:
    """All processes enter a step of the method that runs; `batch` is its number in its data, from 0."""
    of = _running[-1] if _running else Entry(0, "a loop", "")
    enter(f"a step of {of.name}", of.place, f"batch {batch} (from 0) of its data, ")


def meet(name: str) -> None:
    """All processes enter this, and go on once all have.

    Raises:
        FlowError: another one entered something else, or did not come within KERAS_FLOW_TIMEOUT.
    """
    here = tensor_engine().world()
    if here.process_count == 1:
        return
    enter(name)
    if _are_together:
        return
    engine, key, reach = _store(), f"{_prefix()}/meeting/{now().number}", 1
    # the binomial tree of `agreement`, up to process 0
    while reach < here.process_count and not here.process_index & reach:
        if here.process_index + reach < here.process_count:
            theirs = f"{key}/{here.process_index + reach}"
            wait_for(theirs, here.process_index + reach)
            engine.delete_text(theirs)
        reach *= 2
    if here.process_index != 0:
        engine.put_text(f"{key}/{here.process_index}", "here")
        wait_for(f"{key}/0", 0)
        return
    engine.put_text(f"{key}/0", "all")
    _written.append(f"{key}/0")
    if len(_written) > _LAG:
        engine.delete_text(_written.popleft())


@contextmanager
def together() -> Iterator[None]:
    """Inside, all processes make the same calls after they have met, and need not meet again."""
    global _are_together
    outer, _are_together = _are_together, True
    try:
        yield
    finally:
        _are_together = outer


@contextmanager
def running(name: str, meets: bool) -> Iterator[None]:
    """Inside, a method of a model runs, and steps are its steps.

    Args:
        name: the method.
        meets: whether processes meet before it.
    """
    if tensor_engine().world().process_count == 1:
        yield
        return
    (meet if meets else enter)(name)
    _running.append(now())
    try:
        yield
    finally:
        _running.pop()


def begin_anew(times: int) -> None:
    """Count from the start, after processes were stopped in different places; `times` as in `agreement`."""
    global _begun_anew, _entries, _told
    _begun_anew = times
    _entries = deque([Entry(0, "the beginning", "")], _KEPT)  # never empty: a thread reads the last one
    _told = (0, Counter())
    _written.clear()


# ---- waiting


def wait_for(key: str, process: int, seconds: float | None = None, what: str = "") -> str:
    """A text of another process, asked for in pieces; between them this one looks where that one is.

    Args:
        key: of the text.
        process: who writes it.
        seconds: to wait in all; None: KERAS_FLOW_TIMEOUT.
        what: for what, in messages; empty: what this process entered last.

    Raises:
        FlowError: that process, or another one, is elsewhere, or did not write within this time.
    """
    seconds = joining.waiting_seconds() if seconds is None else seconds
    engine, until = _store(), time.monotonic() + seconds
    while True:
        try:
            return engine.get_text(key, min(seconds, _LOOK_SECONDS))
        except joining.SilentProcess as error:
            if time.monotonic() >= until:
                count = engine.world().process_count
                raise joining.SilentProcess(process, count, seconds, error.__cause__ or error) from error
        _tell()
        if verdict := _verdict():
            raise FlowError(verdict)
        theirs = _position_of(process)
        if theirs is None or theirs.number < now().number or (theirs.number == now().number and _is_same(theirs)):
            continue
        if theirs.number > now().number and (text := _asked(key)):
            return text  # written meanwhile
        raise FlowError(judged(what or str(now()), process, theirs))


def _is_same(theirs: Entry) -> bool:
    return theirs.name == now().name


def _position_of(process: int) -> Entry | None:
    """What a process entered under the number of this one, or the first after it; None where it told nothing."""
    entries = _told_by(process)
    if not entries:
        return None
    at = next((entry for entry in entries if entry.number == now().number), None)
    if at is not None and not _is_same(at):
        return at
    return next((entry for entry in entries if entry.number > now().number), entries[-1])


def _told_by(process: int) -> list[Entry]:
    told = _asked(f"{_prefix()}/at/{process}")
    return [Entry(*each) for each in json.loads(told)] if told else []


def _verdict() -> str:
    """The error that another process found; empty where there is none, or the calls that it is of are over."""
    number, _, text = _asked(f"{_prefix()}/verdict/0").partition("\n")
    return text if number and int(number) >= now().number else ""


def _asked(key: str) -> str:
    """A text of the store; empty where there is none."""
    try:
        return _store().get_text(key, _ASK_SECONDS)
    except Exception:  # it is not there, or the store is gone with its process
        return ""


def judged(mine: str, process: int, theirs: Entry) -> str:
    """The text of the error for all processes, which is also written for those that wait.

    Args:
        mine: what this process waits in.
        process: another one, which is elsewhere.
        theirs: what that one entered.
    """
    here = tensor_engine().world()
    word, words = ("rank", "ranks") if here.process_count == here.size else ("process", "processes")
    after = f"{word} {process} has come to {theirs}" if theirs.name == _END else f"{word} {process} is in {theirs}"
    text = (
        f"{mine} needs all {words}: {word} {here.process_index} called it, where {after}, so that each would wait for "
        f"the other without end. Every {word} must make the same calls: look for a branch that some of them take, such "
        "as `if kf.env.is_main_process():`, make the call before it, and print or log the result inside"
    )
    if _verdict():  # another process was first
        return text
    # all that are in one of these calls hear it; later ones do not, where the program goes on after the error
    last = max(entry.number for entry in (now(), theirs, *_told_by(process)))
    _put_again(f"{_prefix()}/verdict/0", f"{last}\n{text}")
    return text


# ---- what process 0 does for all


def first_tells(name: str, text: str) -> None:
    """In process 0: tell whoever asks what became of something that it does for all. Nobody needs to ask.

    Args:
        name: what it does, the same in all processes.
        text: what became of it.
    """
    key = _next_of_first(name)
    _store().put_text(key, f":{text}")
    _written.append(key)
    if len(_written) > _LAG:
        _store().delete_text(_written.popleft())


def ask_first(what: str, name: str) -> str:
    """Return what process 0 tells, in another process.

    Args:
        what: for what, in messages.
        name: as in `first_tells`.

    Raises:
        FlowError: process 0 does not do it: it is elsewhere, or silent.
    """
    return wait_for(_next_of_first(name), 0, what=f"{what} ({_place()})")[1:]


def _next_of_first(name: str) -> str:
    """The key of what process 0 tells next of this name in this line of the program.

    Counted from the last entry, since all processes are under its number; by name and line, since process 0 may do more
    than the others: what it does in a branch of its own is not taken for what all do. Not by path, which may differ (a
    time in it, or a folder of its own for each process that does not write).
    """
    global _told
    if _told[0] != now().number:
        _told = (now().number, Counter())
    thing = f"{zlib.crc32(f'{name} {_place()}'.encode()):08x}"
    _told[1][thing] += 1
    return f"{_prefix()}/told/{_told[0]}/{thing}/{_told[1][thing]}/0"


# ---- telling


def _watch(ended: threading.Event) -> None:
    """Tell the others where this process is, when it has been there for two looks."""
    seen = told = (-1, -1)
    while not ended.wait(_LOOK_SECONDS):
        place = (_begun_anew, now().number)
        if place == seen and place != told:
            _tell()
            told = place
        seen = place


def _tell() -> None:
    """Write where this process is, with the entries before."""
    key = f"{_prefix()}/at/{_store().world().process_index}"
    told = json.dumps([[entry.number, entry.name, entry.place] for entry in list(_entries)])
    _put_again(key, told)


def _put_again(key: str, text: str) -> None:
    engine = _store()
    with contextlib.suppress(Exception):  # the store is gone with its process
        with contextlib.suppress(Exception):
            engine.delete_text(key)  # of some engines a text cannot be written twice
        engine.put_text(key, text)


def _leave() -> None:
    """Tell at exit that nothing failed: who waits for this process will wait without end."""
    assert _watching is not None
    _watching.set()
    if getattr(sys, "last_value", None) is None:
        _entries.append(Entry(now().number + 1, _END, ""))
        _tell()


def _store() -> Backend:
    """The engine, whose store is asked only where processes are several; numpy, which has none, is one process."""
    return cast("Backend", tensor_engine())


def _prefix() -> str:
    return f"keras_flow/{_begun_anew}"


def _place() -> str:
    """The line of the user's program that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        if is_of_user(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
