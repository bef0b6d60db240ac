"""A guard on speed that does not depend on the clock: what a step calls, copies and communicates, and no step compiled
twice. A count that falls is good news, and is written down here."""

import pytest

TO_DEVICES, TO_HOST, HOOKS = "arrays to devices", "arrays to host", "hook calls"
COLLECTIVES = "collectives called from Python"
#: engine -> layout -> count of one step; what is not named is 0
EXPECTED = {
    # the batch's two arrays; the mean of the loss, read at the end of each step by Keras's progress
    "jax": {
        "data parallel": {TO_DEVICES: 2, TO_HOST: 1},
        "tensor parallel": {TO_DEVICES: 2, TO_HOST: 1},
        "one rank": {},
    },
    "tensorflow": {
        "data parallel": {TO_DEVICES: 2},
        "tensor parallel": {TO_DEVICES: 2},
        "one rank": {},
    },
    # data parallel: all gradients and what the loss adds to the logs in one all-reduce; hooks: the model's and its
    # layers' calls, assignments of metric and optimizer state, and the logs
    "torch": {
        "data parallel": {TO_HOST: 1, COLLECTIVES: 1, HOOKS: 9},
        "tensor parallel": {TO_HOST: 1, COLLECTIVES: 2, HOOKS: 12},
        "one rank": {TO_HOST: 1},
    },
}


def counts(layout: str) -> dict[str, float]:
    from tests.steps import worker  # its Keras is that of the ranks

    return worker.counts(layout)


@pytest.mark.parametrize("layout", ["data parallel", "tensor parallel", "one rank"])
@pytest.mark.parametrize("engine", EXPECTED)
def test_a_step(engine: str, layout: str, on_ranks) -> None:
    found = on_ranks(engine)(counts, layout)
    assert found.pop("compilations in later epochs") == 0
    assert found.pop("traces in later epochs", 0) == 0
    assert {name: count for name, count in found.items() if count} == EXPECTED[engine][layout]
