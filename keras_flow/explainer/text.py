"""Shows an `Explanation`: tables on a console, plain text for `print`."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from keras_flow.explainer.explanation import Collective, Explanation, VariableRow
from keras_flow.units import amount

#: longest table; of more rows the smallest are summed up in one
_MOST_ROWS = 60


def render(explanation: Explanation, most: int | None = _MOST_ROWS) -> RenderableType:
    """All tables; of more than `most` rows the largest are shown."""
    axes = ", ".join(f"{name}={ranks}" for name, ranks in explanation.placement.items())
    parts: list[RenderableType] = [
        f"[bold]{escape(explanation.model)}[/] on {axes} ({explanation.engine}), "
        f"batches of {explanation.batch_size} rows",
        "",
        *([_stages(explanation), "", *_schedule(explanation), ""] if explanation.stages else []),
        _variables(explanation.variables, most),
        "",
        _memory(explanation),
        "",
        _collectives(explanation, most),
    ]
    if explanation.repeated:
        parts += ["", _repeated(explanation)]
    for advice in explanation.warnings:
        parts += ["", f"[yellow]slow[/] {escape(advice.text)}"]
    parts += ["", *(f"[dim]note: {escape(note)}[/]" for note in explanation.notes)]
    return Group(*parts)


def show(explanation: Explanation, console: Console, most: int | None = _MOST_ROWS) -> None:
    """Print an explanation."""
    console.print(render(explanation, most))


def plain(explanation: Explanation) -> str:
    """The explanation as text without colours, all rows."""
    stream = io.StringIO()
    show(explanation, Console(file=stream, width=160, color_system=None), None)
    return stream.getvalue()


def _table(title: str, *heads: tuple[str, bool]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head, is_number in heads:
        table.add_column(head, justify="right" if is_number else "left", overflow="fold")
    return table


def _stages(explanation: Explanation) -> Table:
    heads = [("stage", True), ("ranks", False), ("layers", True), ("from", False), ("work", True), ("weights", True)]
    heads += [("a micro-batch keeps", True), ("sends in a step", True), ("gets back", True)]
    table = _table("stages", *heads)
    for each in explanation.stages:
        ranks = ", ".join(map(str, each.ranks))
        sizes = (each.weights, each.kept, each.sends, each.gets_back)
        cells = (str(each.number), ranks, str(each.layers), escape(each.first), f"{each.work:.0%}")
        table.add_row(*cells, *map(amount, sizes))
    return table


def _schedule(explanation: Explanation) -> list[RenderableType]:
    idle = f"a rank has nothing to do in {explanation.idle:.0%} of a step"
    idle = f"[bold]schedule[/] {escape(explanation.schedule)}: {idle}"
    return [idle, *map(escape, explanation.picture.splitlines())]


def _variables(rows: Sequence[VariableRow], most: int | None) -> Table:
    table = _table(
        "variables", ("path", False), ("shape", False), ("layout", False), ("from", False), ("bytes/rank", True)
    )
    shown = rows
    if most is not None and len(rows) > most:
        shown = sorted(rows, key=lambda row: -row.bytes)[:most]
    for row in shown:
        note = f" ({row.note})" if row.note else ""
        cells = escape(row.path), escape(str(list(row.shape))), row.layout, escape(row.source + note), amount(row.bytes)
        table.add_row(*cells)
    if len(shown) < len(rows):
        rest = sum(row.bytes for row in rows) - sum(row.bytes for row in shown)
        table.add_row(f"... and {len(rows) - len(shown)} smaller ones", "", "", "", amount(rest))
    return table


def _memory(explanation: Explanation) -> Table:
    heads = ("rank", "weights", "slots", "gradients", "activations (estimate)", "peak (estimate)")
    table = _table("memory of a rank", *((head, True) for head in heads))
    ranks: dict[object, list[int]] = {}
    for rank, memory in explanation.memory.items():
        ranks.setdefault(memory, []).append(rank)
    for memory, alike in ranks.items():
        name = str(alike[0]) if len(alike) == 1 else f"{alike[0]} to {alike[-1]}"
        values = (memory.weights, memory.slots, memory.gradients, memory.activations, memory.peak)  # type: ignore[attr-defined]
        table.add_row(name, *(amount(value) for value in values))
    return table


def _received(explanation: Explanation) -> str:
    if explanation.stages:
        return f"{amount(explanation.received)} received by the rank that receives most, messages of stages included"
    return f"{amount(explanation.received)} received by each rank"


def _collectives(explanation: Explanation, most: int | None) -> RenderableType:
    if not explanation.collectives:
        return "[bold]collectives of a step[/]: none"
    table = _table(
        f"collectives of a step: {len(explanation.collectives)}, {_received(explanation)}",
        ("pass", False),
        ("what", False),
        ("over", False),
        ("received", True),
        ("layer", False),
        ("tensor", False),
        ("why", False),
    )
    shown: Sequence[Collective] = explanation.collectives
    if most is not None and len(shown) > most:
        largest = {id(collective) for collective in sorted(shown, key=lambda collective: -collective.received)[:most]}
        # the largest, in the order of the step and not of their sizes
        shown = [collective for collective in shown if id(collective) in largest]
    for collective in shown:
        over = ", ".join(f"{axis}={explanation.placement[axis]}" for axis in collective.axes)
        cells = (
            collective.phase,
            collective.kind,
            over,
            amount(collective.received),
            collective.path,
            collective.tensor,
            collective.why,
        )
        table.add_row(*(escape(cell) for cell in cells))
    if len(shown) < len(explanation.collectives):
        # what is left out is still counted, so that the rows add up to the title
        rest = explanation.received - sum(collective.received for collective in shown)
        table.add_row("", f"{len(explanation.collectives) - len(shown)} smaller ones", "", amount(rest), "", "", "")
    return table


def _repeated(explanation: Explanation) -> Table:
    table = _table("computed alike on every rank of an axis", ("layer", False), ("over", False), ("parameters", True))
    for layer in explanation.repeated:
        table.add_row(escape(layer.path), f"{layer.axis}={layer.ranks}", f"{layer.parameters:,}")
    return table
