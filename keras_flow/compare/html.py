"""The comparison as one HTML page that loads nothing else: tables, curves, step times, and who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from keras_flow.compare.charts import between_engines, breakable, deviations, held, losses, step_times
from keras_flow.compare.deviations import in_words
from keras_flow.compare.result import Comparison
from keras_flow.compare.table import agreed, heads, left_out, metric_name, nearest, row
from keras_flow.pictures.svg import table
from keras_flow.units import counted, decimal

_STYLE = """
:root{color-scheme:light dark;--ink:#1d2433;--dim:#596273;--line:#d9dee7;--paper:#fff;--panel:#f6f8fb;--bad:#b3261e;--ok:#1f7a37}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9f0;--dim:#a3acbd;--line:#343b49;--paper:#151922;--panel:#1d222d;--bad:#ff8a80;--ok:#7bd394}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1120px;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.45rem;line-height:1.25}h2{font-size:1.1rem;margin:2.2rem 0 .5rem}h1,p,li,dd,pre{overflow-wrap:anywhere}p,li{color:var(--dim)}p b,li b{color:var(--ink)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:600}td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}
tr.first td{border-top:2px solid var(--line)}.bad{color:var(--bad);font-weight:600}.ok{color:var(--ok);font-weight:600}
dl{display:grid;grid-template-columns:auto 1fr;gap:.15rem 1rem;font-size:.9rem}dt{font-weight:600}dd{margin:0;color:var(--dim)}
.charts,.side{display:flex;flex-wrap:wrap;gap:1rem}.chart{flex:1 1 300px;max-width:350px}.side>section{flex:1 1 300px}
table.held{width:auto}table.held td,table.held th{text-align:left;vertical-align:top}
table.held svg{max-width:none}table.held td:first-child{white-space:normal}table.held span{white-space:nowrap;color:var(--dim);font-size:.85rem}
table.text{width:auto}table.text td,table.text th{text-align:left;white-space:normal}table.text td{overflow-wrap:anywhere}
.scroll{overflow-x:auto}pre{background:var(--panel);padding:.6rem .8rem;border-radius:8px;overflow-x:auto}
@media(max-width:520px){.scroll{background:linear-gradient(270deg,var(--paper),transparent) right/2.4rem 100% no-repeat local,linear-gradient(270deg,var(--line),transparent) right/1.2rem 100% no-repeat}
body{font-size:14px;margin:.8rem auto;padding:0 .7rem}th,td{padding:.25rem .4rem}.chart{max-width:none}
pre{white-space:pre-wrap}dl{display:block}dd{margin-bottom:.4rem}
.scroll:has(table.runs){background:none}table.runs,table.runs tbody{display:block}table.runs tr:first-child{display:none}
table.runs tr{display:grid;grid-template-columns:repeat(4,1fr);padding:.5rem 0;border-bottom:1px solid var(--line)}
table.runs td,tr.first td{border:0;text-align:left;padding:.1rem .2rem}
table.runs td:nth-child(-n+2){font-weight:600}table.runs td:nth-child(2){grid-column:span 3}
table.runs td:nth-child(n+3)::before{content:attr(data-head);display:block;font-size:.75rem;color:var(--dim);font-weight:400}}
"""


def page(result: Comparison) -> str:
    """The whole page."""
    verdict = (
        f'<p class="ok">{agreed(result)}</p>'
        if not result.failures
        else "<ul>" + "".join(f'<li class="bad">{escape(text)}</li>' for text in result.failures) + "</ul>"
    )
    backends = ", ".join(dict.fromkeys(run.backend for run in result.runs))
    facts = {**result.versions, **result.environment}
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items())
    from_one_device = _charts(
        "Deviation from one device",
        "The deviation of each step's loss, on a logarithmic scale. The red line is the tolerance. A deviation of zero is "
        "drawn at the bottom.",
        deviations(result),
    )
    from_engines = _charts(
        "Engine against engine",
        "The loss of each step against that of the first backend, from the same weights on the same rows.",
        between_engines(result),
    )
    loss = _charts(
        "Loss",
        "The loss of each step, before its update. The axis runs from the least loss to the greatest. Curves that coincide "
        "are drawn as one dashed line, which has the colours of all.",
        losses(result),
    )
    times = _section("Time of a step", "The median, without compilation.", step_times(result))
    # one engine has one chart of each kind
    curves = "".join((loss, from_one_device, from_engines, times))
    who = _section(
        "Who holds what",
        "A block has the colour and the number of the rank that holds it. A block that several ranks hold is grey, with "
        "the colours of all of them above.",
        f'<div class="scroll">{blocks}</div>' if (blocks := held(result)) else "",
    )
    across = _section(
        "Weights across backends",
        "The final weights of each run, loaded on each backend and evaluated on one device.",
        f'<div class="scroll">{_evaluations(result)}</div>' if result.has_engines else "",
    )
    command = f"<h2>Repeat it</h2><pre>{escape(result.command)}</pre>" if result.command else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>keras_flow: {escape(result.program)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(result.program)}: the same training on {escape(backends)}</h1>
<p>{counted(len(result.runs[0].losses), "step")} of {result.batch_size} rows, from the same weights, over the same rows in the
same order (seed {result.seed}).</p>
<p>{_model(result)}</p>
{verdict}
{"".join(f"<p>{escape(text)}</p>" for text in left_out(result))}
{_known(result)}
<h2>Numbers</h2><div class="scroll">{_table(result)}</div>
<p>{escape(nearest(result))} A number over its tolerance is red and has a ✗.</p>
<dl>{_words(result)}</dl>
{curves if result.has_engines else f'<div class="side">{curves}</div>'}
{_weights(result)}
{who}
{across}
<h2>Environment</h2><div class="scroll"><table class="text">{rows}</table></div>
{command}
</body></html>
"""


def fragment(result: Comparison) -> str:
    """The main parts, as a piece of a page that has colours of its own, such as a notebook."""
    metric = metric_name(result)
    names = heads(result, metric)
    rows = [[cell for cell, _ in row(result, run, metric)] for run in result.runs]
    notes = "".join(f"<div>{escape(str(each))}</div>" for each in (*left_out(result), *result.known))
    verdict = f"✓ {agreed(result)}" if not result.failures else "✗ " + "; ".join(result.failures)
    wrap = "<div style='display:flex;flex-wrap:wrap;gap:1em'>{}</div>"
    return (
        f"<div><b>{escape(verdict)}</b></div>{notes}"
        + table(("backend", "layout", *names), rows, numbers=range(2, 2 + len(names)))
        + wrap.format(losses(result))
        + wrap.format(deviations(result))
        + wrap.format(between_engines(result))
        + step_times(result)
    )


def _known(result: Comparison) -> str:
    """The known differences between engines that concern this program."""
    return "".join(
        f"<p><b>{'Known cause' if each.explains else 'Known difference'}</b>: {escape(str(each))}</p>"
        for each in result.known
    )


def _model(result: Comparison) -> str:
    """The model, its optimizer and its loss, as a sentence."""
    return " · ".join(f"{name}: <b>{escape(words)}</b>" for name, words in result.model.items())


def _charts(title: str, words: str, charts: str) -> str:
    return _section(title, words, f'<div class="charts">{charts}</div>' if charts else "")


def _section(title: str, words: str, content: str) -> str:
    """A part of the page; nothing where there is nothing to show."""
    return f"<section><h2>{title}</h2><p>{words}</p>{content}</section>" if content else ""


def _weights(result: Comparison) -> str:
    """Which weight came nearest to its tolerance in each run, and those that rounding decides."""
    rows = []
    for run in result.runs:
        if run.layout != "1":
            over = " class=bad" if not run.weights_share <= 1 else ""
            share = "less than 1 %" if run.weights_share < 0.01 else f"{100 * run.weights_share:.0f} %"
            weight = breakable(run.weights_worst)
            if run.weights_rounded:
                weight += f"; decided by rounding: {', '.join(map(breakable, run.weights_rounded))}"
            cells = (
                f"<td>{escape(run.backend)}</td><td>{escape(run.layout)}</td><td>{weight}</td><td{over}>{share}</td>"
            )
            rows.append(f"<tr>{cells}</tr>")
    moved = {run.backend: run.weights_moved for run in result.runs if run.layout != "1"}
    amounts = ", ".join(f"{amount:.2g} on {escape(backend)}" for backend, amount in moved.items())
    head = _head(("backend", "layout", "weight", "of its tolerance"))
    return _section(
        "Final weights",
        f"The weight of each run that is nearest to its tolerance. One device moved its weights by at most {amounts}.",
        f'<table class="text">{head}{"".join(rows)}</table>' if rows else "",
    )


def _words(result: Comparison) -> str:
    """What the columns of numbers are."""
    nature = " Not judged here: the model draws random numbers." if result.random_layers else ""
    engine = "Largest difference of a step's loss from that of the first backend, under the same layout."
    metric = metric_name(result)
    words = {
        f"loss, {metric}"
        if metric
        else "loss": "The trained model on the validation rows (or on all rows, if there are "
        "none), as <code>evaluate</code> computes it. The curves below show the loss of each step.",
        "Δ loss, Δ weights": "Largest difference from the run of the same backend on one device.",
        **({"Δ engine": engine + nature} if result.has_engines else {}),
        "tolerances": in_words(len(result.runs[0].losses), result.has_engines),
        "ms": "Median time of a step, without compilation. Ranks of one CPU share its cores, so more ranks are usually "
        "slower. Times on a busy machine vary.",
        "ranks": "Ranks that held weights, and ranks in the layout.",
        "MB/rank": "Most memory for weights on one rank, read from the engine's live arrays.",
        "MB/step": "Bytes that a rank receives in a training step, as <code>keras-flow explain</code> computes them.",
        "peak MB": "Peak memory of a rank during a step, as <code>keras-flow explain</code> computes it.",
    }
    return "".join(f"<dt>{escape(name)}</dt><dd>{text}</dd>" for name, text in words.items())


def _table(result: Comparison) -> str:
    metric = metric_name(result)
    names = ("backend", "layout", *heads(result, metric))
    rows, last = [], None
    for run in result.runs:
        first = ' class="first"' if last not in (None, run.backend) else ""
        last = run.backend
        rows.append(
            f'<tr{first} role="row">'
            + "".join(
                f'<td role="cell"{" class=bad" if over else ""} data-head="{escape(head)}">{escape(cell)}</td>'
                for (cell, over), head in zip(row(result, run, metric), names, strict=True)
            )
            + "</tr>"
        )
    # roles: on a phone it is drawn as a list, and would be no table to a screen reader
    return f'<table class="runs" role="table">{_head(names)}{"".join(rows)}</table>'


def _head(names: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col" role="columnheader">{escape(name)}</th>' for name in names)
    return f'<tr role="row">{cells}</tr>'


def _evaluations(result: Comparison) -> str:
    backends = list(dict.fromkeys(run.backend for run in result.runs))
    head = _head(("trained on", "layout", *backends))
    rows = "".join(
        f"<tr><td>{escape(run.backend)}</td><td>{escape(run.layout)}</td>"
        + "".join(f"<td>{decimal(run.evaluated[name], 6)}</td>" for name in backends)
        + "</tr>"
        for run in result.runs
    )
    return f"<table>{head}{rows}</table>"
