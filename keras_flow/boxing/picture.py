"""A picture of a plan: who holds what before and after, and what moves."""

# pyright: basic
# matplotlib has no types for what `subplots` returns

from __future__ import annotations

from pathlib import Path

from keras_flow import sbp as _sbp
from keras_flow.boxing.spec import BoxingPlan
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.units import amount

#: ranks that a picture can show
MOST = 32


def draw(plan: BoxingPlan, file: Path) -> None:
    """Write the plan as a picture; the file's ending says which kind (png, svg, pdf).

    Raises:
        FlowError: matplotlib is not installed, or there are too many ranks to show.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FlowError("a picture of a plan needs matplotlib: pip install matplotlib") from error
    if len(plan.ranks) > MOST:
        raise FlowError(
            f"a picture shows up to {MOST} ranks, this plan has {len(plan.ranks)}: leave out --png and --svg"
        )
    # ranks of a placement may be any numbers in any order; rows of the picture are theirs
    number = {rank: position for position, rank in enumerate(plan.ranks)}
    received = [[0] * len(plan.ranks) for _ in plan.ranks]
    for rank in plan.ranks:
        for part in plan.for_rank(rank):
            for transfer in part.receives:
                received[number[rank]][number[transfer.sender]] += transfer.piece.size * plan.itemsize
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    before, moved, after = figure.subplots(1, 3)
    _shards(before, plan.source, "before")
    _shards(after, plan.target, "after")
    picture = moved.imshow(received, cmap="Blues")
    moved.set(xlabel="from rank", ylabel="to rank", title=f"bytes received: {amount(plan.total_bytes)}")
    moved.set_xticks(range(len(plan.ranks)), [str(rank) for rank in plan.ranks])
    moved.set_yticks(range(len(plan.ranks)), [str(rank) for rank in plan.ranks])
    figure.colorbar(picture, ax=moved, shrink=0.7)
    figure.suptitle("; ".join(str(step) for step in plan.steps) or "nothing to do", fontsize=10)
    figure.savefig(file, dpi=120)


def _shards(axes, layout: Layout, title: str) -> None:
    """The blocks of the first two dims, each with the ranks that hold it."""
    from matplotlib.patches import Rectangle

    rows = layout.shape[0] if layout.shape else 1
    columns = layout.shape[1] if len(layout.shape) > 1 else 1
    holders: dict[tuple, list[int]] = {}
    for rank in layout.placement.ranks:
        slices = [*layout.local_slices(rank), slice(0, 1), slice(0, 1)][:2]
        holders.setdefault(tuple((part.start, part.stop) for part in slices), []).append(rank)
    for index, (((top, bottom), (left, right)), ranks) in enumerate(sorted(holders.items())):
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, fc=f"C{index % 10}", alpha=0.35, ec="black"))
        sign = " + " if layout.has_partial else ", "
        if bottom > top and right > left:
            text = sign.join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
            axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center", fontsize=9)
    axes.set(xlim=(0, columns), ylim=(rows, 0), title=f"{title}: {_sbp.text(layout.nd_sbp)} (ranks)")
