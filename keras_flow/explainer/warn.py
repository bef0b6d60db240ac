"""Advice on layouts that are legal and slow.

Axes that split no weight, dense layers split alone, attention heads that do not divide, embedding tables that every
rank has whole, layers that a rule leaves out of their like, batches that do not divide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from keras_flow.backends.active import backend
from keras_flow.current import models
from keras_flow.current.batch import BatchPlan
from keras_flow.current.variable_layout import VariableLayout
from keras_flow.explainer.contraction import stored_weight
from keras_flow.explainer.explanation import Advice
from keras_flow.explainer.pairs import model_axes, unpaired
from keras_flow.explainer.step_cost import StepCost
from keras_flow.units import amount

if TYPE_CHECKING:
    import keras

    from keras_flow.distributions.distribution import FlowDistribution

#: where a rule splits this share of at least three equal weights, it was probably meant to split all
_MOST = 2 / 3
#: an embedding table that holds this share of all parameters is worth splitting
_LARGE_SHARE = 0.1


def warnings(
    step: StepCost,
    distribution: FlowDistribution,
    model: keras.Model,
    plan: BatchPlan,
    placed: Sequence[tuple[keras.Variable, VariableLayout]],
) -> list[Advice]:
    """Advice on all slow layouts of a step."""
    return [
        *_idle(step, placed),
        *_unpaired(step),
        *_heads(step, placed),
        *_embeddings(step, model),
        *_left_out(step, model, placed),
        *_batch(step, distribution, plan),
    ]


def _idle(step: StepCost, placed: Sequence[tuple[keras.Variable, VariableLayout]]) -> Iterator[Advice]:
    """Axes that split no weight."""
    for axis in model_axes(step):
        if not any(axis in step.variable(variable) for variable, _ in placed):
            yield Advice(
                "idle",
                (),
                f"no weight is split over axis {axis!r}: its {step.axes[axis]} ranks hold and compute the same",
            )


def _unpaired(step: StepCost) -> Iterator[Advice]:
    for axis in model_axes(step):
        costs: dict[str, int] = defaultdict(int)
        for collective in step.collectives:
            costs[collective.path] += collective.received if axis in collective.axes else 0
        for call, cost in unpaired(step, axis):
            sent = costs[call.path]
            yield Advice(
                "unpaired",
                (call.path,),
                f"{call.path}: {cost} ({amount(sent)} received in each step on axis {axis!r}). In a pair, the first "
                "layer split by columns (kernel dim 1, bias dim 0) and the next by rows (kernel dim 0), two layers "
                "cost one all-reduce; --suggest prints such rules",
            )


def _heads(step: StepCost, placed: Sequence[tuple[keras.Variable, VariableLayout]]) -> Iterator[Advice]:
    notes = {id(variable): given.note for variable, given in placed}
    for call in step.graph.calls:
        layer = call.layer
        # attention layers of Keras have their projections by these names (private, Keras 3.15)
        if not hasattr(layer, "_query_dense"):
            continue
        named = (("_query_dense", "query heads"), ("_key_dense", "key and value heads"))
        for name, what in named:
            kernel = getattr(layer, name).kernel
            note = notes.get(id(kernel), "")
            # the note of a fallback: a split that divides has none
            if "does not divide" not in note:
                continue
            heads = kernel.shape[1]
            fits = [size for size in range(1, heads + 1) if heads % size == 0]
            yield Advice(
                "heads",
                (call.path,),
                f"{call.path}: {heads} {what} do not divide: {note}. Axes of {', '.join(map(str, fits))} ranks divide",
            )


def _embeddings(step: StepCost, model: keras.Model) -> Iterator[Advice]:
    total = sum(step.piece(tuple(variable.shape), {}) for variable in model.variables)
    for call in step.graph.calls:
        if "Embedding" not in {cls.__name__ for cls in type(call.layer).__mro__}:
            continue
        table = stored_weight(call.layer)
        size = step.piece(tuple(table.shape), {})
        for axis in model_axes(step):
            if axis not in step.variable(table) and size >= _LARGE_SHARE * total:
                yield Advice(
                    "embedding",
                    (call.path,),
                    f"{call.path}: the table {list(table.shape)} is whole on each of the {step.axes[axis]} ranks of "
                    f"axis {axis!r}, and is {100 * size / total:.0f} % of all weights; split it by rows "
                    f'({{"{axis}": kf.sbp.split(0)}}), or by features (kf.sbp.split(1)) if the rows do not divide',
                )


def _left_out(
    step: StepCost, model: keras.Model, placed: Sequence[tuple[keras.Variable, VariableLayout]]
) -> Iterator[Advice]:
    """Weights that no rule splits, of layers of which most have theirs split: a pattern may have a wrong number."""
    owners = models.owners_of(model)
    groups: dict[tuple[str, str, tuple[int, ...]], list[tuple[str, set[str]]]] = defaultdict(list)
    for variable, given in placed:
        layer = owners.get(id(variable))
        if layer is not None and len(variable.shape) > 1 and not given.note:
            key = type(layer).__name__, variable.name, tuple(variable.shape)
            groups[key].append((variable.path, set(step.variable(variable))))
    for (name, weight, shape), found in groups.items():
        for axis in model_axes(step):
            whole = tuple(path for path, axes in found if axis not in axes)
            split = len(found) - len(whole)
            if whole and len(found) >= 3 and split >= _MOST * len(found):
                yield Advice(
                    "left out",
                    whole,
                    f"{', '.join(whole)}: whole on axis {axis!r}, which splits {split} of the {len(found)} weights "
                    f"{weight!r} of shape {list(shape)} in {name} layers; look whether a pattern was to match "
                    f"{'it' if len(whole) == 1 else 'them'} too",
                )


def _batch(step: StepCost, distribution: FlowDistribution, plan: BatchPlan) -> Iterator[Advice]:
    if plan.divides:
        return
    if not any(step.splits[key] for key in step.graph.inputs):
        cost = "each rank computes all rows"
    elif backend().capabilities.uneven_batches == "parallel":
        cost = f"rows are padded to {plan.padded_rows}, {plan.padded_rows - plan.rows} are computed for nothing"
    else:
        most, least = (stop - start for start, stop in (plan.block(0), plan.block(plan.replicas - 1)))
        cost = f"ranks get {most} or {least} rows, and those with fewer wait"
    yield Advice(
        "batch",
        (),
        f"a batch of {plan.rows} rows does not divide by {plan.replicas} data ranks: {cost}. The next batch size that "
        f"divides is {plan.padded_rows}",
    )
