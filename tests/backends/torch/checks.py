"""Checks of creation, gradients, random states, files: run on four processes, for `test_on_four_ranks`."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import tempfile
import warnings
from collections.abc import Callable

import numpy as np

from tests.backends import jit_of_files
from tests.backends.torch.registry import check, error_of, on_all_ranks, rank


def small_model(width: int = 8):
    import keras

    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(width, "relu", name="hidden"), keras.layers.Dense(1, name="out")]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@check
def kernels_of_a_spectrogram_that_trains_stay_copies() -> None:
    """They are plain tensors: on a rank's rows alone their gradients would be those of its rows."""
    import keras

    import keras_flow as kf

    value = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
    target = np.random.default_rng(1).normal(size=(8, 1)).astype("float32")

    def trained() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((64,))
        signal = keras.layers.Reshape((64, 1))(keras.layers.Dense(64)(inputs))
        bands = keras.layers.STFTSpectrogram(frame_length=16, frame_step=16, trainable=True)(signal)
        outputs = keras.layers.Dense(1, name="out")(keras.layers.Flatten()(bands))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        before = model.get_weights()
        for _ in range(2):
            model.train_on_batch(value, target)
        return [after - was for after, was in zip(model.get_weights(), before, strict=True)]

    wanted = trained()
    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    with kf.ModelParallel(placement, rules={"out/kernel": {"model": kf.sbp.split(0)}}).scope():
        updates = trained()
    assert any(np.abs(update).max() > 0 for update in wanted)
    for update, other in zip(updates, wanted, strict=True):
        assert np.abs(update - other).max() <= 1e-4 * np.abs(other).max()


@check
def created_in_pieces_with_the_bits_of_one_device() -> None:
    import keras
    from torch.distributed.tensor import DTensor

    import keras_flow as kf

    class Shifted(keras.initializers.RandomNormal):
        def __call__(self, shape, dtype=None):
            return super().__call__(shape, dtype) + 1.0

    makers = (
        Shifted,
        keras.initializers.GlorotUniform,
        keras.initializers.HeNormal,
        keras.initializers.RandomNormal,
        keras.initializers.TruncatedNormal,
        keras.initializers.Orthogonal,
        lambda seed: keras.initializers.Zeros(),
        lambda seed: keras.initializers.Constant(0.5),
    )
    for make in makers:
        for shape in ((64, 48), (32, 3, 8), (1200, 2000)):
            for dim in (0, len(shape) - 1):
                expected = keras.Variable(make(seed=3), shape=shape, name="kernel").numpy()
                rules = {"kernel": {"model": kf.sbp.split(dim)}}
                with kf.ModelParallel(kf.Placement(range(4), axis_names=("model",)), rules=rules).scope():
                    variable = keras.Variable(make(seed=3), shape=shape, name="kernel")
                assert isinstance(variable._value, DTensor)
                assert variable._value._local_tensor.shape[dim] == shape[dim] // 4
                assert variable._value._local_tensor.untyped_storage().nbytes() == 4 * np.prod(shape) // 4
                assert np.array_equal(variable.numpy(), expected), (make, shape, dim)


@check
def gradients_travel_in_buckets() -> None:
    import gc

    import keras_flow as kf
    from keras_flow.backends.torch import gradient_buckets

    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    distribution = kf.DataParallel()
    with distribution.scope():
        model = small_model()
        before = gradient_buckets.reducer(distribution.placement).collectives
        model.train_on_batch(x, y)
        assert gradient_buckets.reducer(distribution.placement).collectives == before + 1
        model.train_on_batch(x[:3], y[:3])  # computed whole by all: nothing to sum
        assert gradient_buckets.reducer(distribution.placement).collectives == before + 1
        wide = small_model(3 << 18)  # 12 MB of kernel, then 3 MB of bias, 3 MB of kernel
        before += 1
        wide.train_on_batch(x, y)
        reducer = gradient_buckets.reducer(distribution.placement)
        assert reducer.collectives == before + 2
    assert reducer._memory._tensors  # for the next step
    del model, wide
    gc.collect()
    assert not reducer._memory._tensors


@check
def buckets_of_one_length_have_memory_of_their_own() -> None:
    import keras

    import keras_flow as kf
    from keras_flow.backends.torch import slot_parts

    def trained() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), *[keras.layers.Dense(16, use_bias=False) for _ in range(4)]])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        before = model.get_weights()
        x, y = np.random.default_rng(0).normal(size=(2, 8, 16)).astype("float32")
        model.train_on_batch(x, y)
        return [after - was for after, was in zip(model.get_weights(), before, strict=True)]

    wanted = trained()
    bytes_of_bucket, slot_parts.BUCKET_BYTES = slot_parts.BUCKET_BYTES, 16 * 16 * 4
    try:
        with kf.DataParallel().scope():
            updates = trained()
    finally:
        slot_parts.BUCKET_BYTES = bytes_of_bucket
    for update, other in zip(updates, wanted, strict=True):
        assert np.abs(update - other).max() <= 1e-5 * np.abs(other).max()


@check
def updates_in_blocks_are_those_of_keras() -> None:
    """Bit by bit, on whole variables and on pieces of split ones, one of which is cut into blocks."""
    import contextlib
    from unittest import mock

    import keras
    import torch

    import keras_flow as kf
    from keras_flow.backends.torch import fused_adam

    shapes = {"wide": (1500, 1600), "small": (8, 12)}  # as many as the optimizer has variables of its own
    makers: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
        name: getattr(keras.optimizers, name)
        for name in ("Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Lion", "Nadam")
    }
    makers["SGD"] = lambda: keras.optimizers.SGD(0.1)
    makers["momentum"] = lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    makers["accumulating"] = lambda: keras.optimizers.Adam(gradient_accumulation_steps=2, use_ema=True)
    mesh = kf.Placement(range(4), axis_names=("model",))
    split = kf.ModelParallel(mesh, rules={"wide": {"model": kf.sbp.split(1)}, "small": {"model": kf.sbp.split(0)}})

    def trained(make: Callable[[], keras.optimizers.Optimizer], scope: contextlib.AbstractContextManager) -> list:
        values = np.random.default_rng(0)
        with scope:
            variables = [
                keras.Variable(values.random(shape, "float32"), name=name, dtype="float32")
                for name, shape in shapes.items()
            ]
            optimizer = make()
            optimizer.build(variables)
            for _ in range(3):
                grads = [torch.tensor(values.random(shape, "float32") - 0.5) for shape in shapes.values()]
                optimizer.apply(grads, variables)
            return [np.array(one.numpy()) for one in (*variables, *optimizer.variables)]

    for name, make in makers.items():
        expected = trained(make, contextlib.nullcontext())
        for scope in (split.scope(), kf.DataParallel().scope()):
            # Adam as it is updated in blocks where the fused kernel does not fit
            with mock.patch.object(fused_adam, "update", return_value=False):
                found = trained(make, scope)
            assert len(found) == len(expected)
            assert all(map(np.array_equal, found, expected)), name


@check
def different_batches_are_found() -> None:
    import keras_flow as kf

    x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")
    if rank() == 2:
        x[13] = 2  # in batch 1, and one of the rows that it computes
    for distribution in (kf.DataParallel(), kf.ModelParallel(kf.Placement(range(4), axis_names=("data",)))):
        with distribution.scope():
            model = small_model()
            fit = functools.partial(model.fit, batch_size=8, shuffle=False, verbose=0)
            errors = on_all_ranks(error_of(functools.partial(fit, x, y)))
            assert len(set(errors)) == 1, errors
            assert "input 'x' of batch 1 differs on rank 2 from rank 1" in errors[0]
            fit(np.ones((32, 4)), y)  # usable
            # single batches are counted by method, whatever loops have read
            for act in (model.train_on_batch, model.test_on_batch):
                errors = on_all_ranks(error_of(functools.partial(act, x, y)))
                assert len(set(errors)) == 1 and "batch 0 differs on rank 2" in errors[0], errors


@check
def sparse_and_ragged_datasets_are_refused_by_name() -> None:
    import tensorflow as tf

    import keras_flow as kf

    rows = tf.data.Dataset.from_tensor_slices(np.ones((8, 4), "float32"))
    ragged = rows.map(lambda x: tf.RaggedTensor.from_row_lengths(x, [1, 3]))
    with kf.DataParallel().scope():
        model = small_model()
        for dataset, name in ((rows.map(tf.sparse.from_dense), "sparse"), (ragged, "ragged")):
            error = error_of(lambda dataset=dataset: model.predict(dataset.batch(4), verbose=0))
            assert error.startswith("FlowError: input x") and f"is {name}: " in error, error


@check
def random_states_are_those_of_rank_0() -> None:
    import keras
    import torch

    import keras_flow as kf

    random.seed(rank()), np.random.seed(rank()), torch.manual_seed(rank())
    keras.random.uniform((2,), seed=None)
    random.seed(rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with kf.DataParallel().scope():
            drawn = (random.random(), np.random.rand(), float(torch.rand(1)), float(keras.random.uniform((1,))[0]))
            weights = small_model().get_weights()[0].tolist()
    assert any("random states differed between the processes" in str(w.message) for w in caught)
    draws = on_all_ranks((drawn, weights))
    assert all(other == draws[0] for other in draws), draws
    random.seed(0)
    assert draws[0][0][0] == random.random()


@check
def weights_made_before_the_scope_are_those_of_rank_0() -> None:
    import keras

    import keras_flow as kf

    keras.utils.set_random_seed(rank())
    model = small_model()
    made = on_all_ranks(model.get_weights()[0].tolist())
    keras.utils.set_random_seed(0)
    rules = {"hidden/kernel": {"model": kf.sbp.split(1)}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kf.ModelParallel(kf.Placement(range(4), axis_names=("model",)), rules=rules).apply(model)
    assert sum("are taken from rank 0" in str(w.message) for w in caught) == 1
    assert model.get_weights()[0].tolist() == made[0] != made[1]


@check
def one_file_for_all_ranks() -> None:
    import keras

    import keras_flow as kf

    folder = on_all_ranks(tempfile.mkdtemp())[0]
    path = os.path.join(folder, "m.weights.h5")
    rules = {"hidden/kernel": {"model": kf.sbp.split(1)}}
    with kf.ModelParallel(kf.Placement(range(4), axis_names=("model",)), rules=rules).scope():
        model = small_model()
        model.save_weights(path)
        errors = on_all_ranks(error_of(lambda: model.save(os.path.join(folder, "missing", "m.keras"))))
        assert all("No such file or directory" in error for error in errors), errors
        assert "process 0, which writes the files of all processes, failed" in errors[1]
        model.train_on_batch(np.ones((8, 4)), np.ones((8, 1)))  # usable
        weights = model.get_weights()
    plain = small_model()
    plain.load_weights(path)
    assert not np.array_equal(plain.get_weights()[0], weights[0])
    assert sorted(os.listdir(folder)) == ["m.weights.h5"]
    keras.backend.clear_session()


@check
def no_rank_holds_a_split_weight_whole_to_save_it() -> None:
    import keras

    import keras_flow as kf
    from keras_flow.backends.torch.gather_blocks import Asking

    folder = on_all_ranks(tempfile.mkdtemp())[0]
    rules = {
        "hidden/kernel": {"data": kf.sbp.split(0), "model": kf.sbp.split(1)},
        "out/kernel": {"model": kf.sbp.split(0)},
    }
    mesh = kf.Placement([[2, 3], [0, 1]], axis_names=("data", "model"))
    blocks, whole = Asking.blocks, Asking.whole
    sizes, made_whole = [], []

    def watched_blocks(asking, tensor):
        for index, block in blocks(asking, tensor):
            sizes.append(block.numel())
            yield index, block

    def watched_whole(asking, tensor):
        made_whole.append(asking.has(tensor))
        return whole(asking, tensor)

    Asking.blocks, Asking.whole = watched_blocks, watched_whole
    try:
        with kf.ModelParallel(mesh, rules=rules).scope():
            model = small_model(3 << 20)  # hidden/kernel has 48 MB, a piece 12 MB, a block at most 8 MB
            model.compile("adam", "mse")
            model.train_on_batch(np.ones((8, 4), "float32"), np.ones((8, 1), "float32"))
            model.save_weights(os.path.join(folder, "m.weights.h5"))
            model.save(os.path.join(folder, "m.keras"))
            expected = [np.array(one.numpy()) for one in (*model.variables, *model.optimizer.variables)]
    finally:
        Asking.blocks, Asking.whole = blocks, whole
    assert not any(made_whole)
    assert max(sizes, default=0) <= (8 << 20) // 4 and bool(sizes) == (rank() == 0)
    if rank() == 0:
        plain = small_model(3 << 20)
        plain.load_weights(os.path.join(folder, "m.weights.h5"))
        loaded = keras.saving.load_model(os.path.join(folder, "m.keras"))
        found = [one.numpy() for one in (*loaded.variables, *loaded.optimizer.variables)]
        assert len(found) == len(expected)
        assert all(map(np.array_equal, found, expected))
        assert all(map(np.array_equal, plain.get_weights(), loaded.get_weights()))
    keras.backend.clear_session()


@check
def files_that_say_jit_compile_are_trained() -> None:
    jit_of_files.trained_inside_and_outside_of_a_scope()


@check
def ranks_that_assign_other_values_to_copies_are_told() -> None:
    import keras

    import keras_flow as kf

    x, y = np.ones((8, 4), "float32"), np.ones((8, 4), "float32")
    kernel = {"kernel": {"model": kf.sbp.split(1)}}
    by_rows = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    for distribution in (kf.DataParallel(), kf.ModelParallel(by_rows, rules=kernel, batch_axes=("data",))):
        with distribution.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="own")])
            model.compile("sgd", "mse")
            model.fit(x, y, verbose=0)
            model.layers[0].kernel.assign(np.full((4, 4), 1.0 + (rank() == 2)))
            errors = on_all_ranks(error_of(functools.partial(model.fit, x, y, verbose=0)))
            assert all("/own/kernel', which should be copies" in str(error) for error in errors), errors
            model.layers[0].kernel.assign(np.ones((4, 4)))
            model.fit(x, y, verbose=0)


@check
def models_that_act_row_by_row_are_known() -> None:
    import keras
    from keras import layers, ops

    from keras_flow.backends.row_wise.row_interaction import of_model

    class Mixing(layers.Layer):
        def call(self, inputs):
            return inputs - ops.mean(inputs, axis=0)

    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    def functional(function):
        x = keras.Input((6, 4))
        return keras.Model(x, function(x))

    for function in (
        lambda x: layers.Dense(3)(x),
        lambda x: x + ops.mean(x, axis=-1, keepdims=True),
        lambda x: layers.Bidirectional(layers.LSTM(3))(x),
        lambda x: layers.BatchNormalization()(layers.Dropout(0.5)(x)),
        lambda x: layers.MultiHeadAttention(2, 2)(x, x),
        lambda x: ops.expand_dims(x, 1),
        lambda x: layers.Concatenate()([x, x * 2.0]),
        lambda x: layers.EinsumDense("abc,cd->abd", (None, 5))(x),
        lambda x: keras.Sequential([layers.Flatten(), layers.Dense(2)])(x),
    ):
        assert of_model(functional(function)) is None, of_model(functional(function))
    for function, word in (
        (lambda x: Mixing(name="mixing")(x), "'mixing' is a custom layer"),
        (lambda x: ops.mean(x, axis=0), "no batch dimension"),
        (lambda x: x - ops.mean(x, axis=0, keepdims=True), "no batch dimension"),
        (lambda x: ops.softmax(x, axis=0), "along dimension 0"),
        (lambda x: ops.softmax(x, axis=-3), "along dimension 0"),
        (lambda x: layers.Concatenate(axis=0)([x, x]), "along dimension 0"),
        (lambda x: ops.flip(x), "along dimension 0"),
        (lambda x: ops.expand_dims(x, 0), "no batch dimension"),
        (lambda x: ops.expand_dims(x, -4), "no batch dimension"),
        (lambda x: layers.Dense(3, activity_regularizer="l2")(x), "activity regularizer"),
        (lambda x: layers.Dense(3, activation=lambda t: t - ops.mean(t))(x), "custom activation"),
        (lambda x: layers.Lambda(lambda t: t * 2.0)(x), "not known to act row by row"),
        (lambda x: x + np.ones((8, 6, 4), "float32"), "no batch dimension"),
        (lambda x: layers.UnitNormalization(axis=0)(x), "along dimension 0"),
    ):
        found = of_model(functional(function))
        assert found is not None and word in found.text, (word, found)
    assert "subclassed model" in str(of_model(Own()))


@check
def shapes_are_inferred_where_the_meta_device_cannot() -> None:
    import keras

    import keras_flow as kf

    class Inner(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), name="scale")
            self.dense = keras.layers.Dense(8, name="inner")
            self.dense.build(shape)

        def call(self, x):
            if x.device.type == "meta":
                raise NotImplementedError("an operator that has no meta kernel")
            return self.dense(x * self.scale)

    rules = {"inner/kernel": {"model": kf.sbp.split(1)}}
    with kf.ModelParallel(kf.Placement(range(4), axis_names=("model",)), rules=rules).scope():
        x = keras.Input((4,))
        model = keras.Model(x, Inner()(x))
        assert model.output_shape == (None, 8)
        assert model.predict(np.ones((4, 4), "float32"), verbose=0).shape == (4, 8)
        own = keras.Sequential([keras.Input((4,)), Inner()])
        assert own(np.ones((4, 4), "float32")).shape == (4, 8)


@check
def outputs_of_layers_may_be_written_into() -> None:
    import keras

    import keras_flow as kf

    class Writes(keras.layers.Layer):
        def build(self, shape):
            self.columns, self.gate = keras.layers.Dense(8, name="columns"), keras.layers.Dense(8, "sigmoid")
            self.rows = keras.layers.Dense(4, name="rows")
            for layer in (self.columns, self.gate):
                layer.build(shape)
            self.rows.build((*shape[:-1], 8))

        def call(self, x):
            y = self.columns(x)
            y *= self.gate(x)
            y = self.rows(y)
            y += 1.0
            return y

    def updated(distribution) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        with distribution.scope() if distribution else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((4,)), Writes()])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(np.linspace(0, 1, 32).reshape(8, 4), np.ones((8, 4)), verbose=0)
        return model.get_weights()

    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    rules = {"columns/kernel": {"model": kf.sbp.split(1)}, "rows/kernel": {"model": kf.sbp.split(0)}}
    expected = updated(None)
    for distribution in (kf.DataParallel(), kf.ModelParallel(mesh, rules=rules)):
        for a, b in zip(expected, updated(distribution), strict=True):
            assert np.allclose(a, b, atol=1e-6)
