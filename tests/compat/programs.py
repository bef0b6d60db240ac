"""Programs of OneFlow 0.x, run on every rank, against NumPy and against plain Keras on one device."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
import keras_flow.compat.oneflow as flow
import keras_flow.compat.oneflow.typing as tp
from keras_flow.compat.oneflow.variables import _layers
from tests.one_device import one_device

#: 13 rows, which the ranks do not divide
ROWS, STEPS, RATE = 13, 4, 0.2


def data(rows: int = ROWS, steps: int = STEPS) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(3)
    return [
        (random.normal(size=(rows, 1, 6, 6)).astype("float32"), random.integers(0, 8, rows).astype("int32"))
        for _ in range(steps)
    ]


def mlp(images: Any, split: bool = False) -> Any:
    initializer = flow.truncated_normal(0.1)
    reshaped = flow.reshape(images, [images.shape[0], -1])
    hidden = flow.layers.dense(reshaped, 16, activation=flow.nn.relu, kernel_initializer=initializer, name="dense1")
    distribute = flow.distribute.split(axis=0) if split else flow.distribute.broadcast()
    return flow.layers.dense(hidden, 8, kernel_initializer=initializer, name="dense2", model_distribute=distribute)


def train_job(
    network: Callable[[Any], Any] = mlp, mirrored: int = 0, optimizer: Any = None, watched: list | None = None
) -> Any:
    """A job of the reference programs; `mirrored` is the most rows of a device."""
    config = flow.function_config()
    config.default_data_type(flow.float)
    config.default_logical_view(flow.scope.mirrored_view() if mirrored else flow.scope.consistent_view())
    kind: Any = tp.ListNumpy if mirrored else tp.Numpy
    rows = mirrored or ROWS

    @flow.global_function(type="train", function_config=config)
    def job(
        images: kind.Placeholder((rows, 1, 6, 6), dtype=flow.float),
        labels: kind.Placeholder((rows,), dtype=flow.int32),
    ) -> kind:
        logits = network(images)
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits, name="loss")
        schedule = flow.optimizer.PiecewiseConstantScheduler([], [RATE])
        (optimizer or flow.optimizer.SGD(schedule, momentum=0)).minimize(loss)
        if watched is not None:
            flow.watch(flow.math.reduce_mean(loss), watched.append)
        return loss

    return job


def began() -> dict[str, np.ndarray]:
    """Initial values of the reference MLP, which replace those that were drawn."""
    random = np.random.default_rng(5)
    shapes = {"dense1/kernel": (36, 16), "dense1/bias": (16,), "dense2/kernel": (16, 8), "dense2/bias": (8,)}
    return {name: (0.3 * random.normal(size=shape)).astype("float32") for name, shape in shapes.items()}


def by_numpy(
    update: Callable[[str, np.ndarray, int], np.ndarray] = lambda name, gradient, step: -RATE * gradient,
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Losses of the rows, and weights, of a training by formulas in float64."""
    w = {name: value.astype("float64") for name, value in began().items()}
    losses = []
    for step, (x, y) in enumerate(data()):
        flat = x.reshape(ROWS, -1).astype("float64")
        before = flat @ w["dense1/kernel"] + w["dense1/bias"]
        hidden = np.maximum(before, 0)
        logits = hidden @ w["dense2/kernel"] + w["dense2/bias"]
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        losses.append(-np.log(p[np.arange(ROWS), y]))
        d = (p - np.eye(8)[y]) / ROWS
        inner = (d @ w["dense2/kernel"].T) * (before > 0)
        gradients = {
            "dense1/kernel": flat.T @ inner,
            "dense1/bias": inner.sum(0),
            "dense2/kernel": hidden.T @ d,
            "dense2/bias": d.sum(0),
        }
        for name, gradient in gradients.items():
            w[name] = w[name] + update(name, gradient, step)
    return losses, w


def is_numpys(losses: list[np.ndarray], **options: Any) -> None:
    expected, weights = by_numpy(**options)
    for found, wanted in zip(losses, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    found = flow.get_all_variables()
    assert sorted(found) == sorted(weights)
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, atol=2e-5, err_msg=name)


def begin() -> None:
    flow.clear_default_session()
    keras.utils.set_random_seed(1)


def layer(name: str) -> Any:
    return _layers[name][0]


# ---- programs


def consistent_mlp() -> None:
    """The MLP, with a predict job that shares its variables, and a value that is watched."""
    begin()
    watched: list = []
    job = train_job(watched=watched)
    flow.load_variables(began())
    losses = [job(x, y) for x, y in data()]
    is_numpys(losses)
    np.testing.assert_allclose(watched, [loss.mean() for loss in losses], atol=1e-6)

    @flow.global_function()
    def evaluate(
        images: tp.Numpy.Placeholder((ROWS, 1, 6, 6)), labels: tp.Numpy.Placeholder((ROWS,), dtype=flow.int32)
    ) -> tp.Callback[tuple[tp.Numpy, tp.Numpy]]:
        return labels, flow.nn.softmax(mlp(images))

    before = flow.get_all_variables()
    got: list = []
    x, y = data()[0]
    evaluate(x, y)(got.append)
    (labels, p) = got[0]
    np.testing.assert_array_equal(labels, y)
    hidden = np.maximum(x.reshape(ROWS, -1) @ before["dense1/kernel"] + before["dense1/bias"], 0)
    logits = hidden @ before["dense2/kernel"] + before["dense2/bias"]
    wanted = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(p, wanted, atol=1e-5)
    assert str(kf.layout_of(layer("dense1").kernel)).startswith("B ")


def mirrored_mlp() -> None:
    """A list with an array for each device, the last ones shorter; a row counts as much as any other."""
    begin()
    size = kf.env.get_world_size()
    cuts = np.linspace(0, ROWS, size + 1).astype(int)[1:-1]  # 4 ranks: 3, 3, 3, 4
    watched: list = []
    job = train_job(mirrored=4, watched=watched)
    flow.load_variables(began())
    losses = []
    for x, y in data():
        loss = job(np.split(x, cuts), np.split(y, cuts))
        assert [len(each) for each in loss] == [len(each) for each in np.split(y, cuts)]
        np.testing.assert_allclose(watched[-1], [each.mean() for each in loss], atol=1e-6)
        losses.append(np.concatenate(loss))
    is_numpys(losses)
    # other lengths than before are another program with the same variables
    x, y = data()[0]
    assert sum(len(each) for each in job([x[:1]] * size, [y[:1]] * size)) == size


def hybrid_mlp() -> None:
    """The MLP whose last layer is split by its outputs, which Keras's kernel has last."""
    begin()
    job = train_job(lambda images: mlp(images, split=True))
    flow.load_variables(began())
    is_numpys([job(x, y) for x, y in data()])
    assert str(kf.layout_of(layer("dense2").kernel)) == "S(1) (from kf.shard)"
    assert str(kf.layout_of(layer("dense2").bias)) == "S(0) (from kf.shard)"
    assert str(kf.layout_of(layer("dense1").kernel)).startswith("B ")


def lenet(images: Any, stages: bool, pieces: int = 1) -> Any:
    """The LeNet of the reference programs, with its two placements; smaller."""
    initializer = flow.truncated_normal(0.3)
    first, second = (
        (flow.scope.placement(kind_of_devices(), "0:0"), flow.scope.placement(kind_of_devices(), "0:1"))
        if stages
        else (flow.scope.placement(kind_of_devices(), f"0:0-{kf.env.get_world_size() - 1}"),) * 2
    )
    with first:
        images = flow.unpack(images, pieces) if pieces > 1 else images
        conv1 = flow.layers.conv2d(
            images, 4, 3, padding="SAME", activation=flow.nn.relu, kernel_initializer=initializer, name="conv1"
        )
        pool1 = flow.nn.max_pool2d(conv1, ksize=2, strides=2, padding="SAME", name="pool1", data_format="NCHW")
        reshape = flow.reshape(pool1, [pool1.shape[0], -1])
        hidden = flow.layers.dense(reshape, 8, activation=flow.nn.relu, kernel_initializer=initializer, name="hidden")
    with second:
        logits = flow.layers.dense(hidden, 8, kernel_initializer=initializer, name="outlayer")
        return flow.pack(logits, pieces) if pieces > 1 else logits


def kind_of_devices() -> str:
    return kf.init().type


def by_keras(values: dict[str, np.ndarray], steps: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Plain Keras's LeNet, trained on one device from these values; the model."""
    with one_device():
        model = keras.Sequential(
            [
                keras.layers.Input((1, 6, 6)),
                keras.layers.Permute((2, 3, 1)),
                keras.layers.Conv2D(4, 3, padding="same", activation="relu", name="conv1"),
                keras.layers.MaxPooling2D(2, 2, "same"),
                keras.layers.Permute((3, 1, 2)),
                keras.layers.Flatten(),
                keras.layers.Dense(8, "relu", name="hidden"),
                keras.layers.Dense(8, name="outlayer"),
            ]
        )
        model.compile(keras.optimizers.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        names = [f"{variable.path.split('/')[-2]}/{variable.name}" for variable in model.weights]
        model.set_weights([values[name] for name in names])
        for x, y in steps:
            model.train_on_batch(x, y)
        return dict(zip(names, model.get_weights(), strict=True))


def is_keras(stages: bool, mirrored: bool = False) -> None:
    begin()
    traced = train_job(lambda images: lenet(images, stages), mirrored=4 if mirrored else 0)
    cuts = np.linspace(0, ROWS, kf.env.get_world_size() + 1).astype(int)[1:-1]

    def job(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.concatenate(traced(np.split(x, cuts), np.split(y, cuts))) if mirrored else traced(x, y)

    x, y = data()[0]
    first = job(x, y)
    after_one = flow.get_all_variables()
    losses = [job(x, y) for x, y in data()[1:]]
    found = flow.get_all_variables()
    wanted = by_keras(after_one, data()[1:])
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=2e-5, err_msg=name)
    assert all(loss.shape == (ROWS,) for loss in (first, *losses))


def consistent_lenet() -> None:
    is_keras(stages=False)


def mirrored_lenet() -> None:
    """Convolutions and pooling of a list with an array for each device, of unlike lengths."""
    is_keras(stages=False, mirrored=True)


def pipelined_lenet() -> None:
    """Convolutions on device 0, the output layer on device 1."""
    is_keras(stages=True)
    ranks = [kf.layout_of(layer(name).kernel).layout.placement.ranks for name in ("conv1", "hidden", "outlayer")]
    assert ranks == [(0,), (0,), (1,)]
    with pytest.raises(kf.FlowError, match="cannot be cut in 4 micro-batches"):
        train_job(lambda images: lenet(images, True, pieces=4))(*data()[0])


def variables_of_ones_own() -> None:
    """`flow.get_variable` with a split, and a loss that is more than a mean of rows."""
    begin()
    w = np.random.default_rng(0).normal(size=(36, 8)).astype("float32")

    @flow.global_function(type="train")
    def job(
        images: tp.Numpy.Placeholder((ROWS, 1, 6, 6)), labels: tp.Numpy.Placeholder((ROWS,), dtype=flow.int32)
    ) -> dict:
        flat = flow.flatten(images, start_dim=1)
        weight = flow.get_variable("weight", (36, 8), distribute=flow.distribute.split(1))
        bias = flow.get_variable("bias", (8,), initializer=flow.constant_initializer(0.5))
        logits = flow.nn.bias_add(flow.matmul(flat, weight), bias)
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        total = flow.math.reduce_mean(loss) + 0.5 * flow.math.reduce_sum(flow.math.square(weight))
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [RATE]), momentum=0).minimize(total)
        return {"total": total, "most": flow.math.reduce_max(loss), "labels": labels}

    flow.load_variables({"weight/value": w})
    x, y = data()[0]
    got = job(x, y)
    assert str(kf.layout_of(layer("weight").value)) == "S(1) (from kf.shard)"
    flat, b = x.reshape(ROWS, -1).astype("float64"), np.full(8, 0.5)
    logits = flat @ w + b
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    losses = -np.log(p[np.arange(ROWS), y])
    np.testing.assert_allclose(got["total"], losses.mean() + 0.5 * np.square(w, dtype="float64").sum(), rtol=1e-5)
    np.testing.assert_allclose(got["most"], losses.max(), rtol=1e-5)
    np.testing.assert_array_equal(got["labels"], y)
    d = (p - np.eye(8)[y]) / ROWS
    found = flow.get_all_variables()
    np.testing.assert_allclose(found["weight/value"], w - RATE * (flat.T @ d + w), atol=2e-5)
    np.testing.assert_allclose(found["bias/value"], b - RATE * d.sum(0), atol=2e-5)


def batch_normalization() -> None:
    """Statistics of the logical batch in a train job, moving ones in a predict job, which returns a variable too."""
    begin()

    @flow.global_function(type="train")
    def job(x: tp.Numpy.Placeholder((ROWS, 3))) -> tuple[tp.Numpy, tp.Numpy]:
        y = flow.layers.batch_normalization(x, momentum=0.9, epsilon=1e-3, name="norm")
        loss = flow.nn.MSELoss(y, y * 0.0 + 1.0)
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.0]), momentum=0).minimize(loss)
        return y, flow.math.argmax(y, axis=1)

    @flow.global_function()
    def evaluate(x: tp.Numpy.Placeholder((2, 3))) -> tp.Bundle[list]:
        return [
            flow.layers.batch_normalization(x, momentum=0.9, epsilon=1e-3, name="norm"),
            flow.get_variable("w", (2,)),
        ]

    x = np.random.default_rng(2).normal(2.0, 3.0, (ROWS, 3)).astype("float32")
    y, largest = job(x)
    wanted = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3)
    np.testing.assert_allclose(y, wanted, atol=1e-5)
    np.testing.assert_array_equal(largest, wanted.argmax(1))
    moved, weight = evaluate(x[:2])
    np.testing.assert_allclose(moved, (x[:2] - 0.1 * x.mean(0)) / np.sqrt(0.9 + 0.1 * x.var(0) + 1e-3), atol=1e-5)
    np.testing.assert_array_equal(weight, np.zeros(2))


def layer_norm() -> None:
    """Over all dims from one on, with gamma and beta along the last one, or along all of these; in either view."""
    x = np.random.default_rng(5).normal(2.0, 3.0, (ROWS, 2, 3)).astype("float32")
    gamma, beta = np.array([1.0, 2.0, 3.0], "float32"), np.array([0.5, 0.0, -0.5], "float32")

    def norms(x: Any) -> list:
        scaled = flow.layers.layer_norm(x, name="scaled")
        return [scaled, flow.layers.layer_norm(x, begin_norm_axis=1, begin_params_axis=1, epsilon=1e-3, name="all")]

    for mirrored in (False, True):
        begin()
        config = flow.function_config()
        if mirrored:
            config.default_logical_view(flow.scope.mirrored_view())

        @flow.global_function("predict", config)
        def job(
            x: (tp.ListNumpy if mirrored else tp.Numpy).Placeholder((ROWS // 4 + 1 if mirrored else ROWS, 2, 3)),
        ) -> tp.Bundle[list]:
            return norms(x)

        flow.load_variables({"scaled/gamma": gamma, "scaled/beta": beta})
        found = job(np.array_split(x, 4) if mirrored else x)
        for parts, epsilon, factor, offset in zip(found, [1e-5, 1e-3], [gamma, 1.0], [beta, 0.0], strict=True):
            values = np.concatenate(parts) if mirrored else parts
            wanted = (x - x.mean((1, 2), keepdims=True)) / np.sqrt(x.var((1, 2), keepdims=True) + epsilon)
            np.testing.assert_allclose(values, wanted * factor + offset, atol=1e-5)
        shapes = {name: value.shape for name, value in flow.get_all_variables().items()}
        assert shapes == {"scaled/gamma": (3,), "scaled/beta": (3,), "all/gamma": (2, 3), "all/beta": (2, 3)}


def another_session() -> None:
    """A job has the variables of the session in which it is called; a value that is refused is not kept."""
    begin()

    @flow.global_function()
    def job(x: tp.Numpy.Placeholder((4, 3))) -> tp.Numpy:
        return flow.layers.dense(x, 1, name="out")

    x, ones = np.ones((4, 3), "float32"), np.ones((3, 1), "float32")
    job(x)
    with pytest.raises(kf.FlowError, match="has the shape"):
        flow.load_variables({"out/kernel": np.ones((5, 5)), "out/bias": np.ones(1)})
    flow.load_variables({"out/kernel": ones})
    assert job(x)[:, 0].tolist() == [3.0] * 4
    flow.clear_default_session()
    flow.load_variables({"out/kernel": 2 * ones})
    assert job(x)[:, 0].tolist() == [6.0] * 4
    assert sorted(flow.get_all_variables()) == ["out/bias", "out/kernel"]


def jobs_train_what_they_say() -> None:
    """Whether a layer trains, and its regularizer, are each job's own; its layout is that of all."""
    begin()
    x = np.random.default_rng(8).normal(size=(ROWS, 3)).astype("float32")

    def networks(x: Any, trains: str, regularizer: Any = None) -> Any:
        for name in ("first", "second"):
            options = {"use_bias": False, "kernel_regularizer": regularizer, "trainable": name in trains}
            x = flow.layers.dense(x, 3, kernel_initializer=flow.ones_initializer(), name=name, **options)
        return x * flow.get_variable("own", (3,), initializer=flow.ones_initializer(), trainable="own" in trains)

    def job_of(trains: str, regularizer: Any = None) -> Any:
        @flow.global_function(type="train")
        def job(x: tp.Numpy.Placeholder((ROWS, 3))) -> None:
            loss = flow.math.reduce_mean(networks(x, trains, regularizer))
            flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [RATE]), momentum=0).minimize(loss)

        return job

    @flow.global_function()
    def evaluate(x: tp.Numpy.Placeholder((ROWS, 3))) -> tp.Numpy:
        return networks(x, "")

    evaluate(x)
    w = {"first": np.ones((3, 3)), "second": np.ones((3, 3)), "own": np.ones(3)}
    jobs = [("first", None, 0.0), ("second", flow.regularizers.l2(0.5), 0.5), ("first own", None, 0.0)]
    made = [(job_of(trains, regularizer), trains, l2) for trains, regularizer, l2 in jobs]
    for job, trains, l2 in made * 2:
        job(x)
        hidden, d = x @ w["first"], np.full((ROWS, 3), 1 / (3 * ROWS))
        inner = d * w["own"]
        gradients = {
            "first": x.T @ (inner @ w["second"].T),
            "second": hidden.T @ inner,
            "own": (hidden @ w["second"] * d).sum(0),
        }
        for name in trains.split():
            w[name] = w[name] - RATE * (gradients[name] + l2 * w[name])
        found = flow.get_all_variables()
        for name, value in w.items():
            key = f"{name}/value" if name == "own" else f"{name}/kernel"
            np.testing.assert_allclose(found[key], value, atol=1e-5, err_msg=f"{name} after {trains}")

    @flow.global_function()
    def split(x: tp.Numpy.Placeholder((ROWS, 3))) -> tp.Numpy:
        return flow.layers.dense(x, 3, use_bias=False, name="first", model_distribute=flow.distribute.split(0))

    with pytest.raises(kf.FlowError, match=r"layer .first. is .* in another job, and .*S\(1\)"):
        split(x)


def micro_batches() -> None:
    """`flow.unpack` in a job with stages: three micro-batches, and the numbers of the whole batch."""
    begin()
    config = flow.function_config()
    config.default_placement_scope(flow.scope.placement(kind_of_devices(), "0:1"))
    seen: list = []

    @flow.global_function(type="train", function_config=config)
    def job(x: tp.Numpy.Placeholder((12, 4))) -> tp.Numpy:
        with flow.scope.placement(kind_of_devices(), "0:0"):
            pieces = flow.unpack(x, 3)
            seen.append(pieces.shape)
            initializer = flow.ones_initializer()
            hidden = flow.layers.dense(pieces, 2, kernel_initializer=initializer, use_bias=False, name="first")
        y = flow.layers.dense(hidden, 1, kernel_initializer=initializer, name="second")
        y = flow.pack(y, 3)
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.1]), momentum=0).minimize(y)
        return y

    x = np.random.default_rng(4).normal(size=(12, 4)).astype("float32")
    np.testing.assert_allclose(job(x)[:, 0], 2 * x.sum(1), atol=1e-5)
    first, second = np.ones((4, 2)) - 0.1 * x.mean(0)[:, None], np.ones(2) - 0.1 * x.sum(1).mean()
    np.testing.assert_allclose(job(x)[:, 0], x @ first @ second - 0.1, atol=1e-5)
    assert seen[-1] == (4, 4)
    assert [kf.layout_of(layer(name).kernel).layout.placement.ranks for name in ("first", "second")] == [(0,), (1,)]


def one_placement() -> None:
    """A job whose only placement is device 1 runs there."""
    begin()

    @flow.global_function(type="train")
    def job(x: tp.Numpy.Placeholder((5, 4))) -> tp.Numpy:
        with flow.scope.placement(kind_of_devices(), "0:1"):
            y = flow.layers.dense(x, 1, kernel_initializer=flow.ones_initializer(), name="out")
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.5]), momentum=0).minimize(y)
        return y

    x = np.arange(20, dtype="float32").reshape(5, 4)
    np.testing.assert_allclose(job(x)[:, 0], x.sum(1), rtol=1e-6)
    np.testing.assert_allclose(job(x)[:, 0], x @ (1 - 0.5 * x.mean(0)) - 0.5, rtol=1e-6)
    assert kf.layout_of(layer("out").kernel).layout.placement.ranks == (1,)


def images_of_ones_own() -> None:
    """`flow.nn.conv2d` with a variable of OneFlow's order of dims, biases of channels, and pooling."""
    begin()
    kernel = np.random.default_rng(6).normal(size=(2, 1, 3, 3)).astype("float32")

    @flow.global_function()
    def job(x: tp.Numpy.Placeholder((5, 1, 6, 6))) -> tp.Numpy:
        filters = flow.get_variable("filters", (2, 1, 3, 3))
        bias = flow.get_variable("bias", (2,), initializer=flow.constant_initializer(0.5))
        y = flow.nn.bias_add(flow.nn.conv2d(x, filters, strides=1, padding="VALID"), bias)
        return flow.nn.avg_pool2d(y, ksize=2, strides=2, padding="VALID")

    flow.load_variables({"filters/value": kernel})
    x = np.random.default_rng(7).normal(size=(5, 1, 6, 6)).astype("float32")
    windows = np.lib.stride_tricks.sliding_window_view(x[:, 0], (3, 3), axis=(1, 2))
    convolved = np.einsum("rhwij,cij->rchw", windows, kernel[:, 0]) + 0.5
    wanted = convolved.reshape(5, 2, 2, 2, 2, 2).mean((3, 5))
    np.testing.assert_allclose(job(x), wanted, atol=1e-5)


def bad_input() -> None:
    """Each mistake is one line that names what was asked and what was found."""
    begin()
    x, y = data()[0]
    job = train_job()
    refused = [
        (lambda: job(x[:5], y), "argument 'images' has the shape (5, 1, 6, 6); its placeholder says (13, 1, 6, 6)"),
        (lambda: job(x, y + 0.5), "argument 'labels' has dtype float64; its placeholder says int32"),
        (lambda: train_job(mirrored=4)([x[:2]], [y[:2]]), "is a list with an array for each device: 4, got 1"),
        (lambda: train_job(mirrored=4)(x, y), "argument 'images' is a tp.ListNumpy: give a list of 4 arrays"),
        (
            lambda: train_job(mirrored=4)([x[:2]] * 4, [y[:2]] * 3 + [y[:1]]),
            "'images' has [2, 2, 2, 2] rows, 'labels' has [2, 2, 2, 1]",
        ),
        (lambda: train_job(mirrored=4)([x[:5]] * 4, [y[:4]] * 4), "its placeholder says at most 4 rows of (1, 6, 6)"),
        (lambda: flow.global_function()(lambda x: x), "argument 'x' has no placeholder as its annotation"),
        (lambda: train_job(lambda x: mlp(mlp(x)))(x, y), "two layers named 'dense1'"),
        (
            lambda: train_job(lambda x: mlp(x, split=True), mirrored=4)([x[:2]] * 4, [y[:2]] * 4),
            "need flow.scope.consis",
        ),
        (
            lambda: train_job(lambda x: flow.layers.layer_norm(x, begin_norm_axis=2))(x, y),
            "begin_norm_axis=2 and begin_params_axis=-1 of inputs (13, 1, 6, 6); legal are one dim for both",
        ),
        (lambda: flow.layers.dense(x, 3), "an operation of flow is part of a job"),
        (lambda: flow.config.cpu_device_num(2), "came after the first job: the session has 4 ranks already"),
        (lambda: flow.nn.moments, "flow.nn.moments of OneFlow 0.x is not in keras_flow.compat.oneflow. Instead: use"),
        (lambda: flow.data.load_mnist, "flow.data of OneFlow 0.x is not in"),
        (lambda: flow.function_config().enable_auto_mixed_precision, "keras.config.set_dtype_policy"),
        (lambda: flow.optimizer.SGD(0.1), "an optimizer takes a schedule, got 0.1"),
    ]
    for call, text in refused:
        with pytest.raises(kf.FlowError) as caught:
            call()
        assert text in str(caught.value), caught.value
    # a job that was refused leaves nothing behind
    flow.load_variables(began())
    is_numpys([job(x, y) for x, y in data()])

    @flow.global_function(type="train")
    def without_loss(x: tp.Numpy.Placeholder((2, 3))) -> tp.Numpy:
        return x

    with pytest.raises(kf.FlowError, match="is a train job and minimizes no loss"):
        without_loss(np.ones((2, 3), "float32"))


def grid_of_devices() -> None:
    """`parallel_distribution` on a 2 x 2 grid: rows over its first axis, the variable's columns over its second."""
    begin()

    @flow.global_function(type="train")
    def job(x: tp.Numpy.Placeholder((6, 4))) -> tp.Numpy:
        with flow.scope.placement(kind_of_devices(), "0:0-3", hierarchy=(2, 2)):
            weight = flow.get_variable(
                "weight", (4, 8), initializer=flow.ones_initializer(), parallel_distribution=["B", "S(1)"]
            )
            y = flow.matmul(x, weight)
        flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [1.0]), momentum=0).minimize(y)
        return y

    x = np.arange(24, dtype="float32").reshape(6, 4)
    np.testing.assert_allclose(job(x), x @ np.ones((4, 8)), rtol=1e-6)
    assert kf.layout_of(layer("weight").value).layout.local_shape(0) == (4, 4)
    wanted = 1 - np.tile(x.sum(0)[:, None] / 48, 8)
    np.testing.assert_allclose(flow.get_all_variables()["weight/value"], wanted, rtol=1e-5)


def optimizers() -> None:
    """Adam without bias correction, momentum, a warm-up, and clipping by the norm of all gradients."""
    of = flow.optimizer
    m: dict[str, Any] = {}
    v: dict[str, Any] = {}

    def adam(name: str, g: np.ndarray, step: int) -> np.ndarray:
        m[name] = 0.9 * m.get(name, 0) + 0.1 * g
        v[name] = 0.999 * v.get(name, 0) + 0.001 * g * g
        return -0.01 * m[name] / (np.sqrt(v[name]) + 1e-3)

    def momentum(name: str, g: np.ndarray, step: int) -> np.ndarray:
        rate = RATE * (0.5 + 0.5 * step / 2) if step < 2 else 0.1 if step > 2 else RATE
        m[name] = 0.9 * m.get(name, 0) - rate * g
        return m[name]

    warmup = of.warmup.linear(2, 0.5)
    cases = [
        (of.Adam(of.PiecewiseConstantScheduler([], [0.01]), epsilon=1e-3), adam),
        (of.SGD(of.PiecewiseConstantScheduler([2], [RATE, 0.1], warmup=warmup)), momentum),
    ]
    for optimizer, update in cases:
        begin()
        m.clear()
        v.clear()
        job = train_job(optimizer=optimizer)
        flow.load_variables(began())
        is_numpys([job(x, y) for x, y in data()], update=update)


def checkpoints(folder: str) -> None:
    """Saved after training, loaded in a session that has made no variable yet, under another layout."""
    begin()
    job = train_job()
    for x, y in data()[:2]:
        job(x, y)
    path = str(Path(folder) / "models")
    flow.checkpoint.save(path)
    saved = flow.get_all_variables()
    x, y = data()[2]
    next_loss = job(x, y)
    begin()
    check_point = flow.train.CheckPoint()
    check_point.load(path)
    again = train_job(lambda images: mlp(images, split=True))(x, y)
    np.testing.assert_allclose(again, next_loss, atol=1e-5)
    found = flow.checkpoint.get(path)
    assert sorted(found) == sorted(saved)
    for name, value in saved.items():
        np.testing.assert_array_equal(found[name], value)


def older_config() -> None:
    """`config.train` and `flow.losses.add_loss`, as the programs before 0.2 wrote them."""
    begin()
    config = flow.function_config()
    config.train.primary_lr(RATE)
    config.train.model_update_conf({"naive_conf": {}})

    @flow.global_function(config)
    def job(
        images: tp.Numpy.Placeholder((ROWS, 1, 6, 6)), labels: tp.Numpy.Placeholder((ROWS,), dtype=flow.int32)
    ) -> tp.Numpy:
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, mlp(images))
        flow.losses.add_loss(loss)
        return loss

    flow.load_variables(began())
    is_numpys([job(x, y) for x, y in data()])


def on_all_ranks() -> None:
    """Programs each of whose placements has all ranks."""
    consistent_mlp()
    mirrored_mlp()
    hybrid_mlp()
    layer_norm()
    another_session()
    jobs_train_what_they_say()


def small() -> None:
    """What `make test` runs."""
    on_all_ranks()
    pipelined_lenet()
    bad_input()


def large() -> None:
    consistent_lenet()
    mirrored_lenet()
    variables_of_ones_own()
    grid_of_devices()
    optimizers()
    older_config()
    checkpoints(tempfile.gettempdir())
