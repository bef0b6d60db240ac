"""Seeded faults: the grid must see each of them, or it could not fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
from keras import layers, ops

from keras_flow.runtime import env
from tests.parity.cases import data, plain
from tests.parity.cases.layers import crossentropy
from tests.parity.harness import LAYOUTS, MIRRORED, Case, Run, compare, run_once

FAULTS = ("gradient of one rank x 1.01", "dropout mask shifted", "last batch dropped", "one row counted twice")
RULES = {"hidden/kernel": 1, "hidden/bias": 0, "logits/kernel": 0}
#: the layout under which every model of plain SGD must show that one gradient is doubled
DOUBLED_UNDER = "2x2"
#: the run that must pass, else nothing would be proven
NONE = ""
#: case -> its numbers on one device, once they were asked for
_references: dict[str, Run] = {}


def layouts(backend: str) -> tuple[str, ...]:
    """The layouts that faults are seeded under."""
    return (*LAYOUTS, MIRRORED) if backend == "tensorflow" else LAYOUTS


def seeded(backend: str) -> list[tuple[str, str]]:
    """(layout, fault): all faults under data parallel, one each for the others, and no fault under each layout.

    With `strategy="mirrored"` a loss that is not Keras's own is refused, which leaves out the first fault.
    """
    chosen = [*(("dp4", fault) for fault in FAULTS), ("tp4", FAULTS[1]), ("2x2", FAULTS[0])]
    chosen += [(MIRRORED, fault) for fault in FAULTS[1:] if MIRRORED in layouts(backend)]
    return [*chosen, *((layout, NONE) for layout in layouts(backend))]


def _loss(run: Run):
    """The loss; the faulty one scales the gradient that comes from the rows of data rank 0 by 1.01, not the value."""
    original = crossentropy()
    if not (run.distributed and run.fault == FAULTS[0]):
        return original

    def faulty(true, predicted):
        rows = ops.shape(predicted)[0]
        mine = ops.cast(ops.arange(rows) < rows // 4, predicted.dtype)[:, None]
        return original(true, predicted + 0.01 * mine * (predicted - ops.stop_gradient(predicted)))

    return faulty


@contextlib.contextmanager
def _shifted_masks(on: bool) -> Iterator[None]:
    """Dropout masks that are moved by one row."""
    from keras.src import backend

    plain = backend.random.dropout
    if on:
        backend.random.dropout = lambda inputs, *args, **kwargs: ops.roll(
            plain(ops.roll(inputs, 1, axis=0), *args, **kwargs), -1, axis=0
        )
    try:
        yield
    finally:
        backend.random.dropout = plain


def _program(run: Run) -> None:
    x, y = data.FEATURES[:64], data.LABELS[:64]
    steps = 4
    if run.distributed and run.fault == "last batch dropped":
        steps = 3
    if run.distributed and run.fault == "one row counted twice":
        x, y = x.copy(), y.copy()
        x[1], y[1] = x[0], y[0]
    with run.scope(), _shifted_masks(run.distributed and run.fault == "dropout mask shifted"):
        model = keras.Sequential(
            [
                layers.Input((16,)),
                layers.Dense(32, activation="relu", name="hidden"),
                layers.Dropout(0.3, seed=4),
                layers.Dense(8, name="logits"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), _loss(run))
        for _ in range(5):
            for step in range(steps):
                rows = slice(16 * step, 16 * step + 16)
                loss = model.train_on_batch(x[rows], y[rows])
        run.record("loss", "last loss", np.ravel(loss)[0])
    run.record_model(model)


def seen(name: str, layout: str, fault: str, folder: str) -> list[str]:
    """What the comparison with one device says of a run with a fault, or with none.

    Args:
        name: a case of plain SGD, or nothing for the program of the other faults.
        layout: the layout of the run.
        fault: one of `FAULTS`, `plain.DOUBLED` or nothing.
        folder: for its files.
    """
    case = next((case for case in plain.CASES if case.name == name), Case("seeded fault", _program, (), RULES))
    run, _ = run_once(case, layout, folder, fault)
    if env.process_index():
        return []  # the first process has the reference
    if case.name not in _references:
        _references[case.name] = run_once(case, "1", folder)[0]
    return compare(_references[case.name], run).over
