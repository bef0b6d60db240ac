"""The comparison as a table on the console."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keras_flow.compare import deviations
from keras_flow.compare.result import Comparison, RunResult
from keras_flow.units import megabytes

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
        title = f"{result.program}: {len(result.runs[0].losses)} steps of {result.batch_size} rows"
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
            cells = row(result, run, metric)
            table.add_row(*cells[:2], *cells[2:][part])
        console.print(table)
    engine = "Δ engine: from the first backend, same layout. " if result.has_engines else ""
    console.print(
        "loss: of the final weights. Δ loss (of each step), Δ weights: from the run on one device of the same backend. "
        f"{nearest(result)} "
        f"{engine}ms: median time of a step. MB/rank: most weights that one rank "
        "holds. MB/step: received by a rank in a step. peak MB: the most that a rank holds at one moment of a step "
        "(MB/step and peak MB are what explain computes)."
    )
    if result.random_layers:
        console.print(
            'The model draws random numbers with random="stock", which are other ones on each backend: Δ engine is not '
            "judged."
        )
    for backend, reason in result.skipped.items():
        console.print(f"left out: {backend} ({reason})")
    for failure in result.failures:
        console.print(f"[bold red]FAILED[/] {escape(failure)}")
    for known in result.known:
        console.print(f"[bold]{'known cause' if known.explains else 'known difference'}[/]: {escape(str(known))}")
    if not result.failures:
        console.print("[bold green]All runs agree within the tolerances.[/]")


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


def row(result: Comparison, run: RunResult, metric: str | None) -> tuple[str, ...]:
    """One run's cells."""
    between = "-" if run.between_backends is None else _marked(run.between_backends, run.between_share or 0.0)
    return (
        run.backend,
        run.layout,
        f"{run.evaluation['loss']:.4f}",
        *([f"{run.evaluation[metric]:.4f}"] if metric else []),
        _deviation(run.loss_deviation, run.loss_share, run.layout),
        _deviation(run.weights_deviation, run.weights_share, run.layout),
        *([between] if result.has_engines else []),
        f"{1000 * run.step_seconds:.1f}",
        f"{run.ranks_used}/{run.ranks_named}",
        megabytes(max(run.bytes_per_rank.values())),
        _megabytes(run.received_per_step),
        _megabytes(run.peak_per_rank),
    )


def _megabytes(count: int | None) -> str:
    return "-" if count is None else megabytes(count)


def _deviation(value: float, share: float, layout: str) -> str:
    if layout == "1":
        return "-"
    return _marked(value, share)


def _marked(value: float, share: float) -> str:
    return f"{value:.1e}" if share <= 1 else f"[bold red]{value:.1e}[/]"
