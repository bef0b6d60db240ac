"""Balance: sums are formed where they load the most loaded rank least.

Every destination of an element receives it once, whatever the plan; what can be placed freely is where the other
summands are added. That is a transport problem (atoms supply additions, ranks take them), solved here by maximum
flow under a limit, and a search for the least limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


def least_limit(
    supplies: Sequence[int], choices: Sequence[Sequence[int]], base: Sequence[int]
) -> tuple[int, list[dict[int, int]]]:
    """Spread supplies over places so that the most loaded place has the least load.

    Args:
        supplies: what each source gives out.
        choices: for each source the places that may take from it.
        base: the load that each place has already.

    Returns:
        the load of the most loaded place, and for each source what each place takes of it.

    Example:
        >>> least_limit([6, 2], [[0, 1], [1]], [3, 0])
        (6, [{0: 3, 1: 3}, {1: 2}])
    """
    total = sum(supplies)
    low = max([*base, -(-(sum(base) + total) // max(len(base), 1)), 0])
    high = max(low, max(base, default=0) + total)
    while low < high:
        middle = (low + high) // 2
        if _spread(supplies, choices, [middle - load for load in base]) is None:
            low = middle + 1
        else:
            high = middle
    taken = _spread(supplies, choices, [low - load for load in base])
    assert taken is not None
    return low, taken


def _spread(
    supplies: Sequence[int], choices: Sequence[Sequence[int]], rooms: Sequence[int]
) -> list[dict[int, int]] | None:
    """A spreading that leaves every place its room, by shortest augmenting paths; None where there is none."""
    taken: list[dict[int, int]] = [{} for _ in supplies]
    rooms = list(rooms)
    for source, supply in enumerate(supplies):
        left = supply
        while left:
            # breadth first from the source over places and the sources that gave to them, to a place with room
            came: dict[int, tuple[int, int]] = {}  # place -> (source it is reached from, place before or -1)
            queue = deque([(source, -1)])
            goal = -1
            seen = {source}
            while queue and goal < 0:
                giving, before = queue.popleft()
                for place in choices[giving]:
                    if place in came:
                        continue
                    came[place] = (giving, before)
                    if rooms[place] > 0:
                        goal = place
                        break
                    for other, gave in enumerate(taken):
                        if gave.get(place, 0) > 0 and other not in seen:
                            seen.add(other)
                            queue.append((other, place))
            if goal < 0:
                return None
            path, amount, place = [], min(left, rooms[goal]), goal
            while place >= 0:
                giving, before = came[place]
                path.append((giving, place, before))
                if before >= 0:
                    amount = min(amount, taken[giving][before])
                place = before
            for giving, place, before in path:
                taken[giving][place] = taken[giving].get(place, 0) + amount
                if before >= 0:
                    taken[giving][before] -= amount
            rooms[goal] -= amount
            left -= amount
    return [{place: amount for place, amount in gave.items() if amount} for gave in taken]
