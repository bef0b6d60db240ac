"""An explanation as HTML for a notebook: the picture of the model, then its tables."""

from __future__ import annotations

from html import escape

from keras_flow.explainer.explanation import Explanation
from keras_flow.pictures.svg import table
from keras_flow.units import amount

#: longest table; of more rows the largest are shown
_MOST_ROWS = 40


def html(explanation: Explanation) -> str:
    """Tables of variables, memory and collectives, with what is slow, and notes."""
    axes = ", ".join(f"{name}={ranks}" for name, ranks in explanation.placement.items())
    parts = [
        f"<div><b>{escape(explanation.model)}</b> on {escape(axes)} ({escape(explanation.engine)}), batches of "
        f"{explanation.batch_size} rows: {'a rank receives at most' if explanation.stages else 'each rank receives'} "
        f"<b>{amount(explanation.received)}</b> in a step</div>"
    ]
    if explanation.stages:
        parts += [_stages(explanation), f"<pre>{escape(explanation.picture)}</pre>"]
    parts += [f"<div>⚠ <b>slow</b>: {escape(advice.text)}</div>" for advice in explanation.warnings]
    parts += [_variables(explanation), _memory(explanation), _collectives(explanation)]
    if explanation.repeated:
        rows = [(each.path, f"{each.axis}={each.ranks}", f"{each.parameters:,}") for each in explanation.repeated]
        title = "computed alike on every rank of an axis"
        parts.append(table(("layer", "over", "parameters"), rows, numbers=(2,), title=title))
    parts += [f"<div style='opacity:.7'>note: {escape(note)}</div>" for note in explanation.notes]
    return "".join(parts)


def _stages(explanation: Explanation) -> str:
    rows = [
        (
            str(each.number),
            ", ".join(map(str, each.ranks)),
            str(each.layers),
            each.first,
            f"{each.work:.0%}",
            *map(amount, (each.weights, each.kept, each.sends, each.gets_back)),
        )
        for each in explanation.stages
    ]
    heads = (
        "stage",
        "ranks",
        "layers",
        "from",
        "work",
        "weights",
        "a micro-batch keeps",
        "sends in a step",
        "gets back",
    )
    title = f"{explanation.schedule}: a rank has nothing to do in {explanation.idle:.0%} of a step"
    return table(heads, rows, numbers=(0, 2, 4, 5, 6, 7, 8), title=title)


def _variables(explanation: Explanation) -> str:
    largest = sorted(explanation.variables, key=lambda row: -row.bytes)[:_MOST_ROWS]
    rows = [
        (
            row.path,
            str(list(row.shape)),
            row.layout,
            row.source + (f" ({row.note})" if row.note else ""),
            amount(row.bytes),
        )
        for row in explanation.variables
        if any(row is each for each in largest)
    ]
    rest = sum(row.bytes for row in explanation.variables) - sum(row.bytes for row in largest)
    if len(largest) < len(explanation.variables):
        rows.append((f"and {len(explanation.variables) - len(largest)} smaller ones", "", "", "", amount(rest)))
    return table(("path", "shape", "layout", "from", "bytes/rank"), rows, numbers=(4,), title="variables")


def _memory(explanation: Explanation) -> str:
    ranks: dict[object, list[int]] = {}
    for rank, memory in explanation.memory.items():
        ranks.setdefault(memory, []).append(rank)
    rows = []
    for alike in ranks.values():
        memory = explanation.memory[alike[0]]
        sizes = (memory.weights, memory.slots, memory.gradients, memory.activations, memory.peak)
        name = str(alike[0]) if len(alike) == 1 else f"{alike[0]} to {alike[-1]}"
        rows.append((name, *map(amount, sizes)))
    heads = ("rank", "weights", "slots", "gradients", "activations (estimate)", "peak (estimate)")
    return table(heads, rows, numbers=range(1, 6), title="memory of a rank")


def _collectives(explanation: Explanation) -> str:
    if not explanation.collectives:
        return "<div><b>collectives of a step</b>: none</div>"
    largest = sorted(explanation.collectives, key=lambda sent: -sent.received)[:_MOST_ROWS]
    rows = [
        (
            sent.phase,
            sent.kind,
            ", ".join(f"{axis}={explanation.placement[axis]}" for axis in sent.axes),
            amount(sent.received),
            sent.path,
            sent.tensor,
            sent.why,
        )
        for sent in explanation.collectives
        if any(sent is each for each in largest)
    ]
    if left := len(explanation.collectives) - len(largest):
        rest = explanation.received - sum(sent.received for sent in largest)
        rows.append(("", f"{left} smaller ones", "", amount(rest), "", "", ""))
    heads = ("pass", "what", "over", "received", "layer", "tensor", "why")
    return table(heads, rows, numbers=(3,), title=f"collectives of a step: {len(explanation.collectives)}")
