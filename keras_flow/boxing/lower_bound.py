"""The lower bound: the fewest bytes that any correct plan receives.

Example: an all-reduce over two ranks of 4 elements. Each rank must receive at least once an element that it cannot
compute itself, and one of them must add first: 2 receipts for each element, of 4 bytes.

    >>> from keras_flow.placements import Placement
    >>> pair = Placement([0, 1])
    >>> lower_bound(Layout(pair, "P", (2, 2)), Layout(pair, "B", (2, 2)))
    32
"""

from __future__ import annotations

from keras_flow.boxing.cost import total
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.phases import elements_received
from keras_flow.layout import Layout, itemsize


def lower_bound(source: Layout, target: Layout, dtype: object = "float32") -> int:
    """Bytes that any correct plan must receive, summed over ranks.

    Counted element by element, over the atoms (common boxes of source and target blocks). Let p be the number of
    summands (the product of the source's P axes) and m the number of destinations, a destination being one rank, or
    where the target has a P one family of ranks whose values add up to the element.

    - Without a P in either: a destination that holds the element needs none, any other one receipt.
    - With one in the source, and P nowhere in the target: p - 1 + m - 1, and one more where no destination holds a
      summand. Lower: look at the ranks that one holder of each summand and the destinations make up. Messages that
      carry the element join them, as edges join nodes. All p holders must be joined to a first destination that has the
      whole sum: p - 1 messages if it holds a summand, else p; each further destination receives the sum, or what
      completes it, in at least one message that was not needed for the first: m - 1. Upper: a tree that adds towards
      one destination and spreads from it. For one group (P to S, P to B) these are reduce-scatter and all-reduce, (p -
      1)/p and 2(p - 1)/p of the tensor per rank, optimal by Patarasuk and Yuan, "Bandwidth optimal all-reduce
      algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69 (2009).
    - With a P in the target, families divide the element among their members, and each of the m copies of a member must
      hold the same part: a layout is a promise. Let h(s) be how many copies hold a summand s at the member of which
      most do. Either every summand stays with that member, sum of m - h(s) receipts; or all are collected into one sum,
      which the copies of one member receive: p - 1 + m - 1, one more if no copy of any member holds a summand. The
      smaller counts. Without a P in the source p is 1 and the first way is never worse: m - h.
      On 2x2 this equals an exhaustive search (`tests/boxing/test_lower_bound.py`); on larger placements it is the least
      of these two ways, not proven least of all.

    Raises:
        FlowError: no such dtype.
    """
    return total(Exchange(source, target)) * itemsize(dtype)


def rank_lower_bound(source: Layout, target: Layout, rank: int, dtype: object = "float32") -> int:
    """Bytes that `rank` must receive where neither layout has a P: what it needs and does not hold."""
    return elements_received(Exchange(source, target), rank, "move") * itemsize(dtype)
