"""Checks of data parallel by own rows: losses and metrics add up, nothing is gathered that is not asked for."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.backends.torch.registry import check

ROWS, CLASSES, STEPS = 11, 4, 2
Numbers = dict[str | int, np.ndarray]


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, classes and weights of rows; some weights are 0."""
    random = np.random.default_rng(0)
    weights = random.random(rows).astype("float32") * (np.arange(rows) % 3 != 1)
    return random.standard_normal((rows, 5, 6)).astype("float32"), random.integers(0, CLASSES, rows), weights


def model_with(loss: Any, metrics: Any = (), masked: bool = False, loss_weights: Any = None) -> Any:
    """Two outputs, one for each time step, and one for each row; statistics of all rows in between."""
    import keras

    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 6))
    hidden = keras.layers.Masking()(inputs) if masked else inputs
    steps = keras.layers.Dense(CLASSES, "softmax", name="steps")(hidden)
    rows = keras.layers.BatchNormalization()(keras.layers.Dense(8, "tanh")(keras.layers.Flatten()(inputs)))
    rows = keras.layers.Dense(CLASSES, "softmax", name="rows")(rows)
    model = keras.Model(inputs, {"steps": steps, "rows": rows})
    metrics = metrics if isinstance(metrics, dict) else {"rows": list(metrics)}
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=metrics, loss_weights=loss_weights)
    return model


def numbers(make: Callable[[], Any], rows: int, weighted: bool = False, labels: bool = False) -> Numbers:
    """Logs, updates and predictions of two plain steps and an evaluation."""
    x, classes, weights = data(rows)
    x[1::2, 2:] = 0.0  # of masked time steps
    one_hot = np.eye(CLASSES, dtype="float32")[classes]
    y = {"steps": np.repeat(one_hot[:, None], 5, 1), "rows": classes if labels else one_hot}
    weight = {"steps": np.repeat(weights[:, None], 5, 1), "rows": weights[::-1].copy()} if weighted else None
    model = make()
    before = [value.copy() for value in model.get_weights()]
    found: dict[str | int, Any] = {}
    for step in range(STEPS):
        logs = model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
        found |= {f"log {number} of step {step}": value for number, value in enumerate(logs.values())}
    logs = model.evaluate(x, y, batch_size=rows, sample_weight=weight, verbose=0, return_dict=True)
    found |= {f"log {number}": value for number, value in enumerate(logs.values())}
    for number, (after, was) in enumerate(zip(model.get_weights(), before, strict=True)):
        found[f"update {number}"] = after - was
    found |= {f"predicted {name}": value for name, value in model.predict(x, batch_size=rows, verbose=0).items()}
    return {name: np.asarray(value) for name, value in found.items()}


def off(wanted: Numbers, found: Numbers) -> dict[str | int, float]:
    """Name -> deviation, of its largest element, where it is over 1e-5."""
    assert wanted.keys() == found.keys()
    shares = {
        name: float(np.abs(found[name] - value).max() / max(np.abs(value).max(), 1e-3))
        for name, value in wanted.items()
    }
    return {name: share for name, share in shares.items() if not share <= 1e-5}


def gathered(counted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [collective for collective in counted if collective["kind"] != "all_reduce"]


def compared(make: Callable[[], Any], rows: int, **options: bool) -> list[dict[str, Any]]:
    """Compare with one device; the collectives of a training step."""
    import keras_flow as kf
    from tests.explainer.counting.torch import watching

    wanted = numbers(make, rows, **options)
    with kf.DataParallel(kf.Placement(range(4), axis_names=("data",))).scope():
        assert not off(wanted, numbers(make, rows, **options)), (rows, options)
        model = make()
        x, classes, _ = data(rows)
        one_hot = np.eye(CLASSES, dtype="float32")[classes]
        y = {"steps": np.repeat(one_hot[:, None], 5, 1), "rows": classes if options.get("labels") else one_hot}
        model.train_on_batch(x, y)
        with watching() as counted:
            model.train_on_batch(x, y)
    return counted


@check
def losses_add_up_rows() -> None:
    """Of both outputs, by every reduction, with masks, weights and uneven rows; and nothing is gathered."""
    import keras

    for number, reduction in enumerate(("sum_over_batch_size", "sum", "mean_with_sample_weight")):
        for masked in (False, True):

            def make(reduction: str = reduction, masked: bool = masked) -> Any:
                loss = {
                    "steps": keras.losses.CategoricalCrossentropy(reduction=reduction),
                    "rows": keras.losses.Huber(0.1, reduction=reduction),
                }
                return model_with(loss, ["mae"], masked, {"steps": 0.3, "rows": 2.0})

            rows = ROWS if masked else (8, 9, 5)[number]
            counted = compared(make, rows, weighted=True)
            assert not gathered(counted), counted


@check
def losses_by_name_and_with_ignored_classes() -> None:
    import keras

    def by_name() -> Any:
        return model_with("categorical_crossentropy")

    def ignoring() -> Any:
        return model_with({"steps": "mse", "rows": keras.losses.SparseCategoricalCrossentropy(ignore_class=1)})

    assert not gathered(compared(by_name, ROWS))
    assert not gathered(compared(ignoring, ROWS, labels=True))


@check
def losses_that_mix_rows_get_all_rows() -> None:
    """The user's own, and those of Keras that work along dimension 0."""
    import keras

    def own(y_true: Any, y_pred: Any) -> Any:
        difference = keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
        return difference * keras.ops.max(difference)

    for loss, name in ((own, "own"), (keras.losses.Dice(), "dice"), (keras.losses.CosineSimilarity(axis=0), "cosine")):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert gathered(compared(lambda loss=loss: model_with({"steps": "mse", "rows": loss}), ROWS)), loss
        assert len([each for each in said if f"loss '{name}" in str(each.message)]) == 1, [str(each) for each in said]


@check
def metrics_add_up_rows() -> None:
    import keras

    def metrics() -> list[Any]:
        kinds = keras.metrics
        curves = [
            kinds.AUC(num_thresholds=20),
            kinds.AUC(multi_label=True, num_labels=CLASSES),
            kinds.Precision(top_k=2),
        ]
        matrices = [kinds.F1Score(average="macro"), kinds.OneHotIoU(CLASSES, [0, 2]), kinds.RecallAtPrecision(0.3)]
        means = ["accuracy", "cosine_similarity", kinds.RootMeanSquaredError(), kinds.TopKCategoricalAccuracy(2)]
        return [*curves, *matrices, *means, kinds.R2Score()]

    for rows in (8, 9):
        counted = compared(lambda: model_with("mse", metrics()), rows)
        assert not gathered(counted), counted


@check
def metrics_of_the_users_own_get_all_rows() -> None:
    import keras

    def spread(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.max(y_pred, axis=0) - keras.ops.min(y_pred, axis=0)

    assert gathered(compared(lambda: model_with("mse", [spread]), ROWS))

    def error(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(keras.ops.subtract(y_true, y_pred)), axis=-1)

    for rows in (8, ROWS):  # without the time steps that are masked
        assert gathered(compared(lambda: model_with("mse", {"steps": [error]}, masked=True), rows))


#: kind of prediction -> the activation that makes it, and targets of it from random numbers [rows, CLASSES]
KINDS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "numbers": ("linear", lambda x: x),
    "positive": ("softplus", lambda x: np.abs(x) + 1),
    "binary": ("sigmoid", lambda x: (x > 0).astype("float32")),
    "signs": ("tanh", np.sign),
    "categories": ("softmax", lambda x: np.eye(CLASSES, dtype="float32")[x.argmax(-1)]),
    "sparse": ("softmax", lambda x: x.argmax(-1)),
    "distributions": ("softmax", lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
    "labels": ("hard_sigmoid", lambda x: (x > 0).astype("int32")),
}


@check
def metrics_that_a_train_step_updates_add_up_rows() -> None:
    """As in Keras's guide on custom training; nothing is gathered, and the numbers are those of one device."""
    import keras
    import torch

    import keras_flow as kf
    from tests.backends.torch.partial import counted

    class Model(keras.Model):
        def train_step(self, batch: Any) -> Any:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
            self.zero_grad()
            prediction = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=prediction, sample_weight=weight)
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
            for metric in self.measures:
                metric.update_state(y, prediction, sample_weight=weight)
            self.mean.update_state(loss)
            return {type(metric).__name__: metric.result() for metric in (*self.measures, self.mean)}

    def model() -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        made = Model(inputs, keras.layers.Dense(CLASSES, "softmax")(inputs))
        kinds = keras.metrics
        made.measures = [
            kinds.CategoricalAccuracy(),
            kinds.AUC(),
            kinds.Precision(),
            kinds.SensitivityAtSpecificity(0.5),
            kinds.F1Score(average="micro"),
            kinds.OneHotIoU(CLASSES, [0, 1]),
            kinds.RootMeanSquaredError(),
            kinds.TruePositives(),
            type("Doubled", (kinds.MeanAbsoluteError,), {"update_state": doubled})(),
        ]
        made.mean = kinds.Mean(name="loss")
        made.compile(keras.optimizers.SGD(0.5), "categorical_crossentropy")
        return made

    def doubled(metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.metrics.MeanAbsoluteError.update_state(metric, y_true, y_pred * 2, sample_weight)

    def logs(rows: int, weighted: bool) -> Numbers:
        x, classes, weights = data(rows)
        y = np.eye(CLASSES, dtype="float32")[classes]
        weight = weights if weighted else None
        made = model()
        found = [made.train_on_batch(x[:, 0], y, weight, return_dict=True) for _ in range(2)]
        return {f"{name} {step}": np.asarray(value) for step, log in enumerate(found) for name, value in log.items()}

    for rows, weighted in ((8, False), (11, True)):
        wanted = logs(rows, weighted)
        with kf.DataParallel().scope():
            assert not off(wanted, logs(rows, weighted)), (rows, weighted)
    with kf.DataParallel().scope():
        made = model()
        made.measures.pop()
        x, classes, _ = data(8)
        made.train_on_batch(x[:, 0], np.eye(CLASSES, dtype="float32")[classes])
        with counted() as calls:
            made.train_on_batch(x[:, 0], np.eye(CLASSES, dtype="float32")[classes])
    # of gradients, and of the loss and all metrics; whole and fractional states have two dtypes
    assert calls == ["all_reduce"] * 3, calls


@check
def every_loss_and_metric_of_keras() -> None:
    """Each loss of Keras with all metrics of its kind, on rows that divide and rows that do not."""
    import keras

    import keras_flow as kf
    from keras_flow.backends.row_wise import row_sums
    from tests.explainer.counting.torch import watching
    from tests.sweep.cases import training

    def trained(kind: str, name: str, reduction: str, rows: int, counts: list[Any] | None = None) -> Numbers:
        activation, targets = KINDS[kind]
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES, activation)])
        metrics = [getattr(keras.metrics, metric)(**options) for metric, options in training._METRICS[kind].items()]
        loss = getattr(keras.losses, name)(reduction=reduction)
        # Keras's IoU of several labels a row takes no weights of rows
        plain = [metric for metric in metrics if "IoU" in type(metric).__name__]
        weighted = [metric for metric in metrics if metric not in plain]
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=plain, weighted_metrics=weighted)
        x, _, weights = data(rows)
        x, y = x[:, 0], targets(np.random.default_rng(3).standard_normal((rows, CLASSES)).astype("float32"))
        before = [value.copy() for value in model.get_weights()]
        first = model.train_on_batch(x, y, sample_weight=weights)
        with watching() if counts is not None else contextlib.nullcontext([]) as counted:
            logs = [first, model.train_on_batch(x, y), model.test_on_batch(x, y)]
        if counts is not None:
            counts += counted
            # of rows that interact nothing is expected: each of Keras's classes is known, but for Circle
            assert [metric.name for metric in metrics if row_sums.of_metric(metric, 2)] == []
            assert (row_sums.of_loss(loss, 2) is not None) == (name in ("Circle", "Dice", "Tversky"))
        updates = [after - was for after, was in zip(model.get_weights(), before, strict=True)]
        return {**{f"logs {number}": np.array(log) for number, log in enumerate(logs)}, **dict(enumerate(updates))}

    reductions = ("sum_over_batch_size", "sum", "mean_with_sample_weight")
    cases = [(kind, name) for kind, names in training._LOSSES.items() for name in names.split()]
    for number, (kind, name) in enumerate([*cases, ("labels", "MeanSquaredError")]):
        for rows in (8, 9):
            reduction = reductions[(number + rows) % 3]
            wanted = trained(kind, name, reduction, rows)
            counts: list[Any] = []
            with kf.DataParallel().scope():
                found = trained(kind, name, reduction, rows, counts)
            assert not off(wanted, found), (name, reduction, rows, off(wanted, found))
            assert bool(gathered(counts)) == (name in ("Circle", "Dice", "Tversky")), (name, counts)


@check
def bytes_of_a_rank_do_not_grow_with_the_ranks() -> None:
    """Rows per rank are fixed: what a rank receives grows only by the factor of an all-reduce, 2 (n - 1) / n."""
    import keras

    import keras_flow as kf
    from tests.explainer.counting.torch import watching

    def received(ranks: int) -> float:
        with kf.DataParallel(kf.Placement(range(ranks), axis_names=("data",))).scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(300, "softmax")])
            model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
            x, y = np.ones((16 * ranks, 6), "float32"), np.arange(16 * ranks)
            model.train_on_batch(x, y)
            with watching() as counted:
                model.train_on_batch(x, y)
        return sum(collective["received"] for collective in counted)

    import torch

    # ranks that are not of the placement compute alone, and receive nothing
    two, four = (torch.tensor(float(received(ranks))) for ranks in (2, 4))
    torch.distributed.all_reduce(two, torch.distributed.ReduceOp.MAX)
    # of one n-th and of three n-ths of the gradients, the loss and the metrics: 2 (n - 1) / n times their bytes
    assert 0 < four == 1.5 * two, (two, four)


@check
def outputs_are_logical_tensors_in_a_train_step() -> None:
    """Written into, viewed, read, differentiated, given to a Function: as on one device."""
    import keras
    import torch

    import keras_flow as kf

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 2

    def written(output: Any, y: Any) -> Any:
        output = output + 0
        output += y
        output[1:3] *= 3
        return output.square().mean()

    def into_itself(output: Any, y: Any) -> Any:
        output.mul_(1.5)
        return keras.losses.MeanSquaredError()(y, output)

    def through_a_view(output: Any, y: Any) -> Any:
        output[:, 0] *= 3
        return keras.losses.MeanSquaredError()(y, output)

    def by_a_function(output: Any, y: Any) -> Any:
        return keras.losses.MeanSquaredError()(y, Doubled.apply(output))

    def between_rows(output: Any, y: Any) -> Any:
        return (output @ output.T).std() + keras.ops.mean(output[0] * y)

    def read(output: Any, y: Any) -> Any:
        assert output.shape[0] == len(y) and f"{output!r}".startswith("tensor(")
        assert np.asarray(output.detach()).shape == tuple(output.shape) and len(output.tolist()) == len(y)
        return keras.losses.MeanSquaredError()(y, output) * float(output.sum())

    def twice(output: Any, y: Any) -> Any:
        return keras.losses.MeanSquaredError()(y, output) + keras.losses.LogCosh(reduction=None)(y, output).max()

    class Model(keras.Model):
        def train_step(self, batch: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            self.zero_grad()
            loss = self.of_output(self(x, training=True), keras.ops.convert_to_tensor(y))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
            return {"loss": loss}

    def trained(of_output: Callable[..., Any], rows: int) -> Numbers:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        model = Model(inputs, keras.layers.Dense(3)(inputs))
        model.of_output = of_output
        model.compile(keras.optimizers.SGD(0.5))
        x, y = data(rows)[0][:, 0], np.ones((rows, 3), "float32") / 3
        losses = [model.train_on_batch(x, y, return_dict=True)["loss"] for _ in range(2)]
        return {"losses": np.asarray(losses), **dict(enumerate(model.get_weights()))}

    for of_output in (written, into_itself, through_a_view, by_a_function, between_rows, read, twice):
        for rows in (8, 7):
            wanted = trained(of_output, rows)
            with kf.DataParallel().scope():
                assert not off(wanted, trained(of_output, rows)), (of_output.__name__, rows)


@check
def outputs_of_one_model_are_inputs_of_another() -> None:
    """As in a GAN: nothing is gathered on the way, and gradients come through both."""
    import keras
    import torch

    import keras_flow as kf
    from tests.explainer.counting.torch import watching

    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh")])
            self.second = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

        def train_step(self, batch: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            self.zero_grad()
            loss = keras.losses.MeanSquaredError()(y, self.second(self.first(x)))
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
            return {"loss": loss}

    def trained(rows: int) -> tuple[Numbers, list[Any]]:
        keras.utils.set_random_seed(0)
        model = Pair()
        model.build((None, 6))
        model.compile(keras.optimizers.SGD(0.5))
        x, y = data(rows)[0][:, 0], np.ones((rows, 2), "float32")
        model.train_on_batch(x, y)
        with watching() as counted:
            model.train_on_batch(x, y)
        return dict(enumerate(model.get_weights())), counted

    for rows in (8, 7):
        wanted, _ = trained(rows)
        with kf.DataParallel().scope():
            found, counted = trained(rows)
        assert not off(wanted, found)
        assert not gathered(counted), counted


@check
def a_penalty_on_gradients_is_that_of_one_device() -> None:
    """Gradients of gradients, of inputs (WGAN-GP) and through statistics of all rows."""
    import keras
    import torch

    import keras_flow as kf

    class Critic(keras.Model):
        def train_step(self, batch: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            self.zero_grad()
            x = keras.ops.convert_to_tensor(x).clone().requires_grad_()
            output = self(x, training=True)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = keras.losses.MeanSquaredError()(y, output) + 10 * (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
            return {"loss": loss}

    def trained(rows: int) -> Numbers:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(5, "tanh")(inputs))
        model = Critic(inputs, keras.layers.Dense(1, "softplus")(hidden))
        model.compile(keras.optimizers.SGD(0.1))
        x, y = data(rows)[0][:, 0], np.ones((rows, 1), "float32")
        losses = [model.train_on_batch(x, y, return_dict=True)["loss"] for _ in range(2)]
        return {"losses": np.asarray(losses), **dict(enumerate(model.get_weights()))}

    for rows in (8, 7):
        wanted = trained(rows)
        with kf.DataParallel().scope():
            assert not off(wanted, found := trained(rows)), (rows, off(wanted, found))


@check
def masked_statistics_along_a_middle_axis() -> None:
    """The layer's axis is as long as the last one, so that a mean along the wrong one fits in silence; and is not."""
    import keras

    import keras_flow as kf

    split = kf.ModelParallel(kf.Placement([[0, 1]], axis_names=("data", "model")), rules={"norm/": {"model": "S(0)"}})

    def trained(rows: int, length: int) -> Numbers:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((length, 6))
        hidden = keras.layers.BatchNormalization(axis=1, name="norm")(keras.layers.Masking()(inputs))
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(hidden)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.random.default_rng(0).normal(1.0, 2.0, (rows, length, 6)).astype("float32")
        x[1::2, -2:] = 0.0
        losses = [model.train_on_batch(x, np.ones((rows, 2), "float32")) for _ in range(2)]
        return {"losses": np.asarray(losses), **dict(enumerate(model.get_weights()))}

    for rows, length in ((8, 6), (7, 4)):
        wanted = trained(rows, length)
        for distribution in (kf.DataParallel(), split):
            with distribution.scope():
                found = trained(rows, length)
            assert not off(wanted, found), (distribution, off(wanted, found))


@check
def one_mask_for_all_rows_is_one_where_ranks_have_one_row() -> None:
    """A noise shape [1, ...] is one mask for all rows, also on a rank that has a single row."""
    import keras

    import keras_flow as kf

    x, y = np.ones((4, 3, 6), "float32"), np.zeros((4, 18), "float32")

    def losses() -> list[float]:
        keras.utils.set_random_seed(2)
        layers = keras.layers
        model = keras.Sequential(
            [
                layers.Input((3, 6)),
                layers.Dropout(0.5, noise_shape=(1, 1, 6), seed=3),
                layers.SpatialDropout1D(0.5, seed=4),
                layers.Flatten(),
                layers.Dense(18),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return [float(model.train_on_batch(x, y)) for _ in range(4)]

    wanted = losses()
    with kf.DataParallel().scope():
        np.testing.assert_allclose(losses(), wanted, rtol=1e-5)
