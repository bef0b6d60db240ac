"""What a rule asks for and what the variable gets: fallbacks, said once, the same on every engine."""

from __future__ import annotations

import warnings
from dataclasses import replace

import keras
import pytest

import keras_flow as kf
from keras_flow.backends.engine_records import Capabilities
from keras_flow.distributions.resolve import fit_layout, joined_axes, problems_of
from keras_flow.errors import LayoutFallback
from tests.distributions import programs

ABLE = Capabilities(drives_all_ranks=True, several_axes_on_one_dim=True, uneven_batches="parallel")
ONE_AXIS = replace(ABLE, several_axes_on_one_dim=False)
MESH = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
S0, S1, B = kf.sbp.split(0), kf.sbp.split(1), kf.sbp.broadcast


def fitted(spec: kf.sbp.SbpSpec, shape: tuple[int, ...], capabilities: Capabilities = ABLE, **options: object):
    return fit_layout(kf.Layout(MESH, spec, shape), "w", capabilities, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "shape", "got"),
    [
        ((B, S1), (3, 4), (B, S1)),
        ((S0, S1), (4, 4), (S0, S1)),
        ((B, S0), (3, 4), (B, B)),
        ((S0, S0), (4,), (S0, S0)),
        ((S0, S0), (6,), (S0, B)),
        ((S0, S0), (3,), (B, B)),
        ((B, S0), (0,), (B, S0)),
        ((S0, S1), (3, 4), (B, S1)),
    ],
)
def test_a_split_that_does_not_divide_is_broadcast_on_that_axis(spec: object, shape: tuple, got: object) -> None:
    result = fitted(spec, shape)  # type: ignore[arg-type]
    assert result.layout.nd_sbp == got
    assert bool(result.reasons) == (got != spec)
    assert result.layout.divides


def test_the_reason_names_variable_dim_sizes_and_the_largest_axis() -> None:
    wide = kf.Placement(range(8), axis_names=("model",))
    asked = kf.Layout(wide, "S(1)", (5, 12))
    (reason,) = fit_layout(asked, "dense/kernel", ABLE).reasons
    assert reason == (
        "dense/kernel: dim 1 of 12 does not divide by axis 'model' of 8 ranks (16 would, or an axis of 6 ranks); "
        "broadcast on that axis"
    )
    (reason,) = fitted((S0, S0), (6,)).reasons
    assert "dim 0 of 3 (of its 6, cut in 2 by the axes before) does not divide by axis 'model' of 2 ranks (4" in reason


def test_one_axis_on_a_dim() -> None:
    result = fitted((S0, S0), (8, 4), ONE_AXIS)
    assert result.layout.nd_sbp == (S0, B)
    (reason,) = result.reasons
    assert (
        "dim 0 asks for ['data', 'model'] and other tensors use these axes separately; split on 'data' only" in reason
    )
    assert fitted((S0, S0), (8, 4), ONE_AXIS, joined_axes=(("data", "model"),)).reasons == ()


def test_joined_axes_are_those_that_stand_together_everywhere() -> None:
    names = ("data", "model")
    assert joined_axes([(S0, S0), (B, B)], (), names) == (names,)
    assert joined_axes([(S0, S0), (B, S1)], (), names) == ()
    assert joined_axes([(S0, S0)], ("data",), names) == ()
    assert joined_axes([(S0, S0)], names, names) == (names,)
    assert joined_axes([], names, names) == (names,)
    assert joined_axes([(S0, S1)], (), names) == ()


def test_whole_variables_are_an_engines_row_and_hold_for_subclasses() -> None:
    needs = replace(ABLE, whole_variables={"Conv2D": (("kernel",), "this engine computes convolutions whole")})

    class Mine(keras.layers.Conv2D):
        pass

    for layer in (keras.layers.Conv2D(4, 3), Mine(4, 3)):
        result = fit_layout(kf.Layout(MESH, (B, S1), (4, 4)), "conv/kernel", needs, layer=layer)
        assert result.layout.is_broadcast
        assert result.reasons == ("conv/kernel: this engine computes convolutions whole; broadcast on axis 'model'",)
        assert not fit_layout(kf.Layout(MESH, (B, S0), (4,)), "conv/bias", needs, layer=layer).reasons
    assert not fit_layout(kf.Layout(MESH, (B, S1), (4, 4)), "d/kernel", needs, layer=keras.layers.Dense(4)).reasons


def test_what_an_engine_holds_whole_whatever_is_asked() -> None:
    holds = replace(ABLE, held_whole={"integers": "no integers", "preprocessing": "no states"})
    asked = kf.Layout(MESH, (B, S1), (4, 4))
    for dtype in ("int8", "uint8", "bool", "complex64"):
        assert fit_layout(asked, "w", holds, dtype=dtype).reasons == ("w: no integers; broadcast on axis 'model'",)
    assert fit_layout(asked, "w", holds, layer=keras.layers.Normalization()).layout.is_broadcast
    for dtype in ("bfloat16", "float8_e4m3fn"):
        assert fit_layout(asked, "w", holds, layer=keras.layers.Dense(4), dtype=dtype).layout == asked


def test_partial_sum_is_a_problem() -> None:
    assert problems_of(kf.Layout(MESH, (B, "P"), (4,)), "rule 'w'", "w") == [
        "w: rule 'w' asks for partial_sum; a variable is split or broadcast"
    ]
    assert problems_of(kf.Layout(MESH, (B, S0), (4,)), "rule 'w'", "w") == []


def test_uneven_variables_fall_back_with_one_warning_and_the_same_numbers() -> None:
    reference = programs.build(hidden=18)
    single = programs.fit(reference)
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with programs.tensor_parallel().scope():
            model = programs.build(hidden=18)
            losses = programs.fit(model)
            model.evaluate(*programs.rows(), verbose=0)
    said = sorted(str(w.message) for w in caught if issubclass(w.category, kf.FlowWarning))
    assert [text.split(":")[0] for text in said] == ["model/hidden/bias", "model/hidden/kernel", "model/logits/kernel"]
    assert all("of 18 does not divide by axis 'model' of 4 ranks (20 would, or an axis of 3 ranks)" in t for t in said)
    assert losses == pytest.approx(single, rel=1e-5)
    programs.same(model, reference)
    placed = kf.layout_of(programs.variable(model, "hidden/kernel"))
    assert placed.layout.is_broadcast
    assert "does not divide" in placed.note


def test_strict_makes_them_one_error() -> None:
    distribution = kf.ModelParallel(programs.TENSOR, rules=programs.RULES, strict=True)
    with distribution.scope(), warnings.catch_warnings():
        warnings.simplefilter("error", LayoutFallback)
        model = programs.build(hidden=18)
        with pytest.raises(kf.LayoutError) as error:
            programs.fit(model)
    text = str(error.value)
    assert text.startswith("3 layout problems in model 'model'")
    assert text.count("(strict=True)") == 3
    assert "model/hidden/kernel: dim 1 of 18 does not divide" in text


def test_several_axes_on_one_dim() -> None:
    rules = {"hidden/kernel": ("S(1)", "S(1)")}
    with kf.ModelParallel(programs.HYBRID, rules=rules, batch_axes=()).scope():
        model = programs.build()
        programs.fit(model, epochs=1)
    assert programs.held(programs.variable(model, "hidden/kernel")) == dict.fromkeys(range(4), (8, 4))
