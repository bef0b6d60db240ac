"""Which Dense layers follow each other, and which of them are split without their partner.

Two Dense layers in a row cost one all-reduce when the first is split by columns (kernel dim 1) and the second by rows
(kernel dim 0). Split alone, each costs a collective (Megatron-LM, section 3, pairs the layers of a transformer so).
"""

from __future__ import annotations

from collections.abc import Iterator

from keras_flow.explainer.contraction import stored_weight
from keras_flow.explainer.graph import LayerCall
from keras_flow.explainer.step_cost import StepCost

#: layers that multiply by a 2-D kernel and hand features on
_DENSE = frozenset(["Dense"])


def chains(step: StepCost) -> list[tuple[LayerCall, LayerCall]]:
    """Pairs of Dense layers of which the second alone reads the output of the first.

    Operations without weights (activations, dropout) may stand between the two.
    """
    makers = {key: call for call in step.graph.calls for key in call.outputs}
    readers: dict[int, int] = {}
    for call in step.graph.calls:
        for key in call.inputs:
            readers[key] = readers.get(key, 0) + 1
    linked_layers = []
    for call in step.graph.calls:
        if not _is_dense(call) or not call.inputs:
            continue
        key = call.inputs[0]
        # a tensor with a second reader must be whole for that one, so no pair can keep it split
        while key in makers and readers.get(key) == 1:
            maker = makers[key]
            if _is_dense(maker):
                linked_layers.append((maker, call))
                break
            if (getattr(maker.layer, "variables", ()) and not _is_random(maker)) or len(maker.inputs) != 1:
                break
            key = maker.inputs[0]
    return linked_layers


def _is_dense(call: LayerCall) -> bool:
    return type(call.layer).__name__ in _DENSE


def _is_random(call: LayerCall) -> bool:
    return all(variable.path.endswith("seed_generator_state") for variable in call.layer.variables)


def model_axes(step: StepCost) -> list[str]:
    """The axes that split no rows of the batch: those of tensor parallelism."""
    rows = {axis for key in step.graph.inputs for axis in step.splits[key]}
    return [axis for axis, ranks in step.axes.items() if ranks > 1 and axis not in rows]


def unpaired(step: StepCost, axis: str) -> Iterator[tuple[LayerCall, str]]:
    """Dense layers split on an axis whose input has another layout than they need, and what that costs."""
    before = {id(second): first for first, second in chains(step)}
    for call in step.graph.calls:
        if type(call.layer).__name__ != "Dense":
            continue
        dim = step.variable(stored_weight(call.layer)).get(axis)
        key = call.inputs[0]
        whole = axis not in step.splits[key]  # gathered inputs are whole by now
        maker = before.get(id(call))
        columns_before = maker is not None and step.variable(stored_weight(maker.layer)).get(axis) == 1
        if dim == 0 and whole:
            yield (
                call,
                "its kernel is split on the summed dim and its input is whole: an all-reduce of its own",
            )
        elif dim == 1 and columns_before:
            yield call, "its kernel is split by columns after one that is: its input is gathered"
