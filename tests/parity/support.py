"""The support table: what each backend does with each feature under each layout, from the grid's results.

python -m tests.parity.support [--product]    runs the grid (and the product) and writes docs/features.md

The product takes about 105 minutes of processor time; it says how far it is once a minute, and each backend has a time
limit.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.keras_suite import refusals
from tests.parity.results import Grid, Schedule

BACKENDS = ("jax", "tensorflow", "torch")
LAYOUTS = ("dp4", "tp4", "2x2")
#: the layout of `kf.DataParallel(strategy="mirrored")`
MIRRORED = "mirrored4"
#: The cases that `make test-versions` runs with each version. Models of every family, with dropout and with batches
#: that do not divide; plain SGD, which shows a gradient of the wrong size, Adam, AdamW and SGD with momentum. And what
#: goes through parts of Keras that change from version to version: steps not compiled, a loss scale, files.
SMALL = (
    "mlp",
    "cnn",
    "transformer",
    "odd batches",
    "plain SGD: mlp",
    "plain SGD: split convolution",
    "plain SGD: transformer",
    "run_eagerly",
    "mixed_float16",
    "callbacks",
    "files",
)

#: the largest share of the cells of a backend that are not native
MOST_NOT_NATIVE = 0.15
#: what a backend refuses: (backend, case) -> a part of the error, which quotes the engine's own reason
REFUSED: dict[tuple[str, str], str] = {
    ("jax", "strings"): "JAX has no string arrays",
    ("jax", "sparse"): "a sparse input",
    ("jax", "ragged"): "`ragged=True` is not supported with the jax backend",
    ("tensorflow", "jit_compile"): "jit_compile=True, which the tensorflow backend cannot do",
    ("tensorflow", "strings"): "DTensor has no string tensors",
    ("tensorflow", "sparse"): "the batch has a sparse tensor",
    ("tensorflow", "ragged"): "the batch has a ragged tensor",
    ("torch", "jit_compile"): "torch.compile does not trace gradients of distributed tensors",
    ("torch", "steps_per_execution"): "`steps_per_execution` must be 1 with the PyTorch backend",
    ("torch", "strings"): "torch has no string tensors",
    ("torch", "ragged"): "`ragged=True` is not supported with the torch backend",
}
#: what `strategy="mirrored"` refuses besides: case -> a part of the error
REFUSED_MIRRORED = {
    "subclassed": "rows may interact in layer 'penalised' (Penalised), and a replica sees its own rows only",
    "adversaries": "has its own train_step",
}
#: what one device computes for all ranks: (backend, feature) -> why
ONE_DEVICE = {
    ("tensorflow", "model(x)"): (
        "a call outside of a step, with the tapes and loops of one's own around it, is computed by TensorFlow alone on "
        "the first rank of each process, from gathered weights (docs/adr/004)"
    )
}

#: what is tested elsewhere than in the grid
ELSEWHERE = """
## Pipelines

| feature | jax | tensorflow | torch |
|---|---|---|---|
| stages by number, by patterns, by `kf.scope.placement` | native | native | native |
| several ranks for a stage, which share its rows | native | native | native |
| several processes | native | native | native |
| schedules `gpipe`, `1f1b`, `interleaved` | native | native | native |
| schedules `zb1p`, `zbv`: the backward pass in two parts | native | all in the first part: no gain | native |
| `remat="stage"`, `"block"`, patterns | native | native | native |
| stages that `rules` split themselves | native; a lane's ranks in one process | refused | native |
| `zero=1` | refused | refused | native; refused with split stages |
| `zero=2`, `zero=3` | refused | refused | refused |
| BatchNormalization with `batch_normalization="microbatch"` | other numbers than one device's | as on jax | as on jax |
| your own `train_step` or `call` | refused | refused | refused |

Not in the grid: `tests/pipelines` compares them with one device. [Pipelines](pipelines.md) has the reasons.

## Memory

| feature | jax | tensorflow | torch |
|---|---|---|---|
| `zero=1`: slots split | native | native | native |
| `zero=2`: gradients split | native; on CPUs whole until they are summed | as on jax | native |
| `zero=3`: weights split | native; on CPUs they stay gathered in a step | native; not for transformers | native |
| `remat=` | native; on CPUs nothing is gained | native | native |

Not in the grid: `tests/parity/test_zero.py` compares the stages with one device. [Memory](memory.md) has what a rank
holds.

## Exports

`model.export` gives the file of one device from every layout. What Keras has no exporter for, or what its exporter
fails on with one device, is refused in one line; so is a package that is missing, by its name.

| `format=` | jax | tensorflow | torch |
|---|---|---|---|
| `"tf_saved_model"` | equal | equal | Keras's exporter fails |
| `"litert"` | Keras has none | equal | with `litert-torch` |
| `"onnx"` | with `jax2onnx` | with `tf2onnx` | with `onnxscript` |
| `"openvino"` | Keras's exporter fails | with `openvino` | with `openvino` |
| `"torch"` | Keras has none | Keras has none | equal |

Not in the grid: `tests/backends/files/test_exporting.py` exports a trained model of three layouts in each format whose
package is installed, and predicts by the file alone: "equal" are these predictions.

## Programs of Horovod

| feature | jax | tensorflow | torch |
|---|---|---|---|
| `import keras_flow.hvd as hvd`, one rank in a process | native | native; `jit_compile=True` is refused | native |

Not in the grid: `tests/hvd` compares it with Horovod's formulas on 2 processes, and on torch on 3. What is not there,
like Adasum and DistributedGradientTape: [From Horovod](migrate/from_horovod.md).

## Programs of `tf.distribute`

| feature | jax | tensorflow | torch |
|---|---|---|---|
| `kf.CentralStorage()` | native; one process | native; one process | native; the first process holds the variables |
| `kf.ParameterServer()` | refused | native | native |

Not in the grid: `tests/pipelines/test_central_storage.py` compares models and settings with one device, on four
ranks and with 13 rows; `tests/servers` does so with jobs of two workers and two servers.

## Programs of OneFlow 0.x

| feature | jax | tensorflow | torch |
|---|---|---|---|
| `import keras_flow.compat.oneflow as flow`, job functions, consistent and mirrored view | native | native | native |
| `model_distribute=`, `get_variable(distribute=, parallel_distribution=)` | native | native | native |
| `scope.placement`, several in a job: stages | native | native | native |

Not in the grid: `tests/compat` compares the programs of its documentation with NumPy and plain Keras on four ranks,
with 13 rows. What is not there, like eager execution and `parallel_cast`: [From OneFlow](migrate/from_oneflow.md).
"""

#: the end of the page
MADE = """
## How this page is made

`make test-full` writes it. `tests/parity` trains a small model for each row on each engine, on four ranks and on one
device, and compares losses, metrics, predictions and the update of every variable.
"""


def is_expected(result: dict) -> bool:
    """Whether a result of the product has the numbers of one device."""
    return result["status"] == "ok"


def refused_reason(backend: str, case: str, layout: str) -> str:
    """The stated reason of a refused case, or an empty text."""
    return (REFUSED_MIRRORED.get(case, "") if layout == MIRRORED else "") or REFUSED.get((backend, case), "")


@dataclass(frozen=True)
class Cell:
    """One feature on one backend under one layout.

    Attributes:
        state: `native`, `broadcast` (rows computed on every rank), `fallback` (a layout became broadcast, or data
            parallel took the consistent view), `one device` or `refused`.
        reason: why it is not native.
    """

    feature: str
    backend: str
    layout: str
    state: str
    reason: str = ""


def cells(results: Iterable[dict]) -> list[Cell]:
    """The cells of the grid's results; a feature stands in the row of the first case that has it."""
    out = []
    for result in results:
        if result["status"] == "fault":
            continue
        backend, layout = result["backend"], result["layout"]
        for feature in result["features"]:
            state, reason = _state(result)
            why = ONE_DEVICE.get((backend, feature), "") if layout != MIRRORED else ""
            if state == "native" and why:
                state, reason = "one device", why
            out.append(Cell(feature, backend, layout, state, reason))
    return out


def _state(result: dict) -> tuple[str, str]:
    if result["status"] == "refused":
        return "refused", result["error"]
    if result["status"] != "ok":
        return "WRONG", "; ".join(result.get("over") or [result.get("error", "")])
    kinds = (("LayoutFallback", "fallback"), ("FlowWarning: DataParallel", "fallback"), ("ComputedWhole", "broadcast"))
    for kind, state in kinds:
        for note in result.get("notes", ()):
            if note.startswith(kind):
                return state, note.partition(": ")[2]
    return "native", ""


def page(all_cells: Sequence[Cell], product: Sequence[dict] = ()) -> str:
    """docs/features.md, from the cells of the grid and the results of the product."""
    mirrored = [cell for cell in all_cells if cell.layout == MIRRORED]
    all_cells = [cell for cell in all_cells if cell.layout != MIRRORED]
    by_key = {(cell.feature, cell.backend, cell.layout): cell for cell in all_cells}
    features = list(dict.fromkeys(cell.feature for cell in all_cells))
    reasons: dict[str, int] = {}
    lines = []
    for feature in features:
        row = []
        for backend in BACKENDS:
            found = [by_key.get((feature, backend, layout)) for layout in LAYOUTS]
            marks = []
            for cell in found:
                if cell is None:
                    marks.append("–")
                elif cell.reason:
                    number = reasons.setdefault(_tidy(cell.reason), len(reasons) + 1)
                    marks.append(f"{cell.state} [{number}]")
                else:
                    marks.append(cell.state)
            row.append(marks[0] if len(set(marks)) == 1 else " / ".join(marks))
        lines.append(f"| {feature} | " + " | ".join(row) + " |")
    shares = []
    for backend in BACKENDS:
        own = [cell for cell in all_cells if cell.backend == backend]
        if own:
            native = sum(cell.state == "native" for cell in own)
            shares.append(f"{backend} {native} of {len(own)} ({100 * native / len(own):.0f} %)")
    notes = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    return f"""# Features

Does my layer, option or kind of data work on my engine? Find its row. A cell has one state, or three with slashes: for
`dp4` (data parallel over 4 ranks), for `tp4` (tensor parallel over 4 ranks) and for `2x2` (both: 2 data ranks by 2
model ranks). A number in brackets leads to the reason below the table. Single layers and functions of Keras are in
[support](support.md), whole models in [models](models.md).

- **native**: runs as you declared it.
- **broadcast**: some batches are computed whole by every rank, so these batches gain no speed.
- **fallback**: runs more slowly, and one warning says so. Either a weight that a rule splits is kept whole, or data
  parallel takes the *consistent view*: its layers then work on the tensors of the whole batch instead of each rank's
  own rows.
- **one device**: one device computes it, so the other ranks bring no gain.
- **refused**: raises an error that says what to do.
- **–**: not tested under that layout.

In all states but "refused" the numbers are those of one device, unless you ask for other statistics
(`batch_statistics="replica"`, `batch_normalization="microbatch"`).

Native: {", ".join(shares)}.

| feature | jax | tensorflow | torch |
|---|---|---|---|
{chr(10).join(lines)}

## Reasons

{notes or "None."}
{_mirrored_text(mirrored)}{ELSEWHERE}{refusals.section()}{_product_text(product)}{MADE}"""


def _mirrored_text(cells: Sequence[Cell]) -> str:
    if not cells:
        return ""
    works = ", ".join(cell.feature for cell in cells if cell.state != "refused")
    refused = "".join(f"\n- {cell.feature}: {_tidy(cell.reason)}" for cell in cells if cell.state == "refused")
    return f"""
## `kf.DataParallel(strategy="mirrored")` on TensorFlow

The same numbers over 4 ranks, in the cases of the grid that run with it, for: {works}.

Refused:
{refused or "nothing."}
"""


def _product_text(product: Sequence[dict]) -> str:
    if not product:
        return ""
    good = [result for result in product if is_expected(result)]
    worst = max(share for result in good for share in result["worst"].values())
    rest: dict[tuple[str, str, str], list[str]] = {}
    for result in product:
        state, reason = _state(result)
        if state != "native":
            rest.setdefault((result["backend"], state, _tidy(reason)), []).append(
                f"{result['case']}, {result['layout']}"
            )
    bad = "".join(
        f"\n- {backend}, {state}: {'; '.join(names)}: {reason}\n" for (backend, state, reason), names in rest.items()
    )
    return f"""
## The product

Models x optimizers x options (`tests/parity/cases/product.py`), each under every layout on every backend:
{len(good)} of {len(product)} runs have the numbers of one device; the largest deviation is {100 * worst:.1f} %
of the tolerance.
{bad}"""


def _tidy(reason: str) -> str:
    text = re.sub(r"\s+", " ", reason).strip()
    text = re.sub(r"_\d+(?=[/:' ])", "", text)  # counters that Keras gives to names
    return text.replace("|", "\\|")


def main(arguments: Sequence[str]) -> int:
    """Run the grid, and the product with `--product`, and write the page; 1 if a number is wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--product", action="store_true", help="run models x optimizers x options too")
    parser.add_argument("--only", default="", help="regular expression over the product's cases, for a trial")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds for the product of one backend")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "features.md")
    options = parser.parse_args(arguments)
    grids = [Grid(backend) for backend in BACKENDS]
    if options.product:
        grids += [Grid(backend, "--product", "--only", options.only, limit=options.limit) for backend in BACKENDS]
    found, failed = run_all(grids)
    results = [result for part in found[: len(BACKENDS)] for result in part]
    product = [result for part in found[len(BACKENDS) :] for result in part]
    options.out.write_text(page(cells(results), product))
    wrong = [result for result in results if result["status"] not in ("ok", "refused")]
    wrong += [result for result in product if not is_expected(result)]
    print(f"wrote {options.out}: {len(results)} results of the grid, {len(product)} of the product, {len(wrong)} wrong")
    few = [backend for backend in BACKENDS if _share_not_native(results, backend) > MOST_NOT_NATIVE]
    for backend in few:
        print(f"{backend}: {_share_not_native(results, backend):.0%} of the grid's cells are not native")
    for result in wrong:
        print(f"wrong: {result['backend']}, {result['case']}, {result['layout']}: {_state(result)[1][:300]}")
    return 1 if wrong or failed or few else 0


def _share_not_native(results: Iterable[dict], backend: str) -> float:
    own = [cell for cell in cells(r for r in results if r["backend"] == backend) if cell.layout in LAYOUTS]
    return sum(cell.state != "native" for cell in own) / max(len(own), 1)


def run_all(grids: Sequence[Grid], every: float = 60.0) -> tuple[list[list[dict]], bool]:
    """Run workers, two at a time, and say how far they are.

    Args:
        grids: the workers.
        every: seconds between two lines of progress.

    Returns:
        The results of each, and whether one failed or ran out of its time.
    """
    schedule = Schedule(grids, at_once=2)
    said = time.monotonic()
    try:
        while not all(grid.ended for grid in grids):
            time.sleep(0.5)
            if time.monotonic() - said >= every:
                said = time.monotonic()
                print("; ".join(grid.progress() for grid in grids if grid.running), flush=True)
            for grid in grids:
                if grid.ended and grid.running:  # its time is over
                    grid.stop()
    finally:
        schedule.stop()
    for grid in grids:
        if grid.failed:
            print(f"{grid.name}: {grid.end()}")
    return [grid.results() for grid in grids], any(grid.failed for grid in grids)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
