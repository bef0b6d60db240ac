"""Finds the rank of each event in TensorFlow's profile. An event of a virtual CPU does not name its device.

DTensor starts a program on each device from a thread of that device. A second thread runs the program.

- A starting thread shows its device: each but that of CPU:0 sends an argument to CPU:0 before it starts.
- A running thread shows none. But a program runs after its start, and only one assignment of running threads to
  starting threads has this order in all programs of a profile.
- Work that an event leaves for another thread has a number, and the event there names that number as its cause.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_DEVICE = re.compile(r"^_Send input \d+ from \S*/device:[A-Z]+:(\d+) to ")
#: assignments of threads that are looked at; where there are more, too little is known
_MOST_MATCHINGS = 1000
_STARTERS, _RUNNERS = "parallel_device_execute", "eager_async_executor"


@dataclass(frozen=True)
class Event:
    """An event as the profile has it.

    Attributes:
        line: name of its thread.
        name: what ran.
        begin: microseconds.
        duration: microseconds.
        stats: what else is told.
    """

    line: str
    name: str
    begin: float
    duration: float
    stats: Mapping[str, object] = field(hash=False, compare=False)

    @property
    def end(self) -> float:
        """Microseconds."""
        return self.begin + self.duration


@dataclass(frozen=True)
class Run:
    """One run of a program on one device.

    Attributes:
        device: its number.
        program: name of the function.
        start: the event that started it.
    """

    device: int
    program: str
    start: Event


class Causes:
    """Leads from events to the run of the program that they belong to.

    Args:
        events: the events of the whole profile.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        lines: dict[str, list[Event]] = {}
        for event in events:
            lines.setdefault(event.line, []).append(event)
        for found in lines.values():
            found.sort(key=lambda event: (event.begin, -event.duration))
        self._producers = {
            (event.stats["_pt"], event.stats["_p"]): event
            for event in events
            if "_p" in event.stats and "_pt" in event.stats
        }
        self._around: dict[int, tuple[Event, ...]] = {}
        for found in lines.values():
            self._nest(found)
        #: thread that runs programs -> when they began to run, and the runs
        self._runs: dict[str, tuple[list[float], list[Run]]] = {}
        self._devices: dict[str, int] = {}
        self._assign(lines)

    def run_of(self, event: Event) -> Run | None:
        """The run of a program that an event belongs to; None where it is not known."""
        seen: set[int] = set()
        todo = [event]
        while todo:
            here = todo.pop()
            if here.line in self._runs:
                begins, runs = self._runs[here.line]
                place = bisect.bisect_right(begins, here.begin) - 1
                return runs[place] if place >= 0 else None
            for outer in self._around[id(here)]:  # the innermost last, which is looked at first
                cause = self._producers.get((outer.stats.get("_ct"), outer.stats.get("_c")))
                if cause is not None and id(cause) not in seen:
                    seen.add(id(cause))
                    todo.append(cause)
        return None

    def device_of(self, event: Event) -> int | None:
        """The number of the device that an event ran for; None where it is not known."""
        if event.line in self._devices:
            return self._devices[event.line]
        run = self.run_of(event)
        return run.device if run is not None else None

    def _nest(self, found: Sequence[Event]) -> None:
        """Note of each event of a thread which events with a cause are around it, itself included."""
        around: list[Event] = []
        for event in found:
            while around and around[-1].end < event.end:
                around.pop()
            if "_c" in event.stats:
                around.append(event)
            self._around[id(event)] = tuple(around)

    def _assign(self, lines: Mapping[str, Sequence[Event]]) -> None:
        starters = {name: _starts(found) for name, found in lines.items() if name.startswith(_STARTERS)}
        runners = {name: _begins(found) for name, found in lines.items() if name.startswith(_RUNNERS)}
        # the threads of one mesh start the same programs
        for _, group in itertools.groupby(
            sorted(starters, key=lambda name: _programs(starters[name])), key=lambda name: _programs(starters[name])
        ):
            names = list(group)
            devices = _devices({name: lines[name] for name in names})
            assigned = _runners_of({name: starters[name] for name in names}, runners)
            for name in names:
                if name in devices:
                    self._devices[name] = devices[name]
                    if name in assigned:
                        runner = assigned[name]
                        runs = [Run(devices[name], program, event) for event, program, _ in starters[name]]
                        self._runs[runner] = (runners[runner], runs)


Start = tuple[Event, str, float]  # the event, the program, and when the run may have begun at the earliest


def _starts(found: Sequence[Event]) -> list[Start]:
    starts = []
    for event in found:
        if event.name == "EagerExecute" and event.stats.get("is_func"):
            last = max(
                (
                    inner.begin
                    for inner in found
                    if event.begin <= inner.begin <= event.end
                    and (inner.name == "ValidateInputTypeAndPlacement" or _DEVICE.match(inner.name))
                ),
                default=event.begin,
            )
            starts.append((event, str(event.stats.get("eager_op", "")), last))
    return starts


def _programs(starts: Sequence[Start]) -> tuple[str, ...]:
    return tuple(program for _, program, _ in starts)


def _begins(found: Sequence[Event]) -> list[float]:
    """When programs began to run; other operations of these threads are no programs."""
    runs = [event.begin for event in found if event.name == "FunctionRun"]
    begins = []
    for event in found:
        if event.name == "EagerKernelExecute":
            place = bisect.bisect_left(runs, event.begin)
            if place < len(runs) and runs[place] <= event.end:
                begins.append(event.begin)
    return begins


def _devices(lines: Mapping[str, Sequence[Event]]) -> dict[str, int]:
    """The device of each thread that starts programs: told by what it sends, and CPU:0's sends nothing."""
    told = {
        name: {int(match[1]) for event in found if (match := _DEVICE.match(event.name))}
        for name, found in lines.items()
    }
    devices = {name: min(numbers) for name, numbers in told.items() if len(numbers) == 1}
    silent = [name for name, numbers in told.items() if not numbers]
    if len(silent) == 1 and 0 not in devices.values():
        devices[silent[0]] = 0
    return devices if len(set(devices.values())) == len(devices) else {}


def _runners_of(starters: Mapping[str, Sequence[Start]], runners: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Which thread runs what each one starts.

    One that began to run something before it was started is out of the question. What is then true of every assignment
    that is left is told, and nothing else: a rank's lane would else show another one's operations.
    """
    possible = {
        starter: [
            runner
            for runner, begins in runners.items()
            if len(begins) == len(starts) > 0
            and all(begin >= start for (*_, start), begin in zip(starts, begins, strict=True))
        ]
        for starter, starts in starters.items()
    }
    found = list(itertools.islice(_matchings(possible), _MOST_MATCHINGS + 1))
    if not found or len(found) > _MOST_MATCHINGS:
        return {}
    first, *others = found
    return {starter: runner for starter, runner in first.items() if all(each[starter] == runner for each in others)}


def _matchings(possible: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Every assignment of a runner of its own to each starter."""
    if not possible:
        yield {}
        return
    starter = min(possible, key=lambda name: len(possible[name]))
    for runner in possible[starter]:
        rest = {name: [one for one in legal if one != runner] for name, legal in possible.items() if name != starter}
        for matching in _matchings(rest):
            yield {starter: runner, **matching}
