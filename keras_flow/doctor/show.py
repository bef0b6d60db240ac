"""Prints the report of doctor as text that can be pasted into an issue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from keras_flow.doctor.report import Check, EngineReport, Report

_STYLES = {"ok": "green", "failed": "bold red", "warning": "yellow", "absent": "dim", "skipped": "dim"}

#: how an engine computes batches that do not divide by its ranks
_ODD_BATCHES = {
    "parallel": "exact, in parallel",
    "broadcast": "exact, computed on every rank",
    "own rows": "exact, in parallel under kf.DataParallel, else computed on every rank",
}


def show(report: Report, console: Console) -> None:
    """Print a report."""
    _pairs("versions", {name: version or "not installed" for name, version in report.versions.items()}, console)
    _pairs("host", report.host, console)
    _pairs("environment", report.environment, console)
    _checks("host checks", report.checks, console)
    for engine in report.engines:
        _engine(engine, console)
    failures = report.failures
    console.print()
    for failure in failures:
        console.print(f"[bold red]failed[/] {escape(failure)}")
    console.print("everything that was checked works" if not failures else f"{len(failures)} failed")


def _engine(engine: EngineReport, console: Console) -> None:
    _checks(f"{engine.name} {engine.version or ''}", engine.checks, console)
    facts: dict[str, str] = {}
    if engine.devices:
        facts["devices"] = ", ".join(engine.devices)
    facts |= _usable(engine.capabilities)
    for ring in engine.rings:
        facts[f"link, {ring.ranks} ranks"] = (
            f"latency {ring.latency * 1e6:.3g} us, bandwidth {ring.bandwidth / 1e9:.3g} GB/s: "
            f"Link(latency={ring.latency:.3g}, bandwidth={ring.bandwidth:.4g})"
        )
    _rows(facts.items(), console)


def _usable(capabilities: Mapping[str, object]) -> dict[str, str]:
    """What of an engine's capabilities its user can decide by; `--json` has all of them."""
    if not capabilities:
        return {}
    alone = capabilities.get("drives_all_ranks")
    facts = {"ranks": "devices of one process" if alone else "a process each, which kf.run or keras-flow launch starts"}
    facts["odd batches"] = _ODD_BATCHES.get(str(capabilities.get("uneven_batches")), "exact")
    for name, title in (("strategies", "strategies"), ("refused", "not available")):
        if value := capabilities.get(name):
            facts[title] = ", ".join(map(str, value))  # type: ignore[call-overload]
    return facts


def _checks(title: str, checks: Iterable[Check], console: Console) -> None:
    console.print(f"\n[bold]{escape(title)}[/]")
    _rows(
        (
            (check.name, f"[{_STYLES[check.state]}]{check.state}[/]  {escape(check.detail)}".rstrip())
            for check in checks
        ),
        console,
        escaped=True,
    )


def _pairs(title: str, pairs: object, console: Console) -> None:
    if pairs:
        console.print(f"\n[bold]{escape(title)}[/]")
        _rows(dict(pairs).items(), console)  # type: ignore[call-overload]


def _rows(rows: Iterable[tuple[str, str]], console: Console, escaped: bool = False) -> None:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(escape(name), text if escaped else escape(text))
    console.print(table)
