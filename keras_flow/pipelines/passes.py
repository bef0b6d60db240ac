"""`Pass`: one pass of a lane over the micro-batches of a batch, forward alone or as a schedule says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import tree

from keras_flow.backends.active import backend
from keras_flow.current.keras_places import set_keras_mask
from keras_flow.current.microbatch import Microbatch
from keras_flow.layout import balanced
from keras_flow.pipelines import losses, masks
from keras_flow.pipelines.stages import Stage
from keras_flow.pipelines.transfers import Transfers
from keras_flow.schedules.action import (
    BACKWARD,
    FORWARD,
    INPUTS,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    WEIGHTS,
    Action,
)

if TYPE_CHECKING:
    from keras_flow.pipelines.lanes import Lanes
    from keras_flow.pipelines.staged_model import StagedModel

ops: Any = keras.ops


class CutBatch:
    """A batch, cut into micro-batches by the balanced split, and these over the lanes.

    13 rows in four are 4, 3, 3 and 3; in two lanes lane 0 has 2 of each, lane 1 has 2, 1, 1 and 1.
    """

    def __init__(self, pipeline: StagedModel, data: Any):
        self._pipeline = pipeline
        self.data = tree.map_structure(host, data)
        self.x, self.y, self.weights = keras.utils.unpack_x_y_sample_weight(self.data)
        self.inputs = pipeline.inputs_of(self.x)
        self.rows = int(self.inputs[0].shape[0])
        count = min(pipeline.schedule.microbatches, self.rows)  # of a last batch that is short there are fewer
        lanes = len(pipeline.lanes.all)
        #: the rows of each micro-batch in each lane
        self.parts: list[list[slice]] = []
        for number in range(count):
            start, stop = balanced(self.rows, count, number)
            inner = [balanced(stop - start, lanes, lane) for lane in range(lanes)]
            self.parts.append([slice(start + first, start + last) for first, last in inner])
        self.signature = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in self.inputs)

    @property
    def has_empty_lane(self) -> bool:
        """Whether a lane has no rows of any micro-batch: of the first, which is the largest, the last has fewest."""
        return self.parts[0][-1].start == self.parts[0][-1].stop

    def microbatch(self, number: int, lane: int) -> Microbatch:
        """The rows of a micro-batch in a lane."""
        part = self.parts[number][lane]
        return Microbatch(part.start, part.stop - part.start, self.rows)

    def cut(self, structure: Any, part: Microbatch) -> Any:
        """The rows of a micro-batch of each array; weights that have no rows as they are."""

        def rows(leaf: Any) -> Any:
            has_rows = getattr(leaf, "shape", ())[:1] == (self.rows,)
            return leaf[part.start : part.start + part.count] if has_rows else leaf

        return tree.map_structure(rows, structure)

    @functools.cached_property
    def shares(self) -> np.ndarray:
        """What part of each of the batch's losses that of some rows is, [micro-batches, lanes, losses]."""
        outputs = masks.of_outputs(self._pipeline.graph, self.inputs)
        parts = [part for lanes in self.parts for part in lanes]
        shares = losses.shares(self._pipeline.model, (self.y, self.weights), outputs, parts)
        return shares.reshape(len(self.parts), -1, shares.shape[-1]).astype(losses.dtype())


class Pass:
    """One pass of a lane over the micro-batches of a batch.

    Attributes:
        blocks: of the last stage, for each micro-batch the outputs and their masks.
        gradients: stage -> those by its weights, of this lane's rows.
        losses: the sum of each stage and micro-batch.
        state: stage -> its state after the micro-batches so far.
        left: stage -> the state that each micro-batch has left, where they are compared.
    """

    def __init__(
        self,
        pipeline: StagedModel,
        lane: Transfers,
        batch: CutBatch,
        training: bool,
        with_loss: bool,
        scale: float = 1.0,
    ):
        self.pipeline, self.lane, self.batch, self.training, self.scale = pipeline, lane, batch, training, scale
        #: what decides the shapes of messages, as every rank knows it
        self.signature = (batch.signature, training, tuple(bool(stage.trainable) for stage in pipeline.stages))
        self.gradients: dict[int, list[Any]] = {}
        self.losses: list[Any] = []
        self.state = lane.state_of(pipeline.stages)
        self.left: dict[int, list[list[Any]]] = {}
        self._begun = dict(self.state)
        self._weights = lane.weights_of(pipeline.stages)
        self._blocks: dict[int, tuple[Any, Any]] = {}
        self._held: dict[tuple[int, int], Any] = {}
        self._later: dict[tuple[int, int], Any] = {}
        self._has_loss = with_loss and lane.is_own(-1) and pipeline.model._compile_loss is not None

    @property
    def blocks(self) -> list[tuple[Any, Any]]:
        """The outputs and masks of each micro-batch, in their order."""
        return [self._blocks[number] for number in sorted(self._blocks)]

    # ---- the order of work

    def has_part_in(self, action: Action) -> bool:
        """Whether this process computes the action's stage, and the lane has rows of its micro-batch; -1 is none."""
        number = action.microbatch
        return self.lane.is_own(action.stage) and (
            number < 0 or self.batch.microbatch(number, self.lane.number).count > 0
        )

    def do(self, action: Action, sums: Lanes | None) -> None:
        """Run an action; `sums` adds up the gradients of all lanes, None where there are none."""
        stage, kind, number = self.pipeline.stages[action.stage], action.kind, action.microbatch
        if kind == FORWARD:
            self._forward(stage, number)
        elif kind in (BACKWARD, INPUTS):
            # each part of a split pass would compute repeated layers again
            self._backward(stage, number, is_split=kind == INPUTS and not stage.is_repeated)
        elif kind == WEIGHTS:
            later = self._later.pop((stage.number, number), None)
            if later is not None:
                self._add(stage, self._program_of(stage, number).backward_weights(later))
        elif kind in (SEND_F, SEND_B):
            self.lane.send(stage.number, kind, number, self.signature)
        elif kind in (RECV_F, RECV_B):
            self.lane.receive(stage.number, kind, number, self.signature)
        elif kind == REDUCE_GRAD and sums is not None:
            sums.add_up(stage, self.gradients.get(stage.number))

    # ---- the work

    def _forward(self, stage: Stage, number: int) -> None:
        pipeline, part = self.pipeline, self.batch.microbatch(number, self.lane.number)
        learns = self.training and self._learns(stage)
        received, found = [], []
        if stage.number:
            received, found = self.lane.take(stage.number, RECV_F, number)
        inputs = [self.batch.inputs[pipeline.graph.inputs.index(key)] for key in stage.inputs]
        has_gradient = [is_float(tensor) for tensor in received]
        others: dict[str, Any] = {
            "inputs": self.batch.cut(inputs, part),
            "fixed": [None if has else tensor for tensor, has in zip(received, has_gradient, strict=True)],
            "masks": [*[None] * len(inputs), *found],
            "state": self._state_for(stage, number),
            "start": part.start,
            "first": 1.0 if number == self.lane.number == 0 else 0.0,
        }
        is_last = stage is pipeline.last
        if is_last and self._has_loss:
            others["y"] = self.batch.cut(self.batch.y, part)
            others["weights"] = self.batch.cut(self.batch.weights, part)
            others["shares"] = self.batch.shares[number, self.lane.number]
        program = self._program_of(stage, number)
        tensors = [tensor for tensor, has in zip(received, has_gradient, strict=True) if has]
        weights = self._weights[stage.number]
        if learns and not pipeline.remat:
            outputs, rest, held = program.forward(weights, tensors, others)
            self._held[stage.number, number] = held
        else:
            outputs, rest = program.run(weights, tensors, others)
            if learns:
                self._held[stage.number, number] = (weights, tensors, others)
        self.state[stage.number] = list(rest["state"])
        if self.training and pipeline.lanes.compares_microbatches:
            self.left.setdefault(stage.number, []).append(self.state[stage.number])
        self.losses.append(rest["loss"])
        known = iter(outputs)
        sent = [next(known) if tensor is None else tensor for tensor in rest["fixed"]]
        if is_last:
            self._blocks[number] = sent, rest["masks"]
        else:
            self.lane.give(stage.number + 1, RECV_F, number, (sent, rest["masks"]))

    def _backward(self, stage: Stage, number: int, is_split: bool) -> None:
        pipeline = self.pipeline
        from_next = None
        if stage is not pipeline.last:
            from_next = self.lane.take(stage.number, RECV_B, number)
        if not self._learns(stage):
            self.lane.give(stage.number - 1, RECV_B, number, None)
            return
        program = self._program_of(stage, number)
        held = self._held.pop((stage.number, number))
        if pipeline.remat:
            held = program.forward(*held)[2]
        if is_split:
            by_received, self._later[stage.number, number] = program.backward_inputs(held, from_next, self.scale)
        else:
            by_weights, by_received = program.backward(held, from_next, self.scale)
            self._add(stage, by_weights)
        if stage.number:
            self.lane.give(stage.number - 1, RECV_B, number, by_received)

    def _learns(self, stage: Stage) -> bool:
        """Whether the stage or one before it has weights that are trained."""
        return any(each.trainable for each in self.pipeline.stages[: stage.number + 1])

    def _program_of(self, stage: Stage, number: int) -> Any:
        part = self.batch.microbatch(number, self.lane.number)
        with_loss = stage is self.pipeline.last and self._has_loss
        return self.pipeline.program(stage, self.lane.rank(stage.number), part, self.training, with_loss)

    def _add(self, stage: Stage, gradients: list[Any]) -> None:
        before = self.gradients.get(stage.number)
        self.gradients[stage.number] = gradients if before is None else backend().add(before, gradients)

    def _state_for(self, stage: Stage, number: int) -> list[Any]:
        """The state that a micro-batch begins with, as the batch began: a counter counts batches.

        The statistics of BatchNormalization are those that the micro-batch before left.
        """
        begun, now = self._begun[stage.number], self.state[stage.number]
        return [
            new if id(variable) in stage.statistics else old
            for variable, old, new in zip(stage.state, begun, now, strict=True)
        ]

    def keep_state(self) -> None:
        """Give the variables what the forward passes have assigned."""
        for stage in self.pipeline.stages:
            if not self.lane.is_alone and self.lane.rank(stage.number) not in stage.holders:
                continue
            for variable, old, new in zip(
                stage.state, self._begun.get(stage.number, ()), self.state.get(stage.number, ()), strict=False
            ):
                # frozen weights of several stages stay on the rank that has them
                if new is not old and id(variable) not in stage.frozen:
                    backend().write(variable, new)


def follow(runs: Sequence[Pass], order: Sequence[Action], sums: Lanes | None = None) -> None:
    """Run this process's part of what all ranks do: an action of all its lanes before the next.

    All processes keep to one order, so that none waits for what the other does only after what that one waits for.

    Args:
        runs: the passes of its lanes.
        order: what all ranks do, messages included.
        sums: what adds up the gradients of all lanes; None where there are none.
    """
    for action in order:
        for run in runs:
            if run.has_part_in(action):
                # `kf.trace` shows them by their names in a schedule: 1F3 is stage 1, forward, micro-batch 3
                with backend().annotated(f"{action} on rank {run.lane.rank(action.stage)}"):
                    run.do(action, sums)
    for run in runs:
        run.lane.finish()


def is_float(tensor: Any) -> bool:
    """Whether a tensor has gradients."""
    return "float" in keras.backend.standardize_dtype(tensor.dtype)


def host(leaf: Any) -> Any:
    """An array of a tensor; None of None."""
    return leaf if leaf is None else np.asarray(keras.ops.convert_to_numpy(leaf))


def joined(parts: Sequence[Any], found: Sequence[Any]) -> Any:
    """The rows of all micro-batches, with their mask."""
    joined = ops.concatenate(list(parts), 0)
    if all(mask is not None for mask in found):
        set_keras_mask(joined, ops.concatenate(list(found), 0))
    return joined
