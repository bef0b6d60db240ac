"""Bad input: each one clear error, naming what was found and what to do; and odd input that works."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.backends.active import backend
from keras_flow.current.world import World
from tests.distributions import programs


def problem(spec: object, key: str = "hidden/kernel") -> str:
    """What fit says of one rule."""
    with programs.tensor_parallel(**{key: spec}).scope():
        model = programs.build()
        with pytest.raises(kf.LayoutError) as error:
            programs.fit(model)
    return str(error.value)


def test_more_ranks_than_devices() -> None:
    with pytest.raises(kf.FlowError) as error:
        kf.DataParallel(kf.Placement(range(8)))
    text = str(error.value)
    assert "the placement needs ranks up to 7, jax has 4 (ranks 0 to 3)" in text
    assert (
        "kf.run(main, devices=8) or `keras-flow launch --devices 8 script.py`, or call kf.init(devices=8) before"
        in text
    )


def test_processes_without_a_rank_of_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of two processes sees it; `tests/parity/test_processes.py` has jobs."""
    two = World(size=4, type="cpu", local_ranks=(0, 1), process_index=0, process_count=2)
    monkeypatch.setattr(backend(), "world", lambda: two)
    with pytest.raises(kf.FlowError) as error:
        kf.DataParallel(kf.Placement([3, 2]))
    assert str(error.value) == (
        "no rank of the placement [3, 2] is of the process that drives rank 0. On jax each process of a job takes part "
        "in every step: name a rank of each, or start one process, "
        "`keras-flow launch --nproc_per_node 1 --devices_per_proc 4 script.py`"
    )


def test_duplicate_ranks() -> None:
    with pytest.raises(kf.FlowError, match=r"each rank may stand once in a placement; \[1\] stand more than once"):
        kf.DataParallel(kf.Placement([0, 1, 1]))


def test_wrong_device_type() -> None:
    with pytest.raises(
        kf.FlowError, match="the placement is of type 'gpu', this job runs on 'cpu' devices: leave the type"
    ):
        kf.DataParallel(kf.Placement(range(4), type="gpu"))


def test_unknown_strategy_statistics_and_axes() -> None:
    with pytest.raises(
        kf.FlowError, match="strategy='mirrored' is not one of the jax backend's: it has none by name; leave"
    ):
        kf.DataParallel(strategy="mirrored")
    with pytest.raises(kf.FlowError, match='batch_statistics is "global" or "replica", got \'local\''):
        kf.DataParallel(batch_statistics="local")
    with pytest.raises(kf.FlowError, match=r"batch_axes names \['rows'\], the placement's axes are \['model'\]"):
        kf.ModelParallel(programs.TENSOR, batch_axes="rows")
    with pytest.raises(kf.FlowError, match=r"batch_axes names \['b'\]"):
        kf.ModelParallel(programs.HYBRID, batch_axes=("data", "b"))


def test_a_rule_that_matches_nothing_names_the_nearest_paths() -> None:
    text = problem("S(1)", "hiden/kernel")
    assert text.startswith("1 layout problem in model 'model':\n")
    assert "rule 'hiden/kernel' matched no variable; the nearest path is 'model/hidden/kernel'\n" in text
    assert "rules are regular expressions searched in them, first match wins" in text


def test_a_rule_like_no_path_shows_some_as_examples() -> None:
    text = problem("S(1)", "conv2d/kernel")
    assert "rule 'conv2d/kernel' matched no variable; no path is like it; there are, for example, 'model/" in text


def test_a_rule_that_an_earlier_one_shadows_names_it() -> None:
    def said(rules: object, **options: object) -> str:
        with kf.ModelParallel(programs.TENSOR, rules=rules, **options).scope():  # type: ignore[arg-type]
            model = programs.build()
            with pytest.raises(kf.LayoutError) as error:
                programs.fit(model)
        text = str(error.value)
        assert "matched no variable" not in text
        return text

    text = said({"kernel": "S(1)", "bias": "B", "hidden/": "S(0)"})
    assert (
        "rule 'hidden/' is never used: rule 'kernel' comes before it and takes 'model/hidden/kernel' (and 1 more that "
        "it matches); the first match wins: put it earlier, or leave it out"
    ) in text
    text = said({"kernel": "S(1)"}, activations={"hid": "B", "hidden": "B"})
    assert "rule 'hidden' is never used: rule 'hid' comes before it and takes 'model/hidden'; the first" in text
    keys = keras.distribution.LayoutMap(None)
    keys["model/hidden/kernel"], keys[".*hidden/k.*"] = (None, "model"), ("model", None)
    text = said(keys)
    assert "rule '.*hidden/k.*' is never used: rule 'model/hidden/kernel' comes before it and takes" in text
    assert "a key that is the exact path wins: leave it out" in text


def test_keys_of_a_layout_map_that_match_nothing_are_said_once_beside_keys_that_match() -> None:
    keys = keras.distribution.LayoutMap(None)
    keys["model/hidden/kernel"], keys["model/experts.*/kernel"] = (None, "model"), ("model", None)
    with kf.ModelParallel(programs.TENSOR, rules=keys).scope():
        model = programs.build()
        with pytest.warns(kf.FlowWarning, match=r"keys \['model/experts\.\*/kernel'\] match no variable of the model"):
            programs.fit(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            programs.fit(model)
    assert kf.layout_of(model.get_layer("hidden").kernel).layout.nd_sbp == (kf.sbp.split(1),)
    keys["logits/kernel"] = (None, "model")  # the end of a path: what a rule of keras_flow would be
    with kf.ModelParallel(programs.TENSOR, rules=keys).scope():
        model = programs.build()
        with pytest.warns(kf.FlowWarning, match=r"match a path whole, so write '\.\*logits/kernel' \(strict"):
            programs.fit(model)
    alone = keras.distribution.LayoutMap(None)
    alone["model/experts.*/kernel"] = ("model", None)
    for rules, strict in ((keys, True), (alone, False)):
        with kf.ModelParallel(programs.TENSOR, rules=rules, strict=strict).scope():
            model = programs.build()
            with pytest.raises(kf.LayoutError, match=r"experts.*matched no variable"):
                programs.fit(model)


def test_a_function_that_makes_a_layout_map() -> None:
    def get_layout_map(mesh: keras.distribution.DeviceMesh, name: str = "model") -> keras.distribution.LayoutMap:
        if name not in mesh.axis_names:
            raise ValueError(f"{name} is not found")
        keys = keras.distribution.LayoutMap(mesh)
        keys[".*hidden/kernel"] = (None, name)
        return keys

    with kf.ModelParallel(programs.TENSOR, rules=get_layout_map).scope():
        model = programs.build()
        programs.fit(model)
    assert kf.layout_of(model.get_layer("hidden").kernel).layout.nd_sbp == (kf.sbp.split(1),)
    with pytest.raises(kf.FlowError, match=r"get_layout_map makes a LayoutMap for a placement, and none was given"):
        kf.ModelParallel(rules=get_layout_map)
    other = kf.Placement(range(4), axis_names=("tensor",))
    with pytest.raises(
        kf.FlowError, match=r"placement with the axes \['tensor'\]: ValueError: model is not found; name"
    ):
        kf.ModelParallel(other, rules=get_layout_map)
    with pytest.raises(kf.FlowError, match=r"must return a keras.distribution.LayoutMap, got NoneType"):
        kf.ModelParallel(programs.TENSOR, rules=lambda mesh: None)  # type: ignore[arg-type, return-value]


def test_a_rule_of_wrong_rank() -> None:
    text = problem("S(2)")
    assert "model/hidden/kernel: rule 'hidden/kernel': split(2) on axis 'model'" in text
    assert (
        "needs a dimension that the shape [8, 16] does not have: legal are dims 0 to 1 (from the end -2 to -1)" in text
    )
    assert "has 2 sbp, the placement has 1 axes ['model']" in problem("S(0),B")


def test_an_unknown_axis() -> None:
    text = problem({"rows": kf.sbp.split(0)})
    assert "model/hidden/kernel: rule 'hidden/kernel': no axis 'rows': the placement's axes are ['model']" in text


def test_partial_sum() -> None:
    assert "rule 'hidden/kernel' asks for partial_sum; a variable is split or broadcast" in problem("P")


def test_text_that_is_no_sbp() -> None:
    assert "cannot read 'columns' in the nd_sbp 'columns': each part is S(dim), B or P" in problem("columns")


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        (
            ("model", "model"),
            "LayoutMap key 'model/hidden/kernel' uses axis 'model' on dimensions 0 and 1: an axis can split one",
        ),
        ((None, "rows"), "no axis 'rows'"),
        ((None, None, "model"), "split(2) on axis 'model'"),
    ],
)
def test_layout_map(axes: tuple, text: str) -> None:
    rules = keras.distribution.LayoutMap(None)
    rules["model/hidden/kernel"] = axes
    with kf.ModelParallel(programs.TENSOR, rules=rules).scope():
        model = programs.build()
        with pytest.raises(kf.LayoutError) as error:
            programs.fit(model)
    assert text in str(error.value)


def test_a_path_with_several_keys_of_a_layout_map() -> None:
    rules = keras.distribution.LayoutMap(None)
    rules[".*kernel"] = (None, "model")
    rules[".*hidden.*"] = (None, "model")
    with kf.ModelParallel(programs.TENSOR, rules=rules).scope():
        model = programs.build()
        with pytest.raises(kf.LayoutError, match=r"hidden/kernel' matches several keys of the LayoutMap"):
            programs.fit(model)


def test_activations() -> None:
    for spec, text in (({"rows": "S(0)"}, "no axis 'rows'"), ("S(0),B", "has 2 sbp, the placement has 1 axes")):
        keras.utils.clear_session()
        with kf.ModelParallel(programs.TENSOR, activations={"hidden": spec}).scope():
            with pytest.raises(kf.FlowError) as error:
                programs.fit(programs.build())
        assert text in str(error.value)
        assert "hidden" in str(error.value)
    keras.utils.clear_session()
    with kf.ModelParallel(programs.TENSOR, activations={"hidden": "S(2)"}).scope():
        with pytest.raises(kf.LayoutError, match=r"activations: output of '.*hidden': split\(2\)"):
            programs.fit(programs.build())
        with pytest.raises(kf.LayoutError, match=r"1 layout problem .*\n.* output of '.*hidden': split\(2\)"):
            programs.build().predict(programs.rows()[0], verbose=0)
    keras.utils.clear_session()
    with kf.ModelParallel(programs.TENSOR, activations={"hiden": "S(1)"}).scope():
        with pytest.raises(kf.LayoutError, match="activations 'hiden' matched no layer; the nearest path is '"):
            programs.fit(programs.build())


def test_all_problems_of_a_model_stand_in_one_error_and_come_again() -> None:
    rules = {
        "hidden/kernel": "S(2)",
        "hidden/bias": {"rows": kf.sbp.split(0)},
        "logits/kernel": "P",
        "embedding": "S(0)",
    }
    with kf.ModelParallel(programs.TENSOR, rules=rules).scope() as distribution:  # type: ignore[arg-type]
        model = programs.build()
        with pytest.raises(kf.LayoutError) as error:
            distribution.check(model)
        text = str(error.value)
        assert text.startswith("4 layout problems in model 'model':")
        for path in ("model/hidden/kernel", "model/hidden/bias", "model/logits/kernel", "rule 'embedding'"):
            assert text.count(f"\n  {path}") == 1
        for use in (programs.fit, lambda model: model.predict(programs.rows()[0], verbose=0)):
            with pytest.raises(kf.LayoutError) as again:
                use(model)
            assert str(again.value) == text, "never a run without the rules"


def test_a_model_built_by_its_first_batch_is_checked_before_it_trains() -> None:
    with programs.tensor_parallel(**{"hiden": "S(1)"}).scope():
        model = keras.Sequential([keras.layers.Dense(8, name="hidden"), keras.layers.Dense(4)])
        programs.compile(model)
        with pytest.raises(kf.LayoutError, match=r"rule 'hiden' matched no variable; the nearest paths are '.*hidden/"):
            programs.fit(model)


@pytest.mark.parametrize("make", [lambda: kf.DataParallel(programs.DATA), programs.hybrid])
def test_data_shorter_than_a_batch_and_than_the_ranks(make: object) -> None:
    reference = programs.build()
    single = programs.fit(reference, 3)
    evaluated = reference.evaluate(*programs.rows(1), verbose=0)
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    with make().scope():  # type: ignore[operator]
        model = programs.build()
        assert programs.fit(model, 3) == pytest.approx(single, rel=1e-5)
        assert model.evaluate(*programs.rows(1), verbose=0) == pytest.approx(evaluated, rel=1e-5)
        assert model.predict(programs.rows(1)[0], verbose=0).shape == (1, 4)
    programs.same(model, reference)


def test_no_data() -> None:
    x, y = programs.rows(0)
    with kf.DataParallel(programs.DATA).scope():
        model = programs.build()
        for use in (
            lambda: model.fit(x, y, verbose=0),
            lambda: model.fit(x=x, y=y, verbose=0),
            lambda: model.evaluate(x, y, verbose=0),
            lambda: model.predict(x, verbose=0),
            lambda: model.predict([x], verbose=0),
            lambda: model.predict({"x": x}, verbose=0),
            lambda: model.train_on_batch(x, y),
        ):
            with pytest.raises(kf.FlowError, match=r"was given no data: x has shape \[0, 8\]; give at least one row"):
                use()
        with pytest.raises(kf.FlowError, match=r"predict was given no data: x is \[\]; give at least one row"):
            model.predict([], verbose=0)
        assert programs.fit(model)[0] > 0, "usable"


def test_nan_in_the_rows_of_one_rank_stops_as_on_one_device() -> None:
    x, y = programs.rows()
    x[16 + 9] = np.nan  # step 2, rank 2 of 4

    def run(model: keras.Model) -> tuple[list[float], int]:
        options = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, callbacks=[keras.callbacks.TerminateOnNaN()], **options).history["loss"]
        return history, int(model.optimizer.iterations.numpy())

    single = run(programs.build())
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    with kf.DataParallel(programs.DATA).scope():
        distributed = run(programs.build())
    assert np.isnan(single[0][-1])
    np.testing.assert_allclose(distributed[0], single[0], rtol=1e-5)
    assert distributed[1] == single[1] == 2


def test_strings() -> None:
    with kf.DataParallel(programs.DATA).scope():
        model = programs.build()
        with pytest.raises(kf.FlowError, match=r"model 'model' was given strings \(shape \[4, 8\]\)"):
            model.predict_on_batch(np.full((4, 8), "a"))


def test_a_problem_is_forgotten_with_its_rule() -> None:
    """In a notebook a user mends a cell and runs it again, under the same distribution."""
    x, y = np.ones((8, 8), "float32"), np.ones((8, 4), "float32")
    distribution = kf.ModelParallel(programs.TENSOR, activations={"act_": {"model": kf.sbp.split(2)}})

    def cell(is_marked: bool, dims: int) -> None:
        with distribution.scope():
            dense = keras.layers.Dense(4, name="d")
            if is_marked:
                kf.shard(dense, kernel="P")
            inputs = keras.Input((8,))
            outputs = keras.layers.Reshape((4, 1, 1, 1)[: dims - 1])(dense(inputs))
            outputs = keras.layers.Activation("relu", name=f"act_{dims}")(outputs)
            model = keras.Model(inputs, keras.layers.Flatten()(outputs))
            model.compile("sgd", "mse")
        model.fit(x, y, batch_size=8, verbose=0)

    with pytest.raises(kf.LayoutError, match=r"d/kernel: kf\.shard"):
        cell(True, 5)
    with pytest.raises(kf.LayoutError, match="output of 'act_2'"):
        cell(False, 2)
    cell(False, 5)
