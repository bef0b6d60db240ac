"""docs/models.md: what each engine does with each of the common models under each layout."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tests.models.worker import BACKENDS, BAD, Task, results

PATH = Path(__file__).parents[2] / "docs" / "models.md"
#: backend -> the results of its tasks
Results = Mapping[str, Mapping[Task, dict]]

#: the end of the page
MADE = """
## How this page is made

`python -m tests.models.worker --docs` writes it from the runs of `tests/models`. Each model trains for two plain SGD
steps on each engine, under each layout and on one device. The update of every variable is compared to 1e-4 of its
largest element, losses, metrics and predictions to 1e-5 (those of trained weights to 1e-4). If a number is off in
float32, float64 decides.
"""


def write(folder: Path) -> int:
    """Write the page from `folder`/BACKEND.jsonl; 1 if a result is missing, a number wrong or something crashed."""
    lines = {}
    for backend in BACKENDS:
        path = folder / f"{backend}.jsonl"
        # what was off in float32 is what float64 says
        lines[backend] = {**results(path), **results(path.with_suffix(".float64.jsonl"))}
        for (case, layout), line in lines[backend].items():
            if line["state"] in BAD:
                print(line["state"], backend, case, layout)
    PATH.write_text(text(lines))
    return int(any(line["state"] in BAD for own in lines.values() for line in own.values()))


def text(lines: Results) -> str:
    """The page."""
    os.environ.setdefault("KERAS_BACKEND", "numpy")  # names need no engine
    from tests.models.cases import CASES

    reasons: dict[str, int] = {}
    tables: dict[tuple[str, ...], list[str]] = {}
    for case in CASES:
        cells = []
        for backend in BACKENDS:
            marks = [_mark(lines.get(backend, {}).get((case.name, layout)), reasons) for layout in case.layouts]
            cells.append(marks[0] if len(set(marks)) == 1 else " / ".join(marks))
        tables.setdefault(case.layouts, []).append(f"| {case.name} | {' | '.join(cells)} |")
    head = f"| | {' | '.join(BACKENDS)} |\n|---|{'---|' * len(BACKENDS)}"
    parts = [f"{' / '.join(layouts)}\n\n{head}\n" + "\n".join(rows) for layouts, rows in tables.items()]
    notes = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    return f"""# Models

Does a model like mine run on my engine? Find the nearest model. The line above each table names the layouts of its
states, in their order:

- `dp4` is `kf.DataParallel` over 4 ranks.
- `2x2`, `1x4` and `4x1` are `kf.ModelParallel` on data ranks x model ranks. Transformers have Megatron's rules, and
  convolutions are split by filters. KerasHub's backbones have the layout map that they ship
  (`Backbone.get_layout_map`), which splits weights over both axes.

A cell has one state for all layouts, or one for each layout with slashes. A number in brackets leads to the reason
below the tables:

- **native**: runs as you declared it.
- **fallback**: runs more slowly, and one warning says so. A split weight is kept whole, something is computed whole,
  or data parallel takes the *consistent view*: its layers then work on the tensors of the whole batch instead of each
  rank's own rows.
- **refused**: raises one error that names the layer and the way out.
- **–**: was not run.

In the first two states the numbers are those of one device.

{(chr(10) * 2).join(parts)}

## Reasons

{notes or "None."}
{MADE}"""


def _mark(line: dict | None, reasons: dict[str, int]) -> str:
    if line is None:
        return "–"
    state = line["state"]
    notes = line.get("notes", []) if state == "right" else []
    why = [line["error"]] if state == "refused" else notes
    told = sorted({reasons.setdefault(_tidy(reason), len(reasons) + 1) for reason in why})
    falls_back = any(_IDLE_KEYS not in note for note in notes)
    name = ("fallback" if falls_back else "native") if state == "right" else state
    return name + (f" [{', '.join(map(str, told))}]" if told else "")


#: of a note that is no fallback: keys of a LayoutMap that are for other variants of the model
_IDLE_KEYS = "match no variable of the model"
#: names, sizes and advice in notes -> what is left of them, so that the same reason is the same text
_NAMES = (
    (r"^LayoutFallback: .* does not divide .*", "a dim does not divide by its axis: broadcast"),
    (r"^LayoutFallback: \S+( and \d+ more)?: (?=TensorFlow)", ""),
    (r"^(LayoutFallback|FlowWarning): ", ""),
    (r"^ComputedWhole: (in the gradients: |[\w/., ]+: )*", "computed whole: "),
    (
        r"^DataParallel: '\S+' is (a custom layer|a subclassed model).*? so model '\S+' is",
        r"\1 may mix rows, so the model is",
    ),
    (r" \((the numbers are those of one device|strict=True makes).*", ""),
    (r"_\d+(?=[/:' ,])", ""),
)


def _tidy(note: str) -> str:
    reason = " ".join(note.split())
    for pattern, kept in _NAMES:
        reason = re.sub(pattern, kept, reason)
    return reason[:300].replace("|", "\\|")
