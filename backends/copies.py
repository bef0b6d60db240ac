"""Finds processes whose copies of a variable differ, before a loop computes with them.

Nothing else would say so: a difference is a number like any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from keras_flow import sbp
from keras_flow.backends.rendezvous import agreement
from keras_flow.current.models import all_variables
from keras_flow.current.variable_layout import keras_layout
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

    from keras_flow.layout import Layout
    from keras_flow.placements import Placement


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """The variables of a model and of its optimizers, in one order on all ranks; those of metrics are left out."""
    return list(all_variables(model, metrics=False, optimizers=True))


def compare(variables: Sequence[keras.Variable], shards: Callable[[keras.Variable], Mapping[int, np.ndarray]]) -> None:
    """Check that processes which hold the same block of a variable hold equal values. All processes call this.

    Each hashes its blocks: those of one layout at the same place together. On a 2x2 placement whose rows are two
    processes, both hold the blocks (., 0) and (., 1) of variables with `B, S(0)`, and the whole of those with `B, B`.
    So each tells three hashes, and whoever tells the same name must tell the same hash.

    Args:
        variables: the same in all processes, in one order.
        shards: gives the values of a variable by rank, for the ranks of this process.

    Raises:
        FlowError: in all processes, naming the first variable that differs.
    """
    together: defaultdict[str, xxhash.xxh3_64] = defaultdict(xxhash.xxh3_64)
    single: dict[str, str] = {}
    for index, variable in enumerate(variables):
        for block, value in _blocks(variable, shards):
            single[f"{index} {block}"] = digest = xxhash.xxh3_64_hexdigest(value)
            together[block].update(digest.encode())
    if not agreement.differing({block: found.hexdigest() for block, found in together.items()}):
        return
    # the hash of each variable is told only where something is wrong
    wrong = {int(name.split()[0]) for name in agreement.differing(single)}
    paths = [variables[index].path for index in sorted(wrong)]
    others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    raise FlowError(
        f"the ranks hold different values of {paths[0]!r}{others}, which should be copies of one value. Weights "
        "that were loaded inside the scope must come from the same file on all ranks (on several hosts: a file "
        "that each host has in the same version), and assigned values must be equal on all ranks"
    )


def _blocks(
    variable: keras.Variable, shards: Callable[[keras.Variable], Mapping[int, np.ndarray]]
) -> Iterator[tuple[str, memoryview]]:
    """(name of a block, its values as bytes), each once: the ranks of one process have copies of one value."""
    placed = keras_layout(variable)
    if placed is None or variable._value is None:
        return
    layout, seen = placed.layout, set()
    for rank, value in shards(variable).items():
        block = _name(layout, rank)
        if block not in seen:
            seen.add(block)
            yield block, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _name(layout: Layout, rank: int) -> str:
    """The layout, and where on it a rank is along the axes that split: equal for ranks that hold copies."""
    where = [
        index if isinstance(part, sbp.Split) else None
        for index, part in zip(layout.placement.coordinates(rank), layout.nd_sbp, strict=True)
    ]
    return f"{_short(layout.placement)} {layout.nd_sbp} {where}"


@lru_cache
def _short(placement: Placement) -> str:
    """A name of the placement that does not grow with its ranks."""
    return xxhash.xxh3_64_hexdigest(repr((placement.ranks, placement.hierarchy)).encode())
