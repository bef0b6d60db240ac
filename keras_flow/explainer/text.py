"""An explanation as text."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from keras_flow.explainer.explanation import Collective, Explanation, VariableRow
from keras_flow.units import amount

#: rows of a table beyond which the smallest are summed up
_MOST_ROWS = 60


def render(found: Explanation, most: int | None = _MOST_ROWS) -> RenderableType:
    """All tables; of more than `most` rows the largest are shown."""
    axes = ", ".join(f"{name}={ranks}" for name, ranks in found.placement.items())
    parts: list[RenderableType] = [
        f"[bold]{escape(found.model)}[/] on {axes} ({found.engine}), batches of {found.batch_size} rows",
        "",
        _variables(found.variables, most),
        "",
        _memory(found),
        "",
        _collectives(found, most),
    ]
    if found.repeated:
        parts += ["", _repeated(found)]
    for advice in found.warnings:
        parts += ["", f"[yellow]slow[/] {escape(advice.text)}"]
    parts += ["", *(f"[dim]note: {escape(note)}[/]" for note in found.notes)]
    return Group(*parts)


def show(found: Explanation, console: Console, most: int | None = _MOST_ROWS) -> None:
    """Print an explanation."""
    console.print(render(found, most))


def plain(found: Explanation) -> str:
    """As text without colours, all rows."""
    stream = io.StringIO()
    show(found, Console(file=stream, width=160, color_system=None), None)
    return stream.getvalue()


def html(found: Explanation) -> str:
    """For a notebook."""
    from rich.console import Console

    console = Console(width=160, record=True, file=io.StringIO())
    show(found, console)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _table(title: str, *heads: tuple[str, bool]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head, is_number in heads:
        table.add_column(head, justify="right" if is_number else "left", overflow="fold")
    return table


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


def _memory(found: Explanation) -> Table:
    heads = ("rank", "weights", "slots", "gradients", "activations (estimate)", "peak (estimate)")
    table = _table("memory of a rank", *((head, True) for head in heads))
    ranks: dict[object, list[int]] = {}
    for rank, memory in found.memory.items():
        ranks.setdefault(memory, []).append(rank)
    for memory, alike in ranks.items():
        name = str(alike[0]) if len(alike) == 1 else f"{alike[0]} to {alike[-1]}"
        values = (memory.weights, memory.slots, memory.gradients, memory.activations, memory.peak)  # type: ignore[attr-defined]
        table.add_row(name, *(amount(value) for value in values))
    return table


def _collectives(found: Explanation, most: int | None) -> RenderableType:
    if not found.collectives:
        return "[bold]collectives of a step[/]: none"
    table = _table(
        f"collectives of a step: {len(found.collectives)}, {amount(found.received)} received by each rank",
        ("pass", False),
        ("what", False),
        ("over", False),
        ("received", True),
        ("layer", False),
        ("tensor", False),
        ("why", False),
    )
    shown: Sequence[Collective] = found.collectives
    if most is not None and len(shown) > most:
        largest = {id(one) for one in sorted(shown, key=lambda one: -one.received)[:most]}
        shown = [one for one in shown if id(one) in largest]
    for one in shown:
        over = ", ".join(f"{axis}={found.placement[axis]}" for axis in one.axes)
        cells = (one.phase, one.kind, over, amount(one.received), one.path, one.tensor, one.why)
        table.add_row(*(escape(cell) for cell in cells))
    if len(shown) < len(found.collectives):
        rest = found.received - sum(one.received for one in shown)
        table.add_row("", f"{len(found.collectives) - len(shown)} smaller ones", "", amount(rest), "", "", "")
    return table


def _repeated(found: Explanation) -> Table:
    table = _table("computed alike on every rank of an axis", ("layer", False), ("over", False), ("parameters", True))
    for one in found.repeated:
        table.add_row(escape(one.path), f"{one.axis}={one.ranks}", f"{one.parameters:,}")
    return table
