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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from keras import tree

from keras_flow.backends.active import backend
from keras_flow.current import microbatch, models
from keras_flow.current.microbatch import Microbatch
from keras_flow.errors import FlowError, warn
from keras_flow.pipelines import losses
from keras_flow.pipelines.graph import CallGraph, filled
from keras_flow.pipelines.lanes import Lanes
from keras_flow.pipelines.passes import CutBatch, Pass, follow, host, is_float, joined
from keras_flow.pipelines.refused import refuse_losses_over_rows
from keras_flow.pipelines.stages import Stage, StageLayer
from keras_flow.pipelines.update import update
from keras_flow.schedules import Schedule
from keras_flow.schedules.action import COMPUTED, FORWARD, Action
from keras_flow.schedules.lowering import in_one_order

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
        self.lanes = Lanes(self.stages)
        self._trained = self._said_added = self._looked_at_losses = False
        #: is told the rows of a training step that has more than those before; None: nobody asks
        self.look_at_rows: Callable[[int], None] | None = None
        self._most_rows = 0
        self._orders: dict[tuple[int, bool], tuple[Action, ...]] = {}
        self._first_stage: dict[int, int] = {}
        self._computed: set[int] = set()
        self._programs: dict[Any, Any] = {}
        self._finish: dict[Any, Any] = {}
        #: those that update the weights
        self.updates: dict[Any, Any] = {}
        for stage in self.stages:
            stage.layer = StageLayer(stage, model)

    @property
    def last(self) -> Stage:
        """The stage with the model's outputs."""
        return self.stages[-1]

    @property
    def computed_on(self) -> set[int]:
        """The ranks of this process that have computed."""
        return set(self._computed)

    def forget_programs(self) -> None:
        """Forget the programs: what the model was compiled with is in them, and where its variables are."""
        for programs in (self._programs, self._finish, self.updates):
            programs.clear()
        for lane in self.lanes.all:
            lane.forget_shapes()  # what has gradients at a cut depends on the loss
        self._looked_at_losses = False

    def reorder(self, schedule: Schedule) -> None:
        """Go on in another order of the same stages and micro-batches."""
        self.schedule, self._orders = schedule, {}

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
        if self.look_at_rows is not None and batch.rows > max(self._most_rows, self.schedule.microbatches - 1):
            self.look_at_rows(batch.rows)
            self._most_rows = batch.rows
        optimizer: Any = self.model.optimizer
        scale = loss_scale(optimizer)
        runs = self._passes(batch, training=True, with_loss=True, scale=scale)
        follow(runs, self._order(len(batch.parts), with_backward=True), self.lanes)
        self.lanes.keep_state(runs, batch.has_empty_lane, training=True)
        update(self, optimizer, self.lanes.gradients(), scale)
        return self._logs(batch, runs)

    def test(self, data: Any) -> dict[str, Any]:
        """One step of `evaluate`; the logs."""
        batch = self._batch(data)
        return self._logs(batch, self._evaluated(batch, with_loss=True))

    def predict(self, data: Any) -> Any:
        """One step of `predict`; the model's outputs, on every rank."""
        batch = CutBatch(self, data)
        blocks, _ = self.lanes.outputs(self._evaluated(batch, with_loss=False), batch.signature)
        outputs = None
        if blocks:
            known = {key: joined(rows, [None]) for key, *rows in zip(self.last.sent, *blocks, strict=True)}
            outputs = filled(self.graph.outputs, known)
        return self.lanes.from_rank(self.last.root, outputs)

    def _passes(self, batch: CutBatch, **settings: Any) -> list[Pass]:
        """A pass of each lane of this process."""
        self._look_at_variables()
        self.lanes.begin()
        return [Pass(self, lane, batch, **settings) for lane in self.lanes.own]

    def _order(self, microbatches: int, with_backward: bool) -> tuple[Action, ...]:
        """What all ranks do for so many micro-batches: the schedule without those that there are not."""
        if (microbatches, with_backward) not in self._orders:
            kinds = COMPUTED if with_backward else (FORWARD,)
            orders = [
                [each for each in order if each.microbatch < microbatches and each.kind in kinds]
                for order in self.schedule.orders
            ]
            made = in_one_order(orders, self.schedule.rank_of, len(self.stages))
            self._orders[microbatches, with_backward] = made
        return self._orders[microbatches, with_backward]

    def _batch(self, data: Any) -> CutBatch:
        """A batch for a step with a loss or metrics, whose objects Keras makes with the first one."""
        batch = CutBatch(self, data)
        model: Any = self.model
        if not all(part is None or part.built for part in (model._compile_loss, model._compile_metrics)):
            model._symbolic_build(data_batch=tree.map_structure(_spec, batch.data))
        if not self._looked_at_losses and model._compile_loss is not None:
            if self.schedule.microbatches * len(self.lanes.all) > 1:
                who = type(models.distribution_of(model)).__name__
                refuse_losses_over_rows(self.graph, model._compile_loss, batch.y, who)
            self._looked_at_losses = True
        return batch

    def _evaluated(self, batch: CutBatch, with_loss: bool) -> list[Pass]:
        """The passes of all lanes, forward alone."""
        runs = self._passes(batch, training=False, with_loss=with_loss)
        follow(runs, self._order(len(batch.parts), with_backward=False))
        self.lanes.keep_state(runs, batch.has_empty_lane, training=False)
        return runs

    def _look_at_variables(self) -> None:
        """Take the variables as they are now, and which stage is the first to use each."""
        distribution = models.distribution_of(self.model)
        repeated = () if distribution is None else distribution.rematerialized
        for stage in self.stages:
            stage.look_at_variables()
            stage.is_repeated = any(layer._remat_mode or layer in repeated for layer in stage.inner_layers)
        self._first_stage = {
            id(variable): stage.number for stage in reversed(self.stages) for variable in stage.trainable
        }

    def inputs_of(self, x: Any) -> list[Any]:
        """The model's inputs, flat, as arrays: in the order, of the dtypes and ranks that Keras gives them."""
        function: Any = models.graph_of(self.model)
        with backend().on_rank(backend().world().local_ranks[0]):
            return [host(value) for value in function._standardize_inputs(x)]

    # ---- programs

    def program(self, stage: Stage, rank: int, part: Microbatch, training: bool, with_loss: bool) -> Any:
        """What computes a stage on a rank for micro-batches of so many rows; compiled where the engine does."""
        trainable = tuple(map(id, stage.trainable))  # a layer may be frozen between two steps
        key = (stage.number, rank, part.count, part.rows, training, with_loss, trainable)
        if key not in self._programs:
            self._computed.add(rank)
            function = functools.partial(self._compute, stage, part.count, part.rows, training, with_loss)
            split = stage.splits(stage.ranks.index(rank))
            self._programs[key] = backend().stage_program(function, rank, not self.model.run_eagerly, split)
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
            self._say_added(stage, scope.losses)
            # Keras divides what an activity regularizer gives by the rows that it sees
            loss = _sum([ops.sum(loss) for loss in scope.losses]) * (count / rows)
            # those of weights do not depend on rows: the first micro-batch counts them, and the first stage
            own = [variable for variable in stage.trainable if self._first_stage[id(variable)] == stage.number]
            regular = _sum([variable.regularizer(variable.value) for variable in own if variable.regularizer])
            loss = loss + ops.multiply(others["first"], regular)
            is_last = stage is self.last
            if with_loss:
                y_pred = filled(self.graph.outputs, dict(zip(stage.sent, outputs, strict=True)))
                with losses.weighed(self.model, others["shares"], is_whole=count == rows):
                    value = self.model._compile_loss(others["y"], y_pred, others["weights"])
                loss = loss if value is None else loss + ops.cast(value, losses.dtype())
        state = [scope.get_current_value(variable) for variable in stage.state]
        state = [old if new is None else new for new, old in zip(state, others["state"], strict=True)]
        has_gradient = [is_float(tensor) for tensor in outputs]
        sent = [] if is_last else [tensor for tensor, has in zip(outputs, has_gradient, strict=True) if has]
        fixed = [None if has and not is_last else tensor for tensor, has in zip(outputs, has_gradient, strict=True)]
        return [*sent, loss], {"fixed": fixed, "masks": found, "state": state, "loss": loss}

    def _say_added(self, stage: Stage, found: Sequence[Any]) -> None:
        """Warn once of losses that are no activity regularizer's, of which is known that they are means over rows."""
        if not found or self._said_added:
            return
        known = sum(inner.activity_regularizer is not None for inner in stage.inner_layers)
        if len(found) > known:
            self._said_added = True
            warn(
                f"a layer of stage {stage.number} calls add_loss, and sees a part of a batch's rows at a time. It is "
                "assumed to be a mean over rows, so parts are weighted by their rows"
            )

    # ---- losses and metrics of the whole batch

    def _logs(self, batch: CutBatch, runs: Sequence[Pass]) -> dict[str, Any]:
        model: Any = self.model
        variables = model.metrics_variables
        loss = self.lanes.sum_on(self.last.rank, [loss for run in runs for loss in run.losses])
        training = bool(runs) and runs[0].training
        blocks, found = self.lanes.outputs(runs, (batch.signature, training))
        logs = None
        if blocks:
            if not self._finish:
                for hides in (False, True):
                    function = functools.partial(self._finished, hides)
                    self._finish[hides] = backend().compiled(function, self.last.rank, not model.run_eagerly)
            finish = self._finish
            outputs, known = (list(map(list, zip(*each, strict=True))) for each in (blocks, found))
            values = [backend().read(variable) for variable in variables]
            # a program for each of the two: in JAX's training step masks do not reach the metrics
            hides = training and not backend().capabilities.masks_reach_metrics
            logs, new = finish[hides](values, batch.data, outputs, known, loss)
            for variable, value in zip(variables, new, strict=True):
                backend().write(variable, value)
        if self.lanes.is_alone:
            return logs  # type: ignore[return-value]
        own = [backend().read(variable) for variable in variables]
        for variable, value in zip(variables, self.lanes.from_rank(self.last.root, own, is_like=True), strict=True):
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
            known = {key: joined(parts, own) for key, parts, own in zip(self.last.sent, outputs, found, strict=True)}
            y_pred = filled(self.graph.outputs, known)
            if model._compile_loss is not None and model._compile_loss.metrics:
                model._compile_loss(y, y_pred, weights)  # which keeps the loss of each output
            if hides_masks:
                known = {key: joined(parts, [None]) for key, parts in zip(self.last.sent, outputs, strict=True)}
                y_pred = filled(self.graph.outputs, known)
            model._loss_tracker.update_state(loss, sample_weight=tree.flatten(x)[0].shape[0])
            logs = model.compute_metrics(x, y, y_pred, sample_weight=weights)
        new = [scope.get_current_value(variable) for variable in variables]
        return logs, [old if value is None else value for value, old in zip(new, values, strict=True)]


def loss_scale(optimizer: Any) -> float:
    """The number with which a loss is multiplied before its gradient is taken."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and optimizer.loss_scale_factor is None:
        return 1.0
    scaled = optimizer.scale_loss(ops.ones((), "float32"))
    return float(ops.convert_to_numpy(scaled))


def _sum(values: Sequence[Any]) -> Any:
    total: Any = 0.0
    for value in values:
        total = total + ops.cast(value, losses.dtype())
    return ops.convert_to_tensor(total, losses.dtype()) if not values else total


def _spec(leaf: Any) -> Any:
    return None if leaf is None else keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))
