"""Gradients of kf.DistributedDataParallel, against the mean of all ranks' own; run by several processes."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends.active import backend


def rows(rank: int, call: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Those of a rank."""
    draw = np.random.default_rng(100 * call + rank)
    return draw.standard_normal((6, 5)).astype("float32"), draw.standard_normal((6, 2)).astype("float32")


def values(tensors: list[Any]) -> list[np.ndarray]:
    return [np.asarray(backend().as_numpy(each)).astype("float64") for each in tensors]


def close(found: list[np.ndarray], expected: list[np.ndarray], what: str, tolerance: float = 1e-6) -> None:
    assert len(found) == len(expected), what
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=what)


def check(
    name: str,
    build: Callable[[], keras.Model],
    loss_of: Callable[..., Callable],
    tolerance: float = 1e-6,
    change: Callable[[keras.Model], None] = lambda model: None,
) -> keras.Model:
    """Two steps together, and two whose first is kept, against the steps of each rank's rows by one rank alone.

    `change` is made to the model that is averaged already.
    """
    here, count = kf.env.get_rank(), kf.env.get_world_size()
    keras.utils.set_random_seed(here)  # each rank begins with weights of its own
    model = build()
    ddp = kf.DistributedDataParallel(model, bucket_size_mb=1e-4)
    alone = build()
    alone.set_weights(model.get_weights())
    step = ddp.value_and_grad(loss_of(ddp))
    single = kf.DistributedDataParallel(alone, group=kf.Placement([here]))
    own_step = single.value_and_grad(loss_of(single))
    for each in (model, alone):
        change(each)

    def mean(calls: list[int]) -> list[np.ndarray]:
        """Of all ranks, what one rank computes of their rows."""
        total: list[np.ndarray] | None = None
        for rank in range(count):
            for call in calls:
                part = values(own_step(*tensors(rows(rank, call)))[1])
                total = part if total is None else [one + other for one, other in zip(total, part, strict=True)]
        assert total is not None
        return [each / count for each in total]

    _, gradients = step(*tensors(rows(here)))
    close(values(gradients), mean([0]), f"{name}, one step", tolerance)
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        _, kept = step(*tensors(rows(here, 1)))
    close(values(kept), values(own_step(*tensors(rows(here, 1)))[1]), f"{name}, kept", tolerance)
    _, both = step(*tensors(rows(here, 2)))
    close(values(both), mean([1, 2]), f"{name}, two steps", tolerance)
    _, after = step(*tensors(rows(here, 3)))
    close(values(after), mean([3]), f"{name}, nothing is kept any more", tolerance)
    everyone = kf.comm.all_gather_object(values([each.value for each in model.trainable_weights]))
    for rank, weights in enumerate(everyone):
        close(weights, everyone[0], f"{name}, weights of rank {rank}", 0.0)
    return model


def tensors(arrays: tuple[np.ndarray, ...]) -> list[Any]:
    return [keras.ops.convert_to_tensor(each) for each in arrays]


def mse(ddp: Callable) -> Callable:
    return lambda x, y: keras.ops.mean((ddp(x, training=True) - y) ** 2)


def dense() -> keras.Model:
    return keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(2)])


def frozen() -> keras.Model:
    model = dense()
    model.layers[0].trainable = False
    return model


def thaw(model: keras.Model) -> None:
    model.layers[0].trainable = True


def fit(model: keras.Model) -> None:
    """On torch, Keras leaves the gradients of its last step."""
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(*rows(0), verbose=0)


class Unused(keras.Model):
    """A layer of it takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = keras.layers.Dense(2), keras.layers.Dense(3)

    def build(self, shape: tuple) -> None:
        self.used.build(shape)
        self.unused.build(shape)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.used(x)


def unused() -> keras.Model:
    model = Unused()
    model.build((None, 5))
    return model


def two_outputs() -> keras.Model:
    x = keras.Input((5,))
    hidden = keras.layers.Dense(4)(x)
    return keras.Model(x, [keras.layers.Dense(2)(hidden), keras.layers.Dense(1)(hidden)])


def two_losses(ddp: Callable) -> Callable:
    def loss(x: Any, y: Any) -> Any:
        first, second = ddp(x)
        return keras.ops.mean((first - y) ** 2) + keras.ops.mean(keras.ops.abs(second))

    return loss


def half() -> keras.Model:
    return keras.Sequential(
        [keras.layers.Input((5,)), keras.layers.Dense(8, dtype="bfloat16"), keras.layers.Dense(2, dtype="float32")]
    )


def statistics() -> keras.Model:
    return keras.Sequential(
        [keras.layers.Input((5,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(2)]
    )


def linear_by_hand() -> None:
    """The gradient of a linear model, by numpy."""
    here, count = kf.env.get_rank(), kf.env.get_world_size()
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(2, use_bias=False)])
    ddp = kf.DistributedDataParallel(model)
    step = ddp.value_and_grad(lambda x, y: (keras.ops.mean((ddp(x) - y) ** 2), ddp(x)), has_aux=True)
    kernel = model.get_weights()[0].astype("float64")
    (loss, outputs), (gradient,) = step(*tensors(rows(here)))
    x, y = rows(here)
    np.testing.assert_allclose(
        backend().as_numpy(outputs), x @ kernel, rtol=1e-5, atol=1e-7
    )  # terms of 1 may cancel; 6e-8 is their rounding
    np.testing.assert_allclose(float(loss), np.mean((x @ kernel - y) ** 2), rtol=1e-5)
    parts = [rows(rank) for rank in range(count)]
    expected = np.mean([x.T @ (x @ kernel - y) * 2 / y.size for x, y in parts], 0)
    np.testing.assert_allclose(backend().as_numpy(gradient), expected, rtol=1e-5, atol=1e-6)


def everything() -> None:
    """All of it."""
    linear_by_hand()
    check("dense", dense, mse)
    model = check("frozen", frozen, mse)
    assert len(model.trainable_weights) == 2
    model = check("unfrozen", frozen, mse, change=thaw)
    assert len(model.trainable_weights) == 4
    check("after fit", dense, mse, change=fit)
    check("unused", unused, mse)
    check("two outputs", two_outputs, two_losses)
    check("bfloat16 beside float32", half, mse, 2e-2)
    shared_before(3, check("statistics", statistics, mse))
    if keras.backend.backend() == "torch":
        calls_share_statistics()
    else:
        average_without_a_gradient()


def average_without_a_gradient() -> None:
    """As a tape gives it of a weight that is not used."""
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(2, use_bias=False)])
    ddp = kf.DistributedDataParallel(model)
    gradient = keras.ops.ones((5, 2)) * (1 + kf.env.get_rank())
    np.testing.assert_allclose(values(ddp.average([gradient]))[0], (1 + kf.env.get_world_size()) / 2)
    np.testing.assert_allclose(values(ddp.average([None]))[0], np.zeros((5, 2)))


def calls_share_statistics() -> None:
    """As a loop of torch calls, twice in a step; a frozen kernel is in the graph of the first call."""
    model = statistics()
    model.layers[1].trainable = False
    ddp = kf.DistributedDataParallel(model)
    for call in range(4):
        x = tensors(rows(kf.env.get_rank(), call))[0]
        loss: Any = keras.ops.mean(ddp(x, training=True)) + keras.ops.mean(ddp(x, training=True))
        loss.backward()
    shared_before(3, model)


def shared_before(call: int, model: keras.Model) -> None:
    """Before this step all ranks had the first one's statistics, and each then took its own rows' at momentum 0.5."""
    x, _ = rows(kf.env.get_rank(), call)
    means = kf.comm.all_gather_object((values([model.layers[0].moving_mean.value])[0], x))
    shared = 2 * means[0][0] - means[0][1].mean(0)
    for moving, own in means:
        np.testing.assert_allclose(2 * moving - own.mean(0), shared, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    kf.init()
    everything()
    if kf.env.is_main_process():
        print("done")
