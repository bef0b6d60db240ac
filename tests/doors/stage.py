"""What a door is opened on: a small model with known weights, and the setting in which it is made and used."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_flow as kf

#: factors of two levels each: the columns of `_ARRAY`
FACTORS: dict[str, tuple[str, str]] = {
    "layout": ("dp4", "2x2"),
    "made": ("in", "before"),
    "used": ("in", "after"),
    "trained": ("yes", "no"),
    "rows": ("divide", "uneven"),
    "seed": ("yes", "none"),
    "first": ("plain", "elsewhere"),
}
#: Taguchi's orthogonal array L8: in 8 rows each two of 7 factors meet in each pair of levels
_ARRAY = ("0000000", "0001111", "0110011", "0111100", "1010101", "1011010", "1100110", "1101001")


@dataclass(frozen=True)
class Setting:
    """Where a model is made, and where its door is opened.

    Attributes:
        layout: `dp4`, or `2x2` with split kernels.
        made: whether the model, its optimizer and its metrics are made in the scope or before it.
        used: whether the door is opened in the scope or after it (the model remembers).
        trained: whether `fit` was called before.
        rows: whether the number of rows divides by the ranks.
        seed: whether `keras.utils.set_random_seed` was called.
        first: whether the model was used under another layout before.
    """

    layout: str
    made: str
    used: str
    trained: str
    rows: str
    seed: str
    first: str

    @property
    def name(self) -> str:
        """Return the levels as one text."""
        return ", ".join(f"{factor} {getattr(self, factor)}" for factor in FACTORS)


def settings() -> list[Setting]:
    """Return the settings of the covering design."""
    levels = list(FACTORS.values())
    return [Setting(*(pair[int(digit)] for pair, digit in zip(levels, row, strict=True))) for row in _ARRAY]


def setting_of(door: str) -> Setting:
    """Return the one setting that the default suite opens a door in: always the same, and spread over the doors."""
    return settings()[zlib.crc32(door.encode()) % len(_ARRAY)]


def distribution(layout: str) -> Any:
    """Return a new distribution of a layout, over the ranks that there are: 4, or 2."""
    ranks = np.arange(kf.env.get_world_size())
    if layout == "dp4":
        return kf.DataParallel(kf.Placement(ranks, axis_names=("data",)))
    mesh = kf.Placement(ranks.reshape(-1, 2), axis_names=("data", "model"))
    return kf.ModelParallel(
        mesh, rules={"h/kernel": {"model": kf.sbp.split(1)}, "h/bias": {"model": kf.sbp.split(0)}}, batch_axes="data"
    )


@dataclass
class Stage:
    """A model, and data for it.

    Attributes:
        setting: how it was made.
        folder: for files; one for all ranks.
        model: functional, compiled with plain SGD; two Dense layers and BatchNormalization.
        x: rows [rows, 6].
        y: targets [rows, 3].
        extra: objects of the case made where the model was made.
        distribution: the layout's; None on one device.
    """

    setting: Setting
    folder: Path
    model: Any = None
    x: Any = None
    y: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    distribution: Any = None

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, the same in every run."""
        rows = 12 if self.setting.rows == "divide" else 11
        rng = np.random.default_rng(rows)
        return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 3)).astype("float32")

    def again(self) -> Any:
        """Return another model like the first, of the same distribution, whether its scope is held or not."""
        with self.distribution.scope() if self.distribution is not None else contextlib.nullcontext():
            return self.build()

    def build(self, layers: Any = None) -> Any:
        """Return a new compiled model with weights that depend on no seed."""
        model = keras.Sequential(
            layers
            or [
                keras.layers.Input((6,)),
                keras.layers.Dense(8, "tanh", name="h"),
                keras.layers.BatchNormalization(name="bn"),
                keras.layers.Dense(3, name="o"),
            ],
            name="door",
        )
        self.fill(model)
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
        return model

    @staticmethod
    def fill(model: Any) -> None:
        """Give kernels known values."""
        rng = np.random.default_rng(5)
        for variable in model.trainable_variables:
            if variable.path.endswith("kernel"):
                variable.assign(rng.normal(size=variable.shape).astype("float32") / 3)


@contextlib.contextmanager
def staged(setting: Setting, folder: Path, make: Any, distributed: bool) -> Iterator[Stage]:
    """Set the stage for a case, and hold the scope in which its door is opened.

    Args:
        setting: where things are made and used.
        folder: for the case's files.
        make: what the case makes where the model is made: `make(stage)` gives `stage.extra`; None for nothing.
        distributed: False for one device, where every scope is none.
    """
    if setting.seed == "yes":
        keras.utils.set_random_seed(3)
    stage = Stage(setting, folder, distribution=distribution(setting.layout) if distributed else None)
    stage.x, stage.y = stage.data()
    held = stage.distribution

    def scope(is_held: bool, which: Any = held) -> Any:
        return which.scope() if distributed and is_held else contextlib.nullcontext()

    with scope(setting.made == "in"):
        stage.model = stage.build()
        if make is not None:
            stage.extra = make(stage)
    if setting.first == "elsewhere":
        other = distribution("2x2" if setting.layout == "dp4" else "dp4") if distributed else None
        with scope(True, other):
            stage.model.evaluate(stage.x, stage.y, verbose=0)
    if setting.trained == "yes":
        with scope(True):
            stage.model.fit(stage.x, stage.y, batch_size=len(stage.x), verbose=0)
    elif setting.used == "after":  # what was never used under a distribution remembers none
        with scope(True):
            stage.model.evaluate(stage.x, stage.y, verbose=0)
    with scope(setting.used == "in"):
        yield stage
