"""Checks of a `train_step` of one's own: what it trains, asks and watches is that of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.backends.torch.registry import check, error_of

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")


def updates_are_those_of_one_device(make: Callable[[], Any]) -> None:
    """Train two steps of the model that `make` makes, on one device and on all ranks."""
    import keras

    import keras_flow as kf

    def trained() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        model = make()
        before = model.get_weights()
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        return [after - was for after, was in zip(model.get_weights(), before, strict=True)]

    wanted = trained()
    with kf.DataParallel().scope():
        updates = trained()
    assert any(np.abs(update).max() > 0 for update in wanted)
    for update, other in zip(updates, wanted, strict=True):
        assert np.abs(update - other).max() <= 1e-5 * np.abs(other).max()


def _apply(model: Any) -> None:
    weights = model.trainable_weights
    model.optimizer.apply([weight.value.grad for weight in weights], weights)


@check
def a_step_may_train_what_was_frozen_when_it_began() -> None:
    import keras

    class Adversarial(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.makes, self.judges = keras.layers.Dense(6), keras.layers.Dense(3)
            self.judges.trainable = False
            self.build(X.shape)

        def build(self, shape: Any) -> None:
            self.makes.build(shape)
            self.judges.build(shape)
            self.of_judge = keras.optimizers.SGD(0.1)

        def call(self, x: Any) -> Any:
            return self.judges(self.makes(x))

        def train_step(self, data: Any) -> Any:
            x, y = data
            self.zero_grad()
            self.judges.trainable = True
            judged: Any = keras.ops.mean(keras.ops.square(self.judges(self.makes(x).detach()) - y))
            judged.backward()
            weights = self.judges.trainable_weights
            self.of_judge.apply([weight.value.grad for weight in weights], weights)
            self.judges.trainable = False
            self.zero_grad()
            loss: Any = keras.ops.mean(keras.ops.square(self(x, training=True)))
            loss.backward()
            _apply(self)
            return {"loss": loss}

    def make() -> Any:
        model = Adversarial()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    updates_are_those_of_one_device(make)


@check
def a_step_may_ask_another_model_by_a_step_of_it() -> None:
    import keras

    class Student(keras.Model):
        def __init__(self, teacher: Any) -> None:
            super().__init__()
            self.head, self.teacher = keras.layers.Dense(3), [teacher]
            self.head.build(X.shape)
            self.built = True

        def call(self, x: Any) -> Any:
            return self.head(x)

        def train_step(self, data: Any) -> Any:
            x, _ = data
            self.zero_grad()
            outputs = self(x, training=True)
            targets = self.teacher[0].predict_on_batch(x)
            loss: Any = keras.ops.mean(keras.ops.square(outputs - keras.ops.convert_to_tensor(targets)))
            loss.backward()
            _apply(self)
            return {"loss": loss}

    def make() -> Any:
        teacher = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        teacher.compile()
        teacher.trainable = False
        model = Student(teacher)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    updates_are_those_of_one_device(make)


@check
def two_backward_passes_before_an_update_are_refused_where_gradients_are_split() -> None:
    import keras

    import keras_flow as kf

    class Twice(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            for _ in range(2):
                self.compute_loss(y=y, y_pred=self(x, training=True)).backward()
            _apply(self)
            return {}

    for stage in (1, 2):
        with kf.DataParallel(zero=stage, zero_min_size=1).scope():
            inputs = keras.Input((6,))
            model = Twice(inputs, keras.layers.Dense(3)(keras.layers.Dense(8)(inputs)))
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        assert "backward() was called twice before one optimizer.apply" in error_of(lambda: model.fit(X, Y, verbose=0))  # noqa: B023


def _watching(how: str) -> Any:
    """A model whose step turns the gradient of the features round, or punishes a gradient by row.

    Args:
        how: `"turned"`, or of what the gradient is: `"inputs"`, `"features"`, `"features and kernel"`.
    """
    import keras
    import torch

    class Watching(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)
            self.first.build(X.shape)
            self.head.build((None, 5))
            self.built = True

        def call(self, x: Any) -> Any:
            return self.head(self.first(x))

        def train_step(self, data: Any) -> Any:
            x, y = data
            self.zero_grad()
            x.requires_grad_(how == "inputs")
            features = self.first(x)
            if how == "turned":
                features.register_hook(lambda gradient: -gradient)
            outputs = self.head(features)
            loss: Any = self.compute_loss(x, y, outputs)
            if how != "turned":
                watched = {"inputs": [x], "features": [features]}.get(how, [features, self.first.kernel.value])
                # features reach the sum by the next layer, and by an operator that takes all rows
                score = outputs.sum() + ((outputs * features[:, :3]).sum() if "kernel" in how else 0.0)
                gradients = torch.autograd.grad(score, watched, create_graph=True)
                by_row: Any = keras.ops.sum(keras.ops.square(gradients[0]), axis=-1)
                loss = (loss + by_row).mean() + sum(each.square().mean() for each in gradients[1:])
            loss.backward()
            _apply(self)
            return {"loss": loss}

    model = Watching()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@check
def a_step_may_turn_the_gradient_of_features_round() -> None:
    updates_are_those_of_one_device(lambda: _watching("turned"))


@check
def a_step_may_ask_for_the_gradient_of_inputs_and_of_features() -> None:
    for how in ("inputs", "features", "features and kernel"):
        updates_are_those_of_one_device(lambda: _watching(how))  # noqa: B023


@check
def layers_that_write_into_their_inputs_leave_the_users_tensors() -> None:
    import keras
    import torch

    import keras_flow as kf

    class Writes(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            x += 1.0
            return x

    x, y = torch.tensor(X), torch.tensor(Y)
    for batch_size in (8, 2):  # also fewer rows than ranks, which all compute whole
        with kf.DataParallel().scope():
            model: Any = keras.Sequential([keras.Input((6,)), Writes(), keras.layers.Dense(3)])
            model.compile("sgd", "mse")
            model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        assert np.array_equal(x.cpu().numpy(), X)


@check
def layers_are_computed_again_in_a_thread_of_the_engine() -> None:
    """As on an accelerator, whose backward pass torch runs in a thread that knows neither step nor distribution."""
    import threading

    import keras

    import keras_flow as kf

    class InThread(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            self.zero_grad()
            loss: Any = self.compute_loss(x, y, self(x, training=True))
            failed: list[BaseException] = []

            def backward() -> None:
                try:
                    loss.backward()
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
            if failed:
                raise failed[0]
            _apply(self)
            return {"loss": loss}

    def trained() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        norm = keras.layers.BatchNormalization(name="norm")
        model: Any = InThread([keras.Input((6,)), keras.layers.Dense(5), norm, keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        before = model.get_weights()
        model.fit(X, Y, batch_size=8, verbose=0)
        return [after - was for after, was in zip(model.get_weights(), before, strict=True)]

    wanted = trained()
    with kf.DataParallel(remat=["norm"]).scope():
        updates = trained()
    largest = max(np.abs(each).max() for each in wanted)
    for update, other in zip(updates, wanted, strict=True):
        assert np.abs(update - other).max() <= 1e-5 * max(np.abs(other).max(), 1e-2 * largest)


@check
def an_index_outside_of_a_split_table_is_an_error() -> None:
    import keras

    import keras_flow as kf

    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    with kf.ModelParallel(placement, rules={"embeddings": {"model": kf.sbp.split(0)}}).scope():
        model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(6, 4)])
        model.compile("sgd", "mse")
        wrong = np.full((4, 3), 6, "int32")
        assert "out of range" in error_of(lambda: model.predict_on_batch(wrong))


@check
def a_loop_of_ones_own_trains_on_after_evaluate() -> None:
    """The rows of this model interact: `evaluate` runs by the consistent view, and leaves the loop's Parameters."""
    import keras
    import torch

    import keras_flow as kf

    class Mixes(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x - x.mean(0, keepdim=True)

    def trained() -> list[Any]:
        keras.utils.set_random_seed(0)
        model: Any = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), Mixes(), keras.layers.Dense(3)])
        model.compile(loss="mse")
        optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
        before = [weight.value for weight in model.weights]
        for _ in range(3):
            optimizer.zero_grad()
            loss: Any = keras.ops.mean(keras.ops.square(model(torch.tensor(X)) - torch.tensor(Y)))
            loss.backward()
            optimizer.step()
            found += [model.evaluate(X, Y, batch_size=8, verbose=0), model.predict(X, verbose=0)]
        assert all(weight.value is one for weight, one in zip(model.weights, before, strict=True))
        return [*found, *model.get_weights()]

    wanted = trained()
    with kf.DataParallel().scope():
        found = trained()
    assert wanted[0] > wanted[2] > wanted[4]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@check
def parameters_are_kept_where_their_values_are() -> None:
    import keras
    import torch

    import keras_flow as kf

    keras.utils.set_random_seed(kf.env.get_rank())  # other values on each rank
    model: Any = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    optimizer, weights = torch.optim.SGD(model.parameters(), 0.1), [weight.value for weight in model.weights]
    with kf.DataParallel().scope():
        model.evaluate(X, Y, verbose=0)
    with kf.DataParallel(kf.Placement([3, 2, 1, 0])).scope():
        model.fit(X, Y, verbose=0)
    with kf.DataParallel().scope():
        model.fit(X, Y, verbose=0)
        model.optimizer.learning_rate = 0.0
        model.fit(X, Y, batch_size=8, verbose=0)
    assert all(weight.value is one for weight, one in zip(model.weights, weights, strict=True))
    mean = [weight.value.grad.numpy() for weight in model.weights]
    model.zero_grad()
    model.compute_loss(y=torch.tensor(Y), y_pred=model(torch.tensor(X))).backward()
    for one, weight in zip(mean, model.weights, strict=True):  # averaged once, however often it was laid
        np.testing.assert_allclose(one, weight.value.grad.numpy(), rtol=1e-4, atol=1e-6)
    before = model.get_weights()
    optimizer.step()
    assert all((one != other).any() for one, other in zip(before, model.get_weights(), strict=True))


@check
def a_layer_that_is_split_between_own_steps_trains_on() -> None:
    import keras
    import torch

    import keras_flow as kf

    def trained(splits: bool) -> list[Any]:
        keras.utils.set_random_seed(0)
        model: Any = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        for step in range(4):
            if step == 2 and splits:
                kf.shard(model.layers[0], kernel={"model": kf.sbp.split(1)})
            model.zero_grad()
            model.compute_loss(y=torch.tensor(Y), y_pred=model(torch.tensor(X), training=True)).backward()
            _apply(model)
        if splits:
            slot = model.optimizer.momentums[0]
            assert kf.layout_of(slot).layout == kf.layout_of(model.layers[0].kernel).layout
            listed = {id(each) for each in model.parameters()}
            assert all(id(weight.value) in listed for weight in model.weights)
        return model.get_weights()

    wanted = trained(splits=False)
    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    with kf.ModelParallel(placement).scope():
        found = trained(splits=True)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@check
def a_teacher_of_another_distribution_sees_all_rows() -> None:
    """The step reaches the teacher only through a global name, so its kernels stay split."""
    import keras

    import keras_flow as kf

    class Student(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, _ = data
            self.zero_grad()
            outputs: Any = self(x, training=True)
            loss: Any = keras.ops.mean(keras.ops.square(outputs - keras.ops.stop_gradient(teacher(x))))
            if uses_critic:
                loss = loss + 0.1 * keras.ops.mean(keras.ops.square(critic(outputs)))
            loss.backward()
            _apply(self)
            return {"loss": loss}

    def make() -> Any:
        model: Any = Student([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1))
        return model

    keras.utils.set_random_seed(3)
    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    with kf.ModelParallel(placement, rules={"wide/kernel": {"model": kf.sbp.split(1)}}).scope():
        wide = keras.layers.Dense(8, "tanh", name="wide")
        teacher: Any = keras.Sequential([keras.Input((6,)), wide, keras.layers.Dense(3)])
        critic: Any = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "tanh", name="wide")])
    assert kf.layout_of(wide.kernel).layout.local_shape(0) == (6, 4)
    for uses_critic in (False, True):  # noqa: B007
        updates_are_those_of_one_device(make)


@check
def a_model_that_a_data_thread_asks_is_refused_by_name() -> None:
    import threading

    import keras

    import keras_flow as kf

    said: list[str] = []

    class Asks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            thread = threading.Thread(target=lambda: said.append(error_of(lambda: model.predict_on_batch(X))))
            thread.start()
            thread.join()

    with kf.DataParallel().scope():
        model: Any = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0, callbacks=[Asks()])
    assert said[0].startswith("FlowError: model.predict_on_batch() was called in one thread while model.fit() runs")
