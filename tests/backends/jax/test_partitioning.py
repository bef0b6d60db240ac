"""What XLA's partitioner gets wrong is right under keras_flow: updates of plain SGD against one device."""

from __future__ import annotations

import collections
import contextlib
import re
from typing import Any

import numpy as np
import pytest

from tests import sampling
from tests.sweep import program
from tests.sweep.cases import PIECES
from tests.sweep.design import Setting

pytestmark = [pytest.mark.usefixtures("four_ranks"), pytest.mark.timeout(300)]

#: convolutions with groups; scatters of rows, of features that do not divide; a sort, whose gradient aborts the process
NAMES = (
    "layers.DepthwiseConv2D",
    "layers.Conv2D[groups]",
    "layers.SeparableConv1D",
    "layers.Embedding",
    "ops.get_item[integers]",
    "ops.segment_sum",
    "ops.sort",
    "ops.median[rows]",
)
SETTINGS = (
    Setting("(2,2)", "divides", "last"),
    Setting("(2,2)", "uneven", "last"),
    Setting("(2,1,2)", "few", "first"),
    Setting("(4,)", "uneven", "none"),
)
_references: dict[str, program.Numbers] = {}


@pytest.mark.parametrize(
    ("names", "setting"),
    [
        # windows of one row on two data ranks, and a concatenation of unequal parts of it along a split dim
        (("ops.extract_sequences",), Setting("[[3,1],[0,2]]", "one", "first")),
        (("ops.fft2", "ops.rfft", "ops.ifft2"), Setting("(2,2)", "divides", "last")),
        # the gradient of a transform, whose operand an all-gather had left column-major in memory
        (("ops.fft", "ops.fft2", "ops.ifft2"), Setting("(1,4)", "uneven", "first")),
    ],
    ids=("one row", "transforms", "their gradients"),
)
def test_transforms_are_those_of_one_device(names: tuple[str, ...], setting: Setting) -> None:
    pieces = [PIECES[name] for name in names]
    found = program.run(pieces, setting.rows, program.distribution(setting))
    over = program.compare(program.run(pieces, setting.rows), found)
    assert over == {name: {} for name in names}


def test_rows_left_over_stay_split_in_loops_of_what_is_seen_right() -> None:
    """Joined parts of one length (a cell's gates, a metric's indices), and a rank's own transforms."""
    setting = Setting("(2,2)", "uneven", "last")
    names = ("layers.GRU", "metrics.IoU", "ops.fft")
    found = program.run([PIECES[name] for name in names], setting.rows, program.distribution(setting))
    assert not [note for note in found.notes if note.startswith("ComputedWhole")]


@pytest.mark.parametrize("setting", sampling.some(SETTINGS, every=8), ids=lambda setting: setting.name)
def test_updates_are_those_of_one_device(setting: Setting) -> None:
    pieces = [PIECES[name] for name in NAMES]
    if setting.rows not in _references:
        _references[setting.rows] = program.run(pieces, setting.rows)
    found = program.run(pieces, setting.rows, program.distribution(setting))
    over = program.compare(_references[setting.rows], found)
    assert {name: shares for name, shares in over.items() if shares} == {}
    assert not any("computed whole by every rank" in note for note in found.notes)


def test_a_grouped_convolution_sends_its_kernels_gradient_and_nothing_else() -> None:
    import jax
    import keras
    from jax.sharding import NamedSharding, PartitionSpec

    import keras_flow as kf
    from keras_flow.backends.jax.layouts import mesh

    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    random = np.random.default_rng(0)
    x, kernel = random.random((8, 6, 6, 4), "float32"), random.random((3, 3, 2, 8), "float32")

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return keras.ops.sum(keras.ops.conv(x, kernel, padding="same") ** 2)

    with kf.ModelParallel(placement).scope():
        rows = jax.device_put(x, NamedSharding(mesh(placement), PartitionSpec("data")))
        whole = jax.device_put(kernel, NamedSharding(mesh(placement), PartitionSpec()))
        step = jax.jit(jax.grad(loss))
        text = step.lower(whole, rows).compile().as_text()
        found = np.asarray(step(whole, rows))
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    assert collections.Counter(re.findall(rf"= \S+ ({kinds})(?:-start)?\(", text)) == {"all-reduce": 1}
    expected = np.asarray(jax.grad(loss)(kernel, x))
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("rows", "splits"),
    [
        (7, {"first/bias": 0, "second/kernel": 1}),
        pytest.param(7, {"first/kernel": 3, "third/kernel": 0}, marks=pytest.mark.full),
        pytest.param(8, {"second/kernel": 0, "third/bias": 0, "logits/kernel": 0}, marks=pytest.mark.full),
    ],
)
def test_windows_that_are_split_have_the_numbers_of_one_device(rows: int, splits: dict[str, int]) -> None:
    import keras
    from keras import layers

    import keras_flow as kf

    x = np.random.default_rng(0).normal(size=(rows, 4, 4, 4)).astype("float32")

    def trained(distribution: kf.ModelParallel | None) -> list[np.ndarray]:
        keras.utils.clear_session()
        keras.utils.set_random_seed(7)
        with distribution.scope() if distribution else contextlib.nullcontext():
            model = keras.Sequential(
                [
                    layers.Input((4, 4, 4)),
                    layers.DepthwiseConv2D(2, padding="same", depth_multiplier=2, name="first"),
                    layers.Conv2DTranspose(4, 2, padding="same", name="second"),
                    layers.Conv2D(4, 2, padding="same", name="third"),
                    layers.MaxPooling2D(2, strides=1, padding="same"),
                    layers.Flatten(),
                    layers.Dense(4, name="logits"),
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
            before = model.get_weights()
            model.train_on_batch(x, x[:, 0, 0])
            return [model.predict_on_batch(x), *(a - b for a, b in zip(model.get_weights(), before, strict=True))]

    rules = {path: {"model": kf.sbp.split(dim)} for path, dim in splits.items()}
    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    for expected, found in zip(trained(None), trained(kf.ModelParallel(placement, rules=rules)), strict=True):
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def test_windows_that_the_axes_of_the_batch_split() -> None:
    """Each rank has rows of its own, and weights are split all the same: a random model found it (seed 1/184)."""
    import keras
    from keras import layers

    import keras_flow as kf

    x = np.random.default_rng(0).normal(size=(7, 5, 4, 4)).astype("float32")

    def predicted(distribution: kf.ModelParallel | None) -> np.ndarray:
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        with distribution.scope() if distribution else contextlib.nullcontext():
            model = keras.Sequential(
                [
                    layers.Input((5, 4, 4)),
                    layers.Conv2D(4, 2, padding="same", groups=2, name="first"),
                    layers.Conv2D(4, 2, padding="same", groups=2, name="second"),
                    layers.Conv2DTranspose(4, 2, padding="same", name="third"),
                    layers.Conv2D(4, 2, 2, padding="same", name="fourth"),
                    layers.Conv2D(6, 2, 2, padding="same", name="fifth"),
                ]
            )
            return model.predict(x, batch_size=7, verbose=0)

    over_data = {"first/kernel": 3, "second/bias": 0, "third/kernel": 0, "fourth/bias": 0, "fifth/kernel": 2}
    rules = {path: {"data": kf.sbp.split(dim)} for path, dim in over_data.items()}
    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    distribution = kf.ModelParallel(
        placement, rules={**rules, "fifth/bias": {"model": kf.sbp.split(0)}}, batch_axes=("data", "model")
    )
    assert np.abs(predicted(distribution) - predicted(None)).max() <= 1e-5


def _eager_steps() -> list[float]:
    import keras

    import keras_flow as kf

    class Own(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            x, y = data
            return {"ones": keras.ops.sum(y == 0), "last": x[-1, 0], "sum": keras.ops.sum(x[1:] * 2)}, state

        def predict_step(self, state: Any, data: Any) -> Any:
            return data[::2] + 0, state[1]

    x, found = np.arange(26.0).reshape(13, 2), []
    with kf.DataParallel().scope():
        inputs = keras.Input((2,))
        model = Own(inputs, keras.layers.Dense(1)(inputs))
        for options in ({"run_eagerly": True}, {"jit_compile": False}):
            model.compile("sgd", **options)
            logs = model.fit(x, np.zeros(13), batch_size=13, shuffle=False, verbose=0).history
            found += [
                *(logs[name][0] for name in ("ones", "last", "sum")),
                float(model.predict(x, batch_size=13, verbose=0).sum()),
            ]
    return [float(number) for number in found]


def test_steps_that_are_not_jitted_see_arrays(on_ranks: Any) -> None:
    """Thirteen rows on four ranks are padded; code of the user's own indexes and compares them as on one device."""
    rows = [13.0, 24.0, 648.0, 175.0]
    assert on_ranks("jax")(_eager_steps) == rows * 2
