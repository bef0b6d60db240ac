"""Rounds on JAX: as many as the busiest rank has messages, and at most one message a rank in each."""

from __future__ import annotations

import doctest
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_flow.backends.jax import rank_grid, schedule

RANKS = tuple(range(5))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(RANKS), st.sampled_from(RANKS)), max_size=20))
def test_rounds_are_as_many_as_the_busiest_rank_has_messages(pairs):
    ordered = schedule.in_rounds(pairs, RANKS)
    assert sorted(number for numbers in ordered for number in numbers) == list(range(len(pairs)))
    for numbers in ordered:
        for end in (0, 1):
            assert len({pairs[number][end] for number in numbers}) == len(numbers)
    sent = [pair for pair in pairs if pair[0] != pair[1]]
    busiest = max(Counter((end, pair[end]) for pair in sent for end in (0, 1)).values(), default=0)
    assert sum(any(pairs[number][0] != pairs[number][1] for number in numbers) for numbers in ordered) == busiest


@pytest.mark.parametrize("module", [schedule, rank_grid])
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
