"""`kf.notebook.compare`: `keras-flow compare` from a cell."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from keras_flow.compare import html, table
from keras_flow.compare.options import CompareOptions
from keras_flow.compare.result import Comparison
from keras_flow.compare.runner import compared
from keras_flow.errors import require_file, shown_briefly


@dataclass(frozen=True)
class ShownComparison:
    """A comparison, which a notebook shows as tables and curves.

    Attributes:
        result: its numbers.
    """

    result: Comparison

    @property
    def ok(self) -> bool:
        """Whether all deviations are within the tolerances."""
        return not self.result.failures

    def _repr_html_(self) -> str:
        return html.fragment(self.result)

    def __repr__(self) -> str:
        stream = io.StringIO()
        table.show(self.result, Console(file=stream, width=150, color_system=None))
        return stream.getvalue()


@shown_briefly
def compare(
    file: str | Path,
    *,
    backends: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    out: str | Path = "compare-out",
) -> ShownComparison:
    """Train a file's model on several backends and layouts, in processes of their own, and compare the numbers.

    Args:
        file: defines `build_model()`, `load_data()` and, for more than data parallel, `rules()` or `distributions()`.
        backends: Keras backends; None takes those that are installed.
        layouts: `"1"`, `"dpN"`, `"tpN"`, `"AxB"`, or names from `distributions()`; None takes 1, dp4, tp4 and 2x2, of a
            file without `rules()` 1 and dp4.
        steps: training steps; None trains whole epochs.
        epochs: epochs.
        batch_size: rows of a global batch.
        seed: the seed of weights and of the order of samples.
        out: folder for `report.html` and `report.json`.

    Returns:
        The comparison; `.ok`, and `.result` with all numbers.

    Raises:
        FlowError: an unknown or missing backend, no such file, or an error of the file.
    """
    require_file(Path(file), "kf.notebook.compare")
    options = CompareOptions(
        file=Path(file),
        backends=None if backends is None else tuple(backends),
        layouts=None if layouts is None else tuple(layouts),
        steps=steps,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        out=Path(out),
    )
    return ShownComparison(compared(options))
