"""The tables of an `Explanation`: what they say, for a console and for a page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from keras_flow.distributions.fallbacks import first_of
from keras_flow.explainer.explanation import Collective, Explanation, VariableRow
from keras_flow.explainer.folding import folded
from keras_flow.units import amount

_Row = TypeVar("_Row", VariableRow, tuple[Collective, int])
_FOLDED = (
    "like collectives of several layers or weights are one row; --all lists each (in Python "
    "print(explanation.text(all_rows=True)))"
)


@dataclass(frozen=True)
class Table:
    """A table that is not drawn yet.

    Attributes:
        title: what stands above it.
        heads: the name of each column.
        numbers: columns whose cells stand at the right.
        rows: cells, as many in each row as there are columns.
        schedule: of stages, how they are run, and what that leaves unused.
        picture: of the schedule.
    """

    title: str
    heads: tuple[str, ...]
    numbers: tuple[int, ...]
    rows: list[tuple[str, ...]]
    schedule: str = ""
    picture: str = ""


def tables(explanation: Explanation, most: int | None, fold: bool = True) -> Iterator[Table]:
    """All tables, in the order in which they are read.

    Args:
        explanation: what they show.
        most: of more rows the largest are shown; None shows all.
        fold: whether collectives that are alike are one row.
    """
    if explanation.stages:
        yield _stages(explanation)
    yield _variables(explanation, most)
    yield _memory(explanation)
    yield _collectives(explanation, most, fold)
    if explanation.repeated:
        rows = [(each.path, f"{each.axis}={each.ranks}", f"{each.parameters:,}") for each in explanation.repeated]
        yield Table("computed alike on every rank of an axis", ("layer", "over", "parameters"), (2,), rows)


def advice(explanation: Explanation, fold: bool = True) -> list[str]:
    """The texts on slow layouts; with `fold` one for all layers of which the same is said."""
    alike: dict[str, list[str]] = {}
    for each in explanation.warnings:
        path = each.paths[0] if fold and each.paths and each.text.startswith(f"{each.paths[0]}: ") else ""
        alike.setdefault(each.text.removeprefix(f"{path}: ") if path else each.text, []).append(path)
    texts = []
    for text, paths in alike.items():
        named = f"{first_of(paths)}, each" if len(paths) > 1 else paths[0]
        texts.append(f"{named}: {text}" if paths[0] else text)
    return texts


def notes(explanation: Explanation, fold: bool = True) -> list[str]:
    """What stands below the tables: what they do not count, and how to see rows that are folded."""
    shown = [sent for sent, _ in folded(explanation.collectives, False)] if fold else explanation.collectives
    hidden = list(shown) != list(explanation.collectives)
    return [*explanation.notes, *([_FOLDED] if hidden else [])]


def received(explanation: Explanation) -> str:
    """What a rank receives in a step; of stages not each has as much."""
    whom = "a rank receives at most" if explanation.stages else "each rank receives"
    return f"{whom} {amount(explanation.received)} in a step"


def heading(explanation: Explanation) -> str:
    """What is explained, without the model's name."""
    axes = ", ".join(f"{name}={ranks}" for name, ranks in explanation.placement.items())
    return f"on {axes} ({explanation.engine}), batches of {explanation.batch_size} rows"


def _stages(explanation: Explanation) -> Table:
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
    rows = [
        (
            str(stage.number),
            ", ".join(map(str, stage.ranks)),
            str(stage.layers),
            stage.first,
            f"{stage.work:.0%}",
            *map(amount, (stage.weights, stage.kept, stage.sends, stage.gets_back)),
        )
        for stage in explanation.stages
    ]
    idle = f"{explanation.schedule}: a rank has nothing to do in {explanation.idle:.0%} of a step"
    return Table("stages", heads, (0, 2, 4, 5, 6, 7, 8), rows, idle, explanation.picture)


def _variables(explanation: Explanation, most: int | None) -> Table:
    shown, left = _largest(explanation.variables, [row.bytes for row in explanation.variables], most)
    rows = [
        (
            row.path,
            str(list(row.shape)),
            row.layout,
            row.source + (f" ({row.note.removeprefix(f'{row.path}: ')})" if row.note else ""),
            amount(row.bytes),
        )
        for row in shown
    ]
    if left:
        rest = sum(row.bytes for row in explanation.variables) - sum(row.bytes for row in shown)
        rows.append((f"... and {left} more, none of them larger", "", "", "", amount(rest)))
    return Table("variables", ("path", "shape", "layout", "from", "bytes/rank"), (4,), rows)


def _memory(explanation: Explanation) -> Table:
    heads = ("rank", "weights", "slots", "gradients", "activations (estimate)", "peak (estimate)")
    ranks: dict[object, list[int]] = {}
    for rank, memory in explanation.memory.items():
        ranks.setdefault(memory, []).append(rank)
    rows = []
    for alike in ranks.values():
        memory = explanation.memory[alike[0]]
        sizes = (memory.weights, memory.slots, memory.gradients, memory.activations, memory.peak)
        rows.append((_ranks(alike), *map(amount, sizes)))
    return Table("memory of a rank", heads, (1, 2, 3, 4, 5), rows)


def _ranks(alike: Sequence[int]) -> str:
    """Numbers of ranks in few words.

    Example:
        >>> _ranks([0]), _ranks([3, 1, 0, 2]), _ranks([0, 2, 3])
        ('0', '0 to 3', '0, 2 to 3')
    """
    ranks = set(alike)
    starts = sorted(rank for rank in ranks if rank - 1 not in ranks)
    stops = sorted(rank for rank in ranks if rank + 1 not in ranks)
    return ", ".join(
        str(start) if stop == start else f"{start} to {stop}" for start, stop in zip(starts, stops, strict=True)
    )


def _collectives(explanation: Explanation, most: int | None, fold: bool) -> Table:
    all_of_them = explanation.collectives
    alike = folded(all_of_them, bool(explanation.stages)) if fold else [(sent, 1) for sent in all_of_them]
    shown, _ = _largest(alike, [sent.received for sent, _ in alike], most)
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
        for sent, _ in shown
    ]
    left = len(all_of_them) - sum(count for _, count in shown)
    if left:
        # what is left out is still counted, so that the rows add up to the title
        rest = sum(sent.received for sent, _ in alike) - sum(sent.received for sent, _ in shown)
        rows.append(("", f"{left} more, none of them larger", "", amount(rest), "", "", ""))
    title = f"collectives of a step: {len(all_of_them) or 'none'}"
    if all_of_them:
        title += f", {amount(explanation.received)} received by "
        whom = "the rank that receives most, messages of stages included" if explanation.stages else "each rank"
        title += whom
    return Table(title, ("pass", "what", "over", "received", "layer", "tensor", "why"), (3,), rows)


def _largest(rows: Sequence[_Row], sizes: Sequence[int], most: int | None) -> tuple[Sequence[_Row], int]:
    """The `most` largest rows, in the order that they have, and how many are left out."""
    if most is None or len(rows) <= most:
        return rows, 0
    chosen = sorted(range(len(rows)), key=lambda number: -sizes[number])[:most]
    return [rows[number] for number in sorted(chosen)], len(rows) - most
