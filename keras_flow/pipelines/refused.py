"""What a pipeline refuses: layers and models whose numbers would not be those of one device, stages that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_flow.backends.active import backend
from keras_flow.backends.row_wise import row_interaction, row_sums
from keras_flow.current import models
from keras_flow.errors import FlowError, warn
from keras_flow.pipelines import losses
from keras_flow.pipelines.graph import CallGraph, filled, units
from keras_flow.pipelines.stage_ranks import StageRanks
from keras_flow.pipelines.stages import Stage


def refuse_rows_that_interact(calls: CallGraph, lanes: int, statistics: str, who: str) -> None:
    """Refuse layers in which the rows of a batch interact: a stage sees those of a micro-batch.

    Args:
        calls: the model's.
        lanes: how many ranks share a stage.
        statistics: what `batch_normalization=` says.
        who: the distribution's name.
    """
    own: dict[str, None] = {}
    for call in calls.calls:
        layer = call.operation
        if not isinstance(layer, keras.Layer):
            continue
        for inner in layer._flatten_layers():
            if isinstance(inner, keras.layers.BatchNormalization) and statistics == "refuse":
                other = 'say batch_normalization="microbatch", which is another number than one device\'s'
                raise FlowError(
                    f"{who}: layer {inner.path!r} takes the statistics of all rows of a batch, and sees a part of them "
                    "at a time. Use GroupNormalization or LayerNormalization, or "
                    f"{other if who == 'PipelineParallel' else 'train it under kf.DataParallel'}"
                )
            if isinstance(inner, keras.layers.BatchNormalization) and lanes > 1:
                raise FlowError(
                    f"layer {inner.path!r} takes the statistics of a micro-batch, whose rows are on {lanes} ranks: "
                    "give each stage one rank, or use GroupNormalization or LayerNormalization"
                )
            if getattr(inner, "stateful", False):
                raise FlowError(f"layer {inner.path!r} is stateful: its rows go on with those of the batch before")
        for unit in units(layer):
            interaction = row_interaction.of_layer(unit)
            if interaction is None or isinstance(unit, keras.layers.BatchNormalization):
                continue
            # what Keras's activity regularizers give is a mean over rows: it is weighted by those of a micro-batch
            if interaction.kind == "added loss" and unit.activity_regularizer is not None:
                continue
            if interaction.kind not in ("own code", "function", "quantization", "unknown"):
                raise FlowError(f"{interaction.text}, of which a stage sees the rows of a micro-batch only")
            own[interaction.text] = None
    if own:
        warn(f"{who}: {'; '.join(own)}. A stage gives it a micro-batch at a time: a row must not depend on the others")


def refuse_losses_over_rows(graph: CallGraph, compiled: Any, y: Any, who: str) -> None:
    """Refuse a built loss of Keras that compares rows, and warn of losses of the user's own.

    Args:
        graph: the model's calls.
        compiled: Keras's compiled loss, built.
        y: targets.
        who: the distribution's name.

    Raises:
        FlowError: naming the loss.
    """
    own: dict[str, None] = {}
    outputs = filled(graph.outputs, dict(enumerate(graph.tensors)))
    for loss, (_, output, _) in losses.given_to_losses(compiled, y, None, outputs):
        interaction = row_sums.of_loss(loss, len(output.shape))
        if interaction is not None and interaction.kind != "own code":
            raise FlowError(
                f"{who}: {interaction.text}, and is given a part of a batch's rows at a time. Take a loss with a value "
                "for each row (Dice and Tversky have one by axis=), or train under kf.DataParallel"
            )
        if interaction is not None:
            own[interaction.text] = None
    if own:
        warn(
            f"{who}: {'; '.join(own)}. It is given a part of a batch's rows at a time: its value for a row must not "
            "depend on the others"
        )


def refuse_other_updates(model: Any, who: str) -> None:
    """Refuse a model whose weights are updated otherwise than by one optimizer and the sums of gradients.

    Args:
        model: which.
        who: the distribution's name.

    Raises:
        FlowError: a layer assigns its weights, or `MultiOptimizer` wants all of its variables at once.
    """
    for layer in model._flatten_layers():
        of_float8 = any(variable.overwrite_with_gradient for variable in layer._trainable_variables)
        if of_float8 or row_interaction.assigns_weights(layer):
            what = "the scales of float8" if of_float8 else "its kernel"
            raise FlowError(
                f"layer {layer.path!r} assigns {what} in each call, and {who} calls it for some rows of a batch at a "
                "time. Train it under kf.DataParallel or kf.ModelParallel"
            )
    optimizer = getattr(model, "optimizer", None)
    inside = () if optimizer is None else models.with_inner(optimizer)
    if any(isinstance(each, keras.optimizers.MultiOptimizer) for each in inside):
        raise FlowError(
            f"{who} updates variables rank by rank, which keras.optimizers.MultiOptimizer does not take. Compile the "
            "model with one optimizer, or train it under kf.DataParallel or kf.ModelParallel"
        )


def refuse_own_steps(model: Any) -> None:
    """Refuse a model with a training step of its own, which computes a whole batch."""
    for name in ("train_step", "compute_loss", "test_step", "predict_step"):
        if models.has_own(model, name):
            raise FlowError(
                f"model {model.name!r} has a {name} of its own, which computes a whole batch; a pipeline computes "
                "it in stages and micro-batches. Give the loss to `compile`, or train it under kf.DataParallel or "
                "kf.ModelParallel"
            )


def refuse_split_stages(ranks: StageRanks, rules: object) -> None:
    """Refuse axes over which stages are split where no rule says how, and engines that cannot do so.

    Args:
        ranks: the ranks of the stages.
        rules: as the user gives them.

    Raises:
        FlowError: saying which can.
    """
    axis = ranks.split_axes[0]
    if rules is None:
        raise FlowError(
            f"PipelineParallel: the placement's axis {axis!r} is neither pipe_axis nor of batch_axes, and "
            f'nothing is split over it. Say rules= as of kf.ModelParallel, for example {{"kernel": {{{axis!r}: '
            "kf.sbp.split(1)}}, or leave the axis out"
        )
    reason = backend().capabilities.refused.get("split stages")
    if reason is None and backend().capabilities.drives_all_ranks:
        world = backend().world()
        lanes = (lane.ranks for place in ranks.places for lane in ranks.lanes(place))
        apart = next((lane for lane in lanes if len(world.first_of_each_process(lane)) > 1), None)
        if apart is not None:
            reason = (
                f"ranks {list(apart)} compute together and are of several processes, of which none has the tensors of "
                "another. Let one process drive them, or use torch"
            )
    if reason is not None:
        raise FlowError(f"stages that are split over an axis ({axis!r}) on {backend().name}: {reason}")


def zero_of(stage: int, min_size: int, ranks: StageRanks) -> dict[str, Any]:
    """What a stage's part is told of `zero=`; refuses what a pipeline cannot split.

    Raises:
        FlowError: saying what to do.
    """
    if stage == 0:
        return {}
    if backend().capabilities.drives_all_ranks:
        other = "torch" if stage == 1 else "torch, where a pipeline splits slots alone, zero=1"
        raise FlowError(
            f"PipelineParallel(zero={stage!r}) on {backend().name}: a process has slots once, on the first of its "
            f"ranks in a stage. Leave zero= out, or use {other}"
        )
    if stage != 1:
        raise FlowError(
            f"PipelineParallel(zero={stage!r}): a pipeline splits slots alone, zero=1. Split weights and gradients "
            "of a stage by rules= over an axis of their own, or take kf.ModelParallel"
        )
    if ranks.split_axes or len(ranks.places[0]) == 1:
        raise FlowError(
            "PipelineParallel(zero=1) splits slots over the ranks that share the rows of a stage, which are not split "
            'otherwise: take a placement with the axes ("pipe", "data")'
        )
    return {"zero": 1, "zero_min_size": min_size, "batch_axes": ("lane",)}


def refuse_unlike(ranks: Sequence[tuple[int, ...]]) -> None:
    """Refuse stages placed by hand that have different numbers of ranks, or some ranks in common."""
    for one in ranks:
        for other in ranks:
            if len(one) != len(other) or (one != other and set(one) & set(other)):
                raise FlowError(
                    f"kf.scope.placement: one stage is on ranks {list(one)}, another on {list(other)}. Stages have the "
                    "same number of ranks, and the same ranks or none in common"
                )


def refuse_complex(graph: CallGraph, made: Sequence[Stage]) -> None:
    """Refuse a complex tensor that crosses from stage to stage: a message has no gradient for it."""
    maker = {key: call.path for call in graph.calls for key in call.outputs}
    for stage in made[:-1]:
        for key in stage.sent:
            if "complex" in keras.backend.standardize_dtype(graph.tensors[key].dtype):
                raise FlowError(
                    f"{maker[key]!r} makes complex numbers, which go from stage {stage.number} to the next without a "
                    "gradient. Cut the model elsewhere (stages= takes patterns), or split them into real and imaginary "
                    "parts before the cut"
                )


def refuse_shared_state(made: Sequence[Stage]) -> None:
    """Refuse a layer with state that two ranks call: weights may be tied, but who would move its state on?"""
    rank_of: dict[int, int] = {}
    for stage in made:
        stage.look_at_variables()
        for variable in stage.state:
            first = rank_of.setdefault(id(variable), stage.rank)
            if first != stage.rank and id(variable) not in stage.frozen:
                layer = next(each for each in stage.layers if any(own is variable for own in each.variables))
                raise FlowError(
                    f"layer {layer.path!r} is called on ranks {first} and {stage.rank} and has state that a call "
                    f"may change ({variable.path}). Weights may be shared by stages, state may not: call it in one "
                    "stage, or give each its own"
                )
