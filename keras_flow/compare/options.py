"""The options of `keras-flow compare`, and the job that they become for each backend's process."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

#: layouts that are compared unless others are named: of a file with `rules()`, and of one without
LAYOUTS, WITHOUT_RULES = ("1", "dp4", "tp4", "2x2"), ("1", "dp4")


@dataclass(frozen=True)
class CompareOptions:
    """The command line of `keras-flow compare`.

    Attributes:
        file: the user's program.
        backends: Keras backends, in the order in which they run; None: those that are installed.
        layouts: `"1"`, `"dpN"`, `"tpN"`, `"AxB"` or names from the program's `distributions()`; None: `LAYOUTS`, or
            `WITHOUT_RULES` where the file has no `rules()`.
        steps: training steps; None trains whole epochs.
        epochs: epochs; None is 1 without `steps`, otherwise as many as the steps need.
        batch_size: rows of a global batch.
        seed: seed of the initial weights and of the order of samples.
        out: folder for the report.
        trace: write a timeline of three more steps of each run.
        ranks: how many ranks layouts of the program's own may use; None: 4, or more where another layout names more.
    """

    file: Path
    backends: tuple[str, ...] | None = None
    layouts: tuple[str, ...] | None = None
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    seed: int = 0
    out: Path = Path("compare-out")
    trace: bool = False
    ranks: int | None = None

    def command(self) -> str:
        """The command line that asks for the same.

        Example:
            >>> CompareOptions(Path("mine.py"), ("jax",), ("1", "dp4"), steps=50).command()
            'keras-flow compare mine.py --backends jax --layouts 1,dp4 --steps 50 --seed 0 --out compare-out'
        """
        words = ["keras-flow", "compare", str(self.file)]
        words += [] if self.backends is None else ["--backends", ",".join(self.backends)]
        words += [] if self.layouts is None else ["--layouts", ",".join(self.layouts)]
        numbers = {"ranks": self.ranks, "steps": self.steps, "epochs": self.epochs, "batch-size": self.batch_size}
        for name, value in numbers.items():
            words += [] if value is None else [f"--{name}", str(value)]
        words += ["--seed", str(self.seed), "--out", str(self.out)]
        words += ["--trace"] if self.trace else []
        return shlex.join(words)


@dataclass(frozen=True)
class CompareJob:
    """The task of one backend's process, sent to it as JSON.

    Attributes:
        file: the user's program, absolute.
        backend: Keras backend of the process.
        layouts: layouts to train, `"1"` first.
        steps: see `CompareOptions`.
        epochs: see `CompareOptions`.
        batch_size: rows of a global batch.
        seed: see `CompareOptions`.
        folder: for weights, events and results of all processes.
        traces: folder for timelines; None: none are written.
        ranks: see `CompareOptions`.
        perturbed: the first weights are changed in their last bit: what rounding does to this program.
        random: the `random=` of the run on one device; None: that of the layouts.
    """

    file: str
    backend: str
    layouts: tuple[str, ...]
    steps: int | None
    epochs: int | None
    batch_size: int
    seed: int
    folder: str
    traces: str | None = None
    perturbed: bool = False
    ranks: int | None = None
    random: str | None = None

    @property
    def of_backend(self) -> Path:
        """The folder of what all runs of the backend have in common."""
        return Path(self.folder) / self.backend

    def of_run(self, layout: str) -> Path:
        """The folder of one layout's run; by number, because a layout's name may be any text."""
        return self.of_backend / str(self.layouts.index(layout))

    def write(self, path: Path) -> None:
        """Write the job for the process."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: str | Path) -> CompareJob:
        """Read a job that `write` wrote."""
        values = json.loads(Path(path).read_text())
        return CompareJob(**{**values, "layouts": tuple(values["layouts"])})
