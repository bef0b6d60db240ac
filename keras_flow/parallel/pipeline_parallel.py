"""Pipeline parallel: a model is cut into stages, each on a rank of its own, and a batch into micro-batches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import keras

from keras_flow import sbp, schedules
from keras_flow.backends.active import backend
from keras_flow.current import dry_run
from keras_flow.current.creator import creator
from keras_flow.current.models import stock_graph
from keras_flow.current.variable_layout import KerasLayout, VariableLayout, keras_layout
from keras_flow.distributions import models
from keras_flow.distributions.distribution import FlowDistribution
from keras_flow.distributions.ranks import require_placement
from keras_flow.distributions.rules import PatternRules
from keras_flow.errors import FlowError, warn
from keras_flow.layout import Layout
from keras_flow.parallel import said_ranks
from keras_flow.parallel.tools import ExplainedDistribution
from keras_flow.pipelines import asked_schedule, cutting, graph, refused, stages
from keras_flow.pipelines.stage_ranks import Ranks, StageRanks
from keras_flow.pipelines.staged_model import StagedModel
from keras_flow.placements import Placement
from keras_flow.schedules.automatic import one_at_a_time

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from keras_flow.explainer.explanation import Explanation

#: attribute of a model: its `_Cut`
_PIPELINE = "_keras_flow_pipeline"


@dataclass(frozen=True)
class _Cut:
    """A model's stages, and of which graph and by which distribution they are cut.

    It is no tuple: Keras loads weights into what the containers among a model's attributes hold. A functional model is
    its own graph, so that this would never end.
    """

    distribution: PipelineParallel
    graph: object
    pipeline: StagedModel


class PipelineParallel(ExplainedDistribution):
    """A model in stages, each on ranks of its own; the numbers of a step are those of one device on the whole batch.

    Losses are divided by the numbers of the whole batch, gradients of all micro-batches are added before one update,
    clipping takes the norm of all stages, dropout masks are those of one device, and metrics count every row once.

    Args:
        placement: the ranks, along `pipe_axis`, and along `batch_axes` where several ranks share a stage: each of them
            computes some rows of every micro-batch. Along all other axes a stage's tensors are split, as `rules` say.
            None takes all of the job as stages.
        stages: how many: the model is cut by cost, so that the slowest stage is as fast as it can be. Or for each stage
            the patterns (regular expressions) of its layers' paths. None takes the ranks along `pipe_axis`, times
            `chunks`.
        microbatches: into how many parts a batch is cut, by the balanced split; None takes twice the stages.
        schedule: `"gpipe"`, `"1f1b"`, `"interleaved"`, `"zb1p"`, `"zbv"`, a `kf.schedules.Schedule`, or the path of its
            CSV file. `"auto"` is the shortest that `kf.schedules.auto` finds where a backward pass takes twice a
            forward pass, and a rank holds as many micro-batches as in `"1f1b"`, or as many as `memory` has room for.
        chunks: stages of each rank, for `"interleaved"` and `"zb1p"`; `"zbv"` has two, `"auto"` as many at most.
        pipe_axis: the axis of the placement along which the stages are.
        batch_axes: those along which the rows of a micro-batch are; an axis that the placement does not have is none.
        rules: as of `kf.ModelParallel`: patterns of variable paths -> how a stage's weights are split over the axes
            that are neither `pipe_axis` nor `batch_axes`: `{"up/kernel": {"model": kf.sbp.split(1)}}`.
        activations: the same over layer paths, for layer outputs.
        remat: what is not held for the backward pass but computed again: `"stage"` for a stage's activations, or
            layers, as of `kf.DataParallel`: `"block"` or patterns of their paths. A layer that is chosen is not cut.
        memory: bytes of a rank, or None. The first training step of more rows than before is refused where `explain`'s
            estimate of its peak is above, with what would fit. `schedule="auto"` orders that step anew: the shortest
            order that is found for the stages' shares of the work, with no rank above.
        batch_normalization: `"refuse"`, or `"microbatch"`: BatchNormalization takes the statistics of each micro-batch,
            and moves its averages once for each. That is another number than one device's, and stages are on one rank.
        random: `"logical"` (the default) or `"stock"`, as for `kf.DataParallel`; with `"stock"` dropout masks depend on
            the micro-batches.
        zero: 1 splits the optimizer's slots over the ranks that share a stage's rows, on torch; 0: each has all.
        zero_min_size: elements that a rank's part of a slot has at least; what is smaller stays whole.

    Raises:
        FlowError: a placement with other axes, a schedule that does not fit the ranks, stages that cannot be cut.

    Example:
        >>> import keras, numpy as np, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> if kf.env.process_count() == 1:  # of several each must have a rank of the placement
        ...     with kf.PipelineParallel(kf.Placement([0, 1], axis_names=("pipe",)), microbatches=4).scope():
        ...         model = keras.Sequential(
        ...             [keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1, kernel_initializer="ones")]
        ...         )
        ...         model.compile(keras.optimizers.SGD(0.1), "mse")
        ...     history = model.fit(np.ones((8, 2)), np.zeros((8, 1)), batch_size=8, verbose=0)
    """

    mirrored_view = True
    layers_stand_alone = False
    #: whether the first rank of a stage alone has its variables; otherwise each process that has ranks of it
    _first_holds_all = False

    def __init__(
        self,
        placement: Placement | None = None,
        *,
        stages: int | Sequence[Sequence[str]] | None = None,
        microbatches: int | None = None,
        schedule: str | Path | schedules.Schedule = "1f1b",
        chunks: int | None = None,
        pipe_axis: str = "pipe",
        batch_axes: str | Sequence[str] = "data",
        rules: Mapping[str, sbp.SbpSpec] | None = None,
        activations: Mapping[str, sbp.SbpSpec] | None = None,
        remat: str | Sequence[str] | None = None,
        memory: int | None = None,
        batch_normalization: str = "refuse",
        random: str | None = None,
        zero: int = 0,
        zero_min_size: int = 1024,
    ):
        if placement is None:
            world = dry_run.world() or backend().world()
            placement = Placement(range(world.size), axis_names=(pipe_axis,))
        require_placement(placement, type(self).__name__)
        axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
        self._ranks = StageRanks(placement, pipe_axis, axes, self._first_holds_all)
        if self._ranks.split_axes:
            refused.refuse_split_stages(self._ranks, rules)
        self._zero = refused.zero_of(zero, zero_min_size, self._ranks)
        if isinstance(remat, str) and remat not in ("stage", "block"):
            raise FlowError(
                f'remat is None, "stage", "block" (the repeated blocks of a model) or a list of regular expressions of '
                f"layer paths, got {remat!r}"
            )
        if memory is not None and (not isinstance(memory, int) or memory < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise FlowError(f"memory is a number of bytes of a rank, or None for any; got {memory!r}")
        if batch_normalization not in ("refuse", "microbatch"):
            raise FlowError(f'batch_normalization is "refuse" or "microbatch", got {batch_normalization!r}')
        self._asked = (schedule, stages, microbatches, chunks)
        self.schedule = asked_schedule.schedule_of(schedule, len(self._ranks.places), stages, microbatches, chunks)
        self.patterns = None if stages is None or isinstance(stages, int) else [list(each) for each in stages]
        #: layer -> the ranks that `kf.scope.placement` said as it was made
        self._said: WeakKeyDictionary[keras.Layer, Ranks] = WeakKeyDictionary()
        self._memory = memory
        self._repeats_stages = remat == "stage"
        self._pipe_axis = pipe_axis
        self.batch_normalization_view = batch_normalization
        #: ranks of a stage -> what lays its variables
        self._parts: dict[Ranks, FlowDistribution] = {}
        self._ranks_of_layer: WeakKeyDictionary[keras.Layer, Ranks] = WeakKeyDictionary()
        super().__init__(
            placement,
            rules=PatternRules(rules),
            activations=PatternRules(activations, "activations"),
            random=random,
            remat=None if self._repeats_stages else remat,
        )
        self.zero_stage = zero  # of its parts
        # what no stage has (counters, metrics) is on every process, and of a process on one rank
        self._home = self
        if backend().capabilities.drives_all_ranks:
            world, last = dry_run.world() or backend().world(), self._ranks_of_stage(self.schedule.stages - 1)[:1]
            self._home = self._made_part(world.first_of_each_process((*last, *self.placement.ranks)))

    def _part(self, ranks: Ranks) -> FlowDistribution:
        """Return the distribution of a stage's variables; where a process has several lanes the first holds them."""
        if ranks not in self._parts:
            lane, holders = self._ranks.lane_here(ranks), self._ranks.holders(ranks)
            self._parts[ranks] = self._made_part(holders) if lane.size == 1 else self._split_part(lane, holders)
            self._parts[ranks].stage_rank = ranks[0]
        return self._parts[ranks]

    def _split_part(self, lane: Placement, holders: Ranks) -> FlowDistribution:
        """Return the distribution that lays a lane's tensors over the ranks which compute the stage together."""
        part = _StagePart(lane, rules=self.rules, activations=self.activations, random=self.random)
        part.whole, part.holders, part.rematerialized = self, holders, self.rematerialized
        part._problems, part._raised, part._warned = (
            self._problems,
            self._raised,
            self._warned,
        )  # `check` raises those of all stages together
        part.fallbacks = self.fallbacks
        return part

    def _made_part(self, holders: Ranks) -> FlowDistribution:
        ranks = holders
        if backend().capabilities.drives_all_ranks:
            own = backend().world().local_ranks
            ranks = ([rank for rank in holders if rank in own] or holders)[:1]
        part = _StagePart(Placement(list(ranks), ("lane",)), random=self.random, **self._zero)
        part.whole, part.mirrored_view, part.holders = self, True, holders
        return part

    # ---- where variables are

    def layout_for(
        self, path: str, shape: tuple[int, ...], layer: keras.Layer | None = None, dtype: str = "float32"
    ) -> KerasLayout:
        """The layout of a variable: on its layer's stage; until that is known, and for all else, on all ranks."""
        made_by = creator()
        ranks = self._ranks_of(layer or (made_by.layer if made_by else None))
        part, source = (self._home, "default") if ranks is None else (self._part(ranks), "its stage")
        if ranks is not None and self._ranks.split_axes:
            return part.layout_for(path, shape, layer, dtype)
        return KerasLayout(VariableLayout(Layout(part.placement, {}, shape), source), part)

    def _ranks_of(self, layer: keras.Layer | None) -> Ranks | None:
        if layer is None:
            return None
        said = said_ranks.current()
        if said is not None:
            self._said.setdefault(layer, said)
        ranks = self._said.get(layer, self._ranks_of_layer.get(layer))
        if ranks is None and self.patterns is not None:
            stage = cutting.stage_of_path(getattr(layer, "path", "") or layer.name, self.patterns)
            ranks = None if stage is None else self._ranks_of_stage(stage)
        return ranks

    def _ranks_of_stage(self, stage: int) -> Ranks:
        return self._ranks.places[self.schedule.rank_of[stage]]

    def adopt(self, model: keras.Model, *others: object) -> bool:
        """Cut the model into stages, and bring each variable to those of its stage; whether any moved."""
        if model.built:
            self._cut(model)
        changed = super().adopt(model, *others)
        moved = False
        for layer in model._flatten_layers():
            ranks = self._ranks_of_layer.get(layer)
            seeds = [generator.state for generator in layer._seed_generators]  # which its stage alone moves on
            for variable in (*layer._trainable_variables, *layer._non_trainable_variables, *seeds):
                found = keras_layout(variable)
                if ranks is not None and found is not None and found.distribution is not self._part(ranks):
                    backend().place(
                        variable, self.layout_for(variable.path, tuple(variable.shape), layer, variable.dtype)
                    )
                    moved = True
        optimizer = getattr(model, "optimizer", None)
        if moved and optimizer is not None:
            models.lay_optimizer(
                optimizer, self
            )  # slots that a checkpoint has filled are laid, but not on their stages
        if moved:
            backend().forget_steps(model)
        return changed or moved

    def build_for(self, model: keras.Model, x: object) -> None:
        """Build a Sequential without an `Input` for arrays: its layers are cut before the first step.

        Raises:
            FlowError: the data are no arrays, so that nothing says the shape of a row.
        """
        if not isinstance(model, keras.Sequential):
            return
        shape = getattr(x, "shape", None)
        if shape is None:
            raise FlowError(
                f"model {model.name!r} is not built, so that no stages can be cut. Begin it with keras.Input(shape), "
                "or call model.build((None, ...)) before"
            )
        model.build((None, *shape[1:]))

    def own_steps(self, model: keras.Model) -> AbstractContextManager[object] | None:
        """Inside, Keras's loops run the pipeline's steps."""
        return self._running(model)

    @contextmanager
    def _running(self, model: keras.Model) -> Iterator[None]:
        refused.refuse_own_steps(model)
        refused.refuse_other_updates(model, type(self).__name__)
        pipeline = self._cut(model)
        optimizer: Any = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)  # while hooks say where its slots are
        if model.train_function is None:  # the model was compiled, or quantized, since the last step
            pipeline.forget_programs()
        steps = {"train": pipeline.train, "test": pipeline.test, "predict": pipeline.predict}
        for name, step in steps.items():
            setattr(model, f"{name}_function", backend().step_function(model, name, step))
        yield

    def computed_on(self, model: keras.Model) -> set[int]:
        """The ranks of this process that have computed stages of a model."""
        found = self._cut_before(model)
        return set() if found is None else found.computed_on

    def explain(self, model: keras.Model, batch_size: int) -> Explanation:
        """Stages, messages and memory of a training step, without running anything.

        Args:
            model: a built model, created inside or outside of a scope.
            batch_size: rows of a batch.

        Returns:
            Each stage's ranks, weights, share of the work and messages, each rank's memory by the schedule, and the
            schedule drawn; printed as tables.

        Raises:
            FlowError: the model is not built or cannot be cut, or has fewer rows than micro-batches.
        """
        from keras_flow.explainer.memory_limit import shortest_within
        from keras_flow.explainer.pipeline import explain_pipeline

        pipeline = self._cut(model)
        if self._is_auto and self._memory is not None:
            pipeline = copy.copy(pipeline)
            pipeline.reorder(shortest_within(self, pipeline, batch_size, self._memory))
        explanation = explain_pipeline(self, pipeline, batch_size, self._pipe_axis)
        self.check(model)
        return explanation

    def __repr__(self) -> str:
        said = self.schedule
        parts = f"{said.stages} stages, {said.name}, {said.microbatches} micro-batches"
        return f"{type(self).__name__}({self.placement}, {parts})"

    @property
    def parts_of_batch(self) -> int:
        """Micro-batches, times the ranks that share the rows of each."""
        return self.schedule.microbatches * len(self._ranks.lanes(self._ranks.places[0]))

    # ---- stages

    def _cut_before(self, model: keras.Model) -> StagedModel | None:
        found: _Cut | None = model.__dict__.get(_PIPELINE)
        if found is None or found.distribution is not self:
            return None
        # a Sequential that was changed has another graph
        return found.pipeline if found.graph is stock_graph(model) else None

    def _cut(self, model: keras.Model) -> StagedModel:
        """Return the model's stages, and note where its layers are now: other models may call them in other stages."""
        pipeline = self._cut_before(model) or self._cut_anew(model)
        for stage in reversed(pipeline.stages):  # of a layer of several stages it is the first
            self._ranks_of_layer.update(dict.fromkeys(stage.inner_layers, stage.all_ranks))
        return pipeline

    def _cut_anew(self, model: keras.Model) -> StagedModel:
        calls = graph.of(model, self.blocks_of(model))
        schedule = self.schedule
        ranks = [self._ranks_of_stage(stage) for stage in range(schedule.stages)]
        said = {number: self._said_ranks(call.operation) for number, call in enumerate(calls.calls)}
        if any(each is not None for each in said.values()):
            stage_of_call, ranks = cutting.by_ranks(calls, said)
            refused.refuse_unlike(ranks)
            schedule = self._schedule_on(ranks)
        elif self.patterns is not None:
            stage_of_call = cutting.by_patterns(calls, self.patterns)
        else:
            stage_of_call = cutting.by_cost(calls, schedule.stages)
        cutting.check(calls, stage_of_call, schedule.stages)
        lanes = [self._ranks.lanes(each) for each in ranks]
        refused.refuse_rows_that_interact(calls, len(lanes[0]), self.batch_normalization_view, type(self).__name__)
        made = stages.cut(calls, stage_of_call, [self._ranks.shown(each) for each in lanes])
        refused.refuse_shared_state(made)
        refused.refuse_complex(calls, made)
        for stage, each, of_stage in zip(made, ranks, lanes, strict=True):
            stage.holders = self._ranks.holders(each)
            if self._zero:
                self._part(each).ensure_entered()  # groups are made by all processes
            if of_stage[0].size > 1:
                here = self._part(each)
                stage.split = tuple(
                    here if lane.ranks == here.placement.ranks else self._split_part(lane, stage.holders)
                    for lane in of_stage
                )
        pipeline = self._staged(model, calls, made, schedule, self._repeats_stages)
        # with the model: what is kept here, and refers to it, would keep it as long as this distribution
        object.__setattr__(model, _PIPELINE, _Cut(self, stock_graph(model), pipeline))
        if self._memory is not None:
            pipeline.look_at_rows = functools.partial(self._keep_within_memory, pipeline, self._memory)
        return pipeline

    def _keep_within_memory(self, pipeline: StagedModel, memory: int, rows: int) -> None:
        """Order the step by the memory where the schedule is `"auto"`; refuse a batch that needs more than that."""
        from keras_flow.explainer.memory_limit import refuse_memory, shortest_within

        if self._is_auto:
            pipeline.reorder(shortest_within(self, pipeline, rows, memory))
        refuse_memory(self, pipeline, rows, memory, self._with_microbatches)

    @property
    def _is_auto(self) -> bool:
        return self._asked[0] == "auto"

    def _with_microbatches(self, microbatches: int) -> schedules.Schedule | None:
        """The requested schedule with so many micro-batches (of `"auto"` what holds the least); None of a value."""
        given, stages, _, chunks = self._asked
        if given not in asked_schedule.NAMES:
            return None
        if self._is_auto:
            return one_at_a_time(list(self.schedule.rank_of.values()), microbatches)
        return asked_schedule.schedule_of(given, len(self._ranks.places), stages, microbatches, chunks)

    def _staged(self, *args: Any) -> StagedModel:
        """Make the model in stages that runs the steps."""
        return StagedModel(*args)

    def _said_ranks(self, operation: object) -> Ranks | None:
        """The ranks that were said as a layer, or one inside it, was made."""
        if not isinstance(operation, keras.Layer):
            return None
        found = [self._said[layer] for layer in operation._flatten_layers() if layer in self._said]
        return found[0] if found else None

    def refuse_ranks(self, ranks: Ranks) -> None:
        """Refuse ranks that the placement does not have, or that are no stage's where stages are split.

        Raises:
            FlowError: naming those that it has.
        """
        axes, places = self._ranks.split_axes, self._ranks.places
        if axes and ranks not in places:
            raise FlowError(
                f"kf.scope.placement: stages are split over {list(axes)}, so a stage is on the ranks "
                f"{' or '.join(map(str, map(list, places)))}, not on {list(ranks)}"
            )
        for rank in ranks:
            if rank not in self.placement.ranks:
                raise FlowError(
                    f"kf.scope.placement: rank {rank} is not of the pipeline's {list(self.placement.ranks)}"
                )

    def _schedule_on(self, ranks: Sequence[Ranks]) -> schedules.Schedule:
        """The schedule of stages that were placed by hand: the requested one if its stages are on the same ranks."""
        schedule, _, microbatches, chunks = self._asked
        parts = microbatches or 2 * len(ranks)
        places = list(dict.fromkeys(ranks))
        try:
            made = asked_schedule.schedule_of(schedule, len(places), len(ranks), microbatches, chunks)
        except FlowError:
            made = None
        if made is not None and [places[made.rank_of[stage]] for stage in range(len(ranks))] == list(ranks):
            return made
        if schedule != "gpipe":
            warn(
                f"PipelineParallel: schedule={schedule!r} has no order for stages on the ranks "
                f"{', '.join(str(list(each)) for each in ranks)}, where kf.scope.placement put them. "
                'They compute in the order of schedule="gpipe"'
            )
        return schedules.gpipe_on([places.index(each) for each in ranks], parts)


class _StagePart(FlowDistribution):
    """Lays the variables of one stage on its ranks; other processes hold nothing of them."""

    is_of_all_processes = False
