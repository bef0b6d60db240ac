"""Numbers of which each rank holds its part, and who reads the logs of a batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from tests.backends.torch.registry import check, error_of, on_all_ranks, rank


def own_rows() -> Any:
    """Rows of a batch of 8, for a number made by hand."""
    import keras_flow as kf
    from keras_flow.backends.torch.rows import mirrored_calls

    return mirrored_calls.rows_of(kf.DataParallel().placement, 8)


def part() -> float:
    """What this rank holds of a number."""
    return 0.5 + rank()


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives that are called meanwhile, also those that a deferred tensor's operator makes."""
    import torch.distributed as torch_distributed

    from keras_flow.backends.torch import doubling

    calls: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(torch_distributed, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    by_doubling = doubling._by_doubling

    def noted_small(*args: Any) -> None:
        calls.append("all_reduce")
        by_doubling(*args)

    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "all_gather_single", "all_to_all_single", "broadcast"):
            stack.enter_context(mock.patch.object(torch_distributed, name, noted(name)))
        # an all-reduce of several messages
        stack.enter_context(mock.patch.object(doubling, "_by_doubling", noted_small))
        yield calls


def partial_numbers_are_their_sum(share: int) -> None:
    """A fifth of all pairs of operators, in parts where that is the same and summed elsewhere: value and gradient."""
    import torch

    from keras_flow.backends.torch.rows.partial_numbers import PartialNumber, partial_number

    two = torch.tensor(2.0)
    operators: dict[str, Callable[[Any], Any]] = {
        "times a number": lambda x: x * 3,
        "number times": lambda x: 3 * x,
        "times a tensor": lambda x: two * x,
        "times a vector": lambda x: (torch.arange(3.0) * x).sum(),
        "over": lambda x: x / two,
        "under": lambda x: two / x,
        "integer division": lambda x: torch.div(x, 2, rounding_mode="floor") + x,
        "plus itself": lambda x: x + x,
        "plus a number": lambda x: x + 1,
        "plus a tensor": lambda x: x + two,
        "plus three times itself": lambda x: torch.add(x, x, alpha=3),
        "of a sum": lambda x: sum([x, x]),
        "minus": lambda x: -x,
        "square": lambda x: x * x,
        "root": lambda x: x.sqrt(),
        "double": lambda x: x.to(torch.float64).to(torch.float32),
        "half": lambda x: x.to(torch.float16).to(torch.float32),
        "integer": lambda x: x + x.detach().to(torch.int32),
        "copy": lambda x: x.clone(),
        "view": lambda x: x.reshape(1)[0],
        "detached": lambda x: x + x.detach(),
        "larger": lambda x: torch.where(x > 1, x, x * 2),
        "stack": lambda x: torch.stack([x, two]).sum(),
        "ones": lambda x: x * torch.ones_like(x),
        "in place": lambda x: (x * 1).mul_(2),
        "written through a view": lambda x: written(x * 1),
    }

    def written(x: Any) -> Any:
        x.view(1).add_(1)
        return x

    ranks = len(on_all_ranks(None))
    pairs = enumerate(itertools.product(operators.items(), repeat=2))
    for (first, f), (second, g) in [pair for number, pair in pairs if number % 5 == share]:
        plain = torch.tensor(sum(on_parts(ranks)), requires_grad=True)
        expected = g(f(plain))
        expected.backward()
        own = torch.tensor(part(), requires_grad=True)
        number = partial_number(own * 1, own_rows())
        assert isinstance(number, PartialNumber)
        found = g(f(number))
        name = f"{first}, then {second}"
        np.testing.assert_allclose(float(found), float(expected), rtol=1e-6, err_msg=name)
        found.backward()
        # inside, gradients are times the ranks
        assert own.grad is not None and plain.grad is not None
        np.testing.assert_allclose(float(own.grad) / ranks, float(plain.grad), rtol=1e-6, err_msg=name)


for share in range(5):
    check(functools.partial(partial_numbers_are_their_sum, share), f"partial_numbers_are_their_sum_{share + 1}_of_5")


def on_parts(ranks: int) -> list[float]:
    return [0.5 + index for index in range(ranks)]


@check
def partial_numbers_are_read_as_their_sum() -> None:
    """By everything that a program reads a loss with."""
    import copy

    import keras
    import torch

    from keras_flow.backends.torch.rows.partial_numbers import partial_number

    ranks = len(on_all_ranks(None))
    total = sum(on_parts(ranks))
    for name, read in {
        "float": float,
        "int": lambda x: int(x) + total % 1,
        "item": lambda x: x.item(),
        "list": lambda x: x.tolist(),
        "format": lambda x: float(f"{x:.3f}"),
        "text": lambda x: float(f"{x}".removeprefix("tensor(").removesuffix(")").partition(",")[0]),
        "data": lambda x: float(x.data),
        "numpy": lambda x: x.detach().numpy(),
        "array": lambda x: np.asarray(x.detach()),
        "Keras": keras.ops.convert_to_numpy,
        "copy": lambda x: float(copy.deepcopy(x.detach())),
        "comparison": lambda x: total if x > total - 0.1 and x < total + 0.1 else 0.0,
    }.items():
        own = torch.tensor(part(), requires_grad=True)
        np.testing.assert_allclose(read(partial_number(own * 1, own_rows())), total, rtol=1e-6, err_msg=name)


@check
def a_linear_loss_is_not_summed_in_the_step() -> None:
    import torch

    from keras_flow.backends.torch.rows.partial_numbers import partial_number

    with counted() as calls:
        own = torch.tensor(part(), requires_grad=True)
        (partial_number(own * 1, own_rows()) * 2 / torch.tensor(3.0)).backward()
    assert not calls, calls


@check
def metrics_are_summed_when_they_are_read() -> None:
    """The same history whoever reads: nobody, a progress bar on one rank, a callback; and how often it is summed."""
    import keras

    import keras_flow as kf

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(dict(logs))

    def model() -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        made = keras.Model(inputs, keras.layers.Dense(3, "softmax")(inputs))
        metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.F1Score(name="f1")]
        made.compile(keras.optimizers.SGD(0.5), "categorical_crossentropy", metrics=metrics)
        return made

    random = np.random.default_rng(0)
    x, y = random.standard_normal((45, 6)).astype("float32"), np.eye(3, dtype="float32")[random.integers(0, 3, 45)]

    def history(**options: Any) -> dict[str, Any]:
        # the last batch has 5 rows; validation has one batch of 8 and one of 1
        made = model()
        return made.fit(x, y, 8, epochs=2, shuffle=False, validation_data=(x[:9], y[:9]), **options).history

    seen: list[dict[str, float]] = []
    wanted = history(verbose=0, callbacks=[Looks()])
    of_one_device, reductions = list(seen), {}
    with kf.DataParallel().scope():
        for name, options in {
            "nobody": {"verbose": 0},
            "lines": {"verbose": 2},
            "a bar on rank 1": {"verbose": int(rank() == 1)},
            "a callback": {"verbose": 0, "callbacks": [Looks()]},
            "a callback on rank 2": {"verbose": 0, "callbacks": [Looks()] if rank() == 2 else []},
        }.items():
            seen.clear()
            with counted() as calls:
                found = history(**options)
            reductions[name] = len(calls)
            for key, values in wanted.items():
                np.testing.assert_allclose(
                    np.asarray(found[key]), np.asarray(values), rtol=2e-6, atol=1e-6, err_msg=f"{name}: {key}"
                )
            for logs, expected in zip(seen, of_one_device, strict=False):
                for key, value in expected.items():
                    np.testing.assert_allclose(logs[key], value, rtol=2e-6, atol=1e-6, err_msg=f"{name}: {key}")
        assert reductions["nobody"] == reductions["lines"] < reductions["a callback"], reductions
        # of twelve steps all but the first; the two evaluations end with a batch that has fewer rows than ranks, which
        # reads what waits
        assert reductions["a callback"] - reductions["nobody"] >= 9, reductions


@check
def logs_between_steps_are_those_of_all_rows() -> None:
    """What reads metrics outside of a loop's steps: single batches, a callback at the end of an epoch, on one rank."""
    import keras

    import keras_flow as kf

    random = np.random.default_rng(0)
    x, y = random.standard_normal((16, 6)).astype("float32"), random.standard_normal((16, 1)).astype("float32")

    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found.append(self.model.test_on_batch(x[:8], y[:8]))
            if rank() == 1:
                # on one rank alone: nothing may wait for the others
                found.append([float(metric.result()) for metric in self.model.metrics[:1]])

    def run() -> list[Any]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        found.clear()
        model.fit(x, y, 8, epochs=2, shuffle=False, verbose=0, callbacks=[Ends()])
        return [*found, model.train_on_batch(x, y), model.evaluate(x, y, 8, verbose=0), model.test_on_batch(x, y)]

    found: list[Any] = []
    wanted = run()
    with kf.DataParallel().scope():
        for expected, value in zip(wanted, run(), strict=True):
            np.testing.assert_allclose(np.asarray(value), np.asarray(expected), rtol=1e-5)


@check
def a_failed_step_leaves_no_additions() -> None:
    import keras

    import keras_flow as kf

    class Stops(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise ValueError("stopped here")

    class Data(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            if index == 2 and self.fails:
                raise ValueError("no such file")
            return x, y

        fails = True

    random = np.random.default_rng(0)
    x, y = random.standard_normal((8, 6)).astype("float32"), random.standard_normal((8, 1)).astype("float32")

    def evaluated() -> list[Any]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
        data = Data()
        assert "no such file" in error_of(lambda: model.fit(data, shuffle=False, verbose=0))
        assert "stopped here" in error_of(lambda: model.fit(x, y, epochs=2, verbose=0, callbacks=[Stops()]))
        return model.evaluate(x, y, verbose=0)

    wanted = evaluated()
    with kf.DataParallel().scope():
        np.testing.assert_allclose(evaluated(), wanted, rtol=1e-5)


@check
def a_metric_summed_twice_is_seen() -> None:
    """A net that would let it through is none."""
    import keras

    import keras_flow as kf
    from keras_flow.backends.torch.rows.partial_numbers import Addition

    random = np.random.default_rng(0)
    x, y = random.standard_normal((16, 6)).astype("float32"), random.standard_normal((16, 1)).astype("float32")

    def evaluated() -> list[float]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        return model.evaluate(x, y, 8, verbose=0)

    finish, wanted = Addition.finish, evaluated()

    def twice(addition: Addition, total: Any) -> None:
        finish(addition, total * (2 if addition.variable.name == "total" else 1))

    with kf.DataParallel().scope():
        np.testing.assert_allclose(evaluated(), wanted, rtol=1e-5)
        with mock.patch.object(Addition, "finish", twice):
            assert np.allclose(evaluated(), np.multiply(wanted, 2), rtol=1e-5)


@check
def means_of_numbers_are_those_of_keras() -> None:
    """Of losses that a program adds to a mean, weighed and not, in both views; without Keras's own operators."""
    import keras
    from keras.src.metrics import reduction_metrics

    import keras_flow as kf

    class Notes(keras.Model):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            self.plain, self.weighed = keras.metrics.Mean(name="plain"), keras.metrics.Mean(name="weighed")

        def train_step(self, data):
            logs = super().train_step(data)
            loss = self.compute_loss(x=data[0], y=data[1], y_pred=self(data[0], training=False))
            self.plain.update_state(loss)
            self.weighed.update_state(loss, sample_weight=2.5)
            self.weighed.update_state(keras.ops.sum(loss * 3))
            return logs | {"plain": self.plain.result(), "weighed": self.weighed.result()}

    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")

    def logs() -> dict[str, list[float]]:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = Notes(inputs, keras.layers.Dense(4, name="out")(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model.fit(x, np.cos(x), batch_size=8, epochs=2, shuffle=False, verbose=0).history

    wanted = logs()
    rules = {"out/kernel": {"model": kf.sbp.split(0)}}
    samplewise = mock.Mock(wraps=reduction_metrics.reduce_to_samplewise_values)
    for distribution in (
        kf.DataParallel(),
        kf.ModelParallel(kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model")), rules=rules),
    ):
        with distribution.scope(), mock.patch.object(reduction_metrics, "reduce_to_samplewise_values", samplewise):
            found = logs()
        for name, values in wanted.items():
            np.testing.assert_allclose(found[name], values, rtol=2e-6, err_msg=name)
    assert not samplewise.called
