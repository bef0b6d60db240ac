"""`keras-flow compare`: starts a process for each backend, shows its progress, and compares the results."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from keras_flow import __version__, atomic, npz
from keras_flow.backends.engine_process import EngineProcess
from keras_flow.backends.engines import ENGINES, require_known, that_train
from keras_flow.compare import deviations, html, table
from keras_flow.compare.known_differences import ProgramFacts, that_fit
from keras_flow.compare.options import LAYOUTS, WITHOUT_RULES, CompareJob, CompareOptions
from keras_flow.compare.result import Comparison, Known, RunResult
from keras_flow.errors import FlowError
from keras_flow.progress import working
from keras_flow.rules_check import RulesCheck
from keras_flow.runtime import versions
from keras_flow.runtime.untested import say_untested
from keras_flow.units import amount, decimal
from keras_flow.user_file import check_file, may_split_weights, ranks_of

_BATCH = 64


def compare(options: CompareOptions, console: Console) -> int:
    """Run a comparison, print its table and write `report.html` and `report.json`.

    Returns:
        0, or 1 if a deviation is over the tolerance or a layout used fewer ranks than it names.

    Raises:
        FlowError: an unknown or missing backend, an error of the user's file, or no report can be written.
    """
    result = compared(options, lambda found: table.show(found, console))
    console.print(f"report: {options.out / 'report.html'}, {options.out / 'report.json'}", markup=False)
    return 1 if result.failures else 0


def compared(options: CompareOptions, show: Callable[[Comparison], object] = lambda found: None) -> Comparison:
    """Run a comparison, show it, and write `report.html` and `report.json`.

    Raises:
        FlowError: see `compare`.
    """
    result = _trained(options)
    show(result)
    try:
        result.write(options.out / "report.json")
        atomic.write_text(options.out / "report.html", html.page(result))
    except OSError as error:
        raise FlowError(f"the report cannot be written into --out {options.out}: {error.strerror}") from error
    return result


def _trained(options: CompareOptions) -> Comparison:
    backends, skipped = chosen_backends(options.backends)
    say_untested(backends)
    named = options.layouts
    if named is None:
        named = LAYOUTS if may_split_weights(options.file) else WITHOUT_RULES
        if named is WITHOUT_RULES:
            print(
                f"{options.file} has no rules(): the layouts are {','.join(named)}. For tp4 and 2x2 it needs some; "
                f"keras-flow explain {options.file} --layout 2x2 prints rules to begin with",
                file=sys.stderr,
            )
    options = replace(options, backends=tuple(backends), layouts=named)
    # one device first: the other layouts are compared with it
    check_file(options.file, named, ranks=options.ranks)
    layouts = ("1", *(name for name in named if name != "1"))
    with _report_folder(options.out), tempfile.TemporaryDirectory(prefix="keras-flow-compare-") as name:
        folder = Path(name)
        jobs = [_job(options, backend, layouts, folder) for backend in backends]
        with (
            working("comparing") as tell,
            RulesCheck(options.file, layouts, backends, "a comparison", options.ranks) as check,
        ):
            for job in jobs:
                _run(job, "train", tell, check)
            for job in jobs:
                _run(job, "evaluate", tell, check)
            # the processes only write files, so that a reader of them needs no engine
            runs = {
                (job.backend, layout): json.loads((job.of_run(layout) / "run.json").read_text())
                for job in jobs
                for layout in layouts
            }
            weights: dict[tuple[str, str], deviations.Deviation] = {}
            for job in jobs:
                found = _weights_of(job, runs, lambda again: _run(again, "train", tell, check))
                weights |= {(job.backend, layout): each for layout, each in found.items()}
        return judge(options, jobs, runs, skipped, weights)


@contextmanager
def _report_folder(out: Path) -> Iterator[None]:
    """The folder is made before the runs, so that a wrong `--out` costs none; left empty by an error, it goes."""
    made = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlowError(f"--out {out} cannot be a folder for the report: {error.strerror}") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise FlowError(f"--out {out} cannot be a folder for the report: it may not be written to")
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):  # traces of the runs so far stay
                out.rmdir()
        raise


def chosen_backends(names: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """The backends of `--backends`, or without it those that are installed; and those left out -> why.

    Raises:
        FlowError: an unknown backend, one that is named and not installed, or none is installed.
    """
    legal = that_train()
    absent = [name for name in legal if versions.installed(name) is None]
    if names is None:
        if len(absent) == len(legal):
            raise FlowError(f"none of the backends {', '.join(legal)} is installed: pip install 'keras-flow[jax]'")
        return [name for name in legal if name not in absent], dict.fromkeys(absent, "not installed")
    require_known(names, legal)
    for name in names:
        if name in absent:
            raise FlowError(
                f"backend {name!r} is not installed: pip install '{ENGINES[name].extra}', or leave it out of --backends"
            )
    # each once, in the order that was asked for: the first is the one that others are compared with
    return list(dict.fromkeys(names)), {}


def _job(options: CompareOptions, backend: str, layouts: tuple[str, ...], folder: Path) -> CompareJob:
    job = CompareJob(
        file=str(options.file.resolve()),
        backend=backend,
        layouts=layouts,
        steps=options.steps,
        epochs=options.epochs,
        batch_size=options.batch_size or _BATCH,
        seed=options.seed,
        folder=str(folder),
        traces=str(options.out.resolve()) if options.trace else None,
        ranks=options.ranks,
    )
    job.write(folder / f"job-{backend}.json")
    return job


def _perturbed(job: CompareJob, random: str | None) -> CompareJob:
    """One device once more, from first weights that are changed in their last bit: what is rounding?"""
    folder = Path(job.folder) / "perturbed"
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(job.folder) / "initial.weights.h5", folder)
    again = replace(job, layouts=("1",), folder=str(folder), traces=None, perturbed=True, random=random)
    again.write(folder / f"job-{job.backend}.json")
    return again


def _run(job: CompareJob, action: str, tell: Callable[[str], None], check: RulesCheck) -> None:
    """Run the process of one backend to its end, and tell what it does.

    Raises:
        FlowError: it failed, and the text is its own error; or rules are wrong.
    """
    folder = Path(job.folder)

    def meanwhile() -> None:
        check.raise_what_is_found()
        tell(_doing(job, action))

    file = str(folder / f"job-{job.backend}.json")
    with EngineProcess(job.backend, "keras_flow.compare.worker", action, file) as process:
        process.wait(meanwhile=meanwhile)
        if process.status:
            reason = folder / f"failed-{job.backend}-{action}.txt"
            text = reason.read_text().strip() if reason.exists() else process.last_words(3000)
            raise FlowError(f"{job.backend}: {text}")


def _doing(job: CompareJob, action: str) -> str:
    """What a process does now, by the last whole line that it has written of its steps."""
    if action == "evaluate":
        return f"{job.backend}: evaluating the weights of all runs"
    path = Path(job.folder) / f"events-{job.backend}.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    if not lines:
        return f"{job.backend}: starting"
    event = json.loads(lines[-1])
    run = f"{job.backend} {event['layout']}"
    if not event["step"]:
        return f"{run}: the first step"
    return f"{run}: step {event['step']} of {event['steps']}, its loss {decimal(event['loss'])}"


def judge(
    options: CompareOptions,
    jobs: list[CompareJob],
    raw: Mapping[tuple[str, str], dict],
    skipped: dict[str, str],
    weights: Mapping[tuple[str, str], deviations.Deviation],
) -> Comparison:
    """Compare the runs that the processes wrote.

    Args:
        options: of the command line.
        jobs: one for each backend, the reference for the other backends first.
        raw: backend and layout -> what the process wrote of the run.
        skipped: backends left out -> why.
        weights: backend and layout -> how far the final weights are from those of one device.
    """
    runs: list[RunResult] = []
    failures: list[str] = []
    random_layers = False
    found_versions: dict[str, str] = {}
    # each backend's evaluation of the weights of all
    evaluated = {
        job.backend: json.loads((Path(job.folder) / f"evaluated-{job.backend}.json").read_text()) for job in jobs
    }
    job_of = {job.backend: job for job in jobs}
    for (backend, layout), run in raw.items():
        random_layers |= run["random_layers"]
        found_versions |= run["versions"]
        judged = not raw[(jobs[0].backend, layout)]["random_layers"]
        folder = job_of[backend].of_run(layout)
        result = _run_result(folder, run, raw, evaluated, ranks_of(layout), judged, weights[backend, layout])
        runs.append(result)
        drawn, of_one = (each["program"]["random"] for each in (run, raw[(backend, "1")]))
        failures += _failures(result) if drawn == of_one else [_of_other_draws(result, drawn, of_one)]
    return Comparison(
        program=options.file.name,
        runs=runs,
        failures=failures,
        batch_size=jobs[0].batch_size,
        seed=options.seed,
        versions=found_versions,
        random_layers=random_layers,
        skipped=skipped,
        environment=_environment(),
        known=_known(ProgramFacts(**raw[(jobs[0].backend, jobs[0].layouts[-1])]["program"]), runs),
        command=options.command(),
        model=raw[(jobs[0].backend, "1")]["model"],
    )


def _environment() -> dict[str, str]:
    """What else the numbers depend on."""
    return {
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor cores": str(os.cpu_count()),
        "memory": amount(psutil.virtual_memory().total),
        "keras_flow": __version__,
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    }


def _run_result(
    folder: Path,
    run: dict,
    raw: Mapping[tuple[str, str], dict],
    evaluated: dict,
    named: int | None,
    between_judged: bool,
    weights: deviations.Deviation,
) -> RunResult:
    """One run, which wrote into `folder`, with its deviations from one device and from the first backend."""
    backend, layout = run["backend"], run["layout"]
    single = raw[(backend, "1")]
    first = next(iter(raw.values()))["backend"]
    loss = deviations.of_losses(run["losses"], single["losses"])
    # two engines round differently, so this has a tolerance of its own
    between = None if backend == first else deviations.of_losses(run["losses"], raw[(first, layout)]["losses"]).value
    hierarchy = list(run["placement"]["hierarchy"]) if run["placement"] else [1]
    return RunResult(
        backend=backend,
        layout=layout,
        losses=run["losses"],
        evaluation=run["evaluation"],
        step_seconds=run["step_seconds"],
        **_shards(folder),
        ranks_named=named or int(np.prod(hierarchy)),
        loss_deviation=loss.value,
        loss_share=loss.of_tolerance,
        weights_deviation=weights.value,
        weights_share=weights.of_tolerance,
        weights_worst=single["paths"][weights.worst],
        weights_moved=weights.moved,
        weights_resolution=weights.resolution if math.isfinite(weights.resolution) else None,
        weights_rounded=[single["paths"][index] for index in weights.rounded],
        between_backends=between,
        between_share=between / deviations.between_limit(run["losses"])
        if between is not None and between_judged
        else None,
        evaluated={name: values[f"{backend}/{folder.name}"] for name, values in evaluated.items()},
        hierarchy=hierarchy,
        received_per_step=run["received_per_step"],
        peak_per_rank=run["peak_per_rank"],
    )


def _of_other_draws(run: RunResult, drawn: str, of_one: str) -> str:
    return (
        f"{run.backend} {run.layout}: it draws random={drawn!r}, and one device {of_one!r} as another layout does, so "
        "nothing can be compared: give all layouts one random=, or compare this one by itself"
    )


def _failures(run: RunResult) -> list[str]:
    """A sentence for everything that is wrong with a run."""
    name = f"{run.backend} {run.layout}"
    out = []
    for step, loss in enumerate(run.losses, 1):
        if not math.isfinite(loss):
            return [
                f"{name}: the loss of step {step} is {loss}, and nothing can be compared: look for such values in "
                "load_data(), or take a smaller learning rate"
            ]
    # `not <=` instead of `>`: NaN is a failure
    if not run.loss_share <= 1:
        out.append(f"{name}: loss deviates by {run.loss_deviation:.2g}, {run.loss_share:.2g} times the tolerance")
    if not run.weights_share <= 1:
        out.append(
            f"{name}: weights deviate by {run.weights_deviation:.2g}, {run.weights_share:.2g} times the tolerance "
            f"in {run.weights_worst!r}"
        )
    # a layout that silently ran on fewer ranks would agree with one device all the better
    if run.ranks_used < run.ranks_named:
        out.append(f"{name}: used {run.ranks_used} of the {run.ranks_named} ranks that it names")
    own = run.evaluated[run.backend]
    for backend, loss in run.evaluated.items():
        if not abs(loss - own) <= deviations.EVALUATION * max(1.0, abs(own)):
            out.append(f"{name}: its weights evaluate to {loss:.6g} on {backend}, to {own:.6g} on {run.backend}")
    if run.between_share is not None and not run.between_share <= 1:
        limit = deviations.between_limit(run.losses)
        out.append(f"{name}: loss deviates by {run.between_backends:.2g} from the first backend's (limit {limit:.2g})")
    return out


def _known(program: ProgramFacts, runs: Sequence[RunResult]) -> list[Known]:
    """The known differences that concern the program, and which deviations they explain."""
    first, engines = runs[0].backend, list(dict.fromkeys(run.backend for run in runs))
    apart = [run for run in runs if run.between_share is not None and not run.between_share <= 1]
    found = []
    for each in that_fit(program, engines):
        explained = [run for run in apart if each.of == "training" and each.separates(run.backend, first)]
        names = [f"{run.backend} {run.layout}" for run in explained]
        found.append(Known(each.name, each.what, each.advice, names))
    if rounded := [run for run in runs if run.weights_rounded]:
        paths = list(dict.fromkeys(path for run in rounded for path in run.weights_rounded))
        found.append(
            Known(
                "weights that rounding decides",
                f"{', '.join(map(repr, paths[:3]))}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}: two "
                "runs on one device end as far apart if their first weights differ in the last bit. A gradient that is "
                "zero but for rounding does that (of a bias before BatchNormalization, or of the bias of an "
                "attention's keys), under an optimizer that divides it by its size (Adam). Losses after the training "
                "follow these weights and what they move, such as a moving mean; those of steps do not.",
                "They are not judged. Compare with SGD to judge them.",
                [f"{run.backend} {run.layout}" for run in rounded],
            )
        )
    return found


def _shards(folder: Path) -> dict[str, dict[Any, Any]]:
    """What the ranks of a run physically hold, and what is declared, as the fields of `RunResult`."""
    found: dict[str, dict[Any, Any]] = {}
    for file in sorted(folder.glob("held-*.json")):
        for name, values in json.loads(file.read_text()).items():
            found[name] = found.get(name, {}) | values
    for name in ("shapes", "bytes_per_rank"):
        of_rank = found.get(name, {})
        found[name] = {int(rank): of_rank[rank] for rank in sorted(of_rank, key=int)}
    return found


def _weights_of(
    job: CompareJob, runs: Mapping[tuple[str, str], dict], train: Callable[[CompareJob], None]
) -> dict[str, deviations.Deviation]:
    """How far the final weights of each layout are from those of one device.

    Args:
        job: it has been trained.
        runs: backend and layout -> what the process wrote of the run.
        train: trains one device once more, where a layout is over the tolerance.
    """
    initial, single = (_weights(path) for path in (job.of_backend / "initial.npz", job.of_run("1") / "final.npz"))

    def of(layout: str, perturbed: Sequence[np.ndarray] | None = None) -> deviations.Deviation:
        steps = len(runs[job.backend, layout]["losses"])
        return deviations.of_weights(_weights(job.of_run(layout) / "final.npz"), single, initial, steps, perturbed)

    found = {layout: of(layout) for layout in job.layouts}
    if over := [layout for layout, each in found.items() if not each.of_tolerance <= 1]:
        again = _perturbed(job, runs[job.backend, "1"]["program"]["random"] or None)  # the masks that it had
        train(again)
        moved = _weights(again.of_run("1") / "final.npz")
        found |= {layout: of(layout, moved) for layout in over}
    return found


def _weights(path: Path) -> list[np.ndarray]:
    return list(npz.read(path).values())
