"""Finds processes that wait for each other in different calls: each numbers the calls that need all processes.

Where a process stays in one call for two looks, a thread of it tells the call's number and name, with the last names
before. So a job that runs well sends nothing. An error needs proof: another process has another name under the same
number, or a higher number. A process that is busy with Python code of its own has no new number, and is waited for.

Example: process 0 waits in its third call, `x.numpy()`. Process 1 tells `model.save` as its third: that is the proof,
and the error names both. If process 1 tells only two calls, process 0 goes on waiting.

Calls of some processes have no number. These count them, and the letters that they have sent: a process under a higher
number is no proof where it has done before what this one waits for. It is one where this process waits in the engine,
since all know its call, and the other one in the store, to compare the call that it makes as its so-and-so-many-th.

A program that waits in the store (`meeting.py`) raises the error itself. One that waits inside an engine's collective
cannot: its thread prints the error and ends the process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from keras_flow.backends.active import tensor_engine
from keras_flow.current import last_call
from keras_flow.errors import FlowError, is_of_user

if TYPE_CHECKING:
    from keras_flow.backends.interface import Backend

#: entries whose names are kept, and told
_KEPT = 50
#: seconds between two looks at the own number, and between two questions where another process is
LOOK_SECONDS = 0.5
#: looks under one number after which a process tells where it is, and after which it asks where the others are
_TELLS, _ASKS = 2, 6
#: seconds of a question for a text that may be missing
_ASK_SECONDS = 0.02
#: name of what a process enters that comes to its end
END = "the end of the program"


@dataclass(frozen=True)
class Entry:
    """A call that a process entered and that needs all processes.

    Attributes:
        number: which of this process's entries it is, from 1.
        name: what it is, the same on all processes.
        place: the line of the user's program, for messages.
        digest: a checksum of the names of all entries up to this one. It is 0 where the processes begin to count, and
            where they begin anew after a failure.
        may_leave: it may turn out that the process does this alone, and takes the entry back.
    """

    number: int
    name: str
    place: str
    digest: int = 0
    may_leave: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


_entries: deque[Entry] = deque([Entry(0, "the beginning", "")], _KEPT)
#: the thread that tells the others, and what ends it
_watching: tuple[threading.Thread, threading.Event] | None = None
_begun_anew = 0
#: texts that this process has exchanged with all (`agreement.py`), which are no entries
_exchanges = 0
#: the entry in which the program waits inside the engine; none where it waits in the store, or runs Python
_inside: Entry | None = None
#: what this process has done that only some take part in, such as the calls of a group: how often
_done: Counter[str] = Counter()
_counting = threading.Lock()


@dataclass(frozen=True)
class OfSome:
    """A call of some processes, in which this one waits.

    Attributes:
        name: what it is.
        processes: these.
        what: as which it is counted.
        missing: how much more of that these must have done than this process.
        in_engine: it waits inside the engine.
    """

    name: str = ""
    processes: tuple[int, ...] = ()
    what: str = ""
    missing: int = 0
    in_engine: bool = False


_of_some = OfSome()


# ---- what this process enters


def now() -> Entry:
    """Return the last entry of this process."""
    return _entries[-1]


def enter(name: str, place: str | None = None, said: str = "", waits: bool = False, may_leave: bool = False) -> None:
    """All processes enter this, and none waits here for the others.

    Args:
        name: what it is.
        place: the line of the user's program; None: the line that is running.
        said: more for people, for whoever asks after a failure.
        waits: the engine will wait for the others inside.
        may_leave: see `Entry`.
    """
    global _watching, _inside
    before = now()
    digest = zlib.crc32(name.encode(), before.digest)
    entry = Entry(before.number + 1, name, user_line() if place is None else place, digest, may_leave)
    _entries.append(entry)
    _inside = entry if waits else None
    last_call.enter(f"{said}{entry}")
    if _watching is None and tensor_engine().world().process_count > 1:
        ended = threading.Event()
        _watching = threading.Thread(target=_watch, args=(ended,), daemon=True, name="keras_flow-meeting"), ended
        _watching[0].start()
        atexit.register(_leave)


def take_back() -> None:
    """This process does alone what it entered last, as if it had not been entered."""
    _entries.pop()  # never the only one: what was entered before it is still there


def stay() -> None:
    """All are in what this process entered last, and it cannot be taken back any more."""
    _entries[-1] = replace(now(), may_leave=False)


def next_exchange() -> int:
    """This process exchanges a text with all, and needs them for it; the number of it, from 1."""
    global _exchanges
    _exchanges += 1
    return _exchanges


def leave_engine() -> None:
    """The program runs Python again: nothing of what it entered waits inside the engine."""
    global _inside
    _inside = None


@contextmanager
def in_store() -> Iterator[None]:
    """Inside, the program waits in the store, and raises an error itself; after it, it goes on as before."""
    global _inside
    inside, _inside = _inside, None
    try:
        yield
    finally:
        _inside = inside


def count(what: str) -> None:
    """This process does something that only some take part in, which has no number."""
    with _counting:
        _done[what] += 1


@contextmanager
def waiting_for(
    processes: tuple[int, ...], name: str, what: str = "", missing: int = 0, in_engine: bool = True
) -> Iterator[None]:
    """Inside, the program waits for some processes, which do not number their calls with all; see `OfSome`."""
    global _of_some
    _of_some = OfSome(name, processes, what or group_of(processes), missing, in_engine)
    try:
        yield
    finally:
        _of_some = OfSome()


def times_begun_anew() -> int:
    """How often the processes have begun anew, the same in all of them."""
    return _begun_anew


def begin_anew(times: int) -> None:
    """Count from the start, after processes were stopped in different places; `times` as in `meeting`."""
    global _begun_anew, _exchanges
    _begun_anew, _exchanges = times, 0
    _count_from(0, "the beginning")


def _count_from(number: int, name: str) -> None:
    global _entries, _inside
    _entries, _inside = deque([Entry(number, name, "")], _KEPT), None  # never empty: a thread reads the last one


def user_line(frame: FrameType | None = None) -> str:
    """The line of the user's program that is running, or of a frame."""
    frame = frame or sys._getframe(2)
    while frame is not None:
        if is_of_user(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _with_line(entry: Entry) -> Entry:
    """Return the entry with the line at which the program waits. A loop does not look up the line of each call."""
    main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    return entry if entry.place or not entry.number else replace(entry, place=user_line(frame))


# ---- what processes tell each other


def store() -> Backend:
    """The engine, whose store is asked only where processes are several; numpy, which has none, is one process."""
    return cast("Backend", tensor_engine())


def prefix() -> str:
    """How the keys of the store begin since processes last began to count."""
    return f"keras_flow/{_begun_anew}"


def asked(key: str) -> str:
    """A text of the store; empty where there is none."""
    try:
        return store().get_text(key, _ASK_SECONDS)
    except Exception:  # it is not there, or the store is gone with its process
        return ""


def tell() -> None:
    """Write where this process is, with the entries before."""
    key = f"{prefix()}/at/{store().world().process_index}"
    *before, last = list(_entries)
    # read after the entries: what was done before the last of them is counted
    with _counting:
        done, of_some = dict(_done), _of_some
    entries = [astuple(entry) for entry in (*before, _with_line(last))]
    in_engine = [of_some.name, of_some.what, done.get(of_some.what, 0)] if of_some.in_engine else ["", "", 0]
    _put_again(key, json.dumps([_exchanges, entries, done, in_engine]))


def told_by(process: int) -> tuple[int, list[Entry], dict[str, int], list[Any]]:
    """Return what another process told last.

    Returns:
        How many texts it has exchanged; its last entries; what it has done that only some take part in, and how often;
        the call of some in which it waits inside the engine: its name, as what it is counted, and its number.
    """
    told = asked(f"{prefix()}/at/{process}")
    exchanges, entries, done, in_engine = json.loads(told) if told else (0, [], {}, ["", "", 0])
    return exchanges, [Entry(*each) for each in entries], done, in_engine


def elsewhere(process: int) -> Entry | None:
    """Return the first entry of another process that is proven to differ from this one's; None without a proof."""
    _, entries, done, (name, what, number) = told_by(process)
    theirs, own = _not_mine(entries, list(_entries))[1], _of_some
    here = _done[own.what]
    if theirs is not None and own.in_engine and theirs.number > now().number:
        # it may have done what this one waits for, and gone on
        return theirs if done.get(own.what, 0) < here + own.missing else None
    if theirs is None and not own.in_engine and what and (what, number) == (own.what, here):
        return Entry(0, name, "")  # in a call that all of them know, where this one compares its own
    return theirs


def apart(process: int) -> bool:
    """Whether another process is where this one is not: elsewhere, or in another line of what may be done alone.

    It is elsewhere, too, where it exchanges a text that this one has not come to, as `fit` does before an epoch and at
    its end. Its entries and those of this process may be told before one of them is taken back; either way each can go
    alone.
    """
    exchanges, theirs, *_ = told_by(process)
    mine = now()
    if not theirs:
        return False
    if exchanges > _exchanges:
        return True
    same = next((entry for entry in theirs if entry.number == mine.number), None)
    if same is None:
        return theirs[-1].number > mine.number
    return (same.name, same.place) != (mine.name, mine.place)


def _not_mine(theirs: list[Entry], mine: list[Entry]) -> tuple[Entry, Entry | None]:
    """The first entries that differ, this process's and the other's; the last own one and None where none is proven.

    Example:
        >>> fit, save = Entry(2, "fit", "", 7), Entry(2, "save", "", 8)
        >>> begin = Entry(1, "begin", "", 1)
        >>> _not_mine([begin, save], [begin, fit])[1].name
        'save'
        >>> _not_mine([begin], [begin, fit])[1] is None
        True
    """
    here = {entry.number: entry for entry in mine}
    for entry in theirs:
        own = here.get(entry.number)
        if own is not None and own.digest != entry.digest and own.digest and entry.digest:
            return (own, None if entry.may_leave else entry)
    # under a higher number: it has left what this one waits in
    further = next((entry for entry in theirs if entry.number > mine[-1].number), None)
    return mine[-1], None if further is None or further.may_leave else further


def group_of(processes: Sequence[int]) -> str:
    """A name of some processes, for keys of the store."""
    return f"{_begun_anew}-{zlib.crc32(repr(tuple(processes)).encode()):08x}"


def verdict(meeting: str = "all") -> Verdict | None:
    """The error that another process found; None where there is none, or the calls that it is of are over.

    Args:
        meeting: the name of a meeting of some processes, of which others do not hear. Each of their calls is another
            meeting.
    """
    numbers, _, text = asked(f"{prefix()}/verdict-of/{meeting}/0").partition("\n")
    if not numbers:
        return None
    first, last = map(int, numbers.split())
    is_over = meeting == "all" and (not now().digest or last < now().number)
    return None if is_over else Verdict(text, first, last)


class Verdict(FlowError):
    """The error of all processes that are in different calls.

    Whoever raises it goes on under the last number of these calls, so that all count alike where the program goes on.

    Attributes:
        first: the number under which the calls began to differ.
        last: the highest number that one of the processes had come to.
    """

    def __init__(self, text: str, first: int, last: int):
        super().__init__(text)
        self.first, self.last = first, last

    def to_raise(self) -> FlowError:
        """The error, in the process that raises it."""
        _count_from(self.last, "an error")
        return FlowError(str(self))


def judged(process: int, theirs: Entry, what: str = "", meeting: str = "all") -> Verdict:
    """The error for all processes that meet, which is also written for those that wait.

    Args:
        process: another one, which is elsewhere.
        theirs: what that one entered.
        what: what this process waits in; empty: what it entered last.
        meeting: as in `verdict`.
    """
    here = tensor_engine().world()
    _, told, *_ = told_by(process)
    mine, other = _not_mine(told, list(_entries))
    if not what and other is not None and mine.number < now().number:  # they differ since an earlier one
        what, theirs = str(mine), other
    word, words = ("rank", "ranks") if here.process_count == here.size else ("process", "processes")
    after = f"{word} {process} has come to {theirs}" if theirs.name == END else f"{word} {process} is in {theirs}"
    said = f"{word} {here.process_index} called it, where {after}, so that each would wait for the other without end"
    if not what and (theirs.number, theirs.name) == (now().number, now().name):
        other = theirs
    if other is not None and (mine.number, mine.name) == (other.number, other.name):  # only what was before differs
        what = str(now())
        said = f"{word} {here.process_index} and {word} {process} made different calls, more than {_KEPT} before it"
    text = (
        f"{what or _with_line(now())} needs all {words}: {said}. Every {word} must make the same calls: look for a "
        "branch that some of them take, such as `if kf.env.is_main_process():`, make the call before it, and print or "
        "log the result inside"
    )
    # all that are in one of these calls hear it; later ones do not, where the program goes on after the error
    last = max(entry.number for entry in (now(), theirs, *told))
    # an entry that is numbered is of all: those who wait in it for this process hear that it does not come
    for each in dict.fromkeys([meeting, "all"] if theirs.number else [meeting]):
        if not verdict(each):  # another process was first
            _put_again(f"{prefix()}/verdict-of/{each}/0", f"{mine.number} {last}\n{text}")
    return Verdict(text, mine.number, last)


def _put_again(key: str, text: str) -> None:
    engine = store()
    with contextlib.suppress(Exception):  # the store is gone with its process
        with contextlib.suppress(Exception):
            engine.delete_text(key)  # of some engines a text cannot be written twice
        engine.put_text(key, text)


# ---- the thread


def _watch(ended: threading.Event) -> None:
    """Tell the others where this process is, and end it where it waits inside the engine without end."""
    seen, looks = now(), 0
    while not ended.wait(LOOK_SECONDS):
        entry = now()
        seen, looks = entry, looks + 1 if entry is seen else 0
        if looks == _TELLS:
            tell()
        if looks >= _ASKS and looks % _TELLS == 0 and _is_inside(entry):
            partners = _of_some.processes
            error = verdict(group_of(partners) if partners else "all") or _proof()
            # who waits in the store, too, raises it
            is_mine = error is not None and error.first <= entry.number
            if is_mine and not ended.wait(2 * LOOK_SECONDS) and _is_inside(entry):
                print(f"keras_flow.FlowError: {error}", file=sys.stderr, flush=True)
                os._exit(1)


def _is_inside(entry: Entry) -> bool:
    return entry is now() and (_inside is entry or _of_some.in_engine)


def _proof() -> Verdict | None:
    """The error, where processes that this one waits for are elsewhere; None where that is not proven.

    All but process 0 look at process 0, which hears of it: so many ranks that wait do not all ask all.
    """
    here = tensor_engine().world().process_index
    name, partners = _of_some.name, _of_some.processes
    for process in partners or (0,):
        theirs = elsewhere(process) if process != here else None
        # a step may be left before the others have entered it: only calls of some processes go by a higher number
        if theirs is not None and (partners or theirs.number <= now().number):
            return judged(process, theirs, name, group_of(partners) if partners else "all")
    return None


def _leave() -> None:
    """Tell at exit that nothing failed: who waits for this process will wait without end."""
    assert _watching is not None
    thread, ended = _watching
    ended.set()
    thread.join(1.0)  # it may be telling what was before the end, and would write that after it
    if getattr(sys, "last_value", None) is None:
        before = now()
        _entries.append(Entry(before.number + 1, END, "", zlib.crc32(END.encode(), before.digest)))
        tell()
