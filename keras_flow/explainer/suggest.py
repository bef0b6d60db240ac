"""Suggests rules that split two Dense layers as a pair, the first by columns, the second by rows (see `pairs`)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from keras_flow import sbp
from keras_flow.errors import FlowError
from keras_flow.explainer.contraction import stored_weight
from keras_flow.explainer.pairs import chains, model_axes, unpaired
from keras_flow.explainer.step_cost import StepCost

if TYPE_CHECKING:
    import keras

    from keras_flow.distributions.distribution import FlowDistribution


def own_rules(distribution: FlowDistribution) -> dict[str, dict[str, int]]:
    """The rules of a distribution; without those that are wrong, which `check` raises."""
    names, found = distribution.placement.axis_names, {}
    for pattern, spec in distribution.rules.patterns():
        with suppress(FlowError):
            parts = zip(names, sbp.nd_sbp(spec, names), strict=True)
            found[pattern] = {axis: part.dim for axis, part in parts if isinstance(part, sbp.Split)}
    return found


def paired_rules(step: StepCost) -> dict[str, dict[str, int]]:
    """Rules that pair the layers that `warn` reports as unpaired, and leave layers without a partner whole.

    Pairs that are split well already stay as they are.

    Returns:
        Variable path -> axis -> dim.
    """
    rules: dict[str, dict[str, int]] = {}
    for axis in model_axes(step):
        blamed = {id(call.layer): call.layer for call, _ in unpaired(step, axis)}
        if not blamed:
            continue
        linked = [(first.layer, second.layer) for first, second in chains(step)]
        # pairs that cost what they should are not to be taken apart for a neighbour's sake
        good = [
            pair for pair in linked if _is_pair(step, axis, *pair) and not blamed.keys() & {id(layer) for layer in pair}
        ]
        done = {id(layer) for pair in good for layer in pair}
        for first, second in linked:
            is_paired = bool(done & {id(first), id(second)})
            is_blamed = bool(blamed.keys() & {id(first), id(second)})
            # a layer can be in one pair only, the first that fits in the order of the model
            if is_paired or not is_blamed or first.kernel.shape[1] % step.axes[axis]:
                continue
            done |= {id(first), id(second)}
            # split by columns, then by rows (Megatron): one sum after the second instead of gathers at each
            _rule(rules, step, axis, first, kernel=1, bias=0)
            _rule(rules, step, axis, second, kernel=0)
        for key, layer in blamed.items():
            if key not in done:
                _rule(rules, step, axis, layer)
    return rules


def _is_pair(step: StepCost, axis: str, first: keras.layers.Dense, second: keras.layers.Dense) -> bool:
    return (step.variable(stored_weight(first)).get(axis), step.variable(stored_weight(second)).get(axis)) == (1, 0)


def _rule(
    rules: dict[str, dict[str, int]],
    step: StepCost,
    axis: str,
    layer: Any,
    kernel: int | None = None,
    bias: int | None = None,
) -> None:
    """Set how a layer's weights are split over one axis; over the others they stay as they are."""
    for variable, dim in ((layer.kernel, kernel), (layer.bias, bias)):
        if variable is not None:
            splits = rules.get(variable.path, step.variable(variable))
            others = {other: part for other, part in splits.items() if other != axis}
            rules[variable.path] = others if dim is None else {**others, axis: dim}
