"""`dist.verify` on one engine: right steps, wrong ones, what it leaves behind, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import keras_flow as kf

X = np.random.default_rng(0).normal(size=(12, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(12, 4)).astype("float32")
MESH = [[0, 1], [2, 3]]


class Doubled(layers.Layer):
    """A seeded fault: under a distribution the gradient that passes is doubled, the output is as it should be."""

    def call(self, x: Any) -> Any:
        return x + (x - ops.stop_gradient(x)) if keras.distribution.distribution() is not None else x


class Unseeded(layers.Layer):
    """NumPy's random numbers in `call`, and no `get_config` that makes it anew."""

    def __init__(self, what: str):
        super().__init__()

    def call(self, x: Any) -> Any:
        return x * np.random.default_rng().random()


class OwnStep(keras.Sequential):
    """A `train_step` of the user's own: the stock one, twice the loss is not its business."""

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().train_step(*args, **kwargs)


def _hybrid(**options: Any) -> Any:
    mesh = kf.Placement(MESH, axis_names=("data", "model"))
    return kf.ModelParallel(mesh, rules={"hidden/kernel": {"model": kf.sbp.split(1)}}, **options)


def _model(*between: layers.Layer, of: type[keras.Sequential] = keras.Sequential, **options: Any) -> keras.Model:
    model = of(
        [
            layers.Input((8,)),
            layers.Dense(8, activation="tanh", name="hidden"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            *between,
            layers.Dense(4, name="out"),
        ],
        name="verified",
    )
    model.compile("adam", "mse", metrics=["mae"], **options)
    return model


def _state(model: keras.Model) -> list[np.ndarray]:
    return [np.array(ops.convert_to_numpy(v)) for v in (*model.variables, *model.optimizer.variables)]


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except kf.FlowError as error:
        return str(error)
    return ""


class Between(keras.Model):
    """Computes between its layers; its attention is several layers in one, and its norm has state."""

    def __init__(self, *between: layers.Layer):
        super().__init__(name="verified")
        self.first = layers.Dense(8, name="hidden")
        self.attention = layers.MultiHeadAttention(2, 4, name="attention")
        self.last = keras.Sequential(
            [layers.BatchNormalization(), layers.Dropout(0.2), *between, layers.Dense(4)], name="last"
        )

    def call(self, x: Any) -> Any:
        steps = ops.reshape(self.first(x), (-1, 2, 4))
        return self.last(ops.reshape(self.attention(steps, steps), (-1, 8)))


def by_layer() -> dict[str, Any]:
    """Each layer by itself, of a model of which one is wrong."""
    distribution = _hybrid()
    with distribution.scope():
        model = Between(Doubled())
        model.compile("adam", "mse", metrics=["mae"])
        model.train_on_batch(X, Y)
        before = _state(model)
    result = distribution.verify(model, X, Y, by_layer=True)
    with distribution.scope():
        same = [bool(np.array_equal(a, b)) for a, b in zip(before, _state(model), strict=True)]
        model.train_on_batch(X, Y)  # goes on
    gradients = [row for row in result.rows if row.quantity == "gradient"]
    return {
        "as it was": all(same),
        "note": result.note,
        "right": sorted({row.name for row in gradients if row.ok}),
        "wrong": sorted({row.name for row in result.rows if not row.ok}),
    }


def in_double() -> dict[str, Any]:
    """A model of layers that compute in float64 where they are asked to, which BatchNormalization does not."""
    distribution = _hybrid()
    with distribution.scope():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(8, "tanh", name="hidden"), layers.Dense(4)])
        model.compile("adam", "mse")
        model.fit(X, Y, verbose=0)
        before = _state(model)
    result = distribution.verify(model, X, Y, dtype="float64")
    with distribution.scope():
        same = [bool(np.array_equal(a, b)) for a, b in zip(before, _state(model), strict=True)]
    worst = max(row["deviation"] for row in result.to_dict()["rows"])
    limit = 1e-6 if keras.backend.backend() == "torch" else 1e-12  # Keras's matmul on torch is in single precision
    return {"ok": result.ok, "is double": worst < limit, "as it was": all(same), "floatx": keras.config.floatx()}


def proved(view: str) -> dict[str, Any]:
    """A right model is proved right, is as it was, and goes on; in the consistent view or the mirrored one."""
    keras.utils.set_random_seed(3)
    distribution = _hybrid() if view == "consistent" else kf.DataParallel()
    with distribution.scope():
        model = _model()
        model.fit(X, Y, verbose=0)
        before = _state(model)
    result = distribution.verify(model, X, Y, sample_weight=np.linspace(0.5, 2.0, 12).astype("float32"))
    with distribution.scope():
        same = [bool(np.array_equal(a, b)) for a, b in zip(before, _state(model), strict=True)]
        model.fit(X, Y, verbose=0)  # goes on
    return {"ok": result.ok, "rows": result.to_dict()["rows"], "as it was": all(same), "text": str(result)}


class LossOfItsStep(OwnStep):
    """The loss is known to the `train_step` alone."""

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        self.compute_loss = lambda x, y, y_pred, *_, **__: ops.mean(ops.square(ops.subtract(y, y_pred)))
        return super().train_step(*args, **kwargs)


def own_step() -> tuple[bool, bool, str]:
    """Whether a `train_step` of the user's own is proved right, and one whose loss is its own; its note."""
    keras.utils.set_random_seed(3)
    distribution = _hybrid()
    with distribution.scope():
        model = _model(of=OwnStep)
        other = LossOfItsStep([layers.Input((8,)), layers.Dense(8, name="hidden"), layers.Dense(4, dtype="bfloat16")])
        other.compile("sgd")
    found = distribution.verify(other, X, Y)
    updates = {row.name for row in found.rows if row.quantity == "update"}
    assert any("dense" in name for name in updates), "of bfloat16 too"
    return distribution.verify(model, X, Y).ok, found.ok, found.note


def fault() -> dict[str, Any]:
    """A doubled gradient, asked for and before the first batch is trained on."""
    keras.utils.set_random_seed(3)
    distribution = _hybrid(verify="first_batch")
    with distribution.scope():
        wrong = _model(Doubled())
        before = _state(wrong)
    result = distribution.verify(wrong, X, Y)
    first_batch = _refused(lambda: wrong.fit(X, Y, batch_size=8, verbose=0))
    with distribution.scope():
        after = _state(wrong)[: len(wrong.variables)]
    return {
        "ok": result.ok,
        "worst": result.to_dict()["rows"][0],
        "raises": _refused(result.raise_if_wrong),
        "first batch": first_batch,
        "untrained": all(np.array_equal(a, b) for a, b in zip(before, after, strict=False)),
    }


def steps_of_a_generator() -> int:
    """How many steps `fit` makes of two batches, of which the first is verified."""
    with _hybrid(verify="first_batch").scope():
        model = _model()
    model.fit((pair for pair in [(X[:8], Y[:8])] * 2), steps_per_epoch=2, verbose=0)
    return int(ops.convert_to_numpy(model.optimizer.iterations))


def refusals() -> dict[str, str]:
    """What is refused, with the error."""
    distribution = _hybrid()
    with distribution.scope():
        fine = _model()
        unseeded = _model(Unseeded("numbers"), run_eagerly=True)
        inner = keras.Sequential([layers.Input((8,)), layers.Dense(4)], name="inner")
        inner.compile("adam")
        of_others = OwnStep([layers.Input((8,)), inner])
        of_others.compile("sgd", "mse")
        of_others.more = {"late": keras.optimizers.Adam()}
    return {
        "not built": _refused(lambda: distribution.verify(keras.Sequential([layers.Dense(2)]), X, Y)),
        "rows": _refused(lambda: distribution.verify(fine, X, Y[:3])),
        "optimizers": _refused(lambda: distribution.verify(of_others, X, Y)),
        "features": _refused(lambda: distribution.verify(fine, X[:, :3], Y)),
        "random": _refused(lambda: distribution.verify(unseeded, X, Y)),
        "dtype": _refused(lambda: distribution.verify(fine, X, Y, dtype="int8")),
        "no configuration": _refused(lambda: distribution.verify(unseeded, X, Y, dtype="float64")),
        "option": _refused(lambda: kf.DataParallel(verify="always")),
    }


def pipeline() -> dict[str, Any]:
    """A step in stages, two ranks to each, is proved right; one micro-batch's gradient left out is found."""
    from keras_flow.pipelines import passes

    placement = kf.Placement([[0, 2], [1, 3]], axis_names=("data", "pipe"))
    distribution = kf.PipelineParallel(placement, microbatches=3, random="logical")
    keras.utils.set_random_seed(3)
    with distribution.scope():
        hidden = [layers.Dense(8, activation="tanh"), layers.Dropout(0.3), layers.LayerNormalization()]
        model = keras.Sequential([layers.Input((8,)), *hidden, layers.Dense(8, "relu"), layers.Dense(4)])
        model.compile("adam", "mse", metrics=["mae"])
    model.fit(X, Y, verbose=0)
    before = _state(model)
    right = distribution.verify(model, X, Y)
    same = [bool(np.array_equal(a, b)) for a, b in zip(before, _state(model), strict=True)]
    model.fit(X, Y, verbose=0)  # goes on

    add = passes.Pass._add
    passes.Pass._add = lambda self, stage, found: None if self.gradients.get(stage.number) else add(self, stage, found)
    try:
        wrong = distribution.verify(model, X, Y)
    finally:
        passes.Pass._add = add
    return {
        "right": [row.name for row in right.rows if not row.ok],
        "as it was": all(same),
        "batches": sorted({row.batch for row in right.rows}),
        "wrong": {row.quantity for row in wrong.rows if not row.ok},
        "by layer": _refused(lambda: distribution.verify(model, X, Y, by_layer=True)),
    }
