"""`StageRanks`: which ranks compute a stage, which of them a lane of it together, and who holds its variables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from keras_flow.backends.active import backend
from keras_flow.current import dry_run
from keras_flow.errors import FlowError
from keras_flow.placements import Placement

#: the ranks of a stage: lane after lane, of each those that compute together
Ranks = tuple[int, ...]


class StageRanks:
    """The ranks of a pipeline: of a placement `("pipe", "data", "model")` of 2 x 2 x 2 ranks

        stage 0   lane 0: ranks 0, 1   lane 1: ranks 2, 3
        stage 1   lane 0: ranks 4, 5   lane 1: ranks 6, 7

    Ranks 0 and 1 compute the rows of lane 0 together: tensors are split over them, along "model".

    Args:
        placement: all ranks.
        pipe_axis: the axis along which the stages are.
        batch_axes: those along which lanes are.
        first_holds_all: whether the first lane of a stage alone has its variables.

    Attributes:
        places: for each place of the pipe axis the ranks of the stages that are there.
        split_axes: the axes over which the tensors of a stage are split.

    Raises:
        FlowError: there is no such axis.
    """  # noqa: D415

    def __init__(
        self, placement: Placement, pipe_axis: str, batch_axes: Collection[str], first_holds_all: bool = False
    ):
        names, self._first_holds_all = placement.axis_names, first_holds_all
        if pipe_axis not in names:
            raise FlowError(
                f"PipelineParallel takes a placement with the axis {pipe_axis!r}, not {list(names)}: for example "
                f"kf.Placement({list(placement.ranks)}, axis_names=({pipe_axis!r},)), or say pipe_axis="
            )
        outer = (pipe_axis, *(name for name in names if name in batch_axes))
        self.split_axes = tuple(name for name in names if name not in outer)
        self._lane_shape = tuple(placement.axis_size(axis) for axis in self.split_axes)
        order = [*map(names.index, outer), *map(names.index, self.split_axes)]
        ranks = np.transpose(np.reshape(placement.ranks, placement.hierarchy), order)
        self.places: list[Ranks] = [tuple(map(int, each)) for each in ranks.reshape(len(ranks), -1)]

    def lanes(self, ranks: Ranks) -> list[Placement]:
        """The ranks of each lane of a stage: one, or those that compute it together."""
        if not self.split_axes:
            return [Placement([rank]) for rank in ranks]
        return [Placement(each, self.split_axes) for each in np.reshape(ranks, (-1, *self._lane_shape))]

    def lane_here(self, ranks: Ranks) -> Placement:
        """The first lane of a stage of which this process has ranks; without any the first."""
        lanes, own = self.lanes(ranks), self._own()
        return next((lane for lane in lanes if set(lane.ranks) & set(own)), lanes[0])

    def holders(self, ranks: Ranks) -> Ranks:
        """Those of a stage's ranks that hold its variables: of each process a lane, which the others get copies of."""
        lanes = {lane.ranks[0]: lane for lane in self.lanes(ranks)}
        first = (dry_run.world() or backend().world()).first_of_each_process(lanes)
        first = first[:1] if self._first_holds_all else first
        return tuple(rank for each in first for rank in lanes[each].ranks)

    def shown(self, lanes: Sequence[Placement]) -> Ranks:
        """The rank that stands for each lane: the first, and in a process that is one of its ranks the own place in it.

        Ranks of one place send to each other from stage to stage: they hold the same parts of all that is split.
        """
        own, size = self._own(), lanes[0].size
        place = next((each.index(own[0]) % size for each in self.places if own[0] in each), 0)
        return tuple(lane.ranks[place if len(own) == 1 else 0] for lane in lanes)

    @staticmethod
    def _own() -> Ranks:
        return (dry_run.world() or backend().world()).local_ranks
