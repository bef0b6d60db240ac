"""Do all processes make the calls that need all? A call that some make alone ends with an error on all of them.

Each process numbers what it enters that needs all: `fit`, each of its steps, `evaluate`, a save of split weights,
operators on global tensors, `kf.comm`. Under one number all must have entered the same (`whereabouts.py`). Before
`fit`, `evaluate` and the like they meet in the job's store, so that none is inside a collective with a process that is
elsewhere: an engine would wait without end, or abort.

Example: process 0 saves in a callback, and the others go on.

    process 0: 1 fit, 2 step, 3 step, 4 save         waits for all
    process 1: 1 fit, 2 step, 3 step, 4 step         told when it had been there for two looks: 4 is no save

A call that needs no others (`predict` with whole weights) begins with a meeting too, since all processes may make it
together. Where another process is in another call, or makes this one in another line, each process makes it alone and
takes its number back.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple

from keras_flow.backends.active import tensor_engine
from keras_flow.backends.rendezvous import whereabouts
from keras_flow.backends.rendezvous.whereabouts import (
    LOOK_SECONDS,
    Entry,
    asked,
    judged,
    prefix,
    store,
    tell,
    user_line,
)
from keras_flow.backends.rendezvous.whereabouts import count as count
from keras_flow.backends.rendezvous.whereabouts import enter as enter
from keras_flow.backends.rendezvous.whereabouts import group_of as group_of
from keras_flow.backends.rendezvous.whereabouts import now as now
from keras_flow.backends.rendezvous.whereabouts import waiting_for as waiting_for
from keras_flow.current import joining
from keras_flow.errors import FlowError

#: meetings after which process 0 removes what it wrote for them: no other one is so far behind
_LAG = 1000
#: name of a read of what is split over processes
READS = "reading a split variable or tensor"
#: name of a call by the program itself that reads what is split over processes
CALLS = "calling a model or layer with split weights"
#: what is said to those who meet
_ALL, _APART = "all", "apart"

#: methods of models that run, with their threads: their steps have their names
_running: list[tuple[Entry, int]] = []
#: keys that this process will remove
_written: deque[str] = deque()
#: all processes have met, and make the same calls
_are_together = False
#: number of the entry under which process 0 told something last, and how often of each thing
_told: tuple[int, Counter[str]] = (0, Counter())
#: processes -> meetings of these alone
_meetings: Counter[tuple[int, ...]] = Counter()


class _Apart(Exception):
    """Another process is elsewhere, and is not needed."""


def note(name: str) -> None:
    """All processes enter an operator that may need no other one: they are compared when they next meet."""
    if tensor_engine().world().process_count > 1:
        enter(name)


def step(batch: int) -> None:
    """All processes enter a step of the method that runs; `batch` is its number in its data, from 0."""
    of = _running[-1][0] if _running else Entry(0, "a loop", "")
    enter(f"a step of {of.name}", of.place, f"batch {batch} (from 0) of its data, ", waits=True)


def meet(name: str, may_leave: bool = False, waits: bool = False) -> bool:
    """All processes enter this, and go on once all have.

    Args:
        name: what it is.
        may_leave: the others are not needed.
        waits: the engine will wait for the others inside.

    Returns:
        Whether all have entered it in the same line; always True where they are needed.

    Raises:
        FlowError: another one that is needed entered something else, or did not come within KERAS_FLOW_TIMEOUT.
    """
    here = tensor_engine().world()
    if here.process_count == 1:
        return True
    enter(name, waits=waits, may_leave=may_leave and not _are_together)
    if _are_together:
        return True
    key = f"{prefix()}/meeting/{now().number}"
    if may_leave:  # of one line: others may call it elsewhere
        key += f"/{zlib.crc32(str(now()).encode()):08x}"
    try:
        _come_together(key, range(here.process_count), may_leave)
    except _Apart:
        if here.process_index:  # that of process 0 is what was decided, which the others may still ask for
            with contextlib.suppress(Exception):
                store().delete_text(f"{key}/{here.process_index}")
        whereabouts.take_back()
        return False
    if may_leave:
        whereabouts.stay()
    return True


def meet_some(name: str, processes: Sequence[int]) -> None:
    """Some processes make a call that needs these alone, which go on once all of them have come.

    Raises:
        FlowError: another one makes another call, or is in what needs all.
    """
    members = tuple(processes)
    _meetings[members] += 1
    meeting = f"{whereabouts.group_of(members)}-{_meetings[members]}"
    entry = Entry(0, name, user_line(), zlib.crc32(name.encode()))
    with whereabouts.waiting_for(members, name, in_engine=False):
        _come_together(f"{prefix()}/meeting-of/{meeting}", members, False, entry, meeting)


def below(place: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield level and place of each process that one hears in a binomial tree, up to the first; then it tells on.

    None hears more than log2(n) others, rounded up, and the tree is as many levels high.

    Example: 1, 3 and 5 tell 0, 2 and 4; then 2 tells 0, of itself and 3; then 4 tells 0, of itself and 5.

        >>> [list(below(place, 6)) for place in range(6)]
        [[(0, 1), (1, 2), (2, 4)], [], [(0, 3)], [], [(0, 5)], []]
    """
    level = 0
    while 1 << level < count and not place & 1 << level:
        if place + (1 << level) < count:
            yield level, place + (1 << level)
        level += 1


def _come_together(
    key: str, members: Sequence[int], may_leave: bool, entry: Entry | None = None, meeting: str = "all"
) -> None:
    """Meet by a binomial tree, up to the first member, which tells all.

    Args:
        key: how the keys of this meeting begin.
        members: the processes that meet.
        may_leave: see `meet`.
        entry: what they meet for; None: what this process entered last.
        meeting: the name under which an error is told to those that meet.
    """
    place, first = members.index(tensor_engine().world().process_index), f"{key}/{members[0]}"
    for other in [members[each] for _, each in below(place, len(members))]:
        text = _waited_for(f"{key}/{other}", other, entry, first if may_leave else None, meeting)
        theirs = Entry(*json.loads(text))
        if theirs.digest != (entry or now()).digest:
            raise _apart_from(other, theirs, entry, meeting)
        store().delete_text(f"{key}/{other}")
    if place:
        store().put_text(f"{key}/{members[place]}", json.dumps(astuple(entry or now())))
        said = _waited_for(first, members[0], entry, first if may_leave else None, meeting)
    else:
        said = store().first_text(first, _ALL)
        _remove_later(first)
    if said == _APART:
        raise _Apart


def _waited_for(key: str, process: int, entry: Entry | None, leaves: str | None, meeting: str) -> str:
    """`wait_for`, of a meeting; where the others are not needed, of `_APART` at the key `leaves`.

    What is there first at this key holds: that all have come, or that each does it alone.
    """
    if leaves is None:
        return wait_for(key, process, what="" if entry is None else str(entry), meeting=meeting)
    until = time.monotonic() + joining.waiting_seconds()
    while True:
        try:
            return store().get_text(key, LOOK_SECONDS)
        except joining.SilentProcess:
            tell()
        if asked(leaves) == _APART:
            raise _Apart
        if whereabouts.apart(process) or time.monotonic() > until:
            said = store().first_text(leaves, _APART)
            _remove_later(leaves)
            if said == _APART:
                raise _Apart


def _apart_from(process: int, theirs: Entry, entry: Entry | None, meeting: str) -> FlowError:
    """The error where another process came for something else, or after other calls."""
    until = time.monotonic() + 6 * LOOK_SECONDS
    # it waits for the first of all, and tells its last calls while it does
    while entry is None and time.monotonic() < until:
        if whereabouts.elsewhere(process) is not None:
            break
        time.sleep(LOOK_SECONDS / 2)
    return judged(process, theirs, "" if entry is None else str(entry), meeting).to_raise()


def _remove_later(key: str) -> None:
    _written.append(key)
    if len(_written) > _LAG:
        with contextlib.suppress(Exception):  # another one may have removed it
            store().delete_text(_written.popleft())


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
def running(name: str, meets: bool, may_leave: bool = False) -> Iterator[bool]:
    """Inside, a method of a model runs, and steps are its steps.

    Args:
        name: the method.
        meets: whether processes meet before it; they do before all that runs in a callback.
        may_leave: the others are not needed.

    Yields:
        Whether all processes run it; otherwise this one does it alone.
    """
    if tensor_engine().world().process_count == 1:
        yield True
        return
    if _running and _running[-1][1] != threading.get_ident():
        raise FlowError(
            f"{name} was called in one thread while {_running[-1][0].name} runs in another, as where a data set calls "
            "it: threads of several processes make their calls in any order, and all processes must make the same "
            f"calls. Call {name} before {_running[-1][0].name}, and give the data its results"
        )
    if not (meets or _running):
        enter(name, waits=True)
    elif not meet(name, may_leave):
        yield False
        return
    _running.append((now(), threading.get_ident()))
    try:
        yield True
    finally:
        _running.pop()
        whereabouts.leave_engine()


def begin_anew(times: int) -> None:
    """Count from the start, after processes were stopped in different places.

    Args:
        times: how often this was done before, the same in all processes.
    """
    global _told
    whereabouts.begin_anew(times)
    _told = (0, Counter())
    _meetings.clear()
    _written.clear()


# ---- waiting


def wait_for(key: str, process: int, seconds: float | None = None, what: str = "", meeting: str = "all") -> str:
    """A text of another process, asked for in pieces; between them this one looks where that one is.

    Args:
        key: the key of the text.
        process: who writes it.
        seconds: to wait in all; None: KERAS_FLOW_TIMEOUT.
        what: for what, in messages; empty: what this process entered last.
        meeting: the name under which an error is told to those that wait.

    Raises:
        FlowError: that process, or another one, is elsewhere, or did not write within this time.
    """
    seconds = joining.waiting_seconds() if seconds is None else seconds
    engine, until = store(), time.monotonic() + seconds
    with whereabouts.in_store():
        while True:
            try:
                return engine.get_text(key, min(seconds, LOOK_SECONDS))
            except joining.SilentProcess as error:
                if time.monotonic() >= until:
                    count = engine.world().process_count
                    raise joining.SilentProcess(process, count, seconds, error.__cause__ or error) from error.__cause__
            tell()
            if found := whereabouts.verdict(meeting):
                raise found.to_raise()
            theirs = whereabouts.elsewhere(process)
            if theirs is None:
                continue
            if theirs.number > now().number and (text := asked(key)):
                return text  # written meanwhile
            raise judged(process, theirs, what, meeting).to_raise()


# ---- what process 0 does for all


def first_tells(name: str, text: str) -> None:
    """Tell, in process 0, whoever asks what became of something that it does for all. Nobody needs to ask.

    Args:
        name: what it does, the same in all processes.
        text: what became of it.
    """
    key = _next_of_first(name)
    store().put_text(key, f":{text}")
    _remove_later(key)


def ask_first(what: str, name: str) -> str:
    """Return what process 0 tells, in another process.

    Args:
        what: for what, in messages.
        name: as in `first_tells`.

    Raises:
        FlowError: process 0 does not do it: it is elsewhere, or silent.
    """
    return wait_for(_next_of_first(name), 0, what=f"{what} ({user_line()})")[1:]


def _next_of_first(name: str) -> str:
    """The key of what process 0 tells next of this name in this line of the program.

    Counted from the last entry, since all processes are under its number; by name and line, since process 0 may do more
    than the others: what it does in a branch of its own counts apart. Not by path, which may differ (a
    time in it, or a folder of its own for each process that does not write).
    """
    global _told
    if _told[0] != now().number:
        _told = (now().number, Counter())
    thing = f"{zlib.crc32(f'{name} {user_line()}'.encode()):08x}"
    _told[1][thing] += 1
    return f"{prefix()}/told/{_told[0]}/{thing}/{_told[1][thing]}/0"
