"""Column and row pairs: rules that let two layers share one all-reduce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from keras_flow.explainer.graph import Call
from keras_flow.explainer.step import Step

if TYPE_CHECKING:
    import keras

#: layers that multiply by a 2-D kernel and hand features on
_DENSE = frozenset(["Dense"])


def chains(step: Step) -> list[tuple[Call, Call]]:
    """Dense layers, each with the one that alone reads its output, through operations without weights."""
    makers = {key: call for call in step.graph.calls for key in call.outputs}
    readers: dict[int, int] = {}
    for call in step.graph.calls:
        for key in call.inputs:
            readers[key] = readers.get(key, 0) + 1
    found = []
    for call in step.graph.calls:
        if not _is_dense(call) or not call.inputs:
            continue
        key = call.inputs[0]
        while key in makers and readers.get(key) == 1:
            maker = makers[key]
            if _is_dense(maker):
                found.append((maker, call))
                break
            if (getattr(maker.layer, "variables", ()) and not _is_random(maker)) or len(maker.inputs) != 1:
                break
            key = maker.inputs[0]
    return found


def _is_dense(call: Call) -> bool:
    return type(call.layer).__name__ in _DENSE


def _is_random(call: Call) -> bool:
    return all(variable.path.endswith("seed_generator_state") for variable in call.layer.variables)


def model_axes(step: Step) -> list[str]:
    """The axes that split no rows."""
    rows = {axis for key in step.graph.inputs for axis in step.splits[key]}
    return [axis for axis, ranks in step.axes.items() if ranks > 1 and axis not in rows]


def pairs(step: Step) -> dict[str, dict[str, int]]:
    """Rules that take the layers blamed for standing alone into pairs, and leave those whole that have no partner:
    variable path -> axis -> dim. Pairs that are good already stay as they are."""
    from keras_flow.explainer.warn import unpaired

    rules: dict[str, dict[str, int]] = {}
    for axis in model_axes(step):
        blamed = {id(call.layer): call.layer for call, _ in unpaired(step, axis)}
        if not blamed:
            continue
        linked = [(first.layer, second.layer) for first, second in chains(step)]
        good = [
            pair for pair in linked if _is_pair(step, axis, *pair) and not blamed.keys() & {id(layer) for layer in pair}
        ]
        done = {id(layer) for pair in good for layer in pair}
        for first, second in linked:
            taken = done & {id(first), id(second)}
            wanted = blamed.keys() & {id(first), id(second)}
            if taken or not wanted or first.kernel.shape[1] % step.axes[axis]:
                continue
            done |= {id(first), id(second)}
            _rule(rules, first, {axis: 1}, {axis: 0})
            _rule(rules, second, {axis: 0}, {})
        for key, layer in blamed.items():
            if key not in done:
                _rule(rules, layer, {}, {})
    return rules


def _is_pair(step: Step, axis: str, first: keras.layers.Dense, second: keras.layers.Dense) -> bool:
    return (step.variable(first.kernel).get(axis), step.variable(second.kernel).get(axis)) == (1, 0)


def _rule(rules: dict[str, dict[str, int]], layer: Any, kernel: dict[str, int], bias: dict[str, int]) -> None:
    rules[layer.kernel.path] = kernel
    if layer.bias is not None:
        rules[layer.bias.path] = bias


def rules_file(rules: Mapping[str, Mapping[str, int]]) -> str:
    """The text of a `rules()` function. Its rules stand before others: the first that matches wins."""
    import re

    lines = []
    for path, splits in rules.items():
        spec = ", ".join(f'"{axis}": kf.sbp.split({dim})' for axis, dim in splits.items())
        lines.append(f'        r"{re.escape(path)}$": {{{spec}}},')
    return (
        "import keras_flow as kf\n\n\ndef rules():\n    return {\n" + "\n".join(lines) + "\n"
        "        # your own rules for other variables follow here\n    }\n"
    )
