"""An explanation as HTML for a notebook: the picture of the model, then its tables."""

from __future__ import annotations

from html import escape

from keras_flow.explainer import tables
from keras_flow.explainer.explanation import Explanation
from keras_flow.pictures import svg

#: longest table; of more rows the largest are shown
_MOST_ROWS = 40


def html(explanation: Explanation) -> str:
    """Tables of variables, memory and collectives, with what is slow, and notes."""
    parts = [
        f"<div><b>{escape(explanation.model)}</b> {escape(tables.heading(explanation))}: "
        f"<b>{tables.received(explanation)}</b></div>"
    ]
    parts += [f"<div>⚠ <b>slow:</b> {escape(text)}</div>" for text in tables.advice(explanation)]
    for table in tables.tables(explanation, _MOST_ROWS):
        parts.append(_drawn(table))
        if table.schedule:
            parts += [f"<div>{escape(table.schedule)}</div>", f"<pre>{escape(table.picture)}</pre>"]
    parts += [f"<div style='opacity:.7'>note: {escape(note)}</div>" for note in tables.notes(explanation)]
    return "".join(parts)


def _drawn(table: tables.Table) -> str:
    if not table.rows:
        return f"<div><b>{escape(table.title)}</b></div>"
    return svg.table(table.heads, table.rows, table.numbers, table.title)
