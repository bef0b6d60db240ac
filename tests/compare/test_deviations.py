"""The tolerances, as they are stated."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keras_flow.compare import deviations
from keras_flow.compare.deviations import JUDGED, Deviation, drift, of_losses


def of_weights(actual: list, expected: list, steps: int, perturbed: list | None = None) -> Deviation:
    """From zeros, so that a weight has moved by its largest value."""
    initial = [np.zeros_like(each) for each in expected]
    return deviations.of_weights(actual, expected, initial, steps, perturbed)


def test_losses() -> None:
    expected = [2.0, 1.0]
    assert of_losses(expected, expected).of_tolerance == 0
    at_limit = [2.0, 1.0 + 1e-5 + 1e-7]
    found = of_losses(at_limit, expected)
    assert found.of_tolerance == pytest.approx(1, rel=1e-6)
    assert found.value == pytest.approx(1.01e-5, rel=1e-6)
    assert of_losses([2.0, 1.00002], expected).of_tolerance > 1
    assert of_losses([0.0, 2e-7], [0.0, 0.0]).of_tolerance == pytest.approx(2)


def test_losses_of_long_runs_may_drift_in_proportion() -> None:
    expected = np.ones(40)
    assert of_losses(expected + 1e-5 * np.linspace(0, 2, 40), expected).of_tolerance < 1.01
    assert of_losses(expected + 2e-5, expected).of_tolerance > 1.9, "the first 20 steps may not"
    assert (drift(5), drift(20), drift(60)) == (1, 1, 3)


@pytest.mark.parametrize("found", [[1.0], [1.0, math.nan], [1.0, math.inf], [1.0, 1.0, 1.0], []])
def test_losses_that_cannot_be_compared_are_infinitely_far(found: list[float]) -> None:
    result = of_losses(found, [1.0, 1.0])
    assert result.value == result.of_tolerance == math.inf
    assert not result.of_tolerance <= 1


def test_a_reference_that_is_not_finite_fails() -> None:
    for wrong in (math.nan, math.inf):
        assert not of_losses([1.0], [wrong]).of_tolerance <= 1


def test_weights() -> None:
    small, large = np.array([0.5, -0.5], "float32"), np.array([8.0], "float32")
    assert of_weights([small, large], [small, large], 20).of_tolerance == 0
    assert of_weights([small + 1e-4], [small], 20).of_tolerance == pytest.approx(1, rel=1e-2)
    assert of_weights([large + 8e-4], [large], 20).of_tolerance == pytest.approx(1, rel=1e-2)
    assert of_weights([small + 2e-4], [small], 20).of_tolerance > 1
    assert of_weights([small + 2e-4], [small], 40).of_tolerance == pytest.approx(1, rel=1e-2)
    worst = of_weights([small + 1e-5, large + 4e-4], [small, large], 20)
    assert worst.value == pytest.approx(4e-4, rel=1e-2)
    assert of_weights([np.zeros((0, 3))], [np.zeros((0, 3))], 20).of_tolerance == 0


def test_weights_may_deviate_by_a_share_of_their_movement() -> None:
    first = np.full(4, 0.5, "float32")
    for moved in (1e-2, 1e-3, 1e-4):
        expected = first + np.float32(moved)
        twice = deviations.of_weights([expected + np.float32(moved)], [expected], [first], 20)
        assert twice.of_tolerance > 50 and twice.resolution < JUDGED / 5
        assert twice.moved == pytest.approx(moved, rel=1e-2)
        rounded = deviations.of_weights([expected + np.float32(2e-7)], [expected], [first], 20)
        assert rounded.of_tolerance < 0.5, "a few last bits"
    still = deviations.of_weights([first], [first + np.float32(5e-7)], [first], 20)
    assert still.of_tolerance <= 1 and still.resolution > JUDGED, "not judged, which is said"
    assert deviations.of_weights([first], [first], [first], 20).resolution == math.inf
    counts = np.arange(3)
    assert deviations.of_weights([counts], [counts], [counts], 20).of_tolerance == 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_weights_that_are_not_finite_fail(wrong: float) -> None:
    good = np.ones(2, "float32")
    bad = np.array([1.0, wrong], "float32")
    assert not of_weights([bad, good], [good, good], 20).of_tolerance <= 1
    assert not of_weights([good, bad], [good, good], 20).of_tolerance <= 1
    assert not of_weights([good], [bad], 20).of_tolerance <= 1


def test_weights_of_other_shapes_fail() -> None:
    assert not of_weights([np.ones((2, 1))], [np.ones(2)], 20).of_tolerance <= 1


def test_weights_that_rounding_moves_as_far_are_not_judged() -> None:
    kernel, bias = np.ones(3, "float32"), np.zeros(3, "float32")
    perturbed = [kernel + 1e-6, bias + 3e-4]
    found = of_weights([kernel + 1e-5, bias + 2e-3], [kernel, bias], 20, perturbed)
    assert found.rounded == (1,) and found.worst == 0
    assert found.of_tolerance == pytest.approx(0.1, rel=2e-2) and found.value == pytest.approx(1e-5, rel=2e-2)
    # ten times as far is no rounding; nor is what does not move on one device
    assert of_weights([kernel, bias + 4e-3], [kernel, bias], 20, perturbed).of_tolerance > 1
    found = of_weights([kernel + 2e-4, bias], [kernel, bias], 20, perturbed)
    assert found.of_tolerance > 1 and found.worst == 0 and not found.rounded


def test_the_nearest_weight_is_one_that_was_moved() -> None:
    """The gradient of an attention's key bias is zero but for rounding: it is near its tolerance whatever is right."""
    kernel, bias = np.zeros(4, "float32"), np.zeros(4, "float32")
    trained, drifted = kernel + 1.0, bias + np.float32(2e-8)
    found = deviations.of_weights([trained + 1e-5, drifted + 3e-8], [trained, drifted], [kernel, bias], 20)
    assert found.worst == 0 and found.of_tolerance == pytest.approx(0.1, rel=0.1)
    alone = deviations.of_weights([drifted + 3e-8], [drifted], [bias], 20)
    assert alone.of_tolerance == pytest.approx(0.3, rel=0.1)
    far = deviations.of_weights([trained, drifted + 2e-7], [trained, drifted], [kernel, bias], 20)
    assert far.worst == 1 and far.of_tolerance == pytest.approx(2.0, rel=0.1)
