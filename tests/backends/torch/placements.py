"""Checks on placements with an axis of one rank, of some of the ranks, and on what one rank does alone."""

from __future__ import annotations

import numpy as np

from tests.backends.torch.registry import check, error_of, on_all_ranks, rank

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")


@check
def boxing_along_an_axis_of_one_rank_changes_nothing() -> None:
    import keras_flow as kf

    for ranks in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1]]):
        placement = kf.Placement(ranks)
        for shape in ((8,), (8, 0)):
            value = np.arange(np.prod(shape), dtype="float32").reshape(shape)
            for source in ("P,B", "B,P", "P,S(0)", "S(0),B", "S(0),S(0)"):
                held = kf.tensor(value, placement=placement, sbp="B,B").to_global(sbp=source)
                found = held.to_global(sbp="B,B")
                for everyone in on_all_ranks(
                    found.to_local().tolist() if rank() in placement.ranks else value.tolist()
                ):
                    assert everyone == value.tolist(), (ranks, source, everyone)


@check
def training_on_such_placements_is_that_of_one_device() -> None:
    import keras

    import keras_flow as kf

    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    y = np.random.default_rng(1).normal(size=(16, 4)).astype("float32")

    def updates() -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(8, "tanh", name="a"), keras.layers.Dense(4, name="b")]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(1.0), "mse")
        before = [np.array(value) for value in model.get_weights()]
        model.fit(x, y, batch_size=16, verbose=0)
        return [after - value for after, value in zip(model.get_weights(), before, strict=True)]

    expected = updates()
    split = {"a/kernel": {"model": kf.sbp.split(-1)}, "b/kernel": {"model": kf.sbp.split(0)}}
    for ranks in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1]], [[3]]):
        placement = kf.Placement(ranks, axis_names=("data", "model"))
        for distribution in (kf.ModelParallel(placement, rules=split), kf.DataParallel(placement)):
            with distribution.scope():
                found = updates()
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=f"{ranks} {distribution}")


@check
def ranks_outside_save_read_and_call_with_the_others() -> None:
    import tempfile
    from pathlib import Path

    import keras

    import keras_flow as kf

    x, y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
    for ranks in ([[0, 1]], [[2, 3]]):
        keras.utils.set_random_seed(3)
        path = str(Path(tempfile.gettempdir()) / f"outside {ranks}.keras")
        placement = kf.Placement(ranks, axis_names=("data", "model"))
        with kf.ModelParallel(placement, rules={"h/kernel": {"model": kf.sbp.split(1)}}, batch_axes="data").scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="h"), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
            callbacks = [keras.callbacks.ModelCheckpoint(path)]
            losses = model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
            direct = keras.ops.convert_to_numpy(model(x))
        found = [*losses, model.evaluate(x, y, verbose=0), direct, model.predict(x, verbose=0), *model.get_weights()]
        for everyone in on_all_ranks(found):
            for one, other in zip(everyone, found, strict=True):  # type: ignore[call-overload]
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(keras.models.load_model(path).get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@check
def a_callback_of_one_rank_may_have_a_model_of_its_own() -> None:
    """Nothing of it had a layout: no message to the others is sent for it."""
    import keras

    import keras_flow as kf

    class Sample(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
            self.net.compile("adam", "mse")
            self.net.optimizer.build(self.net.trainable_variables)
            self.metric, self.seeds = keras.metrics.Mean(), keras.random.SeedGenerator(1)
            self.count, self.outputs = keras.Variable([0.0]), []

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            self.count.assign_add([1.0])
            self.metric.update_state(self.count)
            self.outputs.append(self.net.predict(X, verbose=0))

    keras.utils.set_random_seed(rank() + 5)
    sample = Sample()
    keras.utils.set_random_seed(0)
    wanted = sample.net.predict(X, verbose=0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    with kf.DataParallel().scope():
        model.fit(X, Y, verbose=0, callbacks=[sample] if rank() == 0 else [])
    if rank() == 0:
        assert float(sample.count.numpy()[0]) == 1.0
        np.testing.assert_allclose(sample.outputs, [wanted], rtol=1e-5, atol=1e-6)


@check
def a_scope_that_one_rank_enters_is_an_error() -> None:
    """Its process groups would be waited for without end."""
    import keras

    import keras_flow as kf

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")

    def enter() -> None:
        with kf.DataParallel(kf.Placement([2, 0])).scope():
            pass

    with kf.DataParallel().scope():
        said = error_of(enter if rank() == 0 else lambda: model.fit(X, Y, verbose=0))
    assert "needs all ranks" in said, said


@check
def gradients_on_their_way_keep_their_memory() -> None:
    import torch

    import keras_flow as kf
    from keras_flow.backends.torch import gradient_buckets

    reducer = gradient_buckets.Reducer(kf.Placement([0, 1, 2, 3]))
    sent = reducer._memory.of(4, torch.zeros(1))
    reducer._sent = [(None, (), [], [])]  # as where a backward pass raised
    reducer.reset()
    assert reducer._memory.of(4, torch.zeros(1)).data_ptr() != sent.data_ptr()


@check
def scopes_of_different_placements_are_refused() -> None:
    import keras_flow as kf

    half = kf.DataParallel(kf.Placement([0, 1] if rank() < 2 else [2, 3]))
    assert "process 2: Placement([2, 3]" in error_of(lambda: half.scope().__enter__())
