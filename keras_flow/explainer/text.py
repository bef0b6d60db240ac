"""Shows an `Explanation`: tables on a console, plain text for `print`."""

from __future__ import annotations

import io

from rich import table as console_table
from rich.console import Console, Group, RenderableType
from rich.markup import escape

from keras_flow.explainer import tables
from keras_flow.explainer.explanation import Explanation

#: longest table; of more rows the smallest are summed up in one
_MOST_ROWS = 60


def render(explanation: Explanation, most: int | None = _MOST_ROWS, fold: bool = True) -> RenderableType:
    """All tables; of more than `most` rows the largest are shown, with `fold` collectives that are alike as one."""
    parts: list[RenderableType] = [f"[bold]{escape(explanation.model)}[/] {escape(tables.heading(explanation))}"]
    for table in tables.tables(explanation, most, fold):
        parts += ["", _drawn(table)]
        if table.schedule:
            parts += ["", f"[bold]schedule[/] {escape(table.schedule)}", *map(escape, table.picture.splitlines())]
    for text in tables.advice(explanation, fold):
        parts += ["", f"[yellow]slow:[/] {escape(text)}"]
    parts += ["", *(f"[dim]note: {escape(note)}[/]" for note in tables.notes(explanation, fold))]
    return Group(*parts)


def show(explanation: Explanation, console: Console, most: int | None = _MOST_ROWS, fold: bool = True) -> None:
    """Print an explanation."""
    console.print(render(explanation, most, fold))


def plain(explanation: Explanation, fold: bool) -> str:
    """The explanation as text without colours, with all variables; with `fold` collectives that are alike as one."""
    stream = io.StringIO()
    show(explanation, Console(file=stream, width=160, color_system=None), None, fold)
    return stream.getvalue()


def _drawn(table: tables.Table) -> RenderableType:
    if not table.rows:
        return f"[bold]{escape(table.title)}[/]"
    drawn = console_table.Table(
        title=escape(table.title),
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    for column, head in enumerate(table.heads):
        drawn.add_column(head, justify="right" if column in table.numbers else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(escape, row))
    return drawn
