"""Under which meshes, rows and rules a name is trained: a covering design, not the whole product.

Each name meets each mesh, each kind of rows and each set of rules at least once, and (2, 2) always with rows that do
not divide and with rows that do (two engines split only those). Which rows meet which mesh turns with the group of
names, so that pairs are spread over the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: name -> ranks, axis names, batch axes
MESHES: dict[str, tuple[list, tuple[str, ...], tuple[str, ...]]] = {
    "(4,)": ([0, 1, 2, 3], ("data",), ("data",)),
    "(2,2)": ([[0, 1], [2, 3]], ("data", "model"), ("data",)),
    "(1,4)": ([[0, 1, 2, 3]], ("data", "model"), ("data",)),
    "(4,1)": ([[0], [1], [2], [3]], ("data", "model"), ("data",)),
    "(2,1,2)": ([[[0, 1]], [[2, 3]]], ("data", "mid", "model"), ("data",)),
    "(3,)": ([0, 1, 2], ("data",), ("data",)),
    "[[3,1],[0,2]]": ([[3, 1], [0, 2]], ("data", "model"), ("data",)),
    "two of four": ([3, 1], ("data",), ("data",)),
}
#: kind of rows -> number of rows; at least one mesh has too few rows for "few"
ROWS = {"divides": 12, "uneven": 11, "few": 3, "one": 1}
#: dim of every kernel that a rule splits over the "model" axis
RULES: dict[str, int | None] = {"none": None, "last": -1, "first": 0}
#: weights are split over the rows' axes, whatever their size
ZERO = "zero=3"
#: every layer is computed again in the backward pass
REMAT = "remat"
#: two stages along the last axis; on (2,2) each has two lanes of rows
PIPELINE = "pipeline"
#: modules of names that a layer of the sweep's own applies to all rows: a stage sees those of a micro-batch
_OF_ALL_ROWS = ("ops", "program", "random")


@dataclass(frozen=True)
class Setting:
    """One way to train a group.

    Attributes:
        mesh: a name in `MESHES`.
        rows: a name in `ROWS`.
        rules: a name in `RULES`.
        strategy: of `kf.DataParallel`, `ZERO`, `REMAT`, `PIPELINE`, or empty for the default.
    """

    mesh: str
    rows: str
    rules: str
    strategy: str = ""

    @property
    def name(self) -> str:
        """How results call it."""
        return ", ".join(filter(None, (self.mesh, self.rows, self.rules, self.strategy)))

    @property
    def is_data_parallel(self) -> bool:
        """Whether it is `kf.DataParallel`: a placement of one axis and no rules."""
        return len(MESHES[self.mesh][1]) == 1 and self.rules == "none"

    def takes(self, name: str) -> bool:
        """Whether a name is trained under it."""
        module = name.partition(".")[0]
        if self.strategy == REMAT:
            return module == "layers"
        return self.strategy != PIPELINE or module not in _OF_ALL_ROWS


def covering(number: int, mirrored: bool = False, pipeline: bool = False, remat: bool = False) -> list[Setting]:
    """The settings of the group with this number.

    Args:
        number: turns the pairs of meshes, rows and rules.
        mirrored: whether the engine has `strategy="mirrored"`.
        pipeline: whether a pipeline is among them.
        remat: whether a setting is among them in which layers are computed again.
    """
    rows, rules = list(ROWS), list(RULES)
    odd = number % 2
    settings = [Setting("(2,2)", "uneven", ("last", "first")[odd]), Setting("(2,2)", "divides", ("first", "last")[odd])]
    for place, mesh in enumerate(MESHES):
        has_model = "model" in MESHES[mesh][1]
        rule = rules[(number + place) % len(rules)] if has_model else "none"
        if mesh != "(2,2)":
            settings.append(Setting(mesh, rows[(number + place) % len(rows)], rule))
    rules = ("last", "first")[odd]
    settings.append(Setting("(2,2)", "divides", rules, ZERO) if number % 3 else Setting("(4,)", "uneven", "none", ZERO))
    if remat:
        settings.append(Setting("(4,)", "uneven", "none", REMAT) if odd else Setting("(2,2)", "divides", rules, REMAT))
    if pipeline:
        settings.append(
            Setting(("(2,2)", "two of four")[number // 2 % 2], ("uneven", "divides")[odd], "none", PIPELINE)
        )
    if mirrored:
        settings.append(Setting("(4,)", ("divides", "uneven")[odd], "none", "mirrored"))
    return settings


def grouped(names: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Names in groups that are trained as branches of one model: the engine starts and compiles once for several."""
    return [tuple(names[start : start + size]) for start in range(0, len(names), size)]
