"""The user's file: what it must define, and what is said where it does not."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow import user_file
from tests.launch import programs as files

TINY = Path(__file__).parent / "compare" / "tiny.py"


@pytest.mark.parametrize(
    ("text", "layout", "refused"),
    [
        ("", "2y2", True),
        ("", "2x2", False),
        ("def distributions(): return {}", "2y2", False),
        ("from mine import *", "2y2", False),
        ("distributions = dict", "2y2", False),
        ("x = (", "1", True),
        ("def build_model(): ...", "1", True),
    ],
)
def test_layouts_are_checked_before_the_file_is_run(tmp_path: Path, text: str, layout: str, refused: bool) -> None:
    both = "def build_model(): ...\ndef load_data(): ...\n"
    path = files.write(tmp_path, text if "build_model" in text else both + text)
    if not refused:
        return user_file.check_file(path, [layout])
    with pytest.raises(
        kf.FlowError, match=r"unknown layout '2y2'|program.py is not a Python file: line 3|defines no load_data"
    ):
        user_file.check_file(path, [layout])


@pytest.fixture(scope="module")
def tiny() -> ModuleType:
    kf.init(4)
    return user_file.load(TINY)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("", "defines no build_model and no load_data"),
        ("def build_model(): pass", "defines no load_data"),
        ("build_model = 3\ndef load_data(): pass", "defines no build_model"),
    ],
)
def test_missing_functions(tmp_path: Path, text: str, missing: str) -> None:
    path = files.write(tmp_path, text, f"incomplete_{len(text)}.py")
    with pytest.raises(kf.FlowError) as error:
        user_file.load(path)
    assert missing in str(error.value)
    assert "build_model(), which returns a compiled model, and load_data(), which returns (x, y)" in str(error.value)


def module(**functions: object) -> ModuleType:
    out = ModuleType("given")
    out.__file__ = "given.py"
    out.__dict__.update(functions)
    return out


def test_a_model_that_is_none_or_not_compiled(tiny: ModuleType) -> None:
    import keras

    with pytest.raises(kf.FlowError, match=r"build_model\(\) must return a compiled keras.Model, got NoneType"):
        user_file.build_model(module(build_model=lambda: None))
    with pytest.raises(kf.FlowError, match=r"returned a model that is not compiled: call model.compile"):
        user_file.build_model(module(build_model=lambda: keras.Sequential([keras.layers.Dense(1)])))
    assert user_file.build_model(tiny).name == "tiny"


def test_a_layer_that_fails_is_told_without_the_colours_of_keras() -> None:
    class Wrong(keras.layers.Layer):
        def call(self, x: object) -> object:
            return keras.ops.matmul(x, keras.ops.ones((7, 7)))

    def build() -> keras.Model:
        return keras.Sequential([keras.Input((16,)), Wrong()])

    with pytest.raises(kf.FlowError, match=r"^build_model\(\) fails \(test_user_file.py, line \d+\): ") as error:
        user_file.build_model(module(build_model=build), compiled=False)
    assert "Could not automatically infer" in str(error.value) and "\x1b" not in str(error.value)


def test_a_subclassed_model_has_its_weights_before_it_is_trained() -> None:
    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(4, name="head")

        def call(self, x: object) -> object:
            return self.head(x)

    def build() -> keras.Model:
        model = Net()
        model.compile("sgd", "mse")
        return model

    model = user_file.built_model(module(build_model=build), lambda: np.ones((3, 8), "float32"))
    assert [weight.shape for weight in model.weights] == [(8, 4), (4,)]


def test_a_file_with_a_byte_order_mark_is_python(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def build_model(): ...\ndef load_data(): ...\n", encoding="utf-8-sig")
    user_file.check_file(file, ("dp4",), "a comparison")
    assert not user_file.may_split_weights(file)
    with pytest.raises(kf.FlowError, match=r"mine.keras is not a Python file: its name does not end in .py"):
        user_file.check_file(file.with_suffix(".keras"), ("dp4",))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (None, r"load_data\(\) must return \(x, y\) or \(x, y, x_val, y_val\), got NoneType"),
        ((1,), r"must return \(x, y\)"),
        ((np.ones(3), np.ones(3), np.ones(3)), r"must return \(x, y\)"),
        ((np.ones((0, 2)), np.ones(0)), r"load_data\(\) returned no rows"),
        ((np.ones((3, 2)), np.ones(2)), r"arrays of different lengths: \[2, 3\]"),
        ((np.ones(3), np.ones(3), np.ones(2), np.ones(1)), r"arrays of different lengths: \[1, 2\]"),
    ],
)
def test_wrong_data(values: object, text: str) -> None:
    with pytest.raises(kf.FlowError, match=text):
        user_file.load_data(module(load_data=lambda: values))


def test_data() -> None:
    x, y = {"a": np.ones((3, 2)), "b": np.ones(3)}, np.ones(3)
    data = user_file.load_data(module(load_data=lambda: (x, y)))
    assert (data.x, data.y, data.x_val, data.y_val) == (x, y, None, None)
    assert user_file.load_data(module(load_data=lambda: (x, None))).y is None, "an autoencoder has no targets"


def test_names_of_layouts(tiny: ModuleType) -> None:
    assert user_file.distribution_maker(tiny, "1") is None
    made = {
        name: user_file.distribution_maker(tiny, name)()
        for name in ("dp4", "tp2", "2x2", "pp2", "pp2xdp2", "pp2xtp2-m4", "pp2-zbv-m6", "scaled")
    }  # type: ignore[misc]
    assert {name: (one.placement.hierarchy, one.placement.axis_names) for name, one in made.items()} == {
        "dp4": ((4,), ("data",)),
        "tp2": ((2,), ("model",)),
        "2x2": ((2, 2), ("data", "model")),
        "pp2": ((2,), ("pipe",)),
        "pp2xdp2": ((2, 2), ("pipe", "data")),
        "pp2xtp2-m4": ((2, 2), ("pipe", "model")),
        "pp2-zbv-m6": ((2,), ("pipe",)),
        "scaled": ((2,), ("data",)),
    }
    assert type(made["scaled"]).__name__ == "Scaled", "distributions() wins"
    with pytest.raises(
        kf.FlowError,
        match=r"unknown layout 'qq4': it is 1, .*, dpNz1 or AxBz3 \(zero=1 to 3\), .*, or one of distributions\(\): ",
    ):
        user_file.distribution_maker(tiny, "qq4")


def test_names_of_zero_and_remat(tiny: ModuleType) -> None:
    names = ("dp4", "dp4z2", "dp4r", "dp4z3r", "tp2r", "2x2z1", "2x2r", "2x2z3r")
    made = [user_file.distribution_maker(tiny, name)() for name in names]  # type: ignore[misc]
    assert [one.zero_stage for one in made] == [0, 2, 0, 3, 0, 1, 0, 3]
    layers = keras.layers
    block = [keras.Sequential([layers.Input((4,)), layers.Dense(4)]) for _ in range(2)]
    model = keras.Sequential([layers.Input((4,)), *block])
    assert [len(one.blocks_of(model)) for one in made] == [0, 0, 2, 2, 2, 0, 2, 2]
    pipelines = [user_file.distribution_maker(tiny, name)() for name in ("pp2", "pp2r", "pp2xdp2r-gpipe-m4")]  # type: ignore[misc]
    assert [one._repeats_stages for one in pipelines] == [False, True, True]
    assert [user_file.ranks_of(name) for name in names] == [4, 4, 4, 4, 2, 4, 4, 4]


def test_options_of_a_pipeline_need_one() -> None:
    schedule = user_file.with_schedule
    assert schedule(("dp4", "pp2r"), "zbv", 8) == ("dp4", "pp2r-zbv-m8")
    assert schedule(("pp2-m8",), "zbv", None) == ("pp2-zbv-m8",) == schedule(("pp2-zbv",), None, 8)
    assert schedule(("pp2-zbv", "dp2"), None, None) == ("pp2-zbv", "dp2")
    for layouts, *options, words in (
        (("dp4", "mine"), "zbv", None, "--schedule is of a pipeline, and no layout that was named is one"),
        (("dp4",), None, 8, "--microbatches is of a pipeline"),
        (("pp2",), "zb1p1", None, "--schedule zb1p1: legal are gpipe, 1f1b, interleaved, zb1p, zbv, auto"),
        (("pp2-gpipe",), "zbv", None, "layout 'pp2-gpipe' says in its name what --schedule says too"),
    ):
        with pytest.raises(kf.FlowError, match=words):
            schedule(layouts, *options)


def test_ranks_that_no_layout_has_are_refused() -> None:
    for layouts in (("1", "dp4"), ("dp4", "2x2")):
        with pytest.raises(kf.FlowError, match="us was asked for layout 'dp4' on 8 ranks; its name says 4: leave"):
            user_file.refuse_other_ranks(layouts, 8, "us")
    for layouts in (("1", "dp8"), ("dp4", "mine"), ("1",), ()):
        user_file.refuse_other_ranks(layouts, 8, "us")


def test_the_layout_that_was_meant(tiny: ModuleType) -> None:
    for name, meant in (("dp-4", "dp4"), ("2*2", "2x2"), ("TP4", "tp4"), ("pp2_zbv", "pp2-zbv"), ("scaledd", "scaled")):
        with pytest.raises(kf.FlowError, match=f"unknown layout {re.escape(repr(name))}: did you mean '{meant}'"):
            user_file.distribution_maker(tiny, name)


def test_without_rules_a_skeleton_of_the_models_own_paths(tiny: ModuleType) -> None:
    bare = module(build_model=tiny.build_model)
    for layout in ("tp4", "2x2", "pp2xtp2"):
        with pytest.raises(kf.FlowError) as error:
            user_file.distribution_maker(bare, layout)
        text = str(error.value)
        assert f"layout '{layout}' splits variables, and given.py has neither rules() nor distributions()" in text
    scope: dict = {}
    exec(text.partition("\n\n")[2], scope)  # it can be pasted
    rules = scope["rules"]()
    distribution = kf.ModelParallel(kf.Placement(range(2), axis_names=("model",)), rules=rules)
    columns, rows = {"model": kf.sbp.split(1)}, {"model": kf.sbp.split(0)}
    assert list(rules.values()) == [columns, rows, rows]
    with distribution.scope():
        model = tiny.build_model()
    distribution.check(model)
    assert kf.layout_of(model.variables[0]).layout.nd_sbp == (kf.sbp.split(1),)


def test_a_file_that_ends_the_program_is_told(tmp_path: Path) -> None:
    path = files.write(tmp_path, "import sys\nsys.exit(3)\n", "ends.py")
    with pytest.raises(
        kf.FlowError, match=r"ends.py ends the program as it is imported \(ends.py, line 2\): a compari"
    ):
        user_file.load(path)


def test_rules_that_cannot_be_called_are_told(tmp_path: Path) -> None:
    path = files.write(tmp_path, "def rules(mesh): ...\ndef build_model(): ...\ndef load_data(): ...\n", "asks.py")
    make = user_file.distribution_maker(user_file.load(path), "2x2")
    assert make is not None
    with pytest.raises(kf.FlowError, match=r"^rules\(\) fails: TypeError: rules\(\) missing 1 required positional"):
        make()


@pytest.mark.parametrize(("name", "call"), [("build_model", user_file.build_model), ("load_data", user_file.load_data)])
def test_a_function_that_fails_is_told_by_its_line(name: str, call: object, tmp_path: Path) -> None:
    path = files.write(
        tmp_path, f"import numpy as np\ndef {name}():\n    return np.zeros(6).reshape(4, 2)\n", f"{name}.py"
    )
    module = user_file.load(path, needs=(name,))
    with pytest.raises(
        kf.FlowError, match=rf"^{name}\(\) fails \({name}.py, line 3\): ValueError: cannot reshape array"
    ) as error:
        call(module)  # type: ignore[operator]
    assert isinstance(error.value.__cause__, ValueError)
