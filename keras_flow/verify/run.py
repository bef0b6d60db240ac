"""`dist.verify`: runs the same step under the distribution and on one device from the same state, and compares.

1. `state` keeps the model's variables and the random states, and restores them after each run.
2. `measure` runs a step on a batch and returns all its numbers.
3. This module runs both sides on a batch that divides and one that does not; `verification` has the result.

`by_layer` splits a model that one device cannot hold into layers; `precision` copies a model for `dtype="float64"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import keras
import numpy as np
from rich.console import Console
from rich.progress import track

from keras_flow.backends import random_states, symbolic
from keras_flow.backends.active import backend
from keras_flow.backends.rendezvous import agreement
from keras_flow.current import models
from keras_flow.distributions.distribution import FlowDistribution
from keras_flow.errors import FlowError
from keras_flow.placements import Placement
from keras_flow.progress import is_seen, working
from keras_flow.runtime import env
from keras_flow.verify.by_layer import parts, why_by_layer
from keras_flow.verify.measure import Batch, Numbers, measured, not_measured
from keras_flow.verify.precision import computing_in, copy_in
from keras_flow.verify.state import restored
from keras_flow.verify.verification import ComparedNumber, Verification

#: of gradients and updates, relative to the largest element of the variable, in single precision (docs/design.md)
TOLERANCE = 1e-4
#: the same in double precision, in which Keras 3.15 still computes BatchNormalization, and torch `matmul`, in single
DOUBLE = 1e-5
#: the same in half precision, in units of rounding
HALF = 16
#: share of the tolerance that losses, metrics and outputs may deviate by (docs/design.md)
OF_VALUES = 0.1
#: a gradient smaller than this share of the model's largest one is judged as if it were that large: a gradient that is
#: zero in mathematics (the bias of an attention's keys) is nothing but rounding in single precision
ROUNDING = 1e-2


def verify(
    distribution: FlowDistribution,
    model: keras.Model,
    x: object,
    y: object,
    sample_weight: object = None,
    *,
    tolerance: float | None = None,
    dtype: str | None = None,
    by_layer: bool | None = None,
) -> Verification:
    """See `FlowDistribution.verify`."""
    if backend().capabilities.drives_all_ranks and backend().world().process_count > 1:
        raise FlowError(
            f"verify on {backend().name} is for one process that drives all ranks, since no process trains on one "
            "device alone while others wait: start it by `keras-flow launch --nproc_per_node 1 --devices_per_proc N`, "
            "or run `keras-flow verify FILE.py`; torch has a process for each rank"
        )
    if not distribution.layers_stand_alone:
        if by_layer:
            raise FlowError("verify: a layer by itself has no stages. Without by_layer the whole step is verified")
        by_layer = False
    full_batch = _batch(x, y, sample_weight)
    own_step = _check(model, full_batch, distribution)
    if dtype is None:
        return _verify(distribution, model, full_batch, own_step, tolerance, by_layer)
    states = random_states.states()
    try:
        with computing_in(dtype):
            copy = copy_in(model, distribution, dtype)
            return _verify(distribution, copy, full_batch.in_dtype(dtype), own_step, tolerance, by_layer)
    finally:
        random_states.set_states(states)


def _verify(
    distribution: FlowDistribution,
    model: keras.Model,
    full_batch: Batch,
    own_step: bool,
    tolerance: float | None,
    by_layer: bool | None,
) -> Verification:
    if tolerance is None:
        tolerance = _tolerance(model)
    # the memory that is free differs between devices, and all ranks must decide alike
    why = agreement.first_failure(why_by_layer(model)) if by_layer is None else "as asked for" if by_layer else ""
    if why:
        rows, note = _by_layer(distribution, model, full_batch, own_step, tolerance, why)
    else:
        with working(f"verifying {model.name}"):
            rows = list(_of_model(distribution, model, full_batch, own_step, tolerance))
            absent = not_measured(model, own_step)
            note = f"not verified: {' and '.join(absent.values())}" if absent else ""
    return Verification.of(model.name, repr(distribution), backend().name, tolerance, rows, note)


def _by_layer(
    distribution: FlowDistribution, model: keras.Model, full_batch: Batch, own_step: bool, tolerance: float, why: str
) -> tuple[list[ComparedNumber], str]:
    """The comparisons of each layer by itself, and a note on what they leave out."""
    rows: list[ComparedNumber] = []
    makers, left_out = parts(model, full_batch, distribution, own_step)
    try:
        console = Console(stderr=True)
        silent = env.process_index() > 0 or not is_seen(console)
        for make in track(makers, "verifying layer by layer", console=console, transient=True, disable=silent):
            part = make()
            for row in _of_model(distribution, part.model, part.batch, False, tolerance):
                if part.has_loss or row.quantity != "loss":
                    rows.append(dataclasses.replace(row, name=_named(row, part.model.name)))
    finally:
        backend().forget_steps(model)  # compiled before its layers' variables were moved to one device
    return rows, f"layer by layer ({why}); not verified: {left_out}"


def _named(row: ComparedNumber, layer: str) -> str:
    """The name of a comparison, with the layer's name in front unless it is in it."""
    return row.name if layer in row.name else f"{layer}/{row.name}"


def _of_model(
    distribution: FlowDistribution, model: keras.Model, full_batch: Batch, own_step: bool, tolerance: float
) -> Iterator[ComparedNumber]:
    """The comparisons of a model that one device can hold."""
    single = FlowDistribution(
        Placement([distribution.placement.ranks[0]], ("data",)), batch_axes=("data",), random=distribution.random
    )
    with restored(model, distribution) as state:
        for number, batch in enumerate(_batches(full_batch, distribution.parts_of_batch)):
            try:
                expected = measured(model, batch, single, state, own_step)
            except Exception as error:
                raise FlowError(
                    f"verify: model {model.name!r} cannot be trained on this batch on one device either: "
                    f"{type(error).__name__}: {error}"
                ) from error
            # once: whether a model repeats itself does not depend on the batch
            if number == 0:
                _check_repeats(model, expected, measured(model, batch, single, state, own_step))
            distributed = measured(model, batch, distribution, state, own_step)
            yield from _compared(batch.name, expected, distributed, tolerance)


def _batch(x: object, y: object, sample_weight: object) -> Batch:
    """The rows that the user gave, as NumPy arrays.

    Raises:
        FlowError: no rows, or different numbers of them.
    """
    parts = [
        None if part is None else keras.tree.map_structure(np.asarray, _structure(part))
        for part in (x, y, sample_weight)
    ]
    leaves = [leaf for part in parts if part is not None for leaf in keras.tree.flatten(part)]
    lengths = {len(leaf) if np.ndim(leaf) else 0 for leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        raise FlowError(
            f"verify takes arrays of equally many rows, at least one; got shapes {[np.shape(leaf) for leaf in leaves]}"
        )
    return Batch(*parts, name="")


def _structure(part: object) -> object:
    """Lists of numbers are one array, as for `fit`; lists of arrays are several inputs."""
    if isinstance(part, list | tuple) and part and not hasattr(part[0], "shape"):
        return np.asarray(part)
    return part


def _check(model: keras.Model, batch: Batch, distribution: FlowDistribution) -> bool:
    """Check that a model can be verified; whether it has a `train_step` of the user's.

    Raises:
        FlowError: it is not built or not compiled, or its own step cannot be repeated.
    """
    if not isinstance(model, keras.Model):
        raise FlowError(f"verify takes a keras.Model, got {type(model).__name__}")
    if not model.built:
        raise FlowError(
            f"model {model.name!r} is not built: its variables do not exist yet. Call it on a batch (`model(x[:2])`) "
            "or give its first layer an Input, then verify"
        )
    if not models.is_built(model):  # one that was told the shape of its input alone
        with distribution.scope():
            symbolic.outputs(model, batch.x)
    if not model.compiled:
        raise FlowError(f"model {model.name!r} is not compiled: verify needs its loss. Call model.compile(...) first")
    own_step = models.has_own(model, "train_step")
    if own_step:
        if others := _other_optimizers(model):
            raise FlowError(
                f"model {model.name!r} has a train_step of its own with optimizers {others} besides "
                "model.optimizer: their state cannot be given back, so verify would change it. Verify the parts that "
                "it trains one by one"
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
    return own_step


def _other_optimizers(model: keras.Model) -> list[str]:
    """Names of what holds further optimizers, in the model or in one inside it: `opts`, `discriminator.optimizer`."""

    def holds_one(value: object) -> bool:
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        return any(isinstance(each, keras.optimizers.Optimizer) and each is not model.optimizer for each in inside)

    return [
        name if layer is model else f"{layer.name}.{name}"
        for layer in model._flatten_layers()
        for name, value in vars(layer).items()
        if holds_one(value) and not name.startswith("_self_")  # TensorFlow's own notes
    ]


def _tolerance(model: keras.Model) -> float:
    """The default tolerance: that of the coarsest dtype in which a layer computes."""
    dtypes = {str(layer.compute_dtype) for layer in model._flatten_layers() if layer.compute_dtype}
    units = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
    if dtypes == {"float64"}:
        return DOUBLE
    return max([TOLERANCE, *(HALF * unit for name, unit in units.items() if name in dtypes)])


def _batches(full_batch: Batch, parts: int) -> Iterator[Batch]:
    """A batch that divides by its parts and one that does not, both from the given rows, if these are enough."""
    rows = len(keras.tree.flatten(full_batch.x)[0])
    even = rows // parts * parts
    if even:
        yield full_batch.rows(even, f"{even} rows")
    # one row less than a batch that divides: the last data rank has one less, or none
    uneven = rows if rows % parts else rows - 1
    if uneven > 0 and uneven % parts:
        yield full_batch.rows(uneven, f"{uneven} rows (do not divide by {parts})")


def _check_repeats(model: keras.Model, first: Numbers, second: Numbers) -> None:
    """Raise where two runs on one device differ: the model draws random numbers that no seed of Keras's holds."""
    for (mode, quantity, name), (value, _) in first.items():
        again = second[mode, quantity, name][0]
        # of the largest element, since kernels of a GPU do not repeat to the last bit what they sum
        if np.allclose(value, again, rtol=1e-6, atol=1e-6 * _largest(value) + 1e-12, equal_nan=True):
            continue
        raise FlowError(
            f"model {model.name!r} cannot be verified: two runs on one device from the same state differ already "
            f"({quantity} of {name} in {mode}). It has randomness of its own, for example NumPy's in a layer's `call`, "
            "or state outside of its variables; draw by keras.random with a keras.random.SeedGenerator of the layer"
        )


def _compared(batch: str, expected: Numbers, distributed: Numbers, tolerance: float) -> Iterator[ComparedNumber]:
    """Compare the numbers of one batch, those of one device and those under the distribution."""
    largest = max(
        (
            float(np.max(np.abs(value), initial=0.0))
            for (_, what, _), (value, _) in expected.items()
            if what == "gradient"
        ),
        default=0.0,
    )
    for (mode, quantity, name), (value, rounding) in expected.items():
        actual = distributed.get((mode, quantity, name), (np.empty(0), 0.0))[0]
        if value.shape != actual.shape:
            yield ComparedNumber(batch, mode, quantity, name, float("inf"), float("inf"))
            continue
        unlike = value != actual  # infinities that are equal have no difference
        deviation = float(np.max(np.abs(_numbers(value[unlike]) - _numbers(actual[unlike])), initial=0.0))
        # NaN is a result like any other: both sides must have it at the same places
        if np.isnan(value).tolist() != np.isnan(actual).tolist():
            deviation = float("nan")
        scale = _largest(value)
        if quantity in ("gradient", "update"):
            allowed = tolerance * max(scale, ROUNDING * largest) + 2 * rounding
        else:
            allowed = OF_VALUES * tolerance * max(scale, ROUNDING)
        share = 0.0
        if deviation:
            share = deviation / allowed if allowed else float("inf")
        yield ComparedNumber(batch, mode, quantity, name, deviation, share)


def _largest(value: np.ndarray) -> float:
    """The largest absolute value of the finite elements; 0 where there is none."""
    return float(np.max(np.abs(value[np.isfinite(value)]), initial=0.0))


def _numbers(value: np.ndarray) -> np.ndarray:
    """The value with 0 for NaN: places where both runs have NaN agree."""
    return np.where(np.isnan(value), 0.0, value)
