"""`Lanes`: pipelines side by side, where several ranks share a stage: each computes some rows of every micro-batch.

Two stages on ranks 0, 1 and 2, 3, and a micro-batch of 5 rows:

    lane 0   rows 0, 1, 2   stage 0 on rank 0, stage 1 on rank 2
    lane 1   rows 3, 4      stage 0 on rank 1, stage 1 on rank 3

Within a lane tensors go from stage to stage as in a pipeline of one lane. Across lanes go, once for a step, the sum of
a stage's gradients, and the outputs, of which the loss and the metrics of the whole batch are computed. Where one
process drives all ranks, weights are on the first rank of their stage and the other lanes get copies for each pass; a
process that is one rank holds its own, and all ranks of a stage update theirs alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_flow.backends.active import backend
from keras_flow.distributions.distribution import is_seed
from keras_flow.errors import FlowError
from keras_flow.pipelines import losses
from keras_flow.pipelines.stages import Stage
from keras_flow.pipelines.transfers import Transfers

if TYPE_CHECKING:
    from keras_flow.pipelines.passes import Pass

#: training steps in which states are compared, where that makes the host wait
_COMPARED = 3


class Lanes:
    """All lanes of a pipeline, and what is exchanged between them.

    Args:
        stages: of the model.

    Attributes:
        all: each lane's transfers.
        own: those of which this process has ranks.
        is_alone: whether it has all.
        counts: whether what this process's lanes add to a sum is counted: of ranks that compute a lane together, the
            first's.
    """

    def __init__(self, stages: Sequence[Stage]):
        self._stages = stages
        self.all = [Transfers(stages, lane) for lane in range(len(stages[0].ranks))]
        self.own = [lane for lane in self.all if lane.has_ranks]
        self.is_alone = all(lane.is_alone for lane in self.all)
        self.counts = stages[0].rank == stages[0].root
        self._given: dict[int, list[list[Any]]] = {}
        self._sums: dict[int, Callable[[], list[Any]]] = {}
        self._compared = 0

    def begin(self) -> None:
        """Forget what a step that was broken off has left."""
        self._given.clear()
        self._sums.clear()
        for lane in self.all:
            lane.begin()

    # ---- gradients

    def add_up(self, stage: Stage, gradients: list[Any] | None) -> None:
        """Begin to sum a stage's gradients over its ranks, when the last lane of this process has computed its own."""
        given = self._given.setdefault(stage.number, [])
        gradients = gradients or [None] * len(stage.trainable)
        home = next(lane for lane in self.own if lane.is_own(stage.number))
        given.append(gradients if len(self.all) == 1 else home.on(home.rank(stage.number), gradients))
        if len(given) == sum(lane.is_own(stage.number) for lane in self.own):
            self._sums[stage.number] = backend().sum_over_ranks(
                stage.ranks, given, stage.trainable, stage.splits(home.number)
            )

    def gradients(self) -> dict[int, list[Any]]:
        """The sums, when all are there: for each stage of this process one for each of its trainable weights."""
        return {number: self._sums[number]() for number in sorted(self._sums)}

    # ---- outputs and state

    @property
    def compares_microbatches(self) -> bool:
        """Whether the state that each micro-batch leaves is compared in a training step."""
        return self._compared < _COMPARED

    def outputs(self, runs: Sequence[Pass], signature: object) -> tuple[list[Any], list[Any]]:
        """The last stage's outputs and masks, block after block of rows; elsewhere than on its first rank empty."""
        last = self._stages[-1]
        blocks: list[list[Any]] = []
        for lane in self.all:
            mine = next((run.blocks for run in runs if run.lane is lane), None)
            if last.split and mine is not None:
                mine = backend().on(lane.rank(-1), mine)  # whole
            if lane.rank(-1) != last.rank and self.counts:
                mine = lane.carried(mine, lane.rank(-1), last.rank, lane.number, ("outputs", signature))
            blocks.append(mine or [])
        for lane in self.own:
            lane.finish()
        if not (self.all[0].is_own(-1) and self.counts):
            return [], []
        # a micro-batch's rows are spread over the lanes; those at the end have none where it has fewer rows than lanes
        rows = [
            of_lane[number] for number in range(max(map(len, blocks))) for of_lane in blocks if number < len(of_lane)
        ]
        return [outputs for outputs, _ in rows], [masks for _, masks in rows]

    def keep_state(self, runs: Sequence[Pass], has_empty_lane: bool, training: bool) -> None:
        """Give variables what the forward passes have assigned: it must be the same of each micro-batch and lane.

        Args:
            runs: of this process's lanes.
            has_empty_lane: a lane has had no rows; its seeds have stood still.
            training: whether it is a training step.
        """
        if (training and self.compares_microbatches) or len(self.all) > 1:
            problems = [self._agree_on_microbatches(stage, run) for run in runs for stage in self._stages]
            if len(self.all) > 1:
                problems += [
                    self._agree_on_state(stage, [run for run in runs if stage.number in run.state], has_empty_lane)
                    for stage in self._stages
                ]
            self._raise_on_all([text for text in problems if text])
        for run in runs[:1] if self.is_alone else runs:
            run.keep_state()
        self._compared += training

    def _raise_on_all(self, problems: Sequence[str]) -> None:
        """Raise what some processes found, on all of them: the others would wait for these."""
        if not self.is_alone:
            if not any(map(_has_own_state, self._stages)):
                return
            found = backend().sum_over_processes(keras.ops.convert_to_tensor(float(len(problems)), "float32"))
            total: Any = keras.ops.convert_to_numpy(found)
            if not problems and float(total):
                problems = [
                    "a layer, which another process names, has state that depends on the rows that it sees. Keep such "
                    "state out of the model, or train it under kf.DataParallel"
                ]
        if problems:
            raise FlowError(problems[0])

    def _agree_on_microbatches(self, stage: Stage, run: Pass) -> str:
        """Compare the states that the micro-batches of a lane have left; returns what is wrong with them."""
        first, *others = run.left.get(stage.number) or [[]]
        moves_or_stays = stage.statistics | stage.frozen
        found = (
            _depends_on_rows(stage, variable, "each micro-batch leaves another")
            for state in others
            for variable, one, other in zip(stage.state, first, state, strict=True)
            if not is_seed(variable.path) and id(variable) not in moves_or_stays and not _is_equal(one, other)
        )
        return next(found, "")

    def _agree_on_state(self, stage: Stage, runs: Sequence[Pass], has_empty_lane: bool) -> str:
        """Compare a stage's state between its ranks; all get that of the first. Returns what is wrong with it."""
        if not (_has_own_state(stage) or (has_empty_lane and stage.state)) or not runs:
            return ""
        first = runs[0].state[stage.number]
        if not self.is_alone:
            first = backend().from_process_of(stage.rank, first, True, stage.ranks)
        elif self._compared >= _COMPARED:
            return ""
        for run in runs:
            for variable, one, other in zip(stage.state, first, run.state[stage.number], strict=True):
                if not is_seed(variable.path) and not _is_equal(one, other):
                    which = f"the ranks {list(stage.ranks)} of the stage see different ones"
                    return _depends_on_rows(stage, variable, which)
            run.state[stage.number] = first
        return ""

    # ---- numbers for all ranks

    def sum_on(self, rank: int, values: Sequence[Any]) -> Any:
        """The sum of scalars of all ranks, on a rank."""
        total: Any = keras.ops.zeros((), losses.dtype())
        if self.is_alone:
            total = backend().on(rank, total)
            for value in values:
                total = total + backend().on(rank, value)
            return total
        here = backend().world().local_ranks[0]  # which may be no rank of the placement
        for value in [backend().on(here, value) for value in values]:  # whole: all ranks of a lane take part
            total = total + value if self.counts else total
        return backend().sum_over_processes(total)

    def from_rank(self, rank: int, value: Any, is_like: bool = False) -> Any:
        """A structure of tensors that one rank has, on every process; `is_like`: all have tensors of its shapes."""
        return value if self.is_alone else backend().from_process_of(rank, value, is_like)


def _depends_on_rows(stage: Stage, variable: keras.Variable, why: str) -> str:
    return (
        f"a layer of stage {stage.number} has state that depends on the rows that it sees ({variable.path}), and {why}"
        ". Keep such state out of the model, take microbatches=1 and one rank for each stage, or train it under "
        "kf.DataParallel"
    )


def _has_own_state(stage: Stage) -> bool:
    """Whether its layers have state besides seeds."""
    return any(not is_seed(variable.path) for variable in stage.state)


def _is_equal(one: Any, other: Any) -> bool:
    first, second = (np.asarray(keras.ops.convert_to_numpy(each)) for each in (one, other))
    return bool(np.allclose(first, second, rtol=1e-5, atol=1e-6))
