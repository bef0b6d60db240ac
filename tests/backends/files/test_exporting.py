"""A model is exported as one device would write it, in every format, from every layout and number of processes."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.launch import programs

pytestmark = pytest.mark.timeout(300)

ENGINES = ("jax", "tensorflow", "torch")
ENDINGS = {"tf_saved_model": "", "litert": ".tflite", "onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}
#: formats that an engine has with the packages that tests need
SURE = {"jax": {"tf_saved_model"}, "tensorflow": {"tf_saved_model", "litert"}, "torch": {"torch"}}
#: formats that it has where packages of theirs are installed
BY_PACKAGES = {"jax": {"onnx"}, "tensorflow": {"onnx", "openvino"}, "torch": {"litert", "onnx", "openvino"}}


def scope(layout: str) -> AbstractContextManager[Any]:
    """Enter a layout over all ranks."""
    import numpy as np

    import keras_flow as kf

    if layout == "dp":
        return kf.DataParallel().scope()
    ranks = np.arange(kf.env.get_world_size())
    mesh = ranks.reshape(-1, 2) if layout == "2x2" else ranks[None]
    rules = {"h/kernel$": {"model": kf.sbp.split(1)}, "o/kernel$": {"model": kf.sbp.split(0)}}
    return kf.ModelParallel(kf.Placement(mesh, axis_names=("data", "model")), rules=rules).scope()


def trained() -> Any:
    import keras
    import numpy as np

    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="h"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(4, name="o"),
        ]
    )
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
    model.fit(x, x[:, :4], batch_size=5, verbose=0)
    return model, x


def exported(layouts: tuple[str, ...], formats: tuple[str, ...]) -> dict[str, str]:
    """On each rank: export a trained model in all formats; process 0 loads and predicts. Training goes on afterwards.

    Returns:
        What became of each format: "equal", or the one line that says what is missing.
    """
    import keras
    import numpy as np

    import keras_flow as kf
    from keras_flow.backends.active import backend

    def together(value: Any) -> Any:
        return backend().agree_on(dict.fromkeys(kf.env.local_ranks(), value))[0]

    def export(model: Any, format: str, path: Path) -> str:
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                model.export(str(path), format=format, verbose=True)
            assert "keras-flow-writes" not in printed.getvalue(), "the path of the meantime"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            assert not list(path.parent.iterdir()), "half of a file is left"
            return said
        assert (path.parent / path.name).exists(), "nothing was written"
        return ""

    outcomes = {}
    own = tempfile.mkdtemp()
    shared = Path(together(own))
    plain, x = trained()
    for format in formats:
        (folder := Path(own, f"{format} plain")).mkdir()
        alone = export(plain, format, folder / f"m{ENDINGS[format]}")
        for layout in layouts:
            with scope(layout):
                model, _ = trained()
                before = [kf.layout_of(variable).layout for variable in model.weights]
                expected = model.predict(x[:1], verbose=0)
                folder = shared / f"{layout} {format}"
                folder.mkdir(exist_ok=True)
                path = folder / f"m{ENDINGS[format]}"
                together(True)
                said = export(model, format, path)
                together(True)
                if not alone:
                    assert said == "", (layout, format, said)
                    names = {each.name for each in folder.iterdir()}
                    assert names == {path.name} | ({"m.bin"} if format == "openvino" else set()), names
                    if kf.env.is_main_process():
                        np.testing.assert_allclose(predicted(format, str(path), x[:1]), expected, atol=1e-6)
                else:
                    assert said == alone or said.startswith("FlowError: "), (layout, format, said)
                    assert "\n" not in said
                outcomes[format] = said or "equal"
                assert [kf.layout_of(variable).layout for variable in model.weights] == before
                np.testing.assert_allclose(model.predict(x[:1], verbose=0), expected, atol=1e-6)
                assert np.isfinite(model.fit(x, x[:, :4], batch_size=5, verbose=0).history["loss"][0])
    keras.utils.clear_session()
    return outcomes


def predicted(format: str, path: str, x: Any) -> Any:
    """Compute what the artifact computes, as one who has the file alone."""
    if format == "torch":
        import torch

        return torch.export.load(path).module()(torch.tensor(x)).detach().numpy()
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        return session.run(None, {session.get_inputs()[0].name: x})[0]
    if format == "openvino":
        import openvino

        # a processor that has bfloat16 computes in it otherwise
        return openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0]
    import tensorflow as tf

    with tf.device("CPU:0"):
        if format == "litert":
            interpreter = tf.lite.Interpreter(path)
            interpreter.allocate_tensors()
            interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
            interpreter.invoke()
            return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
        loaded = tf.saved_model.load(path)  # its functions need it as long as they are called
        return loaded.serve(tf.constant(x)).numpy()


@pytest.mark.parametrize("engine", ENGINES)
def test_predictions_are_those_of_the_model(on_ranks: Callable, engine: str) -> None:
    outcomes = on_ranks(engine)(exported, ("dp", "2x2"), tuple(SURE[engine]))
    assert outcomes == dict.fromkeys(SURE[engine], "equal")


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_every_format(on_ranks: Callable, engine: str) -> None:
    outcomes = on_ranks(engine)(exported, ("dp", "2x2", "tp"), tuple(ENDINGS))
    assert {outcomes[format] for format in SURE[engine]} == {"equal"}, outcomes
    for format in set(ENDINGS) - SURE[engine]:
        if format not in BY_PACKAGES[engine]:
            assert outcomes[format] != "equal", (format, "works: say so in docs/features.md")
        elif outcomes[format] != "equal":
            assert "a package that it needs is missing: " in outcomes[format], outcomes[format]


def test_the_table_of_the_page() -> None:
    page = Path(__file__).parents[3].joinpath("docs/features.md").read_text()
    rows = re.findall(r'^\| `"(\w+)"` \| (.*?) \| (.*?) \| (.*?) \|$', page, re.MULTILINE)
    said = {
        engine: {row[0] for row in rows if row[column].startswith(("equal", "with "))}
        for column, engine in enumerate(ENGINES, 1)
    }
    assert said == {engine: SURE[engine] | BY_PACKAGES[engine] for engine in ENGINES}


@pytest.mark.full
@pytest.mark.parametrize("engine", ("jax", "tensorflow"))  # each rank of torch is a process
def test_two_processes_export_one_model(engine: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import keras_flow as kf\nfrom tests.backends.files.test_exporting import exported\n"
        "kf.init(4)\nfound = exported(('dp', '2x2', 'tp'), ('tf_saved_model',))\n"
        "if kf.env.is_main_process():\n    print('found', found, flush=True)\n"
    )
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", "--timeout", "100", str(program)]
    started = programs.start(command, engine, PYTHONPATH=str(Path(__file__).parents[3]))
    code, out, err = programs.finish(started, 170)
    assert code == 0, err
    assert "found {'tf_saved_model': 'equal'}" in out


def test_a_missing_package_is_told_on_every_rank(on_ranks: Callable, tmp_path: Path) -> None:
    def program(path: str) -> str:
        import sys

        import keras

        import keras_flow as kf

        with kf.DataParallel().scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        kept = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "openvino"}
        sys.modules["openvino"] = None  # type: ignore[assignment]  # as where it is not installed
        try:
            model.export(path, format="openvino", verbose=False)
        except kf.FlowError as error:
            return str(error)
        finally:
            del sys.modules["openvino"]
            sys.modules.update(kept)
        return "exported"

    for told in on_ranks("torch").on_each(program, str(tmp_path / "m.xml")):
        assert "model.export(format='openvino'): a package that it needs is missing: " in told
        assert "openvino" in told.rpartition(":")[2] and "\n" not in told


def test_a_model_that_draws_by_the_global_generator(on_ranks) -> None:
    """Its state is no variable of the model, and is on the ranks as those are, where one process predicts alone."""

    def program(folder: str) -> None:
        import keras
        import numpy as np

        import keras_flow as kf
        from keras_flow.backends.files import exporting

        class Drawn(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                return x + 1e-6 * keras.random.uniform((4,))

        x = np.ones((8, 4), "float32")
        with kf.DataParallel().scope():
            model = keras.Sequential([keras.layers.Input((4,)), Drawn(), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
            model.fit(x, x[:, :2], verbose=0)
            expected = model.predict(x, verbose=0)
            with exporting.whole(model):
                model.predict_function = None
                np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-5)
            model.predict_function = None
            np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-5)
            model.export(folder, verbose=False)
        loaded = keras.layers.TFSMLayer(folder, call_endpoint="serve")
        np.testing.assert_allclose(loaded(x), expected, atol=1e-5)

    with tempfile.TemporaryDirectory() as folder:
        on_ranks("tensorflow")(program, folder)
