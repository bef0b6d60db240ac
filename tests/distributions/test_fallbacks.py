"""One warning for all variables of one rule and reason, and one line for all its problems."""

from __future__ import annotations

import warnings

import keras
import pytest

import keras_flow as kf
from keras_flow.distributions.dry_run import dry_run
from keras_flow.distributions.fallbacks import Fallbacks
from keras_flow.errors import LayoutFallback

MESH = kf.Placement(range(4), axis_names=("model",))
RULES = {"up/kernel": {"model": kf.sbp.split(1)}, "up/bias": {"model": kf.sbp.split(0)}}


@pytest.fixture(autouse=True)
def described(four_ranks: None):
    """Models of these tests are only described."""
    with dry_run(4):
        yield


def blocks(count: int, units: int = 18) -> keras.Model:
    layers = [keras.layers.Dense(units, name=f"block{number}_up") for number in range(count)]
    return keras.Sequential([keras.layers.Input((8,)), *layers], name="m")


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if issubclass(each.category, LayoutFallback)]


def test_a_scope_says_one_line_for_each_rule_and_reason() -> None:
    distribution = kf.ModelParallel(MESH, rules=RULES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with distribution.scope():
            blocks(5)
            assert said(caught) == []  # there may be more
    reason = (
        "of 18 does not divide by axis 'model' of 4 ranks (20 would, or an axis of 3 ranks); broadcast on that axis"
    )
    assert said(caught) == [
        f"m/block0_up/kernel and 4 more: dim 1 {reason}",
        f"m/block0_up/bias and 4 more: dim 0 {reason}",
    ]


def test_rules_and_reasons_are_told_apart_and_a_variable_is_named_once() -> None:
    rules = {"block0.*kernel": {"model": kf.sbp.split(1)}, "kernel": {"model": kf.sbp.split(1)}}
    distribution = kf.ModelParallel(MESH, rules=rules)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for units in (18, 18, 19):
            with distribution.scope():
                model = blocks(3, units)
            distribution.check(model)
    assert [text.partition(" does not")[0] for text in said(caught)] == [
        "m/block0_up/kernel: dim 1 of 18",
        "m/block1_up/kernel and 1 more: dim 1 of 18",
        "m/block0_up/kernel: dim 1 of 19",
        "m/block1_up/kernel and 1 more: dim 1 of 19",
    ]


def test_it_is_said_before_a_step_inside_of_the_scope() -> None:
    distribution = kf.ModelParallel(MESH, rules=RULES)
    with distribution.scope():
        model = blocks(2)
        with pytest.warns(LayoutFallback) as caught:
            distribution.check(model)
        assert len(said(list(caught))) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            distribution.check(model)


def test_without_a_scope_it_is_said_at_once() -> None:
    keras.distribution.set_distribution(kf.ModelParallel(MESH, rules={"kernel": {"model": kf.sbp.split(1)}}))
    try:
        with pytest.warns(LayoutFallback, match=r"^m/block0_up/kernel: dim 1 of 18"):
            blocks(1)
    finally:
        keras.distribution.set_distribution(None)


def test_what_ended_in_an_error_waits() -> None:
    fallbacks = Fallbacks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), fallbacks.together():
            fallbacks.add("a", "rule", "why")
            raise KeyError
    with pytest.warns(LayoutFallback, match=r"^a and 1 more: why$"), fallbacks.together():
        fallbacks.add("b", "rule", "why")


def test_problems_of_one_rule_are_one_line() -> None:
    rules = {"up/kernel": {"modell": kf.sbp.split(1)}, "up/bias": {"model": kf.sbp.split(1)}}
    distribution = kf.ModelParallel(MESH, rules=rules)
    with distribution.scope():
        model = blocks(3, 16)
    with pytest.raises(kf.LayoutError) as error:
        distribution.check(model)
    head, kernel, bias, *_ = str(error.value).splitlines()
    assert head == "2 layout problems in model 'm':"
    assert kernel == (
        "  m/block0_up/kernel and 2 more: rule 'up/kernel': no axis 'modell': the placement's axes are ['model']"
    )
    assert bias.startswith("  m/block0_up/bias and 2 more: rule 'up/bias': split(1) on axis 'model' needs a dimension")


def test_strict_problems_are_one_line_too() -> None:
    distribution = kf.ModelParallel(MESH, rules=RULES, strict=True)
    with distribution.scope():
        model = blocks(3)
    with pytest.raises(kf.LayoutError, match=r"(?s)2 layout problems.*  m/block0_up/bias and 2 more: dim 0 of 18 .*"):
        distribution.check(model)
