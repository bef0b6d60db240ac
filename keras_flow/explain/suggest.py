"""Column and row pairs: rules that let two layers share one all-reduce."""

from __future__ import annotations

from collections.abc import Mapping

from keras_flow.explain.graph import Call
from keras_flow.explain.step import Step

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


def pairs(step: Step) -> Mapping[str, Mapping[str, int]]:
    """Rules for the Dense layers that are split on some axis but not as pairs: variable path -> axis -> dim."""
    from keras_flow.explain.warn import unpaired

    rules: dict[str, dict[str, int]] = {}
    for axis in model_axes(step):
        blamed = {id(call.layer) for call, _ in unpaired(step, axis)}
        if not blamed:
            continue
        done: set[int] = set()
        size = step.axes[axis]
        for first, second in chains(step):
            columns, rows = first.layer.kernel, second.layer.kernel
            if id(first.layer) in done or id(second.layer) in done or columns.shape[1] % size:
                continue
            if not ({id(first.layer), id(second.layer)} & blamed):
                continue
            done |= {id(first.layer), id(second.layer)}
            rules.setdefault(columns.path, {})[axis] = 1
            if first.layer.bias is not None:
                rules.setdefault(first.layer.bias.path, {})[axis] = 0
            rules.setdefault(rows.path, {})[axis] = 0
    return rules


def left_over(step: Step, rules: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Paths of blamed kernels that no pair holds; `rules_file` leaves them whole."""
    from keras_flow.explain.warn import unpaired

    return [
        call.layer.kernel.path
        for axis in model_axes(step)
        for call, _ in unpaired(step, axis)
        if call.layer.kernel.path not in rules
    ]


def rules_file(rules: Mapping[str, Mapping[str, int]]) -> str:
    """The text of a `rules()` function. They stand first: the first rule that matches wins."""
    import re

    lines = []
    for path, splits in rules.items():
        spec = ", ".join(f'"{axis}": kf.sbp.split({dim})' for axis, dim in splits.items())
        lines.append(f'        r"{re.escape(path)}$": {{{spec}}},')
    return (
        "import keras_flow as kf\n\n\ndef rules():\n    return {\n" + "\n".join(lines) + "\n"
        "        # your own rules for other variables follow here\n    }\n"
    )
