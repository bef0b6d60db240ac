"""Rules: first match wins by search, and LayoutMaps match as Keras matches."""

from __future__ import annotations

import warnings

import keras
import pytest

import keras_flow as kf
from keras_flow.distributions.rules import LayoutMapRules, PatternRules, takers
from keras_flow.sbp import of_axes
from tests.distributions import programs

S0, S1 = kf.sbp.split(0), kf.sbp.split(1)


def key_of(rules: PatternRules | LayoutMapRules, path: str) -> str | None:
    match = rules.match(path)
    return match.key if match else None


def test_patterns_are_searched_and_the_first_match_wins() -> None:
    rules = PatternRules({"attention.*kernel": "S(1)", "kernel$": "S(0)", "kernel": "B"})
    assert key_of(rules, "block/attention/query/kernel") == "attention.*kernel"
    assert key_of(rules, "block/up/kernel") == "kernel$"
    assert key_of(rules, "block/kernel_scale") == "kernel"
    assert key_of(rules, "block/up/bias") is None
    assert rules.keys == ("attention.*kernel", "kernel$", "kernel")


def test_first_match_wins_on_a_model() -> None:
    distribution = programs.tensor_parallel(**{"hidden/kernel": "S(1)", "kernel": "S(0)"})
    with distribution.scope():
        model = programs.build()
    placed = {v.path: kf.layout_of(v) for v in model.variables if "seed" not in v.path}
    assert str(placed["model/hidden/kernel"]) == "S(1) (from rule 'hidden/kernel')"
    assert str(placed["model/logits/kernel"]) == "S(0) (from rule 'kernel')"
    with programs.tensor_parallel(**{r"hidd\w+/kernel": "S(1)"}).scope():
        other = programs.build()
    # as it stands in the program, so that it can be searched there
    assert r"rule 'hidd\w+/kernel'" in str(kf.layout_of(programs.variable(other, "hidden/kernel")))
    assert str(placed["model/hidden/bias"]) == "B (from default)"
    assert programs.held(programs.variable(model, "hidden/kernel")) == dict.fromkeys(range(4), (8, 4))
    assert programs.held(programs.variable(model, "logits/kernel")) == dict.fromkeys(range(4), (4, 4))


@pytest.mark.parametrize("rules", [["kernel"], "kernel", 3])
def test_rules_are_a_mapping(rules: object) -> None:
    with pytest.raises(
        kf.FlowError, match=r"rules must be a mapping of regular expressions to sbp or a .*LayoutMap, got"
    ):
        kf.ModelParallel(programs.TENSOR, rules=rules)  # type: ignore[arg-type]


def test_a_key_that_is_no_regular_expression() -> None:
    with pytest.raises(kf.FlowError, match=r"activations: '\(' is not a regular expression: missing \)"):
        kf.ModelParallel(programs.TENSOR, activations={"(": "B"})
    with pytest.raises(kf.FlowError, match=r"rules: 3 is not a regular expression"):
        kf.ModelParallel(programs.TENSOR, rules={3: "B"})  # type: ignore[dict-item]


def layout_map(mesh: object = None, **axes: tuple) -> keras.distribution.LayoutMap:
    out = keras.distribution.LayoutMap(mesh)
    for key, value in axes.items():
        out[key] = value
    return out


def test_layout_map_matches_as_keras_does() -> None:
    keys = {
        "hidden/kernel": (None, "model"),
        ".*hidden.*kernel": ("model", None),
        "logits": ("model",),
        ".*a": (),
        "b.*": (),
    }
    rules = LayoutMapRules(layout_map(**keys))
    assert key_of(rules, "hidden/kernel") == "hidden/kernel", "an exact key wins"
    assert key_of(rules, "top/hidden/kernel") == ".*hidden.*kernel", "else one full match"
    assert key_of(rules, "logits/kernel") is None, "the whole path must match"
    with pytest.raises(
        kf.FlowError, match=r"'b/a' matches several keys of the LayoutMap: \['\.\*a', 'b\.\*'\]; let each path"
    ):
        rules.match("b/a")


def test_a_layout_map_may_be_filled_later() -> None:
    filled = layout_map()
    rules = LayoutMapRules(filled)
    filled["late/kernel"] = (None, "model")
    assert rules.keys == ("late/kernel",)
    assert key_of(rules, "late/kernel") == "late/kernel"


def test_axes_by_dimension_become_sbp_by_axis() -> None:
    assert of_axes((None, "model"), "k") == {"model": S1}
    assert of_axes((("data", "model"), None), "k") == {"data": S0, "model": S0}
    assert of_axes((None, None), "k") == {}
    with pytest.raises(kf.FlowError, match="k uses axis 'model' on dimensions 0 and 2: an axis can split one dim"):
        of_axes(("model", None, "model"), "k")


def test_layout_map_without_mesh_and_mixed_keys() -> None:
    """One map for variables and, with the ending /output, for layer outputs, as KerasHub's get_layout_map gives."""
    rules = layout_map(
        **{
            "model/hidden/kernel": (None, "model"),
            ".*logits/kernel": ("model", None),
            ".*hidden/output": (None, "model"),
        }
    )
    distribution = kf.ModelParallel(programs.HYBRID, rules=rules)
    reference = programs.build()
    single = programs.fit(reference)
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    with distribution.scope():
        model = programs.build()
        losses = programs.fit(model)
    assert losses == pytest.approx(single, rel=1e-5)
    programs.same(model, reference)
    assert programs.held(programs.variable(model, "hidden/kernel")) == dict.fromkeys(range(4), (8, 8))


def test_placement_from_the_mesh_of_the_map() -> None:
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], [f"cpu:{rank}" for rank in (3, 2, 1, 0)])
    rules = layout_map(mesh, **{"model/hidden/kernel": (None, "model")})
    distribution = kf.ModelParallel(rules=rules, batch_axes="batch")
    assert distribution.placement == kf.Placement([[3, 2], [1, 0]], ("batch", "model"), "cpu")
    assert distribution.num_model_replicas == 2
    with distribution.scope():
        model = programs.build()
    kernel = programs.variable(model, "hidden/kernel")
    assert kf.layout_of(kernel).layout.local_slices(3) == (slice(0, 8), slice(0, 8))


def test_rows_are_split_over_the_first_axis_of_a_map_as_in_keras() -> None:
    """KerasHub's maps name the axes "batch" and "model"; the default `batch_axes="data"` found neither of them."""
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], [f"cpu:{rank}" for rank in range(4)])
    rules = layout_map(mesh, **{".*hidden/kernel": ("model", "batch")})
    theirs = keras.distribution.ModelParallel(layout_map=rules)
    placement = kf.Placement([[0, 1], [2, 3]], ("batch", "model"))
    for distribution in (
        kf.ModelParallel(theirs),
        kf.ModelParallel(rules=rules),
        kf.ModelParallel(placement, rules=lambda mesh: rules),
    ):
        assert distribution.batch_axes == (theirs.batch_dim_name,) == ("batch",)
    line = keras.distribution.DeviceMesh((4,), ["model"], [f"cpu:{rank}" for rank in range(4)])
    assert kf.ModelParallel(rules=layout_map(line, k=("model",))).batch_axes == ()
    assert kf.ModelParallel(placement, rules={"k": "B,S(0)"}).batch_axes == ()


def test_map_and_placement_must_agree() -> None:
    mesh = keras.distribution.DeviceMesh((4,), ["tensor"], [f"cpu:{rank}" for rank in range(4)])
    with pytest.raises(
        kf.FlowError, match=r"LayoutMap's mesh has axes \['tensor'\], the placement \['model'\]: their names"
    ):
        kf.ModelParallel(programs.TENSOR, rules=layout_map(mesh, **{"k": ("tensor",)}))


@pytest.mark.parametrize("rules", [None, {}, "map"])
def test_no_placement(rules: object) -> None:
    given = layout_map(k=("model",)) if rules == "map" else rules
    with pytest.raises(kf.FlowError, match=r"needs a placement: give one, for example kf.Placement"):
        kf.ModelParallel(rules=given)  # type: ignore[arg-type]


def test_takers_are_the_rules_that_match_before() -> None:
    paths = ["a/hidden/kernel", "a/hidden/bias", "a/logits/kernel", "a/alone"]
    rules = PatternRules({"hidden": "B", "kernel": "B", "kern.*l$": "B"})
    assert takers(rules, "kern.*l$", paths) == {"a/hidden/kernel": "hidden", "a/logits/kernel": "kernel"}
    assert takers(rules, "kernel", paths) == {"a/hidden/kernel": "hidden"}, "it has the other one itself"
    assert takers(rules, "hidden", paths) == {}
    both = LayoutMapRules(layout_map(**{"a/alone": (), ".*alone": (), ".*bias": (), "a/hidden.*": ()}))
    assert takers(both, ".*alone", paths) == {"a/alone": "a/alone"}
    assert takers(both, ".*bias", paths) == {}, "two keys that match alike are a problem of their own"


def test_an_axis_over_which_nothing_is_split_is_said_once() -> None:
    with kf.ModelParallel(programs.TENSOR).scope():
        model = programs.build()
    x, y = programs.rows(8)
    with pytest.warns(
        kf.FlowWarning, match="no rule splits a weight over axis 'model', so its 4 ranks compute the same"
    ):
        model.fit(x, y, batch_size=8, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(x, y, batch_size=8, verbose=0)
        with kf.ModelParallel(programs.TENSOR, activations={"hidden": "S(1)"}).scope():
            other = programs.build()
        other.fit(x, y, batch_size=8, verbose=0)
