"""The support table: what each backend does with each feature under each layout, from the grid's results.

python -m tests.parity.support [--product]    runs the grid (and the product) and writes docs/support.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

BACKENDS = ("jax", "tensorflow", "torch")
LAYOUTS = ("dp4", "tp4", "2x2")

#: what a backend refuses: (backend, case) -> a part of the error, which quotes the engine's own reason
REFUSED: dict[tuple[str, str], str] = {
    ("jax", "strings"): "JAX has no string arrays",
    ("jax", "sparse"): "a sparse input",
    ("jax", "ragged"): "`ragged=True` is not supported with the jax backend",
    ("tensorflow", "jit_compile"): "jit_compile=True, which the tensorflow backend cannot do",
    ("tensorflow", "remat"): "custom_gradient decorator currently supports keywords arguments only",
    ("tensorflow", "strings"): "DTensor has no string tensors",
    ("tensorflow", "sparse"): "the batch has a sparse tensor",
    ("tensorflow", "ragged"): "the batch has a ragged tensor",
    ("torch", "jit_compile"): "torch.compile does not trace gradients of distributed tensors",
    ("torch", "steps_per_execution"): "`steps_per_execution` must be 1 with the PyTorch backend",
    ("torch", "strings"): "torch has no string tensors",
    ("torch", "ragged"): "`ragged=True` is not supported with the torch backend",
}


def refused_reason(backend: str, case: str) -> str:
    """The stated reason of a refused case, or an empty text."""
    return REFUSED.get((backend, case), "")


@dataclass(frozen=True)
class Cell:
    """One feature on one backend under one layout.

    Attributes:
        state: `native`, `broadcast` (rows computed on every rank), `fallback` (a layout became broadcast, or data
            parallel took the consistent view) or `refused`.
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
        state, reason = _state(result)
        out += [Cell(feature, result["backend"], result["layout"], state, reason) for feature in result["features"]]
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
    """docs/support.md, from the cells of the grid and the results of the product."""
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
    return f"""# Support

Written by `make test-full` from the parity grid (`tests/parity`): every row was run on every backend under dp4 (data
parallel over 4 ranks), tp4 (tensor parallel over 4) and 2x2 (hybrid), and its numbers compared with one device. Three
states with slashes are dp4 / tp4 / 2x2; – means that the case is not made for that layout.

- **native**: runs as declared, with the numbers of one device;
- **broadcast**: the same numbers; some batches are computed whole on every rank;
- **fallback**: the same numbers; a split became broadcast, or data parallel took the consistent view, with one warning;
- **refused**: raises an error that says what to do.

Native: {", ".join(shares)}.

| feature | jax | tensorflow | torch |
|---|---|---|---|
{chr(10).join(lines)}

## Reasons

{notes or "None."}
{_product_text(product)}"""


def _product_text(product: Sequence[dict]) -> str:
    if not product:
        return ""
    good = [result for result in product if result["status"] == "ok"]
    worst = max(share for result in good for share in result["worst"].values())
    bad = "".join(
        f"- {result['backend']}: {result['case']}, {result['layout']}\n" for result in product if result not in good
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


def main() -> None:
    from tests.parity.results import Grid

    found: list[dict] = []
    product: list[dict] = []
    for backend in BACKENDS:
        found += Grid(backend).finish()
        if "--product" in sys.argv:
            product += Grid(backend, "--product", limit=7200.0).finish()
    path = Path(__file__).parents[2] / "docs" / "support.md"
    path.write_text(page(cells(found), product))
    wrong = [result for result in (*found, *product) if result["status"] not in ("ok", "refused")]
    print(f"wrote {path.name}: {len(found)} results of the grid, {len(product)} of the product, {len(wrong)} wrong")
    sys.exit(1 if wrong or not found else 0)


if __name__ == "__main__":
    main()
