"""Short texts that the processes of a job tell each other beside tensors, through the engine's key-value store.

Every process calls these functions in the same order; a number that all of them count tells the exchanges apart.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

from keras_flow.backends.active import backend
from keras_flow.backends.rendezvous import meeting, whereabouts
from keras_flow.current import joining
from keras_flow.errors import FlowError

#: process 0 removes what it said so many exchanges ago: no other one is so far behind
_LAG = 1000


def exchange(text: str) -> list[str]:
    """The texts of all processes, in their order, in each. Short facts only: what all read grows with the processes.

    Raises:
        FlowError: a process did not say anything within KERAS_FLOW_TIMEOUT.
    """
    return json.loads(_merged(json.dumps([text]), lambda one, other: json.dumps(json.loads(one) + json.loads(other))))


def differ(facts: Mapping[str, object], balance: int = 0) -> bool:
    """Whether processes that state a fact state different ones, or the balances of all do not add up to 0.

    What a process reads does not grow with the number of processes, since facts that are equal are said once.

    Args:
        facts: name -> numbers, texts, None, and lists of them. A process need not state what another one does.
        balance: an int; the sum over the processes is taken modulo 2**64.

    Raises:
        FlowError: a process did not say anything within KERAS_FLOW_TIMEOUT.
    """
    names, total = _stated(facts, balance)
    return bool(names or total)


def differing(facts: Mapping[str, object]) -> list[str]:
    """Names of the facts of which processes state different ones, in all of them; see `differ`.

    Raises:
        FlowError: a process did not say anything within KERAS_FLOW_TIMEOUT.
    """
    return _stated(facts, 0)[0]


def _stated(facts: Mapping[str, object], balance: int) -> tuple[list[str], int]:
    """Names of the facts that differ, and the sum of the balances."""

    def merge(one: str, other: str) -> str:
        facts, balance, differ = json.loads(one)
        theirs, their_balance, they_differ = json.loads(other)
        differ = {
            *differ,
            *they_differ,
            *(name for name in facts.keys() & theirs.keys() if facts[name] != theirs[name]),
        }
        return json.dumps([facts | theirs, (balance + their_balance) % 2**64, sorted(differ)])

    def judge(said: str) -> str:
        _, balance, names = json.loads(said)
        return json.dumps([names, balance])

    names, total = json.loads(_merged(json.dumps([dict(facts), balance % 2**64, []]), merge, judge))
    return names, total


def first_failure(text: str) -> str:
    """The first text of a process that is not empty, in all of them; what they read does not grow with their number.

    Raises:
        FlowError: a process did not say anything within KERAS_FLOW_TIMEOUT.
    """
    return _merged(text, lambda one, other: one or other)


def _merged(text: str, merge: Callable[[str, str], str], judge: Callable[[str], str] = str) -> str:
    """The texts of all processes, merged in their order, in each: by the tree of `meeting.below`.

    Args:
        text: what this process says.
        merge: (text of some processes, text of those that follow) -> text of both.
        judge: what process 0 tells all of the text that is merged of all. It must not raise, or they wait for it.

    Raises:
        FlowError: a process did not say anything within KERAS_FLOW_TIMEOUT.
    """
    engine, here, key = backend(), backend().world(), _key(whereabouts.next_exchange())
    if here.process_count == 1:
        return judge(text)
    for level, other in meeting.below(here.process_index, here.process_count):
        text = merge(text, _told(f"{key}/{other}", other, _patience(level)))
        engine.delete_text(f"{key}/{other}")
    if here.process_index != 0:
        _tell(f"{key}/{here.process_index}", text)
    return first_says(judge(text) if here.process_index == 0 else "")


def _patience(level: int) -> float:
    """Seconds to wait for one who may wait for others: longer the more levels are below it.

    So that the first to give up is the one that waits for the silent process itself, and names it.
    """
    return joining.waiting_seconds() + min(1.0, joining.waiting_seconds() / 10) * level


def first_says(text: str) -> str:
    """The text of process 0, in all of them.

    Raises:
        FlowError: process 0 did not say anything within KERAS_FLOW_TIMEOUT.
    """
    engine = backend()
    if engine.world().process_count == 1:
        return text
    number = whereabouts.next_exchange()
    key = _key(number)
    if engine.world().process_index != 0:
        return _told(f"{key}/0", 0, _patience(engine.world().process_count.bit_length()))
    _tell(f"{key}/0", text)
    engine.delete_text(f"{_key(number - _LAG)}/0")
    return text


def _tell(key: str, text: str) -> None:
    backend().put_text(key, f"{json.dumps(astuple(meeting.now()))}\n{text}")


def _told(key: str, process: int, seconds: float) -> str:
    """Wait for the text of another process, and raise where that process is in another call than this one."""
    head, _, text = meeting.wait_for(key, process, seconds).partition("\n")
    theirs, mine = meeting.Entry(*json.loads(head)), meeting.now()
    if (theirs.number, theirs.digest) != (mine.number, mine.digest):
        raise meeting.judged(process, theirs).to_raise()
    return text


def agree_on(facts: Mapping[int, Any]) -> dict[int, Any]:
    """Facts by rank, of all processes; made of numbers, texts, None, tuples, lists and dicts."""
    if backend().world().process_count == 1:
        return dict(facts)
    texts = exchange(repr(dict(facts)))
    return {rank: fact for text in texts for rank, fact in ast.literal_eval(text).items()}


def require_equal(facts: Mapping[str, object], what: str) -> None:
    """Check that something is the same in all processes.

    Args:
        facts: name -> value, which has a text of its own.
        what: what the facts are about, for the error.

    Raises:
        FlowError: a fact differs between process 0 and another one.
    """
    if backend().world().process_count == 1:
        return

    mine = {name: str(value) for name, value in facts.items()}
    if not differ({"names": sorted(mine), **mine}):
        return
    first, *others = (json.loads(text) for text in exchange(json.dumps(mine)))
    for index, other in enumerate(others, 1):
        names = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
        pairs = ", ".join(f"{name} is {first.get(name)} in process 0 and {other.get(name)} in it" for name in names)
        if pairs:
            raise FlowError(f"process {index} of the job has {what} of its own: {pairs}. Make them equal on all hosts.")


def _key(number: int) -> str:
    """How the keys of an exchange begin."""
    return f"{whereabouts.prefix()}/{number}"
