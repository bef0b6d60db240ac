"""`StagedModel`: the steps of a model that is cut into stages, run as a schedule says.

A training step with two stages on two ranks and two micro-batches, in the order of `one_f_one_b`:

    rank 0   0F0  0F1            0B0  0B1     update
    rank 1        1F0  1B0  1F1  1B1          update, loss and metrics of the whole batch

`F` computes a stage's layers, and the last stage's also the share of the loss; `B` gives gradients by the stage's
weights, which are added up, and by what it received, which the stage before needs. Weights are updated once. Losses
and metrics are then computed from the outputs of all rows, as one device does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_flow.backends.active import backend
from keras_flow.current import microbatch, models
from keras_flow.current.microbatch import Microbatch
from keras_flow.distributions.distribution import is_seed
from keras_flow.errors import FlowError, warn
from keras_flow.layout import balanced
from keras_flow.pipelines import losses, masks
from keras_flow.pipelines.graph import CallGraph, filled
from keras_flow.pipelines.stages import Stage, StageLayer
from keras_flow.pipelines.transfers import Transfers
from keras_flow.pipelines.update import update
from keras_flow.schedules import Schedule
from keras_flow.schedules.action import BACKWARD, FORWARD, INPUTS, RECV_B, RECV_F, SEND_B, SEND_F, WEIGHTS, Action

ops: Any = keras.ops


class StagedModel:
    """A model in stages.

    Args:
        model: a built model.
        graph: its calls.
        stages: those calls, cut.
        schedule: in which order ranks compute.
        remat: whether a stage's activations are computed again for its backward pass, instead of held.
    """

    def __init__(self, model: keras.Model, graph: CallGraph, stages: Sequence[Stage], schedule: Schedule, remat: bool):
        self.model, self.graph, self.stages, self.schedule, self.remat = model, graph, list(stages), schedule, remat
        self.transfers = Transfers([stage.rank for stage in stages])
        self._trained = self._said_added = False
        self._schedules = {schedule.microbatches: schedule}
        self._first_stage: dict[int, int] = {}
        self._programs: dict[Any, Any] = {}
        self._finish: dict[Any, Any] = {}
        for stage in self.stages:
            stage.layer = StageLayer(stage, model)

    @property
    def last(self) -> Stage:
        """The stage with the model's outputs."""
        return self.stages[-1]

    # ---- steps, as Keras's trainer asks for them

    def train(self, data: Any) -> dict[str, Any]:
        """One training step on a batch; the logs."""
        batch = self._batch(data)
        if batch.rows < self.schedule.microbatches and not self._trained:
            raise FlowError(
                f"a batch of {batch.rows} rows cannot be cut into {self.schedule.microbatches} micro-batches: each has "
                f"one row at least. Take a larger batch_size, or microbatches={batch.rows}"
            )
        self._trained = True
        self._look_at_variables()
        optimizer: Any = self.model.optimizer
        run = _Pass(self, batch, training=True, with_loss=True, scale=_loss_scale(optimizer))
        run.follow(self._schedule(len(batch.parts)))
        run.keep_state()
        update(self, optimizer, run.gradients, run.scale)
        return self._logs(batch, run)

    def test(self, data: Any) -> dict[str, Any]:
        """One step of `evaluate`; the logs."""
        batch = self._batch(data)
        return self._logs(batch, self._forward(batch, with_loss=True))

    def predict(self, data: Any) -> Any:
        """One step of `predict`; the model's outputs, on every rank."""
        batch = _CutBatch(self, data)
        run = self._forward(batch, with_loss=False)
        outputs = run.outputs() if self.last.rank in self.transfers.own else None
        return self.transfers.from_rank(self.last.rank, outputs)

    def _schedule(self, microbatches: int) -> Schedule:
        """The schedule for so many micro-batches: without the actions of those that there are not."""
        if microbatches not in self._schedules:
            orders = [[each for each in order if each.microbatch < microbatches] for order in self.schedule.orders]
            self._schedules[microbatches] = Schedule(orders, self.schedule.name)
        return self._schedules[microbatches]

    def _batch(self, data: Any) -> _CutBatch:
        """A batch for a step with a loss or metrics, whose objects Keras makes with the first one."""
        batch = _CutBatch(self, data)
        model: Any = self.model
        if not all(part is None or part.built for part in (model._compile_loss, model._compile_metrics)):
            model._symbolic_build(data_batch=tree.map_structure(_spec, batch.data))
        return batch

    def _forward(self, batch: _CutBatch, with_loss: bool) -> _Pass:
        self._look_at_variables()
        run = _Pass(self, batch, training=False, with_loss=with_loss)
        run.forward_only()
        run.keep_state()
        return run

    def _look_at_variables(self) -> None:
        """Take the variables as they are now, and which stage is the first to use each."""
        for stage in self.stages:
            stage.look_at_variables()
        self._first_stage = {
            id(variable): stage.number for stage in reversed(self.stages) for variable in stage.trainable
        }

    def inputs_of(self, x: Any) -> list[Any]:
        """The model's inputs, flat, as arrays: in the order, of the dtypes and ranks that Keras gives them."""
        function: Any = models.graph_of(self.model)
        with backend().on_rank(self.stages[0].rank):
            return [_host(value) for value in function._standardize_inputs(x)]

    # ---- programs

    def program(self, stage: Stage, part: Microbatch, training: bool, with_loss: bool) -> Any:
        """What computes a stage for micro-batches of so many rows; compiled where the engine does."""
        key = (stage.number, part.count, part.rows, training, with_loss, len(stage.trainable))
        if key not in self._programs:
            function = functools.partial(self._compute, stage, part.count, part.rows, training, with_loss)
            self._programs[key] = backend().stage_program(function, stage.rank, not self.model.run_eagerly)
        return self._programs[key]

    def _compute(
        self,
        stage: Stage,
        count: int,
        rows: int,
        training: bool,
        with_loss: bool,
        weights: Sequence[Any],
        tensors: Sequence[Any],
        others: Mapping[str, Any],
    ) -> tuple[list[Any], dict[str, Any]]:
        """A stage's layers as a function of values.

        Args:
            stage: which.
            count: rows of the micro-batch.
            rows: rows of the batch.
            training: whether layers train.
            with_loss: whether the stage is the last one and computes its share of the loss.
            weights: values of `stage.trainable`.
            tensors: what was received and has gradients.
            others: the rest: `inputs`, `fixed` (received, without gradients), `masks`, `state`, and of the last stage
                `y`, `weights` and `shares`.

        Returns:
            What has gradients: the tensors sent, and the sum of the losses; and all else.
        """
        received, known = list(others["fixed"]), iter(tensors)
        received = [next(known) if value is None else value for value in received]
        mapping = [*zip(stage.trainable, weights, strict=True), *zip(stage.state, others["state"], strict=True)]
        part = Microbatch(others["start"], count, rows)
        assert stage.layer is not None
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope, microbatch.computing(part):
            outputs, found = stage.layer.run([*others["inputs"], *received], others["masks"], training)
            # Keras divides what an activity regularizer gives by the rows that it sees
            loss = _sum([ops.sum(loss) for loss in self._added(stage, scope.losses)]) * (count / rows)
            # those of weights do not depend on rows: the first micro-batch counts them, and the first stage
            own = [variable for variable in stage.trainable if self._first_stage[id(variable)] == stage.number]
            regular = _sum([variable.regularizer(variable.value) for variable in own if variable.regularizer])
            loss = loss + others["first"] * regular
            is_last = stage is self.last
            if with_loss:
                y_pred = filled(self.graph.outputs, dict(zip(stage.sent, outputs, strict=True)))
                with losses.weighed(self.model, others["shares"]):
                    value = self.model._compile_loss(others["y"], y_pred, others["weights"])
                loss = loss + (0.0 if value is None else value)
        state = [scope.get_current_value(variable) for variable in stage.state]
        state = [old if new is None else new for new, old in zip(state, others["state"], strict=True)]
        has_gradient = [_is_float(tensor) for tensor in outputs]
        sent = [] if is_last else [tensor for tensor, has in zip(outputs, has_gradient, strict=True) if has]
        fixed = [None if has and not is_last else tensor for tensor, has in zip(outputs, has_gradient, strict=True)]
        return [*sent, loss], {"fixed": fixed, "masks": found, "state": state, "loss": loss}

    def _added(self, stage: Stage, found: Sequence[Any]) -> Sequence[Any]:
        """What layers have added to the loss: a mean over rows each, as an activity regularizer is one."""
        known = sum(inner.activity_regularizer is not None for inner in stage.inner_layers)
        if len(found) > known and not self._said_added:
            self._said_added = True
            warn(
                f"PipelineParallel: a layer of stage {stage.number} calls add_loss, and sees a micro-batch at a time. "
                "It is taken for a mean over rows: that of the batch is the mean of all, weighed by their rows"
            )
        return found

    # ---- losses and metrics of the whole batch

    def _logs(self, batch: _CutBatch, run: _Pass) -> dict[str, Any]:
        model: Any = self.model
        variables = model.metrics_variables
        loss = self.transfers.sum_on(self.last.rank, run.losses)
        logs = None
        if self.last.rank in self.transfers.own:
            if not self._finish:
                for hides in (False, True):
                    function = functools.partial(self._finished, hides)
                    self._finish[hides] = backend().compiled(function, self.last.rank, not model.run_eagerly)
            finish = self._finish
            outputs = [[part[place] for part in run.parts] for place in range(len(self.last.sent))]
            found = [[part[place] for part in run.masks] for place in range(len(self.last.sent))]
            values = [backend().read(variable) for variable in variables]
            # a program for each of the two: in JAX's training step masks do not reach the metrics
            hides = run.training and not backend().capabilities.masks_reach_metrics
            logs, new = finish[hides](values, batch.data, outputs, found, loss)
            for variable, value in zip(variables, new, strict=True):
                backend().write(variable, value)
        if self.transfers.is_alone:
            return logs  # type: ignore[return-value]
        own = [backend().read(variable) for variable in variables]
        for variable, value in zip(variables, self.transfers.from_rank(self.last.rank, own, is_like=True), strict=True):
            backend().write(variable, value)
        return model.get_metrics_result()

    def _finished(
        self, hides_masks: bool, values: Sequence[Any], data: Any, outputs: Any, found: Any, loss: Any
    ) -> Any:
        """Logs, and the new state of metrics, from the outputs of all micro-batches."""
        model: Any = self.model
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        variables = model.metrics_variables
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
            known = {key: _joined(parts, own) for key, parts, own in zip(self.last.sent, outputs, found, strict=True)}
            y_pred = filled(self.graph.outputs, known)
            if model._compile_loss is not None and model._compile_loss.metrics:
                model._compile_loss(y, y_pred, weights)  # which keeps the loss of each output
            if hides_masks:
                known = {key: _joined(parts, [None]) for key, parts in zip(self.last.sent, outputs, strict=True)}
                y_pred = filled(self.graph.outputs, known)
            model._loss_tracker.update_state(loss, sample_weight=tree.flatten(x)[0].shape[0])
            logs = model.compute_metrics(x, y, y_pred, sample_weight=weights)
        new = [scope.get_current_value(variable) for variable in variables]
        return logs, [old if value is None else value for value, old in zip(new, values, strict=True)]


class _CutBatch:
    """A batch, cut into micro-batches by the balanced split: 13 rows in four are 4, 3, 3 and 3."""

    def __init__(self, pipeline: StagedModel, data: Any):
        self.data = tree.map_structure(_host, data)
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


class _Pass:
    """One pass over the micro-batches of a batch."""

    def __init__(self, pipeline: StagedModel, batch: _CutBatch, training: bool, with_loss: bool, scale: float = 1.0):
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
        known = {
            key: ops.concatenate(list(column), 0) for key, column in zip(self.pipeline.last.sent, columns, strict=True)
        }
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
        has_gradient = [_is_float(tensor) for tensor in received]
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
        self._take_state(stage, number, rest["state"])
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

    def _take_state(self, stage: Stage, number: int, state: Sequence[Any]) -> None:
        self._state[stage.number] = list(state)

    def keep_state(self) -> None:
        """Give the variables what the forward passes have assigned."""
        for stage in self.pipeline.stages:
            for variable, old, new in zip(
                stage.state, self._begun.get(stage.number, ()), self._state.get(stage.number, ()), strict=False
            ):
                if new is not old:
                    backend().write(variable, new)


def _loss_scale(optimizer: Any) -> float:
    """The number with which a loss is multiplied before its gradient is taken."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and optimizer.loss_scale_factor is None:
        return 1.0
    scaled = optimizer.scale_loss(ops.ones((), "float32"))
    return float(ops.convert_to_numpy(scaled))


def _sum(values: Sequence[Any]) -> Any:
    total: Any = 0.0
    for value in values:
        total = total + ops.cast(value, "float32")
    return ops.convert_to_tensor(total, "float32") if not values else total


def _is_float(tensor: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(tensor.dtype)


def _host(leaf: Any) -> Any:
    return leaf if leaf is None else np.asarray(keras.ops.convert_to_numpy(leaf))


def _spec(leaf: Any) -> Any:
    return None if leaf is None else keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))


def _joined(parts: Sequence[Any], found: Sequence[Any]) -> Any:
    """The rows of all micro-batches, with their mask."""
    joined = ops.concatenate(list(parts), 0)
    if all(mask is not None for mask in found):
        masks.put(joined, ops.concatenate(list(found), 0))
    return joined
