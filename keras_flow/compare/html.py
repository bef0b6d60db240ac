"""The comparison as one HTML page that loads nothing else: table, loss curves, and the shards of each rank."""

from __future__ import annotations

from html import escape
from math import isfinite

from rich.text import Text

from keras_flow.compare.result import Comparison, RunResult
from keras_flow.compare.table import heads, metric_name, row

_COLOURS = ("#3266ad", "#c4542d", "#3f8f4f", "#8256a8", "#a7862b", "#2a8c93")
_STYLE = """
:root{color-scheme:light dark;--ink:#1d2433;--dim:#6a7385;--line:#d9dee7;--paper:#fff;--panel:#f6f8fb}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9f0;--dim:#98a1b3;--line:#343b49;--paper:#151922;--panel:#1d222d}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1080px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2.2rem}p,li{color:var(--dim)}p b,li b{color:var(--ink)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:600}td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}
tr.first td{border-top:2px solid var(--line)}.bad{color:#c22;font-weight:600}.ok{color:#2c8a43;font-weight:600}
.charts{display:flex;flex-wrap:wrap;gap:1rem}.chart{flex:1 1 300px;max-width:350px}
.holds{display:flex;flex-wrap:wrap;gap:1rem}.hold{background:var(--panel);border-radius:8px;padding:.6rem .8rem}
.hold h3{margin:.1rem 0 .5rem;font-size:.95rem}
svg text{fill:var(--dim);font:11px system-ui,sans-serif}svg .name{fill:var(--ink)}.scroll{overflow-x:auto}
"""


def page(result: Comparison) -> str:
    """The whole page."""
    verdict = (
        '<p class="ok">All runs agree within the tolerances.</p>'
        if not result.failures
        else "<ul>" + "".join(f'<li class="bad">{escape(text)}</li>' for text in result.failures) + "</ul>"
    )
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>keras_flow: {escape(result.program)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(result.program)}: the same training on {escape(", ".join(dict.fromkeys(run.backend for run in result.runs)))}</h1>
<p>{len(result.runs[0].losses)} steps of <b>{result.batch_size}</b> rows, from the same weights, over the same samples in the
same order (seed {result.seed}). {escape(versions)}.</p>
{verdict}
<h2>Numbers</h2><div class="scroll">{_table(result)}</div>
<p>Δ loss and Δ weights: the largest deviation from the single-device run of the same backend, red where over the
tolerance. Δ engine: the loss of a step against the first backend under the same layout{_nature(result)}. Step time is a
median without compilation; on few cores more ranks are no faster. MB/rank is the most that one rank holds, read from the engine's live arrays. MB/step
is what a rank receives in a training step, peak MB the most that it holds at one time in one: both as explain says.</p>
<h2>Loss</h2><div class="charts">{_charts(result)}</div>
<h2>Who holds what</h2><p>Each bar is a variable, each row a rank; filled is the part that the rank holds in its memory.</p>
<div class="holds">{_holdings(result)}</div>
<h2>Weights across backends</h2><p>The final weights of each run, loaded on each backend and evaluated on one device.</p>
<div class="scroll">{_evaluations(result)}</div>
</body></html>
"""


def _nature(result: Comparison) -> str:
    return " (not judged: the model draws random numbers)" if result.random_layers else ""


def _table(result: Comparison) -> str:
    metric = metric_name(result)
    names = ("backend", "layout", *heads(metric))
    rows, last = [], None
    for run in result.runs:
        first = ' class="first"' if last not in (None, run.backend) else ""
        last = run.backend
        cells = [Text.from_markup(cell).plain for cell in row(run, metric)]
        # cells of backend, layout and two more; then the deviations; `not <=` is true for nan as well
        over = [False] * 4 + [not run.loss_share <= 1, not run.weights_share <= 1] + [False] * 6
        rows.append(
            f"<tr{first}>"
            + "".join(
                f"<td{' class=bad' if bad else ''}>{escape(cell)}</td>" for cell, bad in zip(cells, over, strict=True)
            )
            + "</tr>"
        )
    return f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in names)}</tr>{''.join(rows)}</table>"


def _charts(result: Comparison) -> str:
    # one scale for all charts, so that engines can be compared by eye
    top = max((loss for run in result.runs for loss in run.losses if isfinite(loss)), default=1.0)
    return "".join(
        _chart(backend, [run for run in result.runs if run.backend == backend], top)
        for backend in dict.fromkeys(run.backend for run in result.runs)
    )


def _chart(backend: str, runs: list[RunResult], top: float) -> str:
    """Loss over steps. Curves of layouts coincide where all is well, so each is drawn thinner than the one below it."""
    width, height, left, top_edge, base = 340, 220, 36, 34, 196
    steps = max(len(runs[0].losses) - 1, 1)

    def y_of(loss: float) -> float:
        return top_edge + (base - top_edge) * (1 - loss / (top or 1))

    lines, keys = [], []
    for index, run in enumerate(runs):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(
            f"{left + (width - left - 8) * step / steps:.1f},{y_of(loss):.1f}"
            for step, loss in enumerate(run.losses)
            if isfinite(loss)
        )
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{max(1.2, 7 - 2 * index)}" '
            f'stroke-linejoin="round" opacity="{0.35 if index == 0 else 0.9}"/>'
        )
        x = left + 74 + 54 * index
        keys.append(f'<rect x="{x}" y="9" width="12" height="4" fill="{colour}"/>')
        keys.append(f'<text x="{x + 16}" y="15">{escape(run.layout)}</text>')
    axis = "".join(
        f'<text x="{left - 6}" y="{y_of(level) + 4:.0f}" text-anchor="end">{level:.2g}</text>'
        f'<line x1="{left}" x2="{width - 8}" y1="{y_of(level):.0f}" y2="{y_of(level):.0f}" stroke="var(--line)"/>'
        for level in (0, top / 2, top)
    )
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="loss on {escape(backend)}">{axis}'
        f'{"".join(lines)}{"".join(keys)}<text class="name" x="{left}" y="15">{escape(backend)}</text>'
        f'<text x="{width - 8}" y="{height - 8}" text-anchor="end">step {len(runs[0].losses)}</text></svg>'
    )


def _holdings(result: Comparison) -> str:
    """Which shards each rank holds, drawn once for each layout: backends differ in no shard, as the bytes show."""
    drawn: dict[str, RunResult] = {}
    for run in result.runs:
        drawn.setdefault(run.layout, run)
    return "".join(_holding(run, result) for run in drawn.values())


def _holding(run: RunResult, result: Comparison) -> str:
    # the shapes of one device are the logical ones
    single = next(each for each in result.runs if each.backend == run.backend and each.layout == "1")
    whole = {path: shape for path, shape in single.shapes[0].items() if "seed_generator" not in path}
    paths = [path for path in run.shapes[min(run.shapes)] if "seed_generator" not in path]
    names = list(whole)
    cell, gap, left, height = 26, 5, 52, 20
    bars = []
    for position, rank in enumerate(run.shapes):
        y = 4 + position * (height + 6)
        bars.append(f'<text class="name" x="0" y="{y + 14}">rank {rank}</text>')
        for index, (path, name) in enumerate(zip(paths, names, strict=True)):
            x = left + index * (cell + gap)
            bars.append(_bar(run, rank, path, whole[name], x, y, cell, height))
    width, total = left + len(paths) * (cell + gap), 8 + len(run.shapes) * (height + 6)
    return (
        f'<div class="hold"><h3>{escape(run.layout)} ({"x".join(map(str, run.hierarchy))})</h3>'
        f'<svg width="{width}" height="{total}" role="img" aria-label="shards under {escape(run.layout)}">{"".join(bars)}</svg></div>'
    )


def _bar(run: RunResult, rank: int, path: str, whole: list[int], x: int, y: int, cell: int, height: int) -> str:
    """The outline of a variable, and in it the rank's share, filled, at the position of its block."""
    shard = run.shapes[rank][path]
    colour = _COLOURS[0]
    # of the bar's width: where this rank's block begins, and how much of the variable it is
    start, share = 0.0, 1.0
    for full, part in zip(whole, shard, strict=True):
        if part < full:
            share *= part / full
            blocks = round(full / part) if part else 1
            ranks = list(run.shapes)
            start = (ranks.index(rank) % blocks) / blocks
            colour = _COLOURS[1]
    return (
        f"<g><title>{escape(path)} {whole}: rank {rank} holds {shard} ({escape(run.declared.get(path, ''))})</title>"
        f'<rect x="{x}" y="{y}" width="{cell}" height="{height}" fill="none" stroke="var(--line)"/>'
        f'<rect x="{x + start * cell:.1f}" y="{y}" width="{share * cell:.1f}" height="{height}" fill="{colour}" opacity=".8"/></g>'
    )


def _evaluations(result: Comparison) -> str:
    backends = list(dict.fromkeys(run.backend for run in result.runs))
    head = "<th>trained on</th><th>layout</th>" + "".join(f"<th>{escape(name)}</th>" for name in backends)
    rows = "".join(
        f"<tr><td>{escape(run.backend)}</td><td>{escape(run.layout)}</td>"
        + "".join(f"<td>{run.evaluated[name]:.6f}</td>" for name in backends)
        + "</tr>"
        for run in result.runs
    )
    return f"<table><tr>{head}</tr>{rows}</table>"
