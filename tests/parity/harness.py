"""The parity grid's measure: a program is run on one device and under each layout, and every number is compared.

Tolerances (fp32, 20 steps) are those of docs/design.md and are never loosened: loss of each step
`|a - b| <= 1e-5 |b| + 1e-7`, final weights `max|a - b| <= 1e-4 max(1, max|b|)`, the update of a variable by one plain
step `max|a - b| <= 1e-4 max(max|b|, a hundredth of the largest update)`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends.active import backend
from keras_flow.current.variable_layout import keras_layout
from tests.parity.support import LAYOUTS, MIRRORED


@dataclass(frozen=True, eq=False)
class Case:
    """A program that must give the same numbers under every layout.

    Attributes:
        name: what pytest and docs/features.md show.
        program: runs the model and records numbers; called once for each layout with the same seeds.
        features: the rows of the support table that this case stands for.
        rules: pattern -> dimension to split on the "model" axis, for tp4 and 2x2.
        layouts: the layouts to run.
        mirrored: whether it runs with `strategy="mirrored"` too, where the backend has that.
        zero_gradient: endings of variable paths whose gradient is zero in mathematics, so that Adam turns rounding into
            steps; left out of the comparison only after `gradient64` has shown it.
        gradient64: path ending -> largest |gradient| in float64 on one device, for `zero_gradient`.
        half: a mixed-precision policy: compared by the rule for half precision, at most twice the deviation that one
            device has from its own fp32 run.
        data_parallel: makes the dp4 distribution where the default is not meant.
    """

    name: str
    program: Callable[[Run], None]
    features: tuple[str, ...]
    rules: Mapping[str, int] = field(default_factory=dict)
    layouts: tuple[str, ...] = LAYOUTS
    mirrored: bool = False
    zero_gradient: tuple[str, ...] = ()
    gradient64: Callable[[], dict[str, float]] | None = None
    half: str = ""
    data_parallel: Callable[[], object] | None = None

    def on(self, backend: str) -> tuple[str, ...]:
        """The layouts to run on a backend."""
        return (*self.layouts, MIRRORED) if self.mirrored and backend == "tensorflow" else self.layouts


class Run:
    """One run of a case: where the program's scope comes from and where its numbers go."""

    def __init__(self, case: Case, layout: str, folder: str, fault: str = "", policy: str = "float32"):
        self.case, self.layout, self.folder, self.fault, self.policy = case, layout, folder, fault, policy
        self.distribution: object | None = None
        self.numbers: dict[str, tuple[str, np.ndarray]] = {}
        self.unsplit: list[str] = []

    @property
    def distributed(self) -> bool:
        return self.layout != "1"

    def make_distribution(self, **options: object) -> object:
        """The distribution of this run's layout, a new one at each call."""
        if self.layout == "dp4" and self.case.data_parallel is not None:
            return self.case.data_parallel()
        return make_distribution(self.layout, self.case.rules, **options)

    @contextlib.contextmanager
    def scope(self) -> Iterator[object | None]:
        """The layout's scope; nothing on one device."""
        if not self.distributed:
            yield None
            return
        if self.distribution is None:
            self.distribution = self.make_distribution()
        with self.distribution.scope():  # type: ignore[attr-defined]
            yield self.distribution

    def record(self, kind: str, name: str, value: object) -> None:
        """Keep a number for the comparison.

        Args:
            kind: `"loss"`, `"weights"`, `"update"` (of one variable by one plain step), `"value"` (predictions and
                metrics, compared as losses with 1e-5 of the largest value) or `"exact"`.
            name: its name in the report.
            value: anything that numpy reads.
        """
        array = np.asarray(value)
        self.numbers[f"{name}#{len(self.numbers)}"] = (kind, array.astype("float64") if kind != "exact" else array)

    def record_model(self, model: keras.Model) -> None:
        """Keep all weights, and note variables whose declared split is not physical."""
        for variable, value in zip(model.weights, model.get_weights(), strict=True):
            if value.dtype.kind == "f" or str(value.dtype) == "bfloat16":
                self.record("weights", _short(variable.path), value)
        self.check_split(model)

    def check_split(self, model: keras.Model) -> None:
        """Compare what each rank holds with the declared layout."""
        if not self.distributed:
            return
        slots = model.optimizer.variables if getattr(model, "optimizer", None) is not None else []
        for variable in [*model.variables, *slots]:
            placed = keras_layout(variable)
            if placed is None:
                self.unsplit.append(f"{variable.path}: no layout")
                continue
            layout = placed.layout
            for rank, shard in backend().shards(variable).items():
                if tuple(shard.shape) != layout.local_shape(rank):
                    self.unsplit.append(
                        f"{variable.path}: rank {rank} holds {shard.shape}, not {layout.local_shape(rank)}"
                    )

    def fit(self, model: keras.Model, *args: object, **kwargs: object) -> dict:
        """`model.fit`, recording the loss after each step and the epoch logs."""
        steps = StepLosses()
        kwargs["callbacks"] = [*kwargs.get("callbacks", ()), steps]  # type: ignore[misc]
        history = model.fit(*args, verbose=0, **kwargs).history  # type: ignore[arg-type]
        self.record("loss", "loss of each step", steps.losses)
        for name in sorted(history):
            if name != "learning_rate":
                self.record("value", f"history {name}", history[name])
        return history


class StepLosses(keras.callbacks.Callback):
    """The loss log after each step (a mean over the steps of the epoch, which starts anew with each epoch)."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.losses.append(float(logs["loss"]))  # type: ignore[index]


def make_distribution(layout: str, rules: Mapping[str, int], **options: object) -> object:
    """dp4, tp4, 2x2 or mirrored4 over ranks 0 to 3; a stage of `zero=` may stand after it, as in dp4z3."""
    layout, _, stage = layout.partition("z")
    options |= {"zero": int(stage), "zero_min_size": 4} if stage else {}
    if layout in ("dp4", MIRRORED):
        options |= {"strategy": "mirrored"} if layout == MIRRORED else {}
        return kf.DataParallel(kf.Placement(range(4), axis_names=("data",)), **options)  # type: ignore[arg-type]
    placement = (
        kf.Placement(range(4), axis_names=("model",))
        if layout == "tp4"
        else kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    )
    specs = {pattern: {"model": kf.sbp.split(dim)} for pattern, dim in rules.items()}
    return kf.ModelParallel(placement, rules=specs, **options)  # type: ignore[arg-type]


def _short(path: str) -> str:
    """A path without the counters that Keras gives to names, which differ from run to run."""
    import re

    return re.sub(r"_\d+(?=/|$)", "", path)


def run_once(case: Case, layout: str, folder: str, fault: str = "", policy: str = "float32") -> tuple[Run, list[str]]:
    """Run a case under one layout from the same seeds; returns its numbers and the keras_flow warnings."""
    keras.utils.clear_session()
    gc.freeze()  # what the engines keep of earlier runs: half of the grid's time went into searching it for cycles
    keras.utils.set_random_seed(7)
    run = Run(case, layout, folder, fault, policy)
    keras.config.set_dtype_policy(policy)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            case.program(run)
    finally:
        keras.config.set_dtype_policy("float32")
    kinds = [f"{w.category.__name__}: {w.message}" for w in caught if issubclass(w.category, kf.FlowWarning)]
    return run, sorted(set(kinds))


@dataclass
class Comparison:
    """What a comparison found.

    Attributes:
        worst: kind -> largest deviation, relative to its tolerance (1 is the limit).
        over: what lies over the tolerance.
        left_out: variables left out -> their largest |gradient| in float64.
    """

    worst: dict[str, float] = field(default_factory=dict)
    over: list[str] = field(default_factory=list)
    left_out: dict[str, float] = field(default_factory=dict)


def compare(reference: Run, other: Run) -> Comparison:
    """Compare two runs of a case number by number."""
    result = Comparison()
    shown = _shown(reference.case)
    left_out = tuple(ending for ending in reference.case.zero_gradient if shown.get(ending, 1.0) < 1e-9)
    result.left_out = {ending: shown[ending] for ending in left_out}
    if list(reference.numbers) != list(other.numbers):
        result.over.append(f"other numbers were recorded: {set(reference.numbers) ^ set(other.numbers)}")
        return result
    # an update that is zero in mathematics is rounding: it is judged by a share of the largest
    least = 1e-2 * max(
        (np.abs(value).max() for kind, value in reference.numbers.values() if kind == "update"), default=0
    )
    for name, (kind, expected) in reference.numbers.items():
        if kind == "weights" and left_out and name.split("#")[0].endswith(left_out):
            continue
        found = other.numbers[name][1]
        share = _share(kind, found, expected, least)
        result.worst[kind] = max(result.worst.get(kind, 0.0), share)
        if not share <= 1.0:
            result.over.append(f"{kind} {name}: {share:.3g} times the tolerance")
    result.over += [f"declared split is not physical: {text}" for text in other.unsplit]
    return result


@functools.cache
def _shown(case: Case) -> dict[str, float]:
    """What `gradient64` shows, computed once for all layouts."""
    return case.gradient64() if case.gradient64 else {}


def _share(kind: str, found: np.ndarray, expected: np.ndarray, least: float = 0.0) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if kind == "exact":
        return 0.0 if np.array_equal(found, expected) else float("inf")
    if not expected.size:
        return 0.0
    if not np.array_equal(np.isnan(found), np.isnan(expected)):
        return float("inf")
    gap = np.abs(np.nan_to_num(found) - np.nan_to_num(expected))
    scale = np.abs(np.nan_to_num(expected))
    if kind == "loss":
        return float(np.max(gap / (1e-5 * scale + 1e-7)))
    if kind == "update":
        return float(gap.max() / (1e-4 * max(scale.max(), least)))
    return float(gap.max() / (1e-4 * max(1.0, scale.max())))  # weights, and values, which follow from them


def compare_half(single32: Run, single16: Run, other16: Run) -> Comparison:
    """Half precision: a layout may deviate from one device's fp32 run at most twice as much as one device does."""
    result = Comparison()
    for name, (kind, expected) in single32.numbers.items():
        if kind == "exact":
            continue
        own = float(np.abs(single16.numbers[name][1] - expected).max())
        gap = float(np.abs(other16.numbers[name][1] - expected).max())
        share = gap / (2 * own) if own else gap
        result.worst[kind] = max(result.worst.get(kind, 0.0), share)
        if not share <= 1.0:
            result.over.append(f"{kind} {name}: {gap:.3g}, one device {own:.3g}")
    result.over += [f"declared split is not physical: {text}" for text in other16.unsplit]
    return result
