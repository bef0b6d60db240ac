"""The comparison as a table on the console."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from keras_flow.compare.result import Comparison, RunResult


def show(result: Comparison, console: Console) -> None:
    """Print the table, then what failed."""
    table = Table(title=f"{result.program}: {len(result.runs[0].losses)} steps of {result.batch_size} rows")
    for name in ("backend", "layout"):
        table.add_column(name, no_wrap=True)
    metric = metric_name(result)
    for name in ("loss", metric or "-", "Δ loss", "Δ weights", "Δ backends", "ms/step", "ranks", "kB/rank"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for run in result.runs:
        if last is not None and last != run.backend:
            table.add_section()
        last = run.backend
        table.add_row(*row(run, metric))
    console.print(table)
    console.print(
        "Δ loss, Δ weights: largest deviation from the single-device run of the same backend (share of the tolerance). "
        "Δ backends: from the first backend, same layout."
    )
    if result.random_layers:
        console.print("The model draws random numbers: backends differ from each other by nature, so Δ backends is not judged.")
    for backend, reason in result.skipped.items():
        console.print(f"left out: {backend} ({reason})")
    for failure in result.failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    if not result.failures:
        console.print("[bold green]All runs agree within the tolerances.[/]")


def metric_name(result: Comparison) -> str | None:
    """The metric to show beside the loss."""
    names = [name for name in result.runs[0].evaluation if name != "loss"]
    return next((name for name in names if "acc" in name), names[0] if names else None)


def row(run: RunResult, metric: str | None) -> tuple[str, ...]:
    """One run's cells."""
    held = sorted(set(run.bytes_per_rank.values()))
    size = "–".join(f"{count / 1000:.1f}" for count in ([held[0], held[-1]] if len(held) > 1 else held))
    return (
        run.backend,
        run.layout,
        f"{run.evaluation['loss']:.5f}",
        f"{run.evaluation[metric]:.4f}" if metric else "-",
        _share(run.loss_deviation, run.loss_share, run.layout),
        _share(run.weights_deviation, run.weights_share, run.layout),
        "-" if run.between_backends is None else f"{run.between_backends:.1e}",
        f"{1000 * run.step_seconds:.1f}",
        f"{run.ranks_used}/{run.ranks_named}",
        size,
    )


def _share(value: float, share: float, layout: str) -> str:
    if layout == "1":
        return "-"
    text = f"{value:.1e} ({100 * share:.0f} %)"
    return text if share <= 1 else f"[bold red]{text}[/]"
