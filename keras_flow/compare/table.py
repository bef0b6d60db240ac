"""The comparison as a table on the console."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keras_flow.compare import deviations
from keras_flow.compare.result import Comparison, RunResult
from keras_flow.units import counted, decimal, megabytes

#: width of the console, in characters, from which one table has room for all columns
_WIDE = 100


def show(result: Comparison, console: Console) -> None:
    """Print the table of a comparison, then what failed."""
    metric = metric_name(result)
    names = heads(result, metric)
    # on a narrow terminal the deviations stand in one table and the costs in another
    end = names.index("ms")
    parts = [slice(None)] if console.width >= _WIDE else [slice(0, end), slice(end, None)]
    for number, part in enumerate(parts):
        title = f"{escape(result.program)}: {counted(len(result.runs[0].losses), 'step')} of {result.batch_size} rows"
        table = Table(title=None if number else title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for name in ("backend", "layout"):
            table.add_column(name, no_wrap=True)
        for name in names[part]:
            table.add_column(name, justify="right", no_wrap=True)
        last = None
        for run in result.runs:
            # an empty row between backends
            if last is not None and last != run.backend:
                table.add_row()
            last = run.backend
            cells = [
                f"[bold red]{escape(cell)}[/]" if over else escape(cell) for cell, over in row(result, run, metric)
            ]
            table.add_row(*cells[:2], *cells[2:][part])
        console.print(table)
    engine = "Δ engine: from the first backend, same layout. " if result.has_engines else ""
    console.print(
        "loss: of the final weights. Δ loss (of each step), Δ weights: from the run on one device of the same backend. "
        f"{escape(nearest(result))} "
        f"{engine}ms: median time of a step. MB/rank: most weights that one rank "
        "holds. MB/step: received by a rank in a step. peak MB: the most that a rank holds at one moment of a step "
        "(MB/step and peak MB are what explain computes)."
    )
    if result.random_layers:
        console.print(
            'The model draws random numbers with random="stock", which are other ones on each backend: Δ engine is not '
            "judged."
        )
    for text in left_out(result):
        console.print(text, markup=False)
    for failure in result.failures:
        console.print(f"[bold red]FAILED[/] {escape(failure)}")
    for known in result.known:
        console.print(f"[bold]{'known cause' if known.explains else 'known difference'}[/]: {escape(str(known))}")
    if not result.failures:
        console.print(f"[bold green]{agreed(result)}[/]")


def agreed(result: Comparison) -> str:
    """The verdict where nothing failed."""
    count = len(result.runs)
    if count == 1:
        return "One run: there is nothing to compare it with."
    return f"{'Both' if count == 2 else f'All {count}'} runs agree within the tolerances."


def left_out(result: Comparison) -> list[str]:
    """A sentence for each backend that was left out."""
    return [f"left out: {backend} ({reason})" for backend, reason in result.skipped.items()]


def nearest(result: Comparison) -> str:
    """A sentence on how close the runs came to the tolerance, which is said even where all is well."""
    of_runs: dict[str, dict[str, float]] = {
        "The largest deviation from one device": {
            f"{run.backend} {run.layout}": max(run.loss_share, run.weights_share)
            for run in result.runs
            if run.layout != "1"
        },
        "The largest between engines": {
            f"{run.backend} {run.layout}": run.between_share for run in result.runs if run.between_share is not None
        },
    }
    said = []
    for what, shares in of_runs.items():
        if shares:
            worst = max(shares, key=lambda name: shares[name])
            amount = f"{100 * shares[worst]:.0f} %" if not shares[worst] < 0.01 else "less than 1 %"
            said.append(f"{what} is {amount} of its tolerance ({worst}).")
    return " ".join([*said, *still(result)])


def still(result: Comparison) -> list[str]:
    """A sentence for each backend whose weights moved too little for a comparison to judge their updates."""
    moved: dict[str, float] = {}
    for run in result.runs:
        if run.layout != "1" and (run.weights_resolution is None or run.weights_resolution > deviations.JUDGED):
            moved[run.backend] = max(moved.get(run.backend, 0.0), run.weights_moved)
    return [
        f"On {backend} one device moved its weights by {amount:.1g} at most: too little to judge the updates. Take "
        "more steps or a larger learning rate, or run keras-flow verify."
        for backend, amount in moved.items()
    ]


def heads(result: Comparison, metric: str | None) -> tuple[str, ...]:
    """Return the headings of the columns after backend and layout; None: the model has no metric."""
    metrics, engines = [metric] if metric else [], ["Δ engine"] if result.has_engines else []
    return ("loss", *metrics, "Δ loss", "Δ weights", *engines, "ms", "ranks", "MB/rank", "MB/step", "peak MB")


def metric_name(result: Comparison) -> str | None:
    """The metric to show beside the loss."""
    names = [name for name in result.runs[0].evaluation if name != "loss"]
    # accuracy, where there is one, says most
    return next((name for name in names if "acc" in name), names[0] if names else None)


def row(result: Comparison, run: RunResult, metric: str | None) -> list[tuple[str, bool]]:
    """One run's cells, and whether each is over its tolerance, which a mark says too: not all see its colour."""
    alone = run.layout == "1"
    deviations = [
        _deviation(None if alone else run.loss_deviation, run.loss_share),
        _deviation(None if alone else run.weights_deviation, run.weights_share),
        *([_deviation(run.between_backends, run.between_share or 0.0)] if result.has_engines else []),
    ]
    named = [run.backend, run.layout, *(decimal(run.evaluation[name]) for name in ("loss", metric) if name)]
    costs = [
        f"{1000 * run.step_seconds:.1f}",
        f"{run.ranks_used}/{run.ranks_named}",
        *map(_megabytes, (max(run.bytes_per_rank.values()), run.received_per_step, run.peak_per_rank)),
    ]
    return [*((each, False) for each in named), *deviations, *((each, False) for each in costs)]


def _megabytes(count: int | None) -> str:
    return "-" if count is None else megabytes(count)


def _deviation(value: float | None, share: float) -> tuple[str, bool]:
    if value is None:
        return "-", False
    return (f"{value:.1e}", False) if share <= 1 else (f"{value:.1e} ✗", True)
