"""A job of several processes: Horovod's names against its formulas in NumPy.

`keras-flow launch --nproc_per_node 2 tests/hvd/job.py FOLDER` prints `done` at its end.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
import keras_flow.hvd as hvd
from tests.hvd.formulas import FEATURES, RATE, ROWS, STEPS, batches, check, formula, linear, rank_values, trained


def ranks() -> None:
    assert hvd.is_initialized() and hvd.local_rank() == hvd.rank() and hvd.local_size() == hvd.size()
    assert hvd.cross_rank() == 0 and hvd.cross_size() == 1 and hvd.is_homogeneous()
    assert hvd.rank() == kf.env.get_rank() and hvd.size() == kf.env.get_world_size()


def collectives() -> None:
    count, here, values = hvd.size(), hvd.rank(), rank_values()
    own, stack = values[here], np.stack(values)
    check(hvd.allreduce(own), stack.mean(0))
    check(hvd.allreduce(own, average=False), stack.sum(0))
    check(hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), 1.5 * stack.sum(0))
    check(hvd.allreduce(own, op=hvd.Min), stack.min(0))
    check(hvd.allreduce(own, op=hvd.Max), stack.max(0))
    check(hvd.allreduce(own, op=hvd.Product), stack.prod(0))
    check(hvd.allreduce(own, compression=hvd.Compression.fp16), stack.mean(0), 2e-3)
    first, second = hvd.grouped_allreduce([own, own.reshape(5, 1) * 2.0])
    check(first, stack.mean(0))
    check(second, 2 * stack.mean(0).reshape(5, 1))
    rows = [np.full((rank + 1, 2), rank, "float32") for rank in range(count)]
    check(hvd.allgather(rows[here]), np.concatenate(rows))
    check(hvd.broadcast(own, root_rank=count - 1), values[-1])
    assert hvd.broadcast_object({"rank": here}, root_rank=1) == {"rank": 1}
    assert hvd.allgather_object(here) == list(range(count))
    # rank r sends s rows to rank s
    sent = np.arange(sum(range(count)), dtype="float32") + 100 * here
    got, sizes = hvd.alltoall(sent, splits=list(range(count)))
    begins = np.cumsum([0, *range(count)])
    check(got, np.concatenate([np.arange(begins[here], begins[here + 1]) + 100 * rank for rank in range(count)]))
    assert keras.ops.convert_to_numpy(sizes).tolist() == [here] * count
    check(hvd.alltoall(np.arange(count, dtype="float32") + 10 * here), np.arange(count) * 10 + here)
    parts = np.array_split(stack.mean(0), count)
    check(hvd.reducescatter(own), parts[here])
    check(hvd.reducescatter(own, op=hvd.Sum), count * parts[here])
    whole = keras.ops.convert_to_numpy(hvd.reducescatter(np.arange(2 * count, dtype="int32"), op=hvd.Sum))
    assert whole.dtype == "int32" and whole.tolist() == [2 * here * count, (2 * here + 1) * count]
    hvd.barrier()
    pair = hvd.ProcessSet([0, count - 1])
    if pair.included():
        check(hvd.allreduce(own, process_set=pair), stack[[0, count - 1]].mean(0))
    hvd.barrier()


class Reduces(keras.layers.Dense):
    """Gives what a collective makes of its outputs."""

    def __init__(self, collective: Callable[[Any], Any], **options: Any):
        super().__init__(1, use_bias=False, kernel_initializer="ones", **options)
        self.collective = collective

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.collective(super().call(inputs))


def gradients() -> None:
    """Gradients pass through collectives of a compiled step: those of the sum of the ranks' losses."""
    count, here = hvd.size(), hvd.rank()
    x = np.stack(rank_values((ROWS, FEATURES))).astype("float64")
    outputs, weights = x.sum(-1), np.arange(1.0, count + 1)
    total, largest = (functools.partial(hvd.allreduce, op=op) for op in (hvd.Sum, hvd.Max))
    # the loss of rank r is r + 1 times the mean of squares of what it gets
    for collective, got, pulled in (
        (hvd.allreduce, outputs.mean(0), lambda found: np.full((count, 1), found.mean())),
        (total, outputs.sum(0), lambda found: np.full((count, 1), found.sum())),
        (lambda value: hvd.broadcast(value, 1), outputs[1], lambda found: np.eye(count)[:, [1]] * found.sum()),
    ):
        model = keras.Sequential([keras.layers.Input((FEATURES,)), Reduces(collective)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), op=hvd.Sum), "mse", loss_weights=here + 1.0)
        zeros = np.zeros((ROWS, 1), "float32")
        model.fit(x[here].astype("float32"), zeros, batch_size=ROWS, shuffle=False, verbose=0)
        of_ranks = pulled(weights) * 2 * got / ROWS
        wanted = 1.0 - RATE * np.einsum("nr,nrf->f", of_ranks, x)
        check(model.get_weights()[0].ravel(), wanted, 1e-5)
    model = keras.Sequential([keras.layers.Input((FEATURES,)), Reduces(largest)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)), "mse")
    with pytest.raises(kf.FlowError, match=r"op=hvd\.Max has no gradient"):
        model.fit(np.ones((4, FEATURES), "float32"), np.ones((4, 1), "float32"), verbose=0)


def elastic_state() -> None:
    """What rank 0 gives in `sync` is what every rank goes back to."""
    state = hvd.elastic.CommittedState(epoch=hvd.rank() + 1)
    state.sync()
    state.epoch = 9
    state.restore()
    assert state.epoch == 1


def join() -> None:
    """Rank r reduces r + 1 times."""
    count = hvd.size()
    for turn in range(hvd.rank() + 1):
        present = count - turn
        check(hvd.allreduce(np.ones(2, "float32")), np.full(2, present / count))
        check(hvd.allreduce(np.ones(2, "float32"), op=hvd.AverageOfPresent), np.ones(2))
    assert hvd.join() == count - 1
    check(hvd.allreduce(np.ones(3, "float32")), np.ones(3))
    # the other way, so that the highest rank sees no call of the others; scalars and matrices too
    for turn in range(count - 1 - hvd.rank()):
        present = count - 1 - turn
        check(hvd.allreduce(np.ones((2, 3), "float32")), np.full((2, 3), present / count))
        check(hvd.allreduce(np.float32(1.0), op=hvd.Sum), present)
    assert hvd.join() == 0


def join_refuses() -> None:
    if hvd.rank() == 0:
        with pytest.raises(kf.FlowError, match=r"rank 0 calls join; rank 1 calls allgather .*Once a rank has joined"):
            hvd.join()
    else:
        with pytest.raises(kf.FlowError, match="Once a rank has joined the others may only reduce by a sum"):
            hvd.allgather(np.ones(2, "float32"))


def wrong_calls() -> None:
    here = hvd.rank()
    begun = time.monotonic()
    with pytest.raises(
        kf.FlowError, match=r"calls allreduce sum float32\[2\] of op=Average; rank 1 calls .* float32\[3\]"
    ):
        hvd.allreduce(np.ones(2 if here == 0 else 3, "float32"))
    with pytest.raises(kf.FlowError, match=r"of op=Average; rank 1 calls .* of op=Sum"):
        hvd.allreduce(np.ones(2, "float32"), op=hvd.Average if here == 0 else hvd.Sum)
    with pytest.raises(kf.FlowError, match=r"of op=Sum; rank 1 calls .* of op=Sum times 1 and 3"):
        hvd.allreduce(np.ones(2, "float32"), op=hvd.Sum, postscale_factor=1.0 if here == 0 else 3.0)
    with pytest.raises(kf.FlowError, match=r"rank 0 calls allreduce .*; rank 1 calls barrier"):
        hvd.allreduce(np.ones(2, "float32")) if here == 0 else hvd.barrier()
    assert time.monotonic() - begun < 10.0
    with pytest.raises(kf.FlowError, match=r"Adasum is not there; take op=hvd.Average"):
        hvd.allreduce(np.ones(2, "float32"), op=hvd.Adasum)
    with pytest.raises(kf.FlowError, match="is not in the process set"):
        hvd.allreduce(np.ones(2, "float32"), process_set=hvd.ProcessSet([(here + 1) % hvd.size()]))
    with pytest.raises(kf.FlowError, match="not both"):
        hvd.allreduce(np.ones(2, "float32"), op=hvd.Sum, average=True)
    with pytest.raises(kf.FlowError, match="the mean of int32 is no int32"):
        hvd.allreduce(np.ones(2, "int32"))
    with pytest.raises(kf.FlowError, match=r"hvd\.reducescatter: the mean of int32 is no int32"):
        hvd.reducescatter(np.ones(2, "int32"))
    with pytest.raises(kf.FlowError, match="the mean of bool is no bool"):
        hvd.allreduce(np.ones(2, "bool"))
    with pytest.raises(kf.FlowError, match="int32 times prescale_factor or postscale_factor is no int32"):
        hvd.allreduce(np.ones(2, "int32"), op=hvd.Sum, postscale_factor=0.5)
    with pytest.raises(kf.FlowError, match="3 rows, splits"):
        hvd.alltoall(np.ones(3, "float32"), splits=[1] * (hvd.size() - 1) + [7])
    with pytest.raises(kf.FlowError, match=r"rank 0 calls alltoall float32\[rows, \] of 1 rows, splits \[5\] for"):
        hvd.alltoall(np.ones(hvd.size() if here else 1, "float32"), splits=[1] * hvd.size() if here else [5])
    with pytest.raises(kf.FlowError, match=r"named loss; rank 1 calls .* named accuracy"):
        hvd.allreduce(np.ones(2, "float32"), "accuracy" if here else "loss")
    with pytest.raises(kf.FlowError, match="no global variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(kf.FlowError, match="distributed already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    with pytest.raises(kf.FlowError, match="backward_passes_per_step or the optimizer's gradient_accumulation_steps"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2), backward_passes_per_step=2)
    check(hvd.allreduce(np.ones(2, "float32")), np.ones(2))


def uneven_steps() -> None:
    """A rank that has ended its epoch while another one goes on is told, and so is the other one."""
    rows = np.ones((4 * (2 + hvd.rank()), FEATURES), "float32")
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)))
    with pytest.raises(
        kf.FlowError, match=r"calls allreduce sum float32\[1\] of op=Average named loss; rank 1 calls .* float32\[4\]"
    ):
        model.fit(rows, rows[:, :1], batch_size=4, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])


def training() -> None:
    """Batches of the ranks have different numbers of rows, and each rank's mean counts alike."""
    mean = lambda gradients: np.mean(gradients, 0)  # noqa: E731
    total = lambda gradients: np.sum(gradients, 0)  # noqa: E731
    halves = lambda gradients: np.mean(gradients, 0) / 2  # noqa: E731
    sgd = lambda **options: keras.optimizers.SGD(RATE, **options)  # noqa: E731
    cases = {
        "plain": (hvd.DistributedOptimizer(sgd()), mean, {}),
        "sum": (hvd.DistributedOptimizer(sgd(), op=hvd.Sum), total, {}),
        "momentum": (hvd.DistributedOptimizer(sgd(momentum=0.9)), mean, {"momentum": 0.9}),
        "predivide": (hvd.DistributedOptimizer(sgd(), gradient_predivide_factor=3.0), mean, {}),
        "groups": (hvd.DistributedOptimizer(sgd(), groups=2), mean, {}),
        "sparse as dense": (hvd.DistributedOptimizer(sgd(), sparse_as_dense=True), mean, {}),
        "passes": (hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2), mean, {"passes": 2}),
        "mean of passes": (
            hvd.DistributedOptimizer(sgd(momentum=0.9), backward_passes_per_step=2, average_aggregated_gradients=True),
            halves,
            {"momentum": 0.9, "passes": 2},
        ),
    }
    for name, (optimizer, reduce, options) in cases.items():
        weights, _ = trained(linear(optimizer))
        for found, wanted in zip(weights, formula(reduce, **options)[0], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6, err_msg=name)
    for groups, wanted in (([[1, 0]], [[0, 1]]), ([[1]], [[0], [1]])):
        model = linear(sgd())
        variables = model.trainable_variables
        named = [[variables[number] for number in group] for group in groups]
        optimizer = hvd.DistributedOptimizer(sgd(), groups=named)
        model.compile(optimizer, "mse")
        for found, right in zip(trained(model)[0], formula(mean)[0], strict=True):
            np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-6)
        bundles = optimizer._bundles([0, 1], [each.value for each in variables], variables)
        assert sorted(map(sorted, bundles)) == wanted, bundles
    model = linear(hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16))
    for found, wanted in zip(trained(model)[0], formula(mean)[0], strict=True):
        np.testing.assert_allclose(found, wanted, atol=5e-3)


class _OwnLoss(keras.callbacks.Callback):
    """Keeps the losses of this rank, before others see them."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(logs["loss"])


def process_sets() -> None:
    """Two sets of ranks train a model each, and average their logs, at the same time."""
    count = hvd.size()
    sets = [hvd.ProcessSet({0, count - 1} - {1}), hvd.ProcessSet([1])]
    mine = hvd.add_process_set(next(each for each in sets if each.included()))
    model, own = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), process_set=mine)), _OwnLoss()
    weights, history = trained(model, epochs=2, callbacks=[own, hvd.callbacks.MetricAverageCallback(process_set=mine)])
    wanted, _ = formula(lambda gradients: np.mean([gradients[rank] for rank in mine.ranks], 0), epochs=2)
    for found, right in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=2e-5, atol=2e-6)
    losses = hvd.allgather_object(own.losses)
    np.testing.assert_allclose(history["loss"], np.mean([losses[rank] for rank in mine.ranks], 0), rtol=1e-6)
    assert hvd.remove_process_set(mine) and not hvd.remove_process_set(hvd.global_process_set)


class HasUnused(keras.layers.Dense):
    """Has a weight that no result depends on."""

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self.unused = self.add_weight(shape=(2,), name="unused")


def without_a_gradient() -> None:
    """A weight that the loss does not depend on stays, also where several passes are one update."""
    for passes in (1, 2):
        model = keras.Sequential([keras.layers.Input((FEATURES,)), HasUnused(1)])
        optimizer = keras.optimizers.SGD(RATE)
        model.compile(hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes), "mse")
        hvd.broadcast_variables(model.variables, root_rank=0)
        before = model.get_weights()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras names the weight
            after, _ = trained(model)
        check(after[-1], before[-1])
        assert np.abs(after[0] - before[0]).max() > 1e-3
    # a gradient of the first of two passes is in the update, though the second pass has none
    weight = keras.Variable([1.0, 2.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), backward_passes_per_step=2)
    for gradient in (keras.ops.ones(2), None):
        optimizer.apply([gradient], [weight])
    check(keras.ops.convert_to_numpy(weight), np.array([1.0, 2.0]) - RATE)


def weights_that_do_not_decay() -> None:
    for scaled in (False, True):
        optimizer: Any = keras.optimizers.AdamW(RATE, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
        weights = [keras.Variable([1.0, 2.0], name=name) for name in ("kernel", "bias")]
        optimizer, zeros = hvd.DistributedOptimizer(optimizer), [keras.ops.zeros(2)] * 2
        if keras.backend.backend() == "jax":  # where Keras's loss scale has no other way
            optimizer.build(weights)
            state, values = ([each.value for each in one] for one in (optimizer.variables, weights))
            found, _ = optimizer.stateless_apply(state, zeros, values)
        else:
            optimizer.apply(zeros, weights)
            found = weights
        for weight, factor in zip(found, (1 - 0.5 * RATE, 1.0), strict=True):
            check(keras.ops.convert_to_numpy(weight), factor * np.array([1.0, 2.0]))


def partial() -> None:
    """The bias of a layer of its own stays on its rank; the kernel is shared."""
    keras.utils.set_random_seed(3)
    inputs = keras.layers.Input((FEATURES,))
    shared, own = keras.layers.Dense(4, use_bias=False), keras.layers.Dense(1, use_bias=False)
    model = keras.Model(inputs, own(shared(inputs)))
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(RATE), local_layers=[own], scale_local_gradients=False
    )
    model.compile(optimizer, "mse")
    trained(model)
    kernels = hvd.allgather_object(model.get_weights())
    for first, other in itertools.pairwise(kernels):
        np.testing.assert_array_equal(first[0], other[0])
        assert np.abs(first[1] - other[1]).max() > 1e-3


def partial_with_a_loss_scale() -> None:
    """One rank's own gradient overflows, and all leave out the step."""
    shared, own = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
    first, second = keras.layers.Input((FEATURES,)), keras.layers.Input((FEATURES,))
    model = keras.Model([first, second], [shared(first), own(second)])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=256.0)
    model.compile(hvd.PartialDistributedOptimizer(optimizer, local_layers=[own]), ["mse", "mse"])
    model.set_weights([np.full((FEATURES, 1), 0.3, "float32")] * 2)
    rows = np.ones((4, FEATURES), "float32")
    for factor, wanted in ((1e30 if hvd.rank() == 1 else 1.0, 0.3), (1.0, 0.3 + 2 * RATE * 0.1)):
        model.train_on_batch([rows, factor * rows], [rows[:, :1]] * 2)
        check(model.get_weights()[0].ravel(), [wanted] * FEATURES)
        check(model.get_weights()[1].ravel(), [0.3 + (wanted - 0.3) / hvd.size()] * FEATURES)
    assert float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)) == 128.0


def callbacks(folder: Path) -> None:
    """The mean of logs, and a warmup whose velocity is scaled with the rate."""
    size, mean = hvd.size(), lambda gradients: np.mean(gradients, 0)
    keras.utils.set_random_seed(hvd.rank())
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)))
    if hvd.rank() > 0:
        model.set_weights([np.full((FEATURES, 1), 9.0, "float32"), np.ones(1, "float32")])
    best = folder / "best.keras"
    _, history = trained(
        model,
        epochs=2,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.BestModelCheckpoint(best, monitor="loss"),
        ],
    )
    weights, losses = formula(mean, epochs=2)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    for found, wanted in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)
    hvd.barrier()
    assert best.exists()
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    warmup = hvd.callbacks.LearningRateWarmupCallback(RATE * size, warmup_epochs=2)
    after = hvd.callbacks.LearningRateScheduleCallback(RATE * size, 0.5, start_epoch=2, momentum_correction=False)
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE * size, momentum=0.9)))
    _, history = trained(model, epochs=3, callbacks=[warmup, after, Rates()])
    scale = [1 / size * ((step + 1) / STEPS * (size - 1) / 2 + 1) for step in range(2 * STEPS)]
    np.testing.assert_allclose(rates, [RATE * size * each for each in (*scale, *[0.5] * STEPS)], rtol=1e-5)
    assert history["lr"][-1] == pytest.approx(RATE * size / 2)
    # the velocities of an optimizer inside a loss scale
    inner = keras.optimizers.SGD(RATE, momentum=0.9)
    model = linear(keras.optimizers.LossScaleOptimizer(inner))
    model.optimizer.build(model.trainable_variables)
    inner.momentums[0].assign(np.ones((FEATURES, 1)))
    schedule = hvd.callbacks.LearningRateScheduleCallback(RATE, 0.5)
    schedule.set_model(model)
    schedule.on_train_batch_begin(0)
    check(inner.momentums[0], np.full((FEATURES, 1), 0.5))


def models(folder: Path) -> None:
    """Whatever a train step is made of: embeddings, batch norm, dropout, a loss scale, steps of one's own."""
    tokens = np.random.default_rng(hvd.rank()).integers(0, 9, size=(12, 5))
    several = 1 if keras.backend.backend() == "torch" else 2  # which has no such steps
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.layers.Input((5,)),
                keras.layers.Embedding(9, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(6, "relu", dtype=policy),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(1),
            ]
        )
        optimizer: Any = keras.optimizers.Adam(0.01)
        if policy != "float32":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(hvd.DistributedOptimizer(optimizer), "mse", steps_per_execution=several)
        before = model.get_weights()
        model.fit(tokens, tokens[:, :1] / 9, batch_size=3, epochs=2, verbose=0)
        moved = hvd.allgather_object([each.numpy() for each in model.trainable_weights])
        for first, other in zip(moved[0], moved[-1], strict=True):
            np.testing.assert_array_equal(first, other)
        assert any(np.abs(old - new).max() > 1e-3 for old, new in zip(before, model.get_weights(), strict=True))
    model.train_on_batch(tokens, tokens[:, :1] / 9)


def loss_scale() -> None:
    """One rank overflows, and all leave out the step; a scale around the optimizer would not know."""
    sgd, policy = keras.optimizers.SGD(RATE), keras.DTypePolicy("mixed_float16")
    model = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(1, dtype=policy)])
    model.dtype_policy = policy
    with pytest.raises(
        kf.FlowError, match=r"the loss scale goes inside: hvd.DistributedOptimizer\(keras.optimizers.Lo"
    ):
        model.compile(hvd.DistributedOptimizer(sgd), "mse")
    scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd, initial_scale=256.0))
    model.compile(scaled, "mse")
    model.set_weights([np.full((FEATURES, 1), 0.3, "float32"), np.zeros(1, "float32")])
    rows = np.ones((4, FEATURES), "float32")
    for factor, wanted in ((1e3 if hvd.rank() == 1 else 1.0, 0.3), (1.0, 0.3 + 2 * RATE * 0.1)):
        model.train_on_batch(factor * rows, rows[:, :1])
        np.testing.assert_allclose(model.get_weights()[0].ravel(), [wanted] * FEATURES, rtol=1e-3)
    assert float(keras.ops.convert_to_numpy(scaled.dynamic_scale)) == 128.0


def files(folder: Path) -> None:
    """A file is one of stock Keras; `hvd.load_model` goes on where it was."""
    path = folder / "model.keras"
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=0.9)))
    trained(model)
    if hvd.rank() == 0:
        model.save(path)
    hvd.barrier()
    stock = keras.saving.load_model(path).optimizer
    assert isinstance(stock, keras.optimizers.SGD) and not hasattr(stock, "keras_flow_calls_in_step")
    weights, _ = trained(hvd.load_model(path))
    for found, wanted in zip(weights, formula(lambda each: np.mean(each, 0), momentum=0.9, epochs=2)[0], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)

    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=0.9), backward_passes_per_step=2))
    trained(model)
    velocities = model.optimizer.momentums
    hvd.barrier()
    if hvd.rank() == 0:
        model.save(path)
        for found, wanted in zip(keras.saving.load_model(path).optimizer.momentums, velocities, strict=True):
            check(found, keras.ops.convert_to_numpy(wanted))
    hvd.barrier()


def built_by_the_first_batch(folder: Path) -> None:
    """Ranks end alike where their first batch makes the weights, and where rank 0 has loaded its model."""
    x, y = batches(hvd.rank())
    keras.utils.set_random_seed(hvd.rank())
    for path in (folder / "made.keras", None):
        if path is None and hvd.rank() == 0:
            model = hvd.load_model(folder / "made.keras")
        else:
            model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=0.9)), "mse")
        given = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(x, y, batch_size=ROWS + hvd.rank(), verbose=0, callbacks=[given])
        kept = hvd.allgather_object([each.numpy() for each in (*model.weights, *model.optimizer.variables)])
        for first, other in zip(kept[0], kept[-1], strict=True):
            np.testing.assert_array_equal(first, other)
        if path is not None and hvd.rank() == 0:
            model.save(path)
        hvd.barrier()


def beside_a_distribution() -> None:
    """Which of them averages would be a guess, so it is refused as soon as both are there."""
    refused = pytest.raises(kf.FlowError, match="hvd and a distribution in one program")
    optimizer, distribution = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)), kf.DataParallel()
    with distribution.scope(), refused:
        hvd.DistributedOptimizer(keras.optimizers.SGD(RATE))
    with distribution.scope(), refused:
        linear(optimizer).fit(np.ones((4, FEATURES), "float32"), np.ones((4, 1), "float32"), verbose=0)


def main(folder: Path) -> None:
    with pytest.raises(kf.FlowError, match=r"call hvd.init\(\) first"):
        hvd.rank()
    hvd.init(process_sets="dynamic")
    cases = [
        ranks,
        collectives,
        gradients,
        elastic_state,
        join,
        join_refuses,
        wrong_calls,
        uneven_steps,
        training,
        process_sets,
        without_a_gradient,
    ]
    cases += [weights_that_do_not_decay, partial, partial_with_a_loss_scale, loss_scale]
    for case in cases:
        begun = time.monotonic()
        case()
        print(f"{case.__name__}: {time.monotonic() - begun:.1f} s", flush=True)
    for in_folder in (callbacks, models, files, built_by_the_first_batch):
        begun = time.monotonic()
        in_folder(folder)
        print(f"{in_folder.__name__}: {time.monotonic() - begun:.1f} s", flush=True)
    beside_a_distribution()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(kf.FlowError, match=r"hvd\.size: .* call hvd\.init\(\) first"):
        hvd.size()
    hvd.init()
    check(hvd.allreduce(np.ones(2, "float32"), op=hvd.Sum), np.full(2, hvd.size()))
    print("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
