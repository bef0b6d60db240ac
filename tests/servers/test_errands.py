"""A call of a worker that hangs is given to another one, and what comes late does no harm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from keras_flow.errors import FlowError
from keras_flow.servers import errands
from keras_flow.servers.counting import Statistics

KEY = (0, 3)


class Program:
    """What a worker computes."""


class Workers:
    """Answers each call by what is next in a list: a value, an error, or an event for which the answer waits."""

    can_repeat = True

    def __init__(self, *answers: Any):
        self.answers, self.settled = list(answers), 0

    def schedule(self, program: Any, others: Any) -> Callable[[], tuple[Any, int]]:
        number, answer = len(self.answers), self.answers.pop(0)

        def wait() -> tuple[Any, int]:
            if isinstance(answer, threading.Event):
                answer.wait(10)
                return ("late", others), number
            if isinstance(answer, Exception):
                raise answer
            return (answer, others), number

        return wait

    def settle(self) -> None:
        self.settled += 1

    def is_lost(self, error: BaseException) -> bool:
        return False


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is overdue soon."""
    monkeypatch.setattr(errands, "_LEAST_SECONDS", 0.05)


def test_a_call_that_hangs_is_sent_once_more_and_its_late_result_is_told() -> None:
    hung, counted, program = threading.Event(), Statistics(), Program()
    sent = errands.Errands(Workers("first", hung, "second"), timeout=5, statistics=counted)
    sent.send((0, 2), program, "rows")  # says how long a call takes
    assert sent.take()[:2] == ((0, 2), ("first", "rows"))
    sent.send(KEY, program, "rows")
    with pytest.warns(match="a worker has not finished a batch for .* s: another one computes it too"):
        assert sent.take()[:2] == (KEY, ("second", "rows"))
    hung.set()
    assert sent.take()[:2] == (KEY, ("late", "rows"))  # the caller knows the key, and drops it
    assert counted.repeated == 1 and not sent.has_results


def test_where_calls_cannot_be_repeated_a_worker_that_hangs_is_an_error() -> None:
    hung, counted = threading.Event(), Statistics()
    workers = Workers("first", hung)
    workers.can_repeat = False
    sent, program = errands.Errands(workers, timeout=0.3, statistics=counted), Program()
    sent.send((0, 2), program, None)
    sent.take()
    sent.send(KEY, program, None)
    with pytest.raises(FlowError, match=r"no worker has finished a batch for 0\.3 s"):
        sent.take()
    hung.set()
    assert counted.repeated == 0


def test_an_error_is_raised_once_and_that_of_a_step_given_up_never() -> None:
    workers = Workers(ValueError("of the program"), ValueError("of a step given up"), "right")
    sent = errands.Errands(workers, timeout=5, statistics=Statistics())
    sent.send(KEY, Program(), None)
    with pytest.raises(ValueError, match="of the program"):
        sent.take()
    sent.forget()
    sent.send((1, 0), Program(), None)
    sent.forget()
    sent.send((2, 0), Program(), None)
    assert sent.take()[:2] == ((2, 0), ("right", None))
    assert workers.settled == 1
