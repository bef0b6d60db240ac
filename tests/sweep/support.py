"""docs/support.md and docs/support.csv, from the results of the sweep.

    python -m tests.sweep.support --from sweep-out      reads sweep-out/jax.jsonl and those of the other backends

The table keeps what it has of names and settings that are not in the folder, so that the sweep can be run in parts
(`python -m tests.sweep.runner --known` leaves out what it has); `--fresh` drops it.
"""

from __future__ import annotations

import argparse
import collections
import re
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

#: the end of the page
MADE = """
## How this page is made

`python -m tests.sweep.support` writes it from the runs of `tests/sweep`. Each public name of Keras is trained by plain
SGD under several meshes, numbers of rows and rules, and its updates, outputs and metrics are compared with one device.
The first table says how many names were run. Names in brackets are variants. A strategy that is asked for by name has
a row of its own, because it refuses what it cannot do.
"""


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

Does a layer, loss, metric, optimizer, operation or random function of Keras work on my engine? Look for its name below
your engine's heading, "Not native on ...". If the name is there, the line below it says what happens:

- **broadcast**: each rank computes all of it, so more ranks bring no gain.
- **fallback**: runs more slowly, and one warning says so. A split weight is kept whole, an operation is computed on
  gathered inputs or by one device, or data parallel takes the *consistent view*: its layers then work on the tensors
  of the whole batch instead of each rank's own rows.
- **refused**: raises one error that names the layer and the way out.

If the name is not there, it runs natively: split as you declared it. Whatever is not refused gives the numbers of one
device. A few names are under "Not compared", because Keras itself fails with them on one device.

What a *program* does with `fit`, saving, callbacks and options is in [features](features.md).
[support.csv](support.csv) has the state of each name under each setting.

The names on JAX are those that compute a batch whole if its rows do not divide by the data ranks. TensorFlow does so
with every name, and torch under `ModelParallel` ([my batch does not divide](howto/batch_does_not_divide.md)): they are
not listed for that. If a dim does not divide by its axis, it stays whole, whatever the layer.

The warnings are of the class `kf.FlowWarning`: `warnings.filterwarnings("ignore", category=kf.FlowWarning)` hides them.

| backend | names run | native under every setting | settings | results |
|---|---|---|---|---|
{chr(10).join(lines)}

{chr(10).join(filter(None, (_reasons(found, backend, strategy) for backend, strategy in _ROWS)))}
{_failures(found)}{MADE}"""


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
                names.setdefault((result.state, _as_shown(reason)), set()).add(result.name)
    order = sorted(names, key=lambda key: (STATES.index(key[0]), -len(names[key]), key[1]))
    text = "".join(f"- {_listed(names[state, reason])}\n\n  **{state}**: {reason}\n" for state, reason in order)
    title = f'{backend}, strategy="{strategy}"' if strategy else backend
    return f"## Not native on {title}\n\n{text or 'Nothing.'}" if own else ""


def _as_shown(reason: str) -> str:
    """The reason without the warning's class, which is not public, and without names of layers of the sweep itself."""
    reason = re.sub(r"'__\w+' is a custom layer \(_\w+\)", "the test calls it in a custom layer", reason)
    return re.sub(r"^(LayoutFallback|ComputedWhole): ", "", reason)


def _listed(names: Set[str]) -> str:
    """The names, or how many there are of each module where they are too many to read."""
    if len(names) <= _LISTED:
        return ", ".join(f"`{name}`" for name in sorted(names))
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
