"""A model is exported as one device would write it, from every layout and number of processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)


def exported(layout: str, formats: tuple[str, ...], folder: str) -> None:
    """On each rank: export a trained model; process 0 loads and predicts. Training goes on afterwards."""
    import keras
    import numpy as np

    import keras_flow as kf

    square = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    rules = {"h/kernel$": {"model": kf.sbp.split(1)}, "o/kernel$": {"model": kf.sbp.split(0)}}
    distribution = kf.DataParallel() if layout == "1x4" else kf.ModelParallel(square, rules=rules)
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
    with distribution.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((6,)),
                keras.layers.Dense(8, activation="tanh", name="h"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(4, name="o"),
            ]
        )
        model.compile("sgd", "mse")
        model.fit(x, x[:, :4], batch_size=5, verbose=0)
        before = [kf.layout_of(variable).layout for variable in model.weights]
        expected = model.predict(x[:1], verbose=0)
        for format in formats:
            path = str(Path(folder, f"{layout}{ENDINGS.get(format, '')}"))
            model.export(path, format=format, verbose=False)
            if kf.env.is_main_process():
                np.testing.assert_allclose(predicted(format, path, x[:1]), expected, atol=1e-6)
        assert [kf.layout_of(variable).layout for variable in model.weights] == before
        np.testing.assert_allclose(model.predict(x[:1], verbose=0), expected, atol=1e-6)
        assert np.isfinite(model.fit(x, x[:, :4], batch_size=5, verbose=0).history["loss"][0])


ENDINGS = {"torch": ".pt2", "litert": ".tflite"}


def predicted(format: str, path: str, x):
    """What the artifact computes, read as one who has the file alone."""
    if format == "torch":
        import torch

        return torch.export.load(path).module()(torch.tensor(x)).detach().numpy()
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


@pytest.mark.parametrize(
    ("engine", "formats"),
    [("jax", ("tf_saved_model",)), ("tensorflow", ("tf_saved_model", "litert")), ("torch", ("torch",))],
)
def test_predictions_are_those_of_the_model(
    on_ranks: Callable, engine: str, formats: tuple[str, ...], tmp_path: Path
) -> None:
    for layout in ("1x4", "2x2"):
        on_ranks(engine)(exported, layout, formats, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2 * len(formats), "written once, and nothing is left beside"


@pytest.mark.skipif(importlib.util.find_spec("openvino") is not None, reason="openvino is installed")
def test_a_missing_package_is_told_on_every_rank(on_ranks: Callable, tmp_path: Path) -> None:
    def program(path: str) -> str:
        import keras

        import keras_flow as kf

        with kf.DataParallel().scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        try:
            model.export(path, format="openvino", verbose=False)
        except kf.FlowError as error:
            return str(error)
        return "exported"

    for told in on_ranks("torch").on_each(program, str(tmp_path / "m.xml")):
        assert "model.export(format='openvino'): a package that it needs is missing: No module named 'openvino'" in told
        assert "\n" not in told
