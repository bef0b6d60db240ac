"""The pictures of a comparison's page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from math import isfinite, prod

import numpy as np

from keras_flow.compare import deviations as tolerances
from keras_flow.compare.result import Comparison, RunResult
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.pictures.charts import Curve, bars, curves
from keras_flow.placements import Placement
from keras_flow.units import counted

#: deviations below this are drawn as this: the rounding of one float32 loss is above
_FLOOR = 1e-9
#: rows of variables that are drawn; the largest
_MOST_ROWS = 24


def _by_backend(result: Comparison) -> dict[str, list[RunResult]]:
    found: dict[str, list[RunResult]] = {}
    for run in result.runs:
        found.setdefault(run.backend, []).append(run)
    return found


def losses(result: Comparison) -> str:
    """Loss over steps: a chart for each backend, all on one scale so that they can be compared by eye."""
    drawn = [loss for run in result.runs for loss in run.losses if isfinite(loss)]
    bounds = (min(drawn), max(drawn)) if drawn else None
    charts = []
    for backend, runs in _by_backend(result).items():
        lines = [Curve(run.layout, run.losses, at) for at, run in enumerate(runs)]
        charts.append(_chart(curves(f"loss on {backend}", lines, bounds=bounds)))
    return "".join(charts)


def deviations(result: Comparison) -> str:
    """How far each loss is from that of one device, with the tolerance drawn in."""
    charts = []
    for backend, runs in _by_backend(result).items():
        single = next((run for run in runs if run.layout == "1"), None)
        others = [run for run in runs if run is not single]
        if single is None or not others:
            continue
        gaps = [_gap(run.layout, run, single, runs.index(run)) for run in others]
        limit = [float(value) if isfinite(value) else 0.0 for value in tolerances.loss_limits(single.losses)]
        charts.append(_chart(curves(f"|Δ loss| on {backend}", gaps, limit=limit, floor=_FLOOR)))
    return "".join(charts)


def between_engines(result: Comparison) -> str:
    """How far each loss is from that of the first backend: a chart for each layout, with the limit drawn in."""
    engines = list(_by_backend(result))
    charts = []
    for layout in dict.fromkeys(run.layout for run in result.runs):
        first, *others = [run for run in result.runs if run.layout == layout]
        gaps = [_gap(run.backend, run, first, engines.index(run.backend)) for run in others]
        # each run has a limit of its own, by its own losses, which are nearly equal: the least one is drawn
        drawn = [[loss for loss in run.losses if isfinite(loss)] or [1.0] for run in others]
        limit = min(map(tolerances.between_limit, drawn), default=0.0)
        if gaps:
            title = f"|Δ loss| to {first.backend}, layout {layout}"
            charts.append(_chart(curves(title, gaps, limit=[limit] * len(first.losses), floor=_FLOOR)))
    return "".join(charts)


def _gap(name: str, run: RunResult, other: RunResult, number: int) -> Curve:
    return Curve(name, [abs(a - b) for a, b in zip(run.losses, other.losses, strict=False)], number)


def step_times(result: Comparison) -> str:
    """A bar for each run."""
    groups = [
        (backend, [(run.layout, run.step_seconds, f"{1000 * run.step_seconds:.1f}") for run in runs])
        for backend, runs in _by_backend(result).items()
    ]
    return bars("median milliseconds of a step", groups)


def held(result: Comparison) -> str:
    """The blocks of the variables under each layout but "1": backends differ in no shard, as the bytes show.

    Variables with the same shape and layout share a row.
    """
    drawn: dict[str, RunResult] = {}
    for run in result.runs:
        if run.layout != "1":
            drawn.setdefault(run.layout, run)
    if not drawn:
        return ""
    # the shapes of one device are the logical ones; paths differ between runs, their order does not
    single = next(run for run in result.runs if run.layout == "1")
    paths = {layout: list(_variables(run)) for layout, run in drawn.items()}
    alike: dict[tuple[tuple[int, ...], str], list[tuple[int, str]]] = {}
    for at, (path, shape) in enumerate(_variables(single).items()):
        laid = repr([_laid(run, paths[layout][at]) for layout, run in drawn.items()])
        alike.setdefault((tuple(shape), laid), []).append((at, path))
    shown = sorted(alike.items(), key=lambda item: -prod(item[0][0]))[:_MOST_ROWS]
    rows = []
    for (shape, _), members in shown:
        at, path = members[0]
        names = "<br>".join(breakable(each) for _, each in members[1:])
        others = f"and {counted(len(members) - 1, 'other')} laid like it"
        others = f"<details><summary>{others}</summary>{names}</details>" if names else ""
        cells = "".join(_blocks(run, paths[layout][at], list(shape)) for layout, run in drawn.items())
        rows.append(f"<tr><td>{breakable(path)} <span>{list(shape)}</span>{others}</td>{cells}</tr>")
    head = "".join(f"<th scope=col>{_layout(run)}</th>" for run in drawn.values())
    left = sum(map(len, alike.values())) - sum(len(members) for _, members in shown)
    more = f"<p>and {counted(left, 'smaller variable')}</p>" if left else ""
    return f'<table class="held"><tr><th scope=col>variable</th>{head}</tr>{"".join(rows)}</table>{more}'


def _laid(run: RunResult, path: str) -> tuple[str, tuple[Sequence[int], Sequence[int]], dict[int, list[int]]]:
    """A variable's nd_sbp, ranks and hierarchy, and the shape of its block on each rank that holds one."""
    blocks = {rank: shapes[path] for rank, shapes in sorted(run.shapes.items()) if path in shapes}
    return run.declared[path].strip("[]"), run.placements.get(path, ((), (0,))), blocks


def _variables(run: RunResult) -> dict[str, list[int]]:
    """Path -> shape that the first rank with the variable holds; in a pipeline a rank has those of its stages."""
    found: dict[str, list[int]] = {}
    for rank in sorted(run.shapes):
        for path, shape in run.shapes[rank].items():
            if "seed_generator" not in path:
                found.setdefault(path, shape)
    # in the order of the model's weights: a rank may have the first and the third stage
    return {path: found[path] for path in (*run.declared, *found) if path in found}


def breakable(path: str) -> str:
    """The path of a variable, which a browser may break after each part of it."""
    return re.sub("([/_])", r"\1<wbr>", escape(path))


def _layout(run: RunResult) -> str:
    several = f", {' x '.join(map(str, run.hierarchy))}" if len(run.hierarchy) > 1 else ""
    return f"{escape(run.layout)}: {counted(prod(run.hierarchy), 'rank')}{several}"


def _blocks(run: RunResult, path: str, shape: list[int]) -> str:
    """A cell: the picture of a variable of this logical shape under the run's layout."""
    declared, (ranks, hierarchy), blocks = _laid(run, path)
    picture = None
    with suppress(FlowError):  # a layout that cannot be read, or of no ranks, is told as text
        placement = Placement(np.reshape(np.asarray(ranks, int), hierarchy))
        layout = Layout(placement, declared, shape) if shape else Layout(placement, {}, [1])
        picture = layout.picture(declared, width=130)
    picture = picture or escape(declared)
    held_shapes = "; ".join(f"rank {rank} holds {blocks[rank]}" for rank in list(blocks)[:8])
    return f'<td title="{shape}: {escape(held_shapes)}">{picture}</td>'


def _chart(svg: str) -> str:
    return f'<div class="chart">{svg}</div>'
