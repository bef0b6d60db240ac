"""The result of a comparison as values, from which the table, the reports and the exit status are built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from keras_flow import atomic
from keras_flow.units import finite


@dataclass(frozen=True)
class RunResult:
    """One backend under one layout.

    Attributes:
        backend: Keras backend.
        layout: name of the layout.
        losses: loss of each step.
        evaluation: loss and metrics of the final weights on the validation rows (training rows where there are none).
        step_seconds: median seconds of a step, the first half of the steps left out.
        bytes_per_rank: rank -> bytes of weights that it physically holds.
        shapes: rank -> variable path -> shape that it physically holds.
        declared: variable path -> nd_sbp.
        placements: variable path -> the ranks of its placement in order, and their hierarchy.
        ranks_named: ranks that the layout names.
        loss_deviation: largest deviation from this backend's single-device run, loss of a step.
        loss_share: the same, as a share of the tolerance.
        weights_deviation: largest deviation of a final weight.
        weights_share: the same, as a share of the tolerance.
        weights_worst: path of the weight with this share.
        weights_moved: how far one device moved its weights, at most.
        weights_resolution: the least share of its movement by which a weight may deviate; None where none has moved.
        weights_rounded: paths of weights that are over the tolerance as far as rounding takes them on one device.
        between_backends: largest deviation of a step's loss from the first backend's run of the same layout.
        between_share: the same, as a share of the limit; None where it is not judged.
        evaluated: backend -> loss of these final weights, evaluated there on one device.
        received_per_step: bytes that a rank receives in a training step, as `explain` says; None where it cannot.
        peak_per_rank: bytes that a rank holds at one time in a step at most (explain's estimate).
    """

    backend: str
    layout: str
    losses: list[float]
    evaluation: dict[str, float]
    step_seconds: float
    bytes_per_rank: dict[int, int]
    shapes: dict[int, dict[str, list[int]]]
    declared: dict[str, str]
    placements: dict[str, tuple[Sequence[int], Sequence[int]]]
    ranks_named: int
    loss_deviation: float
    loss_share: float
    weights_deviation: float
    weights_share: float
    between_backends: float | None
    evaluated: dict[str, float]
    between_share: float | None = None
    hierarchy: list[int] = field(default_factory=list)
    received_per_step: int | None = None
    peak_per_rank: int | None = None
    weights_worst: str = ""
    weights_moved: float = 0.0
    weights_resolution: float | None = None
    weights_rounded: list[str] = field(default_factory=list)

    @property
    def ranks_used(self) -> int:
        """Ranks that hold weights, or compute with copies of another rank's."""
        return len(self.bytes_per_rank)


@dataclass(frozen=True)
class Known:
    """A known difference between engines that concerns the compared program.

    Attributes:
        name: its short name.
        what: what happens, on which engine.
        advice: how to have equal numbers.
        explains: the runs, `"tensorflow dp4"`, whose deviation from the first backend it explains; none where all
            agree.
    """

    name: str
    what: str
    advice: str
    explains: list[str]

    def __str__(self) -> str:
        said = f"of {', '.join(self.explains)}" if self.explains else "here too, without a deviation over its limit"
        return f"{self.name} ({said}). {self.what} {self.advice}"


@dataclass(frozen=True)
class Comparison:
    """All runs of a comparison, and what is wrong with them.

    Attributes:
        program: name of the user's file.
        runs: backend by backend, layout by layout.
        failures: a sentence for each deviation over the tolerance and each layout that used too few ranks.
        batch_size: rows of a global batch.
        seed: seed of weights and order.
        versions: package -> version.
        known: known differences between engines that concern the program, each with what they explain.
        random_layers: whether the model draws an engine's own random numbers, so that two backends never train alike.
        skipped: backends left out, with the reason.
        environment: what else the numbers depend on: Python, the system, its processors.
        command: the command that makes the comparison again.
        model: the model with its parameters, the optimizer and the loss, each in words.
    """

    program: str
    runs: list[RunResult]
    failures: list[str]
    batch_size: int
    seed: int
    versions: dict[str, str]
    random_layers: bool
    skipped: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    known: list[Known] = field(default_factory=list)
    command: str = ""
    model: dict[str, str] = field(default_factory=dict)

    @property
    def has_engines(self) -> bool:
        """Whether there is more than one engine."""
        return len({run.backend for run in self.runs}) > 1

    def write(self, path: Path) -> None:
        """Write report.json. Numbers that are not finite become null, as JSON has none."""
        values = asdict(self)
        # properties are no fields, and `asdict` leaves them out
        for run, source in zip(values["runs"], self.runs, strict=True):
            run["ranks_used"] = source.ranks_used
        atomic.write_text(path, json.dumps(finite(values), indent=1, allow_nan=False))
