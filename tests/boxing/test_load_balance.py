"""Tables of who adds what: they lower the load of the most loaded rank, as far as that can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_flow.boxing import lower_bound, plan
from keras_flow.boxing.load_balance import least_limit
from keras_flow.layout import Layout
from tests.boxing.cases import grid


def test_the_most_loaded_rank_receives_least():
    """Additions are spread: found by hand for pairs where adding at the destination loads one rank more."""
    for hierarchy, before, after, elements in (
        ((2, 2), "S(0),P", "S(1),S(0)", 1152),
        ((4, 2), "P,S(0)", "S(0),B", 1536),
        ((2, 4), "P,S(0)", "S(0),S(0)", 672),
    ):
        made = plan(Layout(grid(hierarchy), before, (64, 48)), Layout(grid(hierarchy), after, (64, 48)))
        assert made.most_loaded == 4 * elements
        assert made.total_bytes == lower_bound(made.source, made.target)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_least_limit_is_the_least(data):
    """Against the limit that linear programming finds."""
    optimize = pytest.importorskip("scipy.optimize")
    places, sources = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    base = data.draw(st.lists(st.integers(0, 9), min_size=places, max_size=places))
    supplies = data.draw(st.lists(st.integers(0, 20), min_size=sources, max_size=sources))
    choices = [sorted(data.draw(st.sets(st.integers(0, places - 1), min_size=1))) for _ in supplies]
    limit, taken = least_limit(supplies, choices, base)
    pairs = [(source, place) for source, some in enumerate(choices) for place in some]
    equal = np.array([[float(source == row) for source, _ in pairs] + [0.0] for row in range(sources)])
    upper = np.array([[float(place == row) for _, place in pairs] + [-1.0] for row in range(places)])
    best = optimize.linprog([0.0] * len(pairs) + [1.0], A_ub=upper, b_ub=[-x for x in base], A_eq=equal, b_eq=supplies)
    assert limit == int(np.ceil(best.x[-1] - 1e-6))
    assert [sum(gave.values()) for gave in taken] == supplies
    loads = [base[place] + sum(gave.get(place, 0) for gave in taken) for place in range(places)]
    assert max(loads) <= limit
