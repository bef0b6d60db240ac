"""Orders of rows: each row once, every order about as often, and nothing but the position asked for."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_flow.permutation import Permutation

WORD = st.integers(0, 2**64 - 1)


def order(length: int, seed: int, stream: int) -> np.ndarray:
    return Permutation(length, seed, stream).rows(np.arange(length))


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.integers(1, 300), st.sampled_from([2**10 - 1, 2**10, 2**10 + 1, 4099])), WORD, WORD)
def test_each_row_stands_at_one_position(length: int, seed: int, stream: int) -> None:
    assert np.array_equal(np.sort(order(length, seed, stream)), np.arange(length))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 10**12), WORD, st.lists(st.integers(0, 10**12), min_size=1, max_size=20))
def test_a_position_needs_no_other(length: int, seed: int, positions: list[int]) -> None:
    wanted = np.array(positions) % length
    permutation = Permutation(length, seed, 0)
    found = permutation.rows(wanted)
    assert ((found >= 0) & (found < length)).all()
    alone = [int(permutation.rows(wanted[place : place + 1])[0]) for place in range(len(wanted))]
    assert found.tolist() == alone


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_every_order_of_a_few_rows_is_as_frequent() -> None:
    for length in (2, 3, 4):
        counts = dict.fromkeys(itertools.permutations(range(length)), 0)
        for epoch in range(2400):
            counts[tuple(int(row) for row in order(length, 5, epoch))] += 1
        expected = 2400 / len(counts)
        chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
        # of a fair draw less than once in 10,000 (1, 5 and 23 degrees of freedom)
        assert chi_squared < {2: 15.2, 3: 25.8, 4: 56.0}[length]


def test_neighbours_do_not_stay_together() -> None:
    for length in (1000, 1024, 30_000):
        found = order(length, 11, 2)
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4 / np.sqrt(length)
        assert abs(np.corrcoef(np.arange(length), found)[0, 1]) < 4 / np.sqrt(length)
