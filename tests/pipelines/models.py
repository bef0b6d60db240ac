"""Models and settings in which a pipeline could get another number than one device, and what it got.

13 rows in four micro-batches are 4, 3, 3 and 3: no mean of means is the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import keras_flow as kf

ROWS = 13
_layers = keras.layers
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, 5)).astype("float32")
Y = _random.normal(size=(ROWS, 3)).astype("float32")
IMAGES = _random.normal(size=(ROWS, 8, 8, 2)).astype("float32")
IDS = _random.integers(0, 7, size=(ROWS, 6))
IDS[:, 3:] *= _random.integers(0, 2, size=(ROWS, 3))  # zeros at the end, which a mask leaves out
CLASSES = _random.integers(0, 3, size=ROWS)
SEQUENCES = _random.normal(size=(ROWS, 6, 3)).astype("float32")
LABELS = _random.integers(0, 3, size=(ROWS, 6))
WEIGHTS = _random.random(ROWS).astype("float32")
ENTRIES = _random.random((ROWS, 6)).astype("float32")
_CROSSENTROPY = "sparse_categorical_crossentropy"


def dense(**last: Any) -> keras.Model:
    """Four layers."""
    return keras.Sequential(
        [
            keras.Input((5,)),
            _layers.Dense(8, activation="relu"),
            _layers.Dense(8, activation="tanh"),
            _layers.Dense(6),
            _layers.Dense(3, **last),
        ]
    )


def dropout() -> keras.Model:
    """Random numbers on three stages."""
    return keras.Sequential(
        [
            keras.Input((5,)),
            _layers.Dense(8),
            _layers.Dropout(0.5),
            _layers.Dense(8, activation="tanh"),
            _layers.GaussianNoise(0.3),
            _layers.Dense(6),
            _layers.Dropout(0.3, noise_shape=(None, 1)),
            _layers.Dense(3),
        ]
    )


def skips() -> keras.Model:
    """Tensors that cross several cuts, the model's input among them."""
    inputs = keras.Input((5,))
    first = _layers.Dense(5)(inputs)
    second = _layers.Dense(5, activation="tanh")(first)
    third = _layers.Dense(4)(_layers.Add()([first, second, inputs]))
    return keras.Model(inputs, _layers.Dense(3)(_layers.Concatenate()([third, first])))


def two_outputs() -> keras.Model:
    """An output of the first stage, and one of the last."""
    inputs = keras.Input((5,))
    first = _layers.Dense(6)(inputs)
    hidden = _layers.Dense(5)(_layers.Dense(6, activation="tanh")(first))
    return keras.Model(inputs, {"p": _layers.Dense(3, name="p")(first), "q": _layers.Dense(3, name="q")(hidden)})


def unordered(as_dict: bool) -> keras.Model:
    """Outputs in another order than that of their names: classes, then numbers."""
    inputs = keras.Input((5,))
    first = _layers.Dense(6, activation="tanh")(inputs)
    classes = _layers.Dense(3, activation="softmax", name="q")(first)
    numbers = _layers.Dense(3, name="a")(_layers.Dense(6)(first))
    return keras.Model(inputs, {"q": classes, "a": numbers} if as_dict else [classes, numbers])


def masked() -> keras.Model:
    """A mask that is made in the first stage and used by the loss."""
    inputs = keras.Input((6,), dtype="int32")
    hidden = _layers.Dense(5, activation="tanh")(_layers.Embedding(7, 4, mask_zero=True)(inputs))
    return keras.Model(inputs, _layers.Dense(3, activation="softmax")(_layers.Dense(5)(hidden)))


def by_keyword() -> keras.Model:
    """A mask that goes through calls by keyword, and one that a call is given."""
    inputs = keras.Input((6,), dtype="int32")
    hidden = _layers.Embedding(7, 4, mask_zero=True)(inputs=inputs)
    first = _layers.Dense(3, activation="softmax", name="p")(
        inputs=_layers.MultiHeadAttention(2, 2)(query=hidden, value=hidden)
    )
    plain = _layers.LSTM(3, return_sequences=True, name="q")(_layers.Dense(4)(hidden), mask=inputs != 2)
    return keras.Model(inputs, {"p": first, "q": plain})


def regularized() -> keras.Model:
    """Losses on every stage."""
    return keras.Sequential(
        [
            keras.Input((5,)),
            _layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2"),
            _layers.Dense(8, bias_regularizer="l1"),
            _layers.Dense(6, activity_regularizer="l1"),
            _layers.Dense(3),
        ]
    )


def tied() -> keras.Model:
    """A layer that is called in two stages."""
    inputs = keras.Input((6,), dtype="int32")
    shared = _layers.Dense(4, activation="tanh")
    hidden = shared(_layers.Embedding(7, 4)(inputs))
    hidden = _layers.Dense(4)(shared(_layers.Dense(4)(hidden)))
    return keras.Model(inputs, _layers.Dense(3, activation="softmax")(_layers.GlobalAveragePooling1D()(hidden)))


def tied_dense() -> keras.Model:
    """Dense layers, one called in two stages: an embedding has slices, whose norms TensorFlow takes one by one."""
    inputs = keras.Input((5,))
    shared = _layers.Dense(5, activation="tanh", kernel_regularizer="l2")
    hidden = _layers.Dense(5)(shared(_layers.Dense(5)(shared(_layers.Dense(5)(inputs)))))
    return keras.Model(inputs, _layers.Dense(3)(hidden))


def nested() -> keras.Model:
    """A model inside, which is cut as well."""
    inner = keras.Sequential([keras.Input((5,)), _layers.Dense(6), _layers.Dropout(0.2), _layers.Dense(5)])
    inputs = keras.Input((5,))
    return keras.Model(inputs, _layers.Dense(3)(_layers.Dense(4)(_layers.Dense(5)(inner(inputs)))))


def attention() -> keras.Model:
    """A small transformer."""
    inputs = keras.Input((6,), dtype="int32")
    x = _layers.Embedding(7, 8)(inputs)
    for _ in range(3):
        normal = _layers.LayerNormalization()(x)
        x = _layers.Add()([x, _layers.MultiHeadAttention(2, 4, dropout=0.1)(normal, normal)])
        x = _layers.Add()([x, _layers.Dense(8)(_layers.Dense(16, activation="gelu")(_layers.LayerNormalization()(x)))])
    return keras.Model(inputs, _layers.Dense(3, activation="softmax")(x))


def blocks() -> keras.Model:
    """Repeated blocks, each a model, with masks of dropout and a loss inside."""
    inputs = keras.Input((5,))
    x = _layers.Dense(8)(inputs)
    for _ in range(4):
        inner = [_layers.Dense(16, "tanh", activity_regularizer="l2"), _layers.Dropout(0.3), _layers.Dense(8)]
        x = _layers.Add()([x, keras.Sequential([keras.Input((8,)), *inner])(x)])
    return keras.Model(inputs, _layers.Dense(3)(x))


def deep() -> keras.Model:
    """Layers for two stages on each of four ranks."""
    inner = [*(_layers.Dense(5, "tanh") for _ in range(7)), _layers.Dropout(0.3), _layers.Dense(3)]
    return keras.Sequential([keras.Input((5,)), *inner])


def two_inputs(as_dict: bool) -> keras.Model:
    """Numbers that the first stage reads, and ids that a later one reads."""
    numbers, ids = keras.Input((5,), name="numbers"), keras.Input((6,), dtype="int32", name="ids")
    hidden = _layers.Dense(6)(_layers.Dense(5, "tanh")(numbers))
    words = _layers.GlobalAveragePooling1D()(_layers.Embedding(7, 6)(ids))
    outputs = _layers.Dense(3)(_layers.Dense(4)(_layers.Add()([hidden, words])))
    return keras.Model({"numbers": numbers, "ids": ids} if as_dict else [numbers, ids], outputs)


def steep() -> keras.Model:
    """Gradients of the first layer are 100 000 times those of the others, which see numbers of usual size."""
    small = keras.initializers.RandomNormal(stddev=1e-6, seed=1)
    inner = [_layers.Dense(8, kernel_initializer=small), _layers.Rescaling(1e5), *map(_layers.Dense, (8, 6, 3))]
    return keras.Sequential([keras.Input((5,)), *inner])


def convolutions() -> keras.Model:
    """Images."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            _layers.Conv2D(4, 3, activation="relu"),
            _layers.MaxPooling2D(),
            _layers.Conv2D(4, 2),
            _layers.Flatten(),
            _layers.Dense(5),
            _layers.Dense(3),
        ]
    )


class Counting(_layers.Layer):
    """Counts its calls in training, and grows with their number."""

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.steps.assign(self.steps + 1.0)
        return x * (1.0 + 0.1 * self.steps)


def counting() -> keras.Model:
    """A layer with a counter of batches."""
    inner = [_layers.Dense(6), Counting(), *(_layers.Dense(width) for width in (5, 4, 3))]
    return keras.Sequential([keras.Input((5,)), *inner])


def embedded() -> keras.Model:
    """Tokens that a row has several times."""
    inner = [_layers.Embedding(7, 4), _layers.Dense(4, "tanh"), _layers.Flatten(), _layers.Dense(4), _layers.Dense(3)]
    return keras.Sequential([keras.Input((6,), dtype="int32"), *inner])


def recurrent() -> keras.Model:
    """Masks inside of stages."""
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            _layers.Embedding(7, 4, mask_zero=True),
            _layers.LSTM(5, return_sequences=True),
            _layers.LSTM(4),
            _layers.Dense(3),
        ]
    )


def _ignoring() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(ignore_class=1)


def _frozen(*numbers: int) -> keras.Model:
    model = dense()
    for number in numbers:
        model.layers[number].trainable = False
    return model


def _sgd(**settings: Any) -> Callable[[], Any]:
    return lambda: keras.optimizers.SGD(0.1, **settings)


def _scaled(**settings: Any) -> Callable[[], Any]:
    return lambda: keras.optimizers.LossScaleOptimizer(_sgd(**settings)(), initial_scale=256.0, dynamic_growth_steps=2)


def _case(make: Callable[[], keras.Model], x: Any, y: Any, **settings: Any) -> tuple[Any, ...]:
    return make, x, y, settings


#: name -> the model, its data, and settings of `compile` and `fit`
CASES: dict[str, tuple[Any, ...]] = {
    "dense": _case(dense, X, Y),
    "blocks": _case(blocks, X, Y),
    "deep": _case(deep, X, Y),
    "weights": _case(dense, X, Y, sample_weight=WEIGHTS),
    "weighted_mean": _case(
        dense,
        X,
        Y,
        sample_weight=WEIGHTS,
        loss=lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    ),
    "sum": _case(
        dense,
        X,
        Y,
        loss=lambda: keras.losses.MeanSquaredError(reduction="sum"),
        optimizer=lambda: keras.optimizers.SGD(0.01),
    ),
    "class_weights": _case(
        lambda: dense(activation="softmax"),
        X,
        CLASSES,
        loss=_CROSSENTROPY,
        metrics=["accuracy"],
        class_weight={0: 1.0, 1: 3.0, 2: 0.2},
    ),
    "dropout": _case(dropout, X, Y),
    "skips": _case(skips, X, Y),
    "two_outputs": _case(
        two_outputs,
        X,
        {"p": Y, "q": Y[:, ::-1].copy()},
        loss={"p": "mse", "q": "mae"},
        metrics={"p": ["mae"], "q": ["mse"]},
        loss_weights={"p": 0.3, "q": 2.0},
    ),
    "losses_by_name": _case(
        lambda: unordered(True),
        X,
        {"q": CLASSES, "a": Y},
        loss=lambda: {"q": _ignoring(), "a": keras.losses.MeanSquaredError()},
        metrics=None,
    ),
    "losses_by_name_of_a_list": _case(
        lambda: unordered(False),
        X,
        {"q": CLASSES, "a": Y},
        loss=lambda: {"q": _ignoring(), "a": keras.losses.MeanSquaredError()},
        metrics=None,
    ),
    "loss_of_one_output": _case(
        lambda: unordered(True), X, {"q": CLASSES, "a": Y}, loss=lambda: {"q": _ignoring()}, metrics=None
    ),
    "loss_of_the_last": _case(
        lambda: keras.Model((model := unordered(False)).inputs, model.outputs[::-1]),
        X,
        [Y, CLASSES],
        loss=lambda: [None, _ignoring()],
        metrics=None,
    ),
    "masked": _case(masked, IDS, LABELS, loss=_CROSSENTROPY, metrics=["accuracy"]),
    "by_keyword": _case(
        by_keyword, IDS, {"p": LABELS, "q": SEQUENCES}, loss={"p": _CROSSENTROPY, "q": "mse"}, metrics=None
    ),
    "masked_weights": _case(masked, IDS, SEQUENCES, sample_weight=ENTRIES),
    "ignored_class": _case(
        masked,
        IDS,
        LABELS,
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(ignore_class=1),
        metrics=[],
    ),
    "regularized": _case(regularized, X, Y),
    "tied": _case(tied, IDS, CLASSES, loss=_CROSSENTROPY, metrics=["accuracy"]),
    "tied_norm": _case(tied_dense, X, Y, optimizer=_sgd(global_clipnorm=0.05)),
    "counting": _case(counting, X, Y),
    "embedded": _case(
        embedded, IDS, Y, batch_size=8, optimizer=lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05)
    ),
    "nested": _case(nested, X, Y),
    "attention": _case(attention, IDS, LABELS, loss=_CROSSENTROPY, metrics=["accuracy"]),
    "convolutions": _case(convolutions, IMAGES, Y),
    "recurrent": _case(recurrent, IDS, Y),
    "frozen": _case(lambda: _frozen(0, 2), X, Y),
    "frozen_stages": _case(lambda: _frozen(0, 1), X, Y),
    "frozen_last": _case(
        lambda: _frozen(3),
        X,
        Y,
        optimizer=lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    ),
    "clipnorm": _case(dense, X, Y, optimizer=_sgd(clipnorm=0.1)),
    "global_clipnorm": _case(dense, X, Y, optimizer=_sgd(global_clipnorm=0.1)),
    "ema_overwritten": _case(dense, X, Y, optimizer=_sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2)),
    "ema": _case(dense, X, Y, optimizer=_sgd(use_ema=True, ema_momentum=0.9)),
    "momentum": _case(dense, X, Y, optimizer=_sgd(momentum=0.9)),
    "adam": _case(dense, X, Y, optimizer=lambda: keras.optimizers.Adam(0.01)),
    "adamw": _case(dense, X, Y, optimizer=lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1)),
    "accumulated": _case(dense, X, Y, optimizer=_sgd(gradient_accumulation_steps=2)),
    "accumulated_norm": _case(
        dense, X, Y, batch_size=6, optimizer=_sgd(gradient_accumulation_steps=2, global_clipnorm=0.1)
    ),
    "loss_scale": _case(dense, X, Y, optimizer=_scaled()),
    "loss_scale_norm": _case(dense, X, Y, optimizer=_scaled(global_clipnorm=0.1)),
    "overflow_of_one_stage": _case(
        steep, X, Y, optimizer=lambda: keras.optimizers.LossScaleOptimizer(_sgd()(), initial_scale=1e37)
    ),
    "list_of_inputs": _case(lambda: two_inputs(False), [X, IDS], Y),
    "dict_of_inputs": _case(lambda: two_inputs(True), {"numbers": X, "ids": IDS}, Y),
    "schedule": _case(
        dense,
        X,
        Y,
        optimizer=lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
    ),
    "eager": _case(dropout, X, Y, run_eagerly=True),
    "short_batch": _case(dropout, X, Y, batch_size=6),
    "empty_lane": _case(dropout, X, Y, batch_size=5),  # three rows in four micro-batches: a lane of two has none
}
#: cases that show each kind of fault once
SOME = (
    "dropout",
    "skips",
    "two_outputs",
    "by_keyword",
    "counting",
    "embedded",
    "masked_weights",
    "tied_norm",
    "regularized",
    "short_batch",
)


#: placements of pipelines whose stages are split
SPLIT = ("split", "lanes", "2x2x2")


def pipeline(name: str) -> kf.PipelineParallel:
    """A pipeline by the name of its schedule: on four ranks, on two, or as `+2x2` on two stages of two ranks.

    In two processes of two ranks `+2x2` gives each process a stage, and `+across` each a lane. `+split` are two stages
    whose weights are split over two ranks, `+lanes` stages of two lanes on one place of the pipe axis, each split, and
    `+2x2x2` two stages of two such lanes, on eight ranks. `+zero` is `+2x2` with slots split over the ranks of a stage.
    `+four` has four ranks.
    """
    if name == "central":
        return kf.CentralStorage(random="logical")
    schedule, _, more = name.partition("+")
    ranks = min(4 if schedule == "1f1b" or more == "four" else 2, kf.env.get_world_size())
    grids = {
        "2x2": kf.Placement([[0, 2], [1, 3]], ("data", "pipe")),
        "zero": kf.Placement([[0, 2], [1, 3]], ("data", "pipe")),
        "across": kf.Placement([[0, 1], [2, 3]], ("data", "pipe")),
        "split": kf.Placement([[0, 1], [2, 3]], ("pipe", "model")),
        "lanes": kf.Placement([[[0, 1], [2, 3]]], ("pipe", "data", "model")),
        "2x2x2": kf.Placement(np.arange(8).reshape(2, 2, 2), ("pipe", "data", "model")),
    }
    return kf.PipelineParallel(
        grids.get(more) or kf.Placement(range(ranks), axis_names=("pipe",)),
        rules={"(kernel|embeddings)$": {"model": kf.sbp.split(1)}} if more in SPLIT else None,
        microbatches=4,
        schedule=schedule,
        chunks=2 if schedule == "auto" else None,
        remat={"remat": "stage", "blocks": "block"}.get(more),
        random="logical",
        zero=int(more == "zero"),
        zero_min_size=1,
    )


def one_device_and(way: str) -> Iterator[Any]:
    """One device, and a pipeline: each with the same seed, from which the model is to be made."""
    for distribution in (kf.DataParallel(kf.Placement([0]), random="logical"), pipeline(way)):
        keras.utils.set_random_seed(3)
        yield distribution


def trained(distribution: Any, name: str) -> dict[str, Any]:
    """Logs, weights, evaluation and predictions of a case after three epochs."""
    make, x, y, settings = CASES[name]
    given = {"batch_size": ROWS, "metrics": ["mae"], "loss": "mse", "optimizer": _sgd(), **settings}
    compiled = {key: given.pop(key) for key in ("metrics", "loss_weights", "run_eagerly") if key in given}
    loss, optimizer = given.pop("loss"), given.pop("optimizer")
    keras.utils.set_random_seed(3)
    with distribution.scope():
        model = make()
        model.compile(optimizer(), loss() if callable(loss) else loss, **compiled)
    history = model.fit(x, y, epochs=3, shuffle=False, verbose=0, **given)
    size = {"batch_size": given["batch_size"], "verbose": 0}
    return {
        "logs": history.history,
        "weights": model.get_weights(),
        "evaluation": model.evaluate(x, y, return_dict=True, **size),
        "predictions": model.predict(x, **size),
    }


def alone(name: str) -> dict[str, Any]:
    """A case on one device."""
    return trained(kf.DataParallel(kf.Placement([0]), random="logical"), name)


def off(
    names: Sequence[str], schedules: Sequence[str], expected: Mapping[str, dict[str, Any]] | None = None
) -> list[str]:
    """What differs from one device by more than float32 rounds, case by case.

    Args:
        names: of cases.
        schedules: as `pipeline` takes them.
        expected: what `alone` gives for each case, where this process is not the only one; None: it is made here.
    """
    found = []
    for name in names:
        one = expected[name] if expected else alone(name)
        for schedule in schedules:
            other = trained(pipeline(schedule), name)
            for key, value in one.items():
                if list(keras.tree.flatten(value)) and (far := distance(value, other[key])) > 2e-5:
                    found.append(f"{name}, {schedule}: {key} are off by {far:.1e}")
    return found


def distance(one: Any, other: Any) -> float:
    """How far the numbers of two structures are apart, relative to the largest of each array above 1; nan is far."""
    keras.tree.assert_same_structure(one, other)
    pairs = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return max(_distance(np.asarray(a, "float64"), np.asarray(b, "float64")) for a, b in pairs)


def _distance(a: Any, b: Any) -> float:
    apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.nan_to_num(apart.max() / max(1.0, np.abs(a).max()), nan=np.inf))
