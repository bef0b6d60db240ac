"""Programs of the tests of the TensorFlow backend, for `test_dtensor`."""

import contextlib
import functools
import gc
import math
import os
import warnings
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import keras_flow as kf
from keras_flow.backends.active import backend
from keras_flow.backends.tensorflow import random as draws
from tests.backends import jit_of_files
from tests.backends.tensorflow import data_threads, replicas, unsplit

S = kf.sbp.split


@keras.saving.register_keras_serializable()
class Shifted(keras.initializers.RandomNormal):
    """A user's own: a draw of Keras's, and more."""

    def __call__(self, shape, dtype=None):
        return super().__call__(shape, dtype) + 1.0


def created_sharded() -> None:
    """Shards have the values of one device."""
    made = ("glorot_uniform", "he_normal", "random_normal", "orthogonal", "zeros", "ones", Shifted)
    shapes = ((64, 24), (12, 20), (8, 4, 12))
    expected = {}
    for name in made:
        for shape in shapes:
            keras.utils.set_random_seed(1)
            expected[name, shape] = keras.Variable(keras.initializers.get(name), shape=shape, name="w").numpy()
    mesh = kf.Placement([[2, 0], [3, 1]], ("a", "b"))
    for spec in ({"a": S(0)}, {"b": S(1)}, {"a": S(1), "b": S(0)}):
        distribution = kf.ModelParallel(mesh, rules={"w": spec}, batch_axes=())
        for (name, shape), value in expected.items():
            with distribution.scope():
                keras.utils.set_random_seed(1)
                variable = keras.Variable(keras.initializers.get(name), shape=shape, name="w")
            np.testing.assert_array_equal(variable.numpy(), value)
            np.testing.assert_array_equal(variable.value.numpy(), value)  # TensorFlow's variable
            layout = kf.layout_of(variable).layout
            for rank, shard in backend().shards(variable).items():
                np.testing.assert_array_equal(shard, value[layout.local_slices(rank)])


def _fit(distribution: object, uneven: bool = True, bn: dict | None = None, **compiled: object) -> tuple:
    random = np.random.RandomState(0)
    x, y = random.randn(62 if uneven else 64, 8).astype("float32"), random.randint(0, 4, 62 if uneven else 64)
    with distribution.scope() if distribution else contextlib.nullcontext():
        keras.utils.set_random_seed(0)
        layers = keras.layers
        model = keras.Sequential(
            [
                layers.Input((8,)),
                layers.Dense(16, activation="relu", name="hidden", kernel_regularizer="l2", activity_regularizer="l2"),
                layers.BatchNormalization(momentum=0.5),
                layers.Dropout(0.3),
                layers.Dense(4),
            ]
        )
        model.compile(
            keras.optimizers.Adam(1e-2, global_clipnorm=0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **compiled,
        )
        history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history
    return model, history, x, y


def _same(one: tuple, other: tuple) -> None:
    for name, values in one[1].items():
        np.testing.assert_allclose(other[1][name], values, rtol=1e-5, atol=1e-7)
    for a, b in zip(one[0].get_weights(), other[0].get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-4 * max(1, np.abs(a).max()))


def any_order_of_ranks() -> None:
    """Gradients go from split columns to split rows rightly where ranks do not ascend along an axis."""
    x, y = (np.random.default_rng(seed).normal(size=(8, 4)).astype("float32") for seed in (0, 1))

    def updates(distribution: object) -> list[np.ndarray]:
        with distribution.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            before = [np.array(value) for value in model.get_weights()]
            model.train_on_batch(x, y)
        return [after - value for after, value in zip(model.get_weights(), before, strict=True)]

    expected = updates(kf.DataParallel(kf.Placement([0])))
    for ranks in ([[3, 1], [0, 2]], [[2, 3], [0, 1]]):
        placement = kf.Placement(ranks, axis_names=("data", "model"))
        for axis in ("data", "model"):
            rules = {"kernel": {axis: kf.sbp.split(0)}}
            for found, value in zip(updates(kf.ModelParallel(placement, rules=rules)), expected, strict=True):
                np.testing.assert_allclose(found, value, rtol=0, atol=1e-5 * np.abs(value).max())


def scaled_losses() -> None:
    """The branches of a loss scale are DTensor's, and no reason for one device (whose warning is an error here)."""
    x, y = (np.random.default_rng(seed).normal(size=(14, 4)).astype("float32") for seed in (0, 1))

    def updates(distribution: object, scale: float) -> list[np.ndarray]:
        with distribution.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
            # the second step's gradients overflow, and its scale is halved
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), scale, dynamic_growth_steps=1)
            model.compile(optimizer, "mse")
            before = [np.array(value) for value in model.get_weights()]
            for _ in range(3):
                model.train_on_batch(x, y)
        changes = [after - value for after, value in zip(model.get_weights(), before, strict=True)]
        return [*changes, np.array(optimizer.dynamic_scale), np.array(optimizer.iterations)]

    for scale in (2.0**10, 2.0**127):
        expected = updates(kf.DataParallel(kf.Placement([0])), scale)
        for found, value in zip(updates(kf.DataParallel(), scale), expected, strict=True):
            np.testing.assert_allclose(found, value, rtol=0, atol=1e-5 * np.abs(value).max())


def steps() -> None:
    """Steps are traced once for each number of rows; a step that raises leaves the model usable."""
    assert os.environ["DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"] == "0"
    model, _, x, y = _fit(kf.DataParallel())
    counts: list[int] = []
    traced = model.train_step
    model.train_step = lambda data: (counts.append(1), traced(data))[1]
    backend().forget_steps(model)
    model.fit(x, y, batch_size=16, epochs=4, verbose=0)
    assert len(counts) == 2, counts  # 16 rows, and 14
    before = model.get_weights()
    with contextlib.suppress(ValueError, tf.errors.OpError):
        model.fit(x[:, :3], y, verbose=0)
        raise AssertionError("wrong data were accepted")
    assert dtensor.get_default_mesh() is None
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    model.fit(x, y, verbose=0)


def layouts() -> None:
    """Axes that are only used together are one mesh axis; statistics by rank are those of their definition."""
    mesh = kf.Placement([[0, 1], [2, 3]], ("a", "b"))
    rules = {"hidden/kernel": {"a": S(1), "b": S(1)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = _fit(kf.ModelParallel(mesh, rules=rules, batch_axes=()))
    assert {part.shape for part in backend().shards(split[0].layers[0].kernel).values()} == {(8, 4)}
    _same(_fit(None), split)
    _same(_fit(None, uneven=False), _fit(kf.DataParallel(mesh), uneven=False))
    x = np.random.RandomState(0).randn(10, 3).astype("float32") * 3 + 1
    for strategy in (None, "mirrored"):
        with kf.DataParallel(batch_statistics="replica", strategy=strategy).scope():
            model = keras.Sequential([keras.layers.Input((3,)), keras.layers.BatchNormalization(momentum=0.0)])
            model.compile("sgd", "mse")
            model.fit(x, x, batch_size=10, shuffle=False, verbose=0)
        groups = [x[a:b] for a, b in ((0, 3), (3, 6), (6, 8), (8, 10))]
        for moving, of in ((model.layers[0].moving_mean, np.mean), (model.layers[0].moving_variance, np.var)):
            np.testing.assert_allclose(moving.numpy(), np.mean([of(g, axis=0) for g in groups], axis=0), rtol=1e-5)


def operations() -> None:
    """Operations along a split dim that DTensor alone computes wrongly."""
    ops = keras.ops
    rules = {"first/kernel": {"model": S(1)}, "last/kernel": {"model": S(0)}}
    cases = {
        "concatenate": lambda h: ops.concatenate([h, ops.relu(h)], 1),
        "reverse": lambda h: h[:, ::-1],
        "split": lambda h: ops.split(h, 2, 1)[1],
        "tile": lambda h: ops.tile(h, (1, 2)),
        "pad": lambda h: ops.pad(h, ((0, 0), (2, 2))),
    }
    x, y = np.random.RandomState(0).randn(16, 8).astype("float32"), np.ones((16, 4), "float32")

    class Model(keras.Model):
        def __init__(self, function: object):
            super().__init__()
            self.function = function
            self.first, self.last = keras.layers.Dense(8, name="first"), keras.layers.Dense(4, name="last")

        def call(self, x: object) -> object:
            return self.last(self.function(self.first(x)))

    for name, function in cases.items():
        weights = []
        for distribution in (None, kf.ModelParallel(kf.Placement([0, 1, 2, 3], ("model",)), rules=rules)):
            with distribution.scope() if distribution else contextlib.nullcontext():
                keras.utils.set_random_seed(0)
                model = Model(function)
                model.compile(keras.optimizers.SGD(0.1), "mse")
                model.fit(x, y, epochs=2, verbose=0)
                weights.append(model.get_weights())
        for one, other in zip(*weights, strict=True):
            np.testing.assert_allclose(other, one, atol=1e-5, err_msg=name)


def mirrored() -> None:
    """What the grid does not show of MirroredStrategy: replicas in another order, and what mixes rows is refused."""
    placement = kf.Placement([3, 1, 0], ("data",))
    _same(_fit(None), _fit(kf.DataParallel(placement, strategy="mirrored")))
    with kf.DataParallel(strategy="mirrored").scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Lambda(lambda x: x)])
        model.compile("sgd", "mse")
        try:
            model.fit(np.ones((4, 8)), np.ones((4, 8)), verbose=0)
        except kf.FlowError as error:
            assert "default strategy" in str(error)
        else:
            raise AssertionError("a layer that may mix rows was accepted")


def replicas_without_rows() -> None:
    """Three rows on four replicas: training, evaluation and prediction of layers that fail on no rows at all."""

    def run() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        images = keras.Input((4, 4, 3))
        x = keras.layers.SeparableConv2D(4, 2, padding="same")(keras.layers.AveragePooling2D(2)(images))
        x = keras.layers.Conv2DTranspose(5, 2)(keras.layers.Conv2D(6, 2, padding="same")(x))
        depthwise = keras.layers.DepthwiseConv2D(2, depth_multiplier=2)(images)
        steps = keras.layers.Reshape((4, 12))(images)
        both = keras.layers.Add()([keras.layers.GRU(5)(steps), keras.layers.GlobalAveragePooling2D()(x)])
        both = keras.layers.Concatenate()([both, keras.layers.GlobalAveragePooling2D()(depthwise)])
        model = keras.Model(images, keras.layers.Dense(2)(keras.layers.BatchNormalization()(both)))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        x, y = np.random.RandomState(0).randn(3, 4, 4, 3).astype("float32"), np.ones((3, 2), "float32")
        logs = [model.train_on_batch(x, y), model.train_on_batch(x, y), model.test_on_batch(x, y)]
        return [model.predict(x, verbose=0), *map(np.asarray, logs), *model.get_weights()]

    wanted = run()
    with kf.DataParallel(strategy="mirrored").scope():
        found = run()
    for value, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(value, right, atol=1e-5)


#: of losses
REDUCTIONS = ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight")


def losses_without_rows(reduction: str) -> None:
    """Three rows on four replicas: a reduction of losses, with weights, two outputs and an added loss."""
    x, y = np.random.RandomState(0).randn(3, 6).astype("float32"), np.ones((3, 4), "float32")
    weights = np.array([0.5, 2.0, 0.0], "float32")

    def run(weighted: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(5, kernel_regularizer="l2")(inputs)
        model = keras.Model(inputs, [keras.layers.Dense(4)(hidden), keras.layers.Dense(4)(hidden)])
        losses = [keras.losses.CosineSimilarity(reduction=reduction), keras.losses.Huber(reduction=reduction)]
        model.compile(keras.optimizers.SGD(0.1), losses, loss_weights=[0.5, 2.0], weighted_metrics=[["mae"], ["mse"]])
        weight = [weights, weights[::-1]] if weighted else None
        logs = [model.train_on_batch(x, [y, -y], weight) for _ in range(2)]
        logs.append(model.test_on_batch(x, [y, -y], weight))
        return [*map(np.asarray, logs), *model.get_weights()]

    for weighted in (False, True):
        wanted = run(weighted)
        with kf.DataParallel(strategy="mirrored").scope():
            found = run(weighted)
        for value, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(value, right, atol=1e-5, err_msg=f"{reduction}, {weighted}")


def copies_of_many_dims() -> None:
    """Repeated and tiled images and volumes, whose stock gradients have more dims than DTensor can cut."""
    layers, ops = keras.layers, keras.ops
    split = kf.sbp.split(0)

    class Tiled(layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return ops.tile(x, [1, 2, 1, 3, 1])

    def run(rows: int) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        images, volumes = keras.Input((4, 4, 2)), keras.Input((2, 3, 2, 2))
        flat = [
            layers.Flatten()(layers.UpSampling2D()(layers.Conv2D(4, 2, padding="same", groups=2, name="c")(images))),
            layers.Flatten()(layers.UpSampling3D()(layers.Conv3D(2, 1)(volumes))),
            layers.Flatten()(Tiled()(volumes)),
        ]
        model = keras.Model([images, volumes], layers.Dense(3)(layers.Concatenate()(flat)))
        model.compile(keras.optimizers.SGD(0.02), "mse")
        random = np.random.RandomState(0)
        x = [random.randn(rows, *inputs.shape[1:]).astype("float32") for inputs in (images, volumes)]
        for _ in range(2):
            model.train_on_batch(x, np.ones((rows, 3), "float32"))
        return model.get_weights()

    mesh = kf.Placement([[0], [1], [2], [3]], ("data", "model"))
    for rows in (8, 7):
        wanted = run(rows)
        with kf.ModelParallel(mesh, batch_axes=("data", "model"), rules={"c/bias": {"data": split}}).scope():
            found = run(rows)
        for value, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(value, right, atol=1e-5)


def operations_that_fail_as_they_run() -> None:
    """DTensor accepts a cut of nine dims and fails as it runs: one error that says so, and the process goes on."""
    layers = keras.layers
    mesh = kf.Placement(range(4), ("model",))
    rules = {"nine": {"model": kf.sbp.split(8)}}
    x, y = np.ones((4, 8), "float32"), np.ones((4, 2), "float32")
    with kf.ModelParallel(mesh, activations=rules).scope():
        nine = [layers.Input((8,)), layers.Reshape((1,) * 7 + (8,), name="nine"), layers.Flatten(), layers.Dense(2)]
        model = keras.Sequential(nine)
        model.compile("sgd", "mse")
        try:
            model.train_on_batch(x, y)
        except kf.FlowError as error:
            assert "nine" in str(error) and "jax or torch" in str(error), error
        else:
            raise AssertionError("nine dims were cut: then this needs no error any more")
    with kf.DataParallel().scope():
        other = keras.Sequential([layers.Input((8,)), layers.Dense(2)])
        other.compile("sgd", "mse")
        other.train_on_batch(x, y)


def draws_of_own_rows() -> None:
    """A rank draws the elements of its rows alone, by TensorFlow's own generator, and they are those of one device."""

    class Drawn(keras.layers.Layer):
        """Random numbers with the rows of its inputs."""

        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(5)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            uniform = keras.random.uniform(keras.ops.shape(x), seed=self.seeds)
            masked = keras.random.dropout(keras.ops.ones_like(x), 0.5, seed=self.seeds)
            return uniform + masked + 0.0 * x

    counters: list[int] = []
    words_from = draws._words_from

    def counted(words, tag, counter, count, dtype):
        counters.append(count)
        return words_from(words, tag, counter, count, dtype)

    def drawn(placement: kf.Placement, shape: tuple[int, ...]) -> np.ndarray:
        counters.clear()
        with kf.DataParallel(placement, random="logical").scope():
            model = keras.Sequential([keras.layers.Input(shape[1:]), Drawn()])
            return model.predict(np.ones(shape, "float32"), batch_size=shape[0], verbose=0)

    with mock.patch.object(draws, "_words_from", counted):
        for shape in ((12, 6), (12, 3, 5), (12, 2, 2, 4)):
            wanted = drawn(kf.Placement([0]), shape)
            line = math.prod(shape[1:-1]) * -(-shape[-1] // 4)
            for ranks in (2, 3, 4):
                np.testing.assert_array_equal(drawn(kf.Placement(range(ranks)), shape), wanted)
                assert set(counters) == {12 // ranks * line}, (shape, ranks, counters)


class Slices(keras.optimizers.Optimizer):
    """Updates by slices alone: what is assigned, added and subtracted is of the rows of a batch."""

    def build(self, variables: list) -> None:
        super().build(variables)
        self.used = self.add_optimizer_variables(variables, "used")
        self.total = self.add_optimizer_variables(variables, "total")

    def update_step(self, gradient: tf.Tensor | tf.IndexedSlices, variable: tf.Variable, learning_rate: object) -> None:
        place = self._get_variable_index(variable)
        if isinstance(gradient, tf.IndexedSlices):
            ones = tf.ones_like(gradient.values)
            self.assign(self.used[place], tf.IndexedSlices(0.5 * ones, gradient.indices, gradient.dense_shape))
            self.assign_add(self.total[place], gradient)
            gradient = self.used[place] * gradient + 0.1 * self.total[place]
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * gradient)


def rows_of_an_embedding_that_repeat() -> None:
    """Keras squares slices of a gradient before those of one row are added up, and so do its updates on a mesh."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 40, (32, 5)), random.normal(size=(32, 3)).astype("float32")
    optimizers = {
        "adam": lambda: keras.optimizers.Adam(0.01),
        "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
        "ftrl": lambda: keras.optimizers.Ftrl(0.1),
        "clipped": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
        "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
        "by slices": lambda: Slices(0.1),
    }

    def trained(scope: contextlib.AbstractContextManager, make: object) -> list[np.ndarray]:
        keras.utils.set_random_seed(2)
        with scope:
            layers = [keras.layers.Embedding(40, 8), keras.layers.Flatten(), keras.layers.Dense(3)]
            model = keras.Sequential([keras.layers.Input((5,), dtype="int32"), *layers])
            model.compile(make(), "mse")  # type: ignore[operator]
            for first in range(0, 32, 8):  # most batches have a row twice, and none has all of them
                model.train_on_batch(x[first : first + 8], y[first : first + 8])
        return model.get_weights()

    mesh, by_rows = kf.Placement(range(4), ("data",)), {"kernel": {"data": S(0)}, "embeddings": {"data": S(1)}}
    for name, make in optimizers.items():
        expected = trained(contextlib.nullcontext(), make)
        for distribution in (
            kf.DataParallel(mesh, random="stock"),
            kf.DataParallel(kf.Placement([0]), random="stock"),
            kf.DataParallel(mesh, strategy="mirrored", random="stock"),
            kf.ModelParallel(mesh, rules=by_rows, batch_axes="data", random="stock"),
        ):
            found = trained(distribution.scope(), make)
            for one, other in zip(expected, found, strict=True):
                np.testing.assert_allclose(other, one, atol=2e-5, err_msg=f"{name}, {distribution}")


def slices_of_ones_own() -> None:
    """A gradient of slices may have its rows' numbers in a tuple, which TensorFlow takes on one device."""
    expected = np.ones((5, 3), "float32")
    expected[[0, 2]] -= 0.1 * np.array([[2.0], [4.0]], "float32")
    values = tf.constant([[2.0] * 3, [4.0] * 3])
    for scope in (contextlib.nullcontext(), kf.DataParallel().scope()):
        with scope:
            variable = keras.Variable(initializer="ones", shape=(5, 3))
            keras.optimizers.SGD(0.1).apply([tf.IndexedSlices(values, (0, 2), (5, 3))], [variable])
            np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected, atol=1e-6)


class Averaged(keras.layers.Layer):
    """Keeps what it has seen in variables of TensorFlow's own, as a `tf.Module` does."""

    def __init__(self):
        super().__init__()
        self.calls, self.average = tf.Variable(0), tf.Variable([1.0] * 3)
        self.generator = tf.random.Generator.from_seed(3)

    @tf.function
    def keep(self, seen: tf.Tensor) -> None:
        self.average.assign(0.9 * self.average + 0.1 * seen)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.keep(tf.stop_gradient(tf.reduce_mean(x, 0)))  # in a graph in the step's
        self.calls.assign_add(1)
        return x - self.average + 0.1 * self.generator.normal((3,))


def variables_of_tensorflow() -> None:
    """A `tf.Variable` that a step changes was changed by each rank: a counter counted the ranks' steps."""
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    first = [np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3), np.zeros(3, "float32")]

    def trained(scope: contextlib.AbstractContextManager) -> list[np.ndarray]:
        with scope:
            averaged = Averaged()
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), averaged])
            model.compile(keras.optimizers.Adam(0.1), "mse")
        model.set_weights(first)
        model.fit(x, x[:, :3], batch_size=8, epochs=2, shuffle=False, verbose=0)
        loss = model.evaluate(x, x[:, :3], batch_size=8, verbose=0)
        prediction = model.predict(x, batch_size=8, verbose=0)
        return [*model.get_weights(), averaged.calls.numpy(), averaged.average.numpy(), loss, prediction]

    wanted = trained(contextlib.nullcontext())
    for distribution in (kf.DataParallel(), kf.ModelParallel(kf.Placement(range(4), ("data",)), rules={})):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for one, other in zip(wanted, trained(distribution.scope()), strict=True):
                np.testing.assert_allclose(other, one, atol=2e-6)
        assert any("StatefulPartitionedCall of 'sequential" in str(each.message) for each in said), list(map(str, said))


def iterators_that_end() -> None:
    """After a loop nothing holds its iterator, so that its threads end without the garbage collector."""
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    gc.collect()
    gc.disable()
    try:
        for distribution in (kf.DataParallel(), kf.DataParallel(strategy="mirrored")):
            with distribution.scope():
                model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0)
            model.evaluate(x, x[:, :1], batch_size=16, verbose=0)
            assert [each for each in gc.get_objects() if isinstance(each, tf.data.Iterator)] == []
    finally:
        gc.enable()


PROGRAMS = {
    program.__name__: program
    for program in (
        created_sharded,
        any_order_of_ranks,
        steps,
        layouts,
        operations,
        mirrored,
        replicas_without_rows,
        copies_of_many_dims,
        rows_of_an_embedding_that_repeat,
        slices_of_ones_own,
        scaled_losses,
        variables_of_tensorflow,
        draws_of_own_rows,
        operations_that_fail_as_they_run,
        iterators_that_end,
    )
}
PROGRAMS |= unsplit.PROGRAMS | replicas.PROGRAMS | data_threads.PROGRAMS
PROGRAMS |= {f"losses_without_rows, {each}": functools.partial(losses_without_rows, each) for each in REDUCTIONS}
PROGRAMS["files_that_say_jit_compile"] = jit_of_files.trained_inside_and_outside_of_a_scope
