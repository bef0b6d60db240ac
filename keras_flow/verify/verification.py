"""The result of `dist.verify`: each number that was compared and how far it deviates, worst first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING

from keras_flow.errors import FlowError
from keras_flow.pictures.svg import table
from keras_flow.units import finite

if TYPE_CHECKING:
    from rich.table import Table

#: rows that a printed table shows where a deviation is over the tolerance; `rows` has all
_SHOWN = 20


@dataclass(frozen=True)
class ComparedNumber:
    """One number, or array of numbers, of the distributed run compared with one device.

    Attributes:
        batch: rows of the batch, and whether they divide: `"64 rows"`, `"63 rows (do not divide)"`.
        mode: `"training"`, `"evaluation"` or `"inference"`.
        quantity: `"gradient"`, `"update"`, `"loss"`, `"metric"` or `"output"`.
        name: path of the variable, or name of the metric or output.
        deviation: largest absolute difference; not finite where shapes differ or one of the two is no number.
        share: deviation / (what the tolerance allows for it); more than 1 is wrong.
    """

    batch: str
    mode: str
    quantity: str
    name: str
    deviation: float
    share: float

    @property
    def ok(self) -> bool:
        """Whether the deviation is within the tolerance."""
        return self.share <= 1.0


@dataclass(frozen=True)
class Verification:
    """The result of `dist.verify`; prints as a table: the worst of each quantity, or all that is wrong.

    Attributes:
        model: name of the model.
        distribution: the distribution in words.
        backend: the engine.
        tolerance: of gradients and updates, relative to the largest element of the variable; a tenth of it for
            losses, metrics and outputs.
        rows: every comparison, worst first.
        note: that layers were verified singly, why, and what that leaves out; else empty.
    """

    model: str
    distribution: str
    backend: str
    tolerance: float
    rows: tuple[ComparedNumber, ...]
    note: str = ""

    @classmethod
    def of(
        cls,
        model: str,
        distribution: str,
        backend: str,
        tolerance: float,
        rows: Iterable[ComparedNumber],
        note: str = "",
    ) -> Verification:
        """The result, with `rows` sorted."""
        # a share that is no number is the worst of all
        ordered = sorted(rows, key=lambda row: (row.share == row.share, -row.share))
        return cls(model, distribution, backend, tolerance, tuple(ordered), note)

    @property
    def ok(self) -> bool:
        """Whether every deviation is within the tolerance."""
        return all(row.ok for row in self.rows)

    @property
    def _shown(self) -> tuple[ComparedNumber, ...]:
        """The worst rows; where all is right, the worst of each quantity."""
        if not self.ok:
            return self.rows[:_SHOWN]
        worst: dict[str, ComparedNumber] = {}
        for row in self.rows:
            worst.setdefault(row.quantity, row)
        return tuple(worst.values())

    def _more(self) -> str:
        more = len(self.rows) - len(self._shown)
        what = "more, each closer than these" if not self.ok else "more, each closer than its quantity's here"
        return f"and {more} {what}" if more else ""

    def to_dict(self) -> dict[str, object]:
        """The result as JSON values; what is not finite is None."""
        return finite({**asdict(self), "rows": [asdict(row) for row in self.rows], "ok": self.ok})

    def raise_if_wrong(self) -> None:
        """Raise if a deviation is over the tolerance.

        Raises:
            FlowError: with the worst deviations.
        """
        wrong = [row for row in self.rows if not row.ok]
        if wrong:
            lines = "\n  ".join(
                f"{row.quantity} of {row.name} in {row.mode}, {row.batch}: deviates by {row.deviation:.3g}, "
                f"{row.share:.3g} times the tolerance"
                for row in wrong[:8]
            )
            raise FlowError(
                f"model {self.model!r} does not compute under {self.distribution} what one device computes "
                f"({len(wrong)} of {len(self.rows)} comparisons are over the tolerance of {self.tolerance:g}):\n"
                f"  {lines}\n"
                "Do not train it under this distribution. A smaller model finds the layer; please report it"
            )

    def __rich__(self) -> Table:
        from rich import box
        from rich.table import Table

        verdict = "the numbers of one device" if self.ok else "[bold red]NOT the numbers of one device[/]"
        title = f"{self.model} on {self.backend}, {self.distribution}: {verdict}"
        shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in ("quantity", "of", "mode", "batch"):
            shown.add_column(column, overflow="fold")
        shown.add_column("deviation", justify="right")
        shown.add_column("of tolerance", justify="right")
        for row in self._shown:
            style = None if row.ok else "red"
            rows, _, uneven = row.batch.partition(" (")  # told once, below: names need the width
            cells = (row.quantity, row.name, row.mode, rows + "*" * bool(uneven), f"{row.deviation:.2e}")
            shown.add_row(*cells, _share(row.share), style=style)
        starred = {row.batch.partition(" (")[2].rstrip(")") for row in self._shown} - {""}
        shown.caption = (
            "\n".join(filter(None, (*(f"* rows that {each}" for each in sorted(starred)), self._more(), self.note)))
            or None
        )
        return shown

    def _repr_html_(self) -> str:
        """The table, for a notebook; a bar says which share of the tolerance each deviation is."""
        verdict = "the numbers of one device" if self.ok else "NOT the numbers of one device"
        sign, shade = ("✓", "#2c8a43") if self.ok else ("✗", "#d33")
        head = (
            f"<div><b style='color:{shade}'>{sign} {verdict}</b>: {escape(self.model)} on {escape(self.backend)}, "
            f"{escape(self.distribution)}, {len(self.rows)} comparisons</div>"
        )
        rows = [
            (row.quantity, row.name, row.mode, row.batch, f"{row.deviation:.2e}", _share(row.share), _bar(row.share))
            for row in self._shown
        ]
        heads = ("quantity", "of", "mode", "batch", "deviation", "of tolerance", "")
        notes = "".join(f"<div style='opacity:.7'>{escape(text)}</div>" for text in (self._more(), self.note) if text)
        return head + table(heads, rows, numbers=(4, 5)) + notes

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def _share(share: float) -> str:
    """A share of the tolerance as text."""
    return f"{share:.1%}" if share < 100 else f"{share:.3g}x"


def _bar(share: float) -> str:
    """Return a share as a bar of at most ten blocks."""
    return "▇" * max(1, min(10, round(10 * share))) if share == share else "?"
