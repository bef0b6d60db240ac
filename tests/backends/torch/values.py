"""Checks on values that a program reads, and on models that are called before they are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.backends.torch.registry import check, on_all_ranks, rank

X = np.random.default_rng(1).normal(size=(8, 8)).astype("float32")


def _hybrid():
    import keras_flow as kf

    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    return kf.ModelParallel(
        placement,
        rules={
            "a/kernel": {"data": kf.sbp.split(0), "model": kf.sbp.split(-1)},
            "b/kernel": {"model": kf.sbp.split(0)},
        },
    )


@check
def values_that_are_read_are_those_of_the_whole_tensor() -> None:
    import keras
    import torch
    from keras import ops

    with _hybrid().scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, name="a"), keras.layers.Dense(4, name="b")])
        kernel = model.layers[0].kernel
        whole = np.array(ops.convert_to_numpy(kernel))
        read: dict[str, tuple[Callable[[], object], object]] = {
            "float": (lambda: float(ops.sum(kernel)), whole.sum()),
            "item": (lambda: ops.norm(kernel).item(), np.linalg.norm(whole)),
            "int": (lambda: int(ops.argmax(kernel)), whole.argmax()),
            "bool": (lambda: bool(ops.sum(kernel) > whole.sum() - 1e-3), True),
            "element": (lambda: float(kernel[-1, -1]), whole[-1, -1]),
            "maximum": (lambda: float(ops.max(ops.norm(kernel, axis=1))), np.linalg.norm(whole, axis=1).max()),
            "tolist": (lambda: kernel.value.detach().tolist(), whole.tolist()),
            "numpy": (lambda: ops.sum(kernel, axis=0).detach().numpy(), whole.sum(0)),
            "array": (lambda: np.array(ops.sum(kernel, axis=1)), whole.sum(1)),
            "format": (lambda: float(f"{ops.sum(kernel):.7f}"), whole.sum()),
            "equal": (lambda: torch.equal(kernel.value, kernel.value * 1.0), True),
        }
        for name, (action, expected) in read.items():
            for found in on_all_ranks(action()):
                # of a sum whose terms cancel, the terms' size is what rounding goes by
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(whole).max(), err_msg=name)
        text = repr(ops.sum(kernel).detach())
        assert f"{whole.sum():.4f}"[:5] in text and len(set(on_all_ranks(text))) == 1, text
        kernel.assign(kernel * (1.0 / float(ops.norm(kernel))))
        np.testing.assert_allclose(np.linalg.norm(np.array(ops.convert_to_numpy(kernel))), 1.0, rtol=1e-5)


@check
def an_array_of_a_weight_is_a_copy() -> None:
    """`np.array(x)` copies: a program keeps with it what weights were before an epoch."""
    import keras

    import keras_flow as kf

    for rules in ({}, {"kernel": {"model": "S(1)"}}):
        mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
        with kf.ModelParallel(mesh, rules=rules, batch_axes="data").scope():
            layer = keras.layers.Dense(4)
            layer.build((None, 3))
            kept = [
                np.array(value) for value in (layer.kernel, layer.kernel.value.detach(), kf.global_tensor(layer.kernel))
            ]
            before = np.asarray(keras.ops.convert_to_numpy(layer.kernel)).copy()
            layer.kernel.assign(layer.kernel + 1.0)
            for value in kept:
                np.testing.assert_array_equal(value, before)


@check
def a_mean_of_ranks_is_no_global_tensor() -> None:
    """A DTensor whose summands are averaged, or compared, would be read as their sum."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    import keras_flow as kf

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("axis",))
    summed = kf.global_tensor(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    np.testing.assert_array_equal(summed.numpy(), [4, 4, 4])
    for reduction in ("avg", "max"):
        try:
            kf.global_tensor(DTensor.from_local(torch.ones(3), mesh, [Partial(reduction)]))
        except kf.FlowError as error:
            assert 'Partial with "sum"' in str(error), error
        else:
            raise AssertionError(f"{reduction} was taken for a sum")


@check
def a_subclassed_model_can_be_called_before_it_is_trained() -> None:
    import keras

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = keras.layers.Dense(8, "tanh", name="a"), keras.layers.Dense(4, name="b")

        def call(self, inputs):
            return self.b(self.a(inputs))

    def called(build: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        model = Model()
        if build:
            model.build((None, 8))
        first = model(X)
        model.compile(keras.optimizers.SGD(0.5), "mse")
        model.fit(X, X[:, :4], batch_size=8, verbose=0)
        return [np.array(keras.ops.convert_to_numpy(value)) for value in (first, *model.get_weights(), model(X))]

    for build in (False, True):
        expected = called(build)
        with _hybrid().scope():
            found = called(build)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def _updates_under_each_layout(layers: Callable[[], list], x: np.ndarray, rate: float) -> Iterator[tuple]:
    """What one epoch of plain SGD adds to each weight: (under a distribution, on one device)."""
    import keras

    import keras_flow as kf

    def updates() -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input(x.shape[1:]), *layers(), keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(rate), "mse")
        before = [np.array(value) for value in model.get_weights()]
        model.fit(x, X[:, :4], batch_size=8, verbose=0)
        return [after - value for after, value in zip(model.get_weights(), before, strict=True)]

    expected = updates()
    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    for distribution in (kf.ModelParallel(placement), kf.DataParallel()):
        with distribution.scope():
            found = updates()
        yield from zip(found, expected, strict=True)


@check
def a_layer_that_assigns_its_weights_is_trained_as_on_one_device() -> None:
    from keras import layers

    def spectral() -> list:
        return [layers.SpectralNormalization(layers.Dense(8, name="inner"))]

    for found, expected in _updates_under_each_layout(spectral, X, 0.5):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@check
def weights_of_preprocessing_layers_are_trained_as_on_one_device() -> None:
    from keras import layers

    def spectrogram() -> list:
        return [layers.STFTSpectrogram(frame_length=16, frame_step=8), layers.Flatten()]

    x = np.random.default_rng(2).normal(size=(8, 32, 1)).astype("float32")
    for found, expected in _updates_under_each_layout(spectrogram, x, 0.01):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


@check
def global_tensors_of_dtypes_that_gloo_does_not_know_are_boxed() -> None:
    import torch

    import keras_flow as kf

    placement = kf.Placement([0, 1, 2, 3])
    for dtype in ("int16", "uint16", "uint32", "uint64", "complex64", "bool", "float32"):
        whole = np.arange(40).reshape(8, 5).astype(dtype)
        parts = kf.to_global(torch.from_numpy(whole[2 * rank() : 2 * rank() + 2].copy()), placement, "S(0)")
        summed = kf.to_global(torch.from_numpy(whole), placement, "P")
        for target in ("B", "S(1)", "S(0)"):
            parts = parts.to_global(sbp=target)
            np.testing.assert_array_equal(parts.numpy(), whole, err_msg=f"{dtype} {target}")
            total = summed.to_global(sbp=target).numpy()
            np.testing.assert_array_equal(total, np.sum([whole] * 4, 0).astype(dtype), err_msg=f"{dtype} P {target}")


@check
def rows_of_dtypes_that_gloo_does_not_know_are_gathered() -> None:
    """As an array in a step, and as what `predict` returns; of rows that divide and of rows that do not."""
    import keras

    import keras_flow as kf

    class Sum(keras.Model):
        def test_step(self, data: Any) -> dict[str, Any]:
            return {"sum": np.asarray(data[0]).sum()}

    for dtype in ("int16", "bool"):
        rows = np.arange(24).reshape(8, 3).astype(dtype)
        for distribution in (kf.DataParallel(), kf.ModelParallel(kf.Placement(range(4), axis_names=("data",)))):
            with distribution.scope():
                inputs = keras.Input((3,), dtype=dtype)
                model = Sum(inputs, keras.layers.Identity(dtype=dtype)(inputs))
                model.compile()
                assert model.evaluate(rows, rows, verbose=0) == rows.sum()
                for count in (8, 7):
                    found = model.predict(rows[:count], batch_size=count, verbose=0)
                    assert found.dtype == dtype
                    np.testing.assert_array_equal(found, rows[:count])
