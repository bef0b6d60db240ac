"""`Pass`: one pass over the micro-batches of a batch, forward alone or as a schedule says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import tree

from keras_flow.backends.active import backend
from keras_flow.current.microbatch import Microbatch
from keras_flow.distributions.distribution import is_seed
from keras_flow.errors import FlowError
from keras_flow.layout import balanced
from keras_flow.pipelines import losses, masks
from keras_flow.pipelines.graph import filled
from keras_flow.pipelines.stages import Stage
from keras_flow.schedules import Schedule
from keras_flow.schedules.action import BACKWARD, FORWARD, INPUTS, RECV_B, RECV_F, SEND_B, SEND_F, WEIGHTS, Action

if TYPE_CHECKING:
    from keras_flow.pipelines.staged_model import StagedModel

ops: Any = keras.ops


class CutBatch:
    """A batch, cut into micro-batches by the balanced split: 13 rows in four are 4, 3, 3 and 3."""

    def __init__(self, pipeline: StagedModel, data: Any):
        self.data = tree.map_structure(host, data)
        self.x, self.y, self.weights = keras.utils.unpack_x_y_sample_weight(self.data)
        self.inputs = pipeline.inputs_of(self.x)
        self.rows = int(self.inputs[0].shape[0])
        count = min(pipeline.schedule.microbatches, self.rows)  # of a last batch that is short there are fewer
        self.parts = [slice(*balanced(self.rows, count, number)) for number in range(count)]
        self.signature = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in self.inputs)

    def microbatch(self, number: int) -> Microbatch:
        """The rows of a micro-batch."""
        part = self.parts[number]
        return Microbatch(part.start, part.stop - part.start, self.rows)

    def cut(self, structure: Any, number: int) -> Any:
        """The rows of a micro-batch of each array; weights that have no rows as they are."""

        def rows(leaf: Any) -> Any:
            has_rows = getattr(leaf, "shape", ())[:1] == (self.rows,)
            return leaf[self.parts[number]] if has_rows else leaf

        return tree.map_structure(rows, structure)


class Pass:
    """One pass over the micro-batches of a batch."""

    def __init__(self, pipeline: StagedModel, batch: CutBatch, training: bool, with_loss: bool, scale: float = 1.0):
        self.pipeline, self.batch, self.training, self.scale = pipeline, batch, training, scale
        #: what decides the shapes of messages, as every rank knows it
        self.signature = (batch.signature, training, tuple(bool(stage.trainable) for stage in pipeline.stages))
        self.gradients: dict[int, list[Any]] = {}
        self.losses: list[Any] = []
        pipeline.transfers.begin()
        own = pipeline.transfers.own
        stages = [stage for stage in pipeline.stages if stage.rank in own]
        self._state = {stage.number: [backend().read(variable) for variable in stage.state] for stage in stages}
        self._begun = dict(self._state)
        self._weights = pipeline.transfers.weights_of(pipeline.stages)
        count = len(batch.parts)
        #: of the last stage: the outputs of each micro-batch, and their masks
        self.parts: list[Any] = [None] * count
        self.masks: list[Any] = [None] * count
        self._held: dict[tuple[int, int], Any] = {}
        self._later: dict[tuple[int, int], Any] = {}
        self._shares: np.ndarray | None = None
        if with_loss and pipeline.last.rank in own and pipeline.model._compile_loss is not None:
            found = masks.of_outputs(pipeline.graph, batch.inputs)
            self._shares = losses.shares(pipeline.model, (batch.y, batch.weights), found, batch.parts)

    def outputs(self) -> Any:
        """The model's outputs for all rows, from the last stage."""
        columns = zip(*self.parts, strict=True)
        known = {key: joined(column, [None]) for key, column in zip(self.pipeline.last.sent, columns, strict=True)}
        return filled(self.pipeline.graph.outputs, known)

    # ---- the order of work

    def follow(self, schedule: Schedule) -> None:
        """Run the lists of the ranks of this process, each action when what it needs is there."""
        own = self.pipeline.transfers.own
        self._go(
            {
                rank: order
                for rank, order in zip(self.pipeline.transfers.ranks_of(schedule), schedule.lowered(), strict=True)
                if rank in own
            }
        )

    def forward_only(self) -> None:
        """Run all forward passes: each stage the micro-batches in their order."""
        orders: dict[int, list[Action]] = {}
        stages, transfers = self.pipeline.stages, self.pipeline.transfers
        for number in range(len(self.batch.parts)):
            for stage in stages:
                order = orders.setdefault(stage.rank, [])
                if stage.number and stages[stage.number - 1].rank != stage.rank:
                    order.append(Action(stage.number, RECV_F, number))
                order.append(Action(stage.number, FORWARD, number))
                if stage is not stages[-1] and stages[stage.number + 1].rank != stage.rank:
                    order.append(Action(stage.number, SEND_F, number))
        self._go({rank: order for rank, order in orders.items() if rank in transfers.own})

    def _go(self, orders: Mapping[int, Sequence[Action]]) -> None:
        waiting = {rank: list(reversed(order)) for rank, order in orders.items()}
        # one action of each rank in turn: near the order in time, so that engines that run ahead overlap ranks
        while any(waiting.values()):
            before = sum(map(len, waiting.values()))
            for order in waiting.values():
                if order and self._can(order[-1]):
                    self._do(order.pop())
            if sum(map(len, waiting.values())) == before:
                stuck = ", ".join(str(order[-1]) for order in waiting.values() if order)
                raise FlowError(f"the schedule cannot go on: {stuck} wait for each other")
        self.pipeline.transfers.finish()

    def _can(self, action: Action) -> bool:
        stage, kind, number = action
        if kind in (RECV_F, RECV_B):
            other = stage - 1 if kind == RECV_F else stage + 1
            return not self.pipeline.transfers.is_own(other) or self.pipeline.transfers.has(stage, kind, number)
        return True

    def _do(self, action: Action) -> None:
        stage, kind, number = self.pipeline.stages[action.stage], action.kind, action.microbatch
        if kind == FORWARD:
            self._forward(stage, number)
        elif kind in (BACKWARD, INPUTS):
            gradients = self._backward(stage, number)
            if kind == BACKWARD:
                self._add(stage, gradients)
            else:
                self._later[stage.number, number] = gradients
        elif kind == WEIGHTS:
            self._add(stage, self._later.pop((stage.number, number)))
        elif kind in (SEND_F, SEND_B):
            self.pipeline.transfers.send(stage.number, kind, number, self.signature)
        elif kind in (RECV_F, RECV_B):
            self.pipeline.transfers.receive(stage.number, kind, number, self.signature)

    # ---- the work

    def _forward(self, stage: Stage, number: int) -> None:
        pipeline, part = self.pipeline, self.batch.microbatch(number)
        learns = self.training and self._learns(stage)
        received, found = [], []
        if stage.number:
            received, found = pipeline.transfers.take(stage.number, RECV_F, number)
        inputs = [self.batch.inputs[pipeline.graph.inputs.index(key)] for key in stage.inputs]
        has_gradient = [is_float(tensor) for tensor in received]
        others: dict[str, Any] = {
            "inputs": self.batch.cut(inputs, number),
            "fixed": [None if has else tensor for tensor, has in zip(received, has_gradient, strict=True)],
            "masks": [*[None] * len(inputs), *found],
            "state": self._state_for(stage, number),
            "start": part.start,
            "first": 1.0 if number == 0 else 0.0,
        }
        is_last = stage is pipeline.last
        if is_last and self._shares is not None:
            others["y"] = self.batch.cut(self.batch.y, number)
            others["weights"] = self.batch.cut(self.batch.weights, number)
            others["shares"] = self._shares[number].astype("float32")
        program = pipeline.program(stage, part, self.training, self._shares_loss(stage))
        tensors = [tensor for tensor, has in zip(received, has_gradient, strict=True) if has]
        weights = self._weights[stage.number]
        if learns and not pipeline.remat:
            outputs, rest, held = program.forward(weights, tensors, others)
            self._held[stage.number, number] = held
        else:
            outputs, rest = program.run(weights, tensors, others)
            if learns:
                self._held[stage.number, number] = (weights, tensors, others)
        self._state[stage.number] = list(rest["state"])
        self.losses.append(rest["loss"])
        known = iter(outputs)
        sent = [next(known) if tensor is None else tensor for tensor in rest["fixed"]]
        if is_last:
            self.parts[number], self.masks[number] = sent, rest["masks"]
        else:
            pipeline.transfers.give(stage.number + 1, RECV_F, number, (sent, rest["masks"]))

    def _backward(self, stage: Stage, number: int) -> list[Any] | None:
        pipeline = self.pipeline
        from_next = None
        if stage is not pipeline.last:
            from_next = pipeline.transfers.take(stage.number, RECV_B, number)
        if not self._learns(stage):
            pipeline.transfers.give(stage.number - 1, RECV_B, number, None)
            return None
        part = self.batch.microbatch(number)
        program = pipeline.program(stage, part, self.training, self._shares_loss(stage))
        held = self._held.pop((stage.number, number))
        if pipeline.remat:
            held = program.forward(*held)[2]
        gradients, by_received = program.backward(held, from_next, self.scale)
        if stage.number:
            pipeline.transfers.give(stage.number - 1, RECV_B, number, by_received)
        return gradients

    def _learns(self, stage: Stage) -> bool:
        """Whether the stage or one before it has weights that are trained."""
        return any(each.trainable for each in self.pipeline.stages[: stage.number + 1])

    def _shares_loss(self, stage: Stage) -> bool:
        return stage is self.pipeline.last and self._shares is not None

    def _add(self, stage: Stage, gradients: list[Any] | None) -> None:
        if gradients is None:
            return
        before = self.gradients.get(stage.number)
        self.gradients[stage.number] = gradients if before is None else backend().add(before, gradients)

    def _state_for(self, stage: Stage, number: int) -> list[Any]:
        """The state that a micro-batch begins with: seeds as the batch began, all else as the one before left it."""
        begun, now = self._begun[stage.number], self._state[stage.number]
        return [
            old if is_seed(variable.path) else new for variable, old, new in zip(stage.state, begun, now, strict=True)
        ]

    def keep_state(self) -> None:
        """Give the variables what the forward passes have assigned."""
        for stage in self.pipeline.stages:
            for variable, old, new in zip(
                stage.state, self._begun.get(stage.number, ()), self._state.get(stage.number, ()), strict=False
            ):
                if new is not old:
                    backend().write(variable, new)


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
        masks.put(joined, ops.concatenate(list(found), 0))
    return joined
