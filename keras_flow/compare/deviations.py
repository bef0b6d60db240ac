"""How far two runs deviate from each other, and how far they may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: steps for which the tolerances are stated; longer runs may drift in proportion, as rounding does
STEPS = 20
LOSS_RELATIVE, LOSS_ABSOLUTE, WEIGHTS = 1e-5, 1e-7, 1e-4
#: of how far one device moved a weight: an update that is wrong by more shows, however small the learning rate is
MOVED = 1e-3
#: what rounding makes of a weight however little it moves: last bits of its largest value, and of a zero
LAST_BITS, ROUNDED_ZERO = 16, 1e-7
#: share of a weight's movement that must be seen; otherwise a comparison says that it cannot judge the updates
JUDGED = 0.1
#: times what one device's weights deviate by, if the first ones change in their last bit: that is rounding
ROUNDING = 10
#: of the loss of the same weights, evaluated by another engine
EVALUATION = 1e-4
#: of losses of two engines trained from the same weights on the same samples: their kernels and orders of sums differ
BETWEEN_BACKENDS = 1e-3


@dataclass(frozen=True)
class Deviation:
    """The largest deviation of a run from its reference.

    Attributes:
        value: the deviation itself.
        of_tolerance: the largest share of the tolerance; over 1 is a failure. Of weights within it, those count that
            one device has moved by more than rounding: how near the others are says nothing of the layout.
        worst: which of the weights has that share.
        moved: how far one device moved its weights, at most.
        resolution: the least share of its movement by which a weight may deviate; infinite where none has moved.
        rounded: the weights that are over the tolerance and within what rounding does to them.
    """

    value: float
    of_tolerance: float
    worst: int = 0
    moved: float = 0.0
    resolution: float = float("inf")
    rounded: tuple[int, ...] = ()


def between_limit(losses: Sequence[float]) -> float:
    """How far the losses of two engines may be apart."""
    return BETWEEN_BACKENDS * max(1.0, max(map(abs, losses))) * drift(len(losses))


def drift(steps: int) -> float:
    """The factor on the tolerances of a run of this many steps."""
    return max(1.0, steps / STEPS)


def in_words(steps: int, has_engines: bool) -> str:
    """The tolerances of a run of this many steps, for a reader of its numbers; has_engines: of several engines too."""
    engines = f" Δ engine: {BETWEEN_BACKENDS:g} of the largest loss, or of 1 if that is larger." if has_engines else ""
    judged = "Weights and engines" if has_engines else "Weights"
    longer = f" {judged}: times {drift(steps):g}, for {steps} steps." if steps > STEPS else ""
    return (
        f"Δ loss: {LOSS_RELATIVE:g} of the loss plus {LOSS_ABSOLUTE:g} (from step {STEPS} on in proportion to the "
        f"step). Δ weights: the largest of {MOVED:g} of the variable's movement on one device, {LAST_BITS} last bits "
        f"of its largest value, and {ROUNDED_ZERO:g}; never more than {WEIGHTS:g} of that value, or of 1 if it "
        "is smaller."
        f"{engines}{longer}"
    )


def of_losses(actual: Sequence[float], expected: Sequence[float]) -> Deviation:
    """Loss at each step: `|a - b| <= 1e-5 |b| + 1e-7` for 20 steps."""
    a, b = np.asarray(actual, "float64"), np.asarray(expected, "float64")
    # a run that stopped early or diverged: no share of a tolerance says how far off that is
    if a.shape != b.shape or not np.isfinite([*a, *b]).all():
        return Deviation(float("inf"), float("inf"))
    gap = np.abs(a - b)
    return Deviation(float(gap.max()), float((gap / loss_limits(b)).max()))


def loss_limits(expected: Sequence[float] | np.ndarray) -> np.ndarray:
    """The tolerance of the loss at each step; it grows with the step: 1.5 times at step 30."""
    b = np.asarray(expected, "float64")
    return (LOSS_RELATIVE * np.abs(b) + LOSS_ABSOLUTE) * np.maximum(1.0, np.arange(1, len(b) + 1) / STEPS)


def of_weights(
    actual: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    initial: Sequence[np.ndarray],
    steps: int,
    perturbed: Sequence[np.ndarray] | None = None,
) -> Deviation:
    """Final weights, each against what its training on one device has changed.

    A variable may deviate by 0.001 of its largest movement. It may always deviate by 16 last bits of its largest value
    and by 1e-7, and never by more than `1e-4 max(1, max|b|)`; all this for 20 steps. Weights that are not finite, or of
    another shape, are infinitely far.

    Example: weights of 0.5 that a warm-up moves by 2e-5 may be 1e-6 apart (16 last bits), 5 % of the movement: twice
    the gradient is an error, and the `resolution` of 0.05 says that one of 1.04 times would be none.

    Args:
        actual: of the run.
        expected: of one device.
        initial: of both.
        steps: of both.
        perturbed: of one device, from first weights that were changed in their last bit: a weight may be as far as ten
            times these. A bias before BatchNormalization has a gradient of 0 but for rounding, which Adam divides by
            its own size; no tolerance says anything of it.
    """
    value, rounded = 0.0, []
    # share of the tolerance, and which weight: of those that were moved by more than rounding, and of the others
    moving, resting = (0.0, 0), (0.0, 0)
    most, resolution = 0.0, float("inf")
    for index, (a, b, first) in enumerate(zip(actual, expected, initial, strict=True)):
        if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return Deviation(float("inf"), float("inf"), index)
        if not b.size:
            continue
        gap, moved = _gap(a, b), _gap(b, first)
        allowed = _allowed(b, moved) * drift(steps)
        if moved:
            most, resolution = max(most, moved), min(resolution, allowed / moved)
        if perturbed is not None and gap > allowed and gap <= ROUNDING * _gap(perturbed[index], b):
            rounded.append(index)
            continue
        value = max(value, gap)
        if gap > allowed or allowed <= JUDGED * moved:
            moving = max(moving, (gap / allowed, index))
        else:
            resting = max(resting, (gap / allowed, index))
    share, worst = moving if moving[0] else resting
    return Deviation(value, share, worst, most, resolution, tuple(rounded))


def _allowed(expected: np.ndarray, moved: float) -> float:
    """How far a variable may be off that one device moved so far in `STEPS` steps."""
    largest = float(np.abs(expected).max())
    most = WEIGHTS * max(1.0, largest)
    if expected.dtype.kind != "f":  # a count, or a number type of few bits, of which NumPy knows no last one
        return most
    return min(most, max(MOVED * moved, LAST_BITS * float(np.finfo(expected.dtype).eps) * largest, ROUNDED_ZERO))


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype("float64") - b.astype("float64")).max())
