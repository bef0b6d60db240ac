"""Models with operations that DTensor splits wrongly, or not at all: updates of plain SGD are those of one device."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import keras_flow as kf
from keras_flow.backends.tensorflow.recovery import root_cause

S = kf.sbp.split
MESH = kf.Placement([[0, 1], [2, 3]], ("data", "model"))
RULES = {"up/kernel": {"model": S(1)}, "out/kernel": {"model": S(0)}}


def _places() -> dict[str, kf.DataParallel | kf.ModelParallel]:
    return {
        "dp4": kf.DataParallel(),
        "2x2": kf.ModelParallel(MESH, rules=RULES, batch_axes="data"),
        "1x3, odd rows": kf.DataParallel(kf.Placement([[0, 1, 2]], ("one", "data"))),
    }


def _updates(distribution: object, build: Callable[[], keras.Model], x: np.ndarray, y: np.ndarray) -> dict:
    keras.utils.clear_session()
    with distribution.scope() if distribution else contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        model = build()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        before = model.get_weights()
        model.fit(x, y, batch_size=12, epochs=1, shuffle=False, verbose=0)
        after = model.get_weights()
    return {v.path: new - old for v, old, new in zip(model.weights, before, after, strict=True)}


def _compare(build: Callable[[], keras.Model], x: np.ndarray, places: Mapping | None = None) -> None:
    y = np.random.default_rng(1).normal(size=(len(x), 3)).astype("float32")
    single = _updates(None, build, x, y)
    for name, distribution in (places or _places()).items():
        found = _updates(distribution, build, x, y)
        for path, update in single.items():
            limit = 1e-4 * np.abs(update).max() + 1e-7
            assert np.abs(found[path] - update).max() <= limit, (name, path)


def _data(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def _features(h: tf.Tensor) -> tf.Tensor:
    largest = ops.sum(ops.top_k(h, 2)[0], -1, keepdims=True)
    middle = ops.quantile(h, 0.3, axis=-1, keepdims=True)
    over_rows = ops.quantile(h, 0.5, axis=0, keepdims=True)
    ordered = ops.sort(h, -1) * ops.take_along_axis(h, ops.argsort(h, -1), -1)
    pairs = ops.sum(ops.abs(h[:, None] - h[None]), 1)
    reversed_ = ops.sum(h[:, None, ::-1, None], (1, 3))
    return h * (largest + middle) + over_rows + ordered + pairs + reversed_ + h[..., None, 3]


def split_classes() -> None:
    """A sparse cross-entropy of logits that are split by classes, in the precision that DTensor has wrong."""
    x, y = _data(8, 4).astype("float64"), np.arange(8) % 8
    weights = []
    for distribution in (None, kf.ModelParallel(MESH, rules={"up/kernel": {"model": S(1)}}, batch_axes="data")):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        with distribution.scope() if distribution else contextlib.nullcontext():
            inputs = layers.Input((4,), dtype="float64")
            model = keras.Model(inputs, layers.Dense(8, dtype="float64", name="up")(inputs))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
            model.compile(keras.optimizers.SGD(0.1), loss)
            model.fit(x, y, batch_size=8, verbose=0)
            weights.append(model.get_weights())
    for single, split in zip(*weights, strict=True):
        np.testing.assert_allclose(split, single, rtol=1e-9)


def sorted_features() -> None:
    """Sorts, largest entries, quantiles and pairs of rows, with their gradients."""

    def build() -> keras.Model:
        return keras.Sequential(
            [layers.Input((8,)), layers.Dense(8, name="up"), layers.Lambda(_features), layers.Dense(3, name="out")]
        )

    _compare(build, _data(24, 8))


def experts() -> None:
    """A mixture of experts by hand."""

    class Experts(layers.Layer):
        def build(self, shape: tuple) -> None:
            self.router = self.add_weight(shape=(8, 4), name="router")
            self.first = self.add_weight(shape=(4, 8, 16), name="first")
            self.second = self.add_weight(shape=(4, 16, 8), name="second")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            values, indices = ops.top_k(ops.softmax(ops.matmul(x, self.router)), 2)
            weights = ops.sum(ops.one_hot(indices, 4) * values[..., None], 1)
            hidden = ops.relu(ops.einsum("bd,edh->beh", x, self.first))
            return ops.einsum("beh,ehd,be->bd", hidden, self.second, weights)

    def build() -> keras.Model:
        return keras.Sequential(
            [layers.Input((8,)), layers.Dense(8, name="up"), Experts(), layers.Dense(3, name="out")]
        )

    _compare(build, _data(24, 8))


def convolutions() -> None:
    """Dilated ones, in groups, a ConvNeXt block; with or without oneDNN."""

    def build() -> keras.Model:
        image = layers.Input((9, 8, 4))
        h = layers.DepthwiseConv2D(3, padding="same", dilation_rate=(1, 2))(image)
        h = layers.Dense(16, activation="gelu", name="up")(layers.LayerNormalization()(h))
        h = layers.Add()([image, layers.Dense(4, name="out")(h)])
        h = layers.Conv2D(6, 3, groups=2, activation="relu")(h)
        h = layers.Conv2D(6, (3, 2), dilation_rate=(2, 3), padding="same")(h)
        h = layers.Reshape((7 * 6, 6))(h)
        h = layers.Conv1D(4, 3, dilation_rate=4, padding="causal")(h)
        return keras.Model(image, layers.Dense(3)(layers.Flatten()(h)))

    _compare(build, _data(24, 9, 8, 4))


def windows() -> None:
    """Depthwise and separable convolutions and average pools stay split by rows, without a word."""

    def build() -> keras.Model:
        image = layers.Input((9, 8, 4))
        h = layers.DepthwiseConv2D(3, strides=2, depth_multiplier=2, padding="same")(image)
        h = layers.AveragePooling2D((3, 2), strides=(2, 1), padding="same")(layers.SeparableConv2D(5, (2, 3))(h))
        line = layers.DepthwiseConv1D(3, dilation_rate=2)(layers.Reshape((9 * 4, 8))(image))
        line = layers.AveragePooling1D(5)(line)
        return keras.Model(image, layers.Dense(3)(layers.concatenate([layers.Flatten()(h), layers.Flatten()(line)])))

    with warnings.catch_warnings():
        warnings.simplefilter("error", kf.FlowWarning)
        _compare(build, _data(24, 9, 8, 4), places={"dp4": _places()["dp4"]})


def whole_on_every_rank() -> None:
    """What DTensor has no rule for is computed whole, which is said once and names the layer."""

    def solved(h: tf.Tensor) -> tf.Tensor:
        h = ops.concatenate([h, ops.tanh(h)], -1)  # small ones are made of other operations
        matrices = ops.eye(16) * 3 + 0.1 * h[:, :, None] * h[:, None, :]
        return ops.squeeze(ops.solve(matrices, h[:, :, None]), -1)

    def build() -> keras.Model:
        return keras.Sequential(
            [
                layers.Input((8,)),
                layers.Dense(8, name="up"),
                layers.Lambda(solved, name="solved"),
                layers.Dense(3, name="out"),
            ],
            name="m",
        )

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _compare(build, _data(24, 8))
    texts = [str(warning.message) for warning in said if "computes it whole" in str(warning.message)]
    assert any(text.startswith("m/solved: TensorFlow's DTensor cannot split operation MatrixSolve") for text in texts)
    assert all(texts.count(text) <= 3 for text in texts), texts  # once for each of three models


def _selected(h: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.boolean_mask(h, h > 0))


def on_one_device() -> None:
    """What DTensor cannot partition even whole is computed by one device, which is said once and names the layer."""

    def build() -> keras.Model:
        numbers = layers.Input((8,))
        h = layers.Dropout(0.5, seed=1)(layers.BatchNormalization()(layers.Dense(8, name="up")(numbers)))
        classes = layers.Lambda(lambda h: ops.cast(ops.abs(h) * 2, "int32"), name="classes")(h)
        known = layers.Embedding(4, 4, name="table")(layers.IntegerLookup(vocabulary=[0, 1, 3], name="words")(classes))
        middle = layers.Lambda(lambda h: h * _selected(h), name="middle")(h)
        return keras.Model(numbers, layers.Dense(3, name="out")(layers.concatenate([middle, layers.Flatten()(known)])))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _compare(build, _data(24, 8))
    texts = [str(warning.message) for warning in said if "one device computes it" in str(warning.message)]
    assert len(texts) == 3 and all("of 'words'" in text or "of 'middle'" in text for text in texts), texts
    model, x = build(), _data(12, 8)
    with kf.ModelParallel(MESH, rules=RULES, batch_axes="data", strict=True).scope():
        model.compile("sgd", "mse")
        try:
            model.fit(x, x[:, :3], verbose=0)
        except kf.FlowError as error:
            assert "strict=False" in str(error), error
        else:
            raise AssertionError("strict=True gave up all layouts")


def _parted(h: tf.Tensor) -> tf.Tensor:
    even, odd = tf.dynamic_partition(h, tf.range(tf.shape(h)[0]) % 2, 2)
    return tf.concat([even, odd], 0)


def _by_python(h: tf.Tensor) -> tf.Tensor:
    doubled = tf.numpy_function(lambda values: 2 * values, [h], tf.float32)
    doubled.set_shape(h.shape)
    return h + tf.stop_gradient(doubled)


def results_of_unknown_shape() -> None:
    """A step with a result of unknown shape, of which pieces were cut that have no rows, or with a Python function.

    The first ended the collectives of the process, the second waited for ever: one device computes both.
    """
    for operation, function in {"DynamicPartition": _parted, "PyFunc": _by_python}.items():

        def build(function: Callable[[tf.Tensor], tf.Tensor] = function) -> keras.Model:
            x = layers.Input((8,))
            h = layers.Lambda(function, name="middle", output_shape=(8,))(layers.Dense(8, name="up")(x))
            return keras.Model(x, layers.Dense(3, name="out")(h))

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _compare(build, _data(24, 8))
        texts = [str(warning.message) for warning in said if "one device computes it" in str(warning.message)]
        assert len(texts) == 3 and all(f"{operation} of 'middle'" in text for text in texts), texts


def made_of_others() -> None:
    """What DTensor has no rule for, and is made of operations that it has rules for, stays split, without a word."""

    def mixed(h: tf.Tensor) -> tf.Tensor:
        pairs = ops.tril(h[:, :, None] * ops.roll(h, 3, -1)[:, None])
        smooth = ops.softplus(h) + ops.softsign(h) * ops.i0(h) + ops.cumprod(1 + h / 9, -1)
        smooth = smooth * ops.prod(1 + h[:, :7] / 9, -1, keepdims=True)
        found = ops.one_hot(ops.argmin(h, -1), 8) + ops.one_hot(ops.argmin(ops.cast(9 * h, "int32"), -1), 8)
        pieces = ops.concatenate(ops.split(ops.rot90(pairs, axes=(1, 2)), [3], axis=-1)[::-1], -1)
        return ops.mean(pieces, 1) + ops.flip(smooth, -1) + h[:, ::-1] * found + ops.sum(pairs, -1)

    def build() -> keras.Model:
        inputs = layers.Input((8,))
        h = layers.Lambda(mixed)(layers.Dense(8, name="up")(inputs))
        h = layers.Bidirectional(layers.GRU(4))(layers.Reshape((4, 2))(h))
        return keras.Model(inputs, layers.Dense(3, name="out")(h))

    with warnings.catch_warnings():
        warnings.simplefilter("error", kf.FlowWarning)
        _compare(build, _data(24, 8), places={"dp4": _places()["dp4"]})
    _compare(build, _data(24, 8))


def shuffled_features() -> None:
    """Features in an order that is drawn, and recurrent convolutions, stay split, without a word."""

    def build() -> keras.Model:
        tokens = layers.Input((6,), dtype="int32")
        h = layers.Dense(8, name="up")(layers.Embedding(12, 8, name="table")(tokens))
        h = layers.Lambda(lambda h: keras.random.shuffle(h, axis=1, seed=3), name="shuffled")(h)
        h = layers.ConvLSTM1D(4, 3, padding="same", name="steps")(h[:, :, :, None])
        return keras.Model(tokens, layers.Dense(3, name="out")(layers.Flatten()(h)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", kf.FlowWarning)
        tokens = np.random.default_rng(0).integers(0, 12, (24, 6)).astype("int32")
        _compare(build, tokens, places={"dp4": _places()["dp4"]})


def counted_categories() -> None:
    """Encoded categories stay split by rows, without a word."""

    def build() -> keras.Model:
        inputs = layers.Input((6,), dtype="int32")
        encoded = [layers.CategoryEncoding(10, mode)(inputs) for mode in ("multi_hot", "count")]
        return keras.Model(inputs, layers.Dense(3, name="out")(layers.concatenate(encoded)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", kf.FlowWarning)
        places = {name: place for name, place in _places().items() if "2x2" not in name}
        _compare(build, np.random.default_rng(0).integers(0, 12, (24, 6)).astype("int32"), places=places)


class Grouped(layers.Layer):
    """Attention with rotary positions, whose keys and values are shared by pairs of heads, as in Llama and Qwen."""

    def build(self, shape: tuple) -> None:
        self.query, self.key, self.value = (
            layers.EinsumDense("btd,dhk->bthk", (None, heads, 4), name=name)
            for name, heads in (("query", 4), ("key", 2), ("value", 2))
        )
        for part in (self.query, self.key, self.value):
            part.build(shape)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        angles = ops.cast(ops.arange(6), "float32")[:, None] / ops.convert_to_tensor([1.0, 10.0])
        angles = ops.concatenate([angles, angles], -1)[None, :, None, :]

        def rotated(h: tf.Tensor) -> tf.Tensor:
            first, second = ops.split(h, 2, axis=-1)
            return h * ops.cos(angles) + ops.concatenate([-second, first], -1) * ops.sin(angles)

        key, value = (ops.repeat(h, 2, axis=2) for h in (rotated(self.key(x)), self.value(x)))
        scores = ops.softmax(ops.einsum("bqhk,bshk->bhqs", rotated(self.query(x)), key))
        return ops.reshape(ops.einsum("bhqs,bshk->bqhk", scores, value), (-1, 6, 16))


def grouped_attention() -> None:
    """Tables, heads and both axes of every kernel split, as KerasHub's layouts are."""

    def build() -> keras.Model:
        tokens = layers.Input((6,), dtype="int32")
        x = layers.Embedding(32, 16, name="table")(tokens)
        x = x + layers.Dense(16, name="out")(Grouped(name="attention")(layers.LayerNormalization()(x)))
        x = x + layers.Dense(16, name="out2")(layers.Dense(32, activation="silu", name="up")(x))
        return keras.Model(tokens, layers.Dense(3)(x[:, -1]))

    both = {"data": S(0), "model": S(1)}
    rules = {
        "table/embeddings": {"model": S(0), "data": S(1)},
        "attention/.*/kernel": {"model": S(1), "data": S(0)},
        "up/kernel": both,
        "out2?/kernel": {"model": S(0), "data": S(1)},
    }
    places = {"2x2": kf.ModelParallel(MESH, rules=rules, batch_axes="data")}
    _compare(build, np.random.default_rng(0).integers(0, 32, (24, 6)).astype("int32"), places=places)


def replicas_draw() -> None:
    """MirroredStrategy: masks with a shape of their own, replicas with one row, and draws for all rows, refused."""

    def build() -> keras.Model:
        inputs = layers.Input((6, 8))
        h = layers.Dropout(0.4, noise_shape=(None, 1, 8), seed=1)(layers.Dense(8, name="up")(inputs))
        h = layers.Dropout(0.4, noise_shape=(1, 6, 8), seed=2)(layers.SpatialDropout1D(0.4, seed=3)(h))
        return keras.Model(inputs, layers.Dense(3, name="out")(layers.Flatten()(h)))

    places = {"mirrored": kf.DataParallel(strategy="mirrored")}
    for rows in (4, 22):
        _compare(build, _data(rows, 6, 8), places=places)
    for make in (layers.MixUp, layers.RandomElasticTransform):
        with kf.DataParallel(strategy="mirrored").scope():
            image = layers.Input((4, 4, 3))
            model = keras.Model(image, layers.Flatten()(make(name="mixed")(image)))
            model.compile("sgd", "mse")
            try:
                model.fit(_data(8, 4, 4, 3), np.zeros((8, 48)), verbose=0)
            except kf.FlowError as error:
                assert f"in layer 'mixed' ({make.__name__})" in str(error), error
            else:
                raise AssertionError("a replica drew for all rows")


def failed_steps() -> None:
    """A step that fails as it runs says why, and leaves the weights, the model and the process as they were."""
    x, y = np.zeros((16, 4), "int32"), _data(16, 3)
    wrong = x.copy()
    wrong[9, 1] = 55
    for name, distribution in _places().items():
        if "odd" in name:
            continue
        with distribution.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential(
                [
                    layers.Input((4,), dtype="int32"),
                    layers.Embedding(10, 4),
                    layers.Dense(4, name="up"),
                    layers.Flatten(),
                    layers.Dense(3, name="out"),
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.train_on_batch(x, y)
            before = model.get_weights()
            try:
                model.train_on_batch(wrong, y)
            except (tf.errors.OpError, kf.FlowError) as error:
                assert "55 is not in [0, 10)" in str(error) or "A rank failed in this step" in str(error), error
            else:
                raise AssertionError("an index out of range was accepted")
            for old, new in zip(before, model.get_weights(), strict=True):
                np.testing.assert_array_equal(np.array(new), old)
            try:
                loss = model.train_on_batch(x, y)
            except kf.FlowError as error:
                # a race within TensorFlow, about once in a thousand failed steps
                assert "start a new process" in str(error), error
                return
            model.set_weights(before)
            assert np.isclose(model.train_on_batch(x, y), loss)


def ended_collectives() -> None:
    """Where TensorFlow has ended the collectives of the process, a step says so, and the weights can be saved."""
    from tensorflow.python.eager import context  # private: nothing public ends them at will

    x, y = _data(16, 4), _data(16, 3)
    with kf.DataParallel().scope():
        model = keras.Sequential([layers.Input((4,)), layers.Dense(3)])
        model.compile("sgd", "mse")
        model.train_on_batch(x, y)
        before = model.get_weights()
        # all ranks may be stopped before they begin, and then none says that the collectives are ended
        stopped = tf.errors.CancelledError(None, None, "Function was cancelled before it was started")
        assert isinstance(root_cause(stopped, model), tf.errors.CancelledError)
        context.context().abort_collective_ops(tf.errors.CANCELLED, "as a failed step does")
        assert "start a new process" in str(root_cause(stopped, model))
        for _ in range(2):
            try:
                model.train_on_batch(x, y)
            except kf.FlowError as error:
                assert "start a new process" in str(error), error
            else:
                raise AssertionError("collectives go on")
        for old, new in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(np.array(new), old)
        file = str(Path(tempfile.mkdtemp()) / "ended.keras")
        model.save(file)
    for old, new in zip(before, keras.models.load_model(file).get_weights(), strict=True):
        np.testing.assert_array_equal(np.array(new), old)


def called_after_build() -> None:
    """`build` of a subclassed model makes no variables; the call after it does, and `fit` checks the rules then."""

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = layers.Dense(8, name="up"), layers.Dense(3, name="out")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.out(self.up(x))

    x = _data(12, 8)
    for calls in (True, False):
        for name, distribution in _places().items():
            with warnings.catch_warnings(), distribution.scope():
                warnings.simplefilter("ignore", UserWarning)  # Keras's, of such a build
                model = Model()
                model.build((None, 8))
                if calls:
                    found = np.array(model(x))
                    wanted = x @ np.array(model.up.kernel) @ np.array(model.out.kernel)
                    np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=name)
                model.compile("sgd", "mse")
                model.fit(x, x[:, :3], verbose=0)


def a_dict_that_a_layer_changes() -> None:
    """A layer that is called outside of a step gets the caller's own dict, as on one device."""
    for name, distribution in _places().items():
        with distribution.scope():
            data = {"images": _data(2, 4, 5, 3), "labels": _data(2, 7)}
            cropped = layers.RandomCrop(3, 3)(data)
        assert cropped is data and data["images"].shape == (2, 3, 3, 3), name


PROGRAMS = {
    program.__name__: program
    for program in (
        split_classes,
        sorted_features,
        experts,
        convolutions,
        windows,
        whole_on_every_rank,
        on_one_device,
        results_of_unknown_shape,
        made_of_others,
        shuffled_features,
        counted_categories,
        grouped_attention,
        replicas_draw,
        failed_steps,
        ended_collectives,
        called_after_build,
        a_dict_that_a_layer_changes,
    )
}
