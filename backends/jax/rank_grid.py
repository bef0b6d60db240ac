"""The ranks of a compiled program: which one runs, which are its neighbours, and what differs between them.

All ranks run one program (SPMD). What is different for each, such as where a piece starts, is a constant table with a
row for each rank, indexed by `lax.axis_index`; what is done differently is a branch of a `lax.switch` on such a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a program, on the axes of its mesh.

    Attributes:
        ranks: in the order of their positions in the mesh.
        axes: names of the mesh's axes.
        sizes: their sizes.
        on_axes: whether these are the placement's axes, so that collectives can go along single ones.
    """

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    on_axes: bool

    def position(self) -> jax.Array:
        """The position of the rank that runs the program."""
        return lax.axis_index(self.axes)

    def lookup(self, rows: Sequence) -> jax.Array:
        """The row of the rank that runs the program, of a table with a row for each position."""
        return jnp.asarray(np.array(rows, np.int32))[self.position()]

    def by_recipe(self, recipes: Mapping[int, Hashable], make: Callable[..., jax.Array], is_cheap: bool) -> jax.Array:
        """`make(recipe)`, by the recipe of the rank that runs the program; of a rank without one, any of them.

        Args:
            recipes: a recipe for each rank; ranks that do the same have equal ones, and share a branch.
            make: gives arrays of one shape for all recipes.
            is_cheap: whether it is quicker to make both of two recipes and select than to branch.
        """
        kinds = list(dict.fromkeys(recipes.values()))
        if len(kinds) == 1:
            return make(kinds[0])
        which = self.lookup([kinds.index(recipes.get(rank, kinds[0])) for rank in self.ranks])
        if is_cheap and len(kinds) == 2:
            return lax.select_n(which, *map(make, kinds))
        return lax.switch(which, [functools.partial(make, kind) for kind in kinds])

    def groups_along(self, names: Sequence[str]) -> dict[int, list[int]]:
        """For each rank the ranks that differ from it on these axes only, the first axis slowest."""
        return groups_along(self.ranks, self.sizes, [self.axes.index(name) for name in names])

    def all_to_all_axes(self, pairs: Sequence[tuple[int, int]]) -> tuple[str, ...]:
        """The axes along which these messages (sender, receiver) are one from each rank to each, itself included.

        Returns:
            Empty where they are not such an all-to-all.
        """
        if len(set(pairs)) != len(pairs):
            return ()
        for chosen in range(1, 2 ** len(self.axes)):
            names = tuple(name for number, name in enumerate(self.axes) if chosen >> number & 1)
            everyone = {(rank, member) for rank, group in self.groups_along(names).items() for member in group}
            if set(pairs) == everyone:
                return names
        return ()

    def permute(self, values: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """Send values along `pairs` (sender, receiver); return what each rank receives, zeros where that is nothing."""
        if all(sender == receiver for sender, receiver in pairs):
            return values
        position = {rank: number for number, rank in enumerate(self.ranks)}
        return lax.ppermute(values, self.axes, [(position[sender], position[receiver]) for sender, receiver in pairs])


def groups_along(ranks: Sequence[int], sizes: Sequence[int], axes: Sequence[int]) -> dict[int, list[int]]:
    """For each rank of a grid the ranks that differ from it on some axes only, the first of these slowest.

    Example:
        >>> groups_along([0, 1, 2, 3], [2, 2], [0])
        {0: [0, 2], 2: [0, 2], 1: [1, 3], 3: [1, 3]}
    """
    grid = np.asarray(ranks).reshape(sizes)
    rest = [axis for axis in range(grid.ndim) if axis not in axes]
    groups = grid.transpose(*rest, *axes).reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()
    return {rank: group for group in groups for rank in group}
