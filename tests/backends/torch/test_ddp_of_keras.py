"""Keras's own data parallelism on torch (Keras 3.16): away from what is not its, and in place where it is asked for."""

from __future__ import annotations

import keras
import pytest
from packaging.version import Version

ENGINE = "torch"
_HAS_OWN = Version(keras.__version__) >= Version("3.16.dev0")


def test_without_a_distribution_each_process_trains_alone(on_ranks) -> None:
    """Processes have other numbers of rows and steps: one that waited for another would hang, counts would be sums."""

    def program() -> None:
        import numpy as np
        import torch.distributed

        from keras_flow.backends.active import backend

        rank = backend().world().process_index
        assert torch.distributed.is_initialized()
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[keras.metrics.TruePositives(name="hits")])
        random = np.random.default_rng(rank)
        x = random.standard_normal((6 + 2 * rank, 4)).astype("float32")
        y = (x[:, :1] > 0).astype("float32")
        kernel, bias = model.get_weights()
        model.train_on_batch(x, y)
        predicted = 1 / (1 + np.exp(-(x @ kernel + bias)))
        gradient = x.T @ ((predicted - y) * predicted * (1 - predicted)) * 2 / len(x)
        np.testing.assert_allclose(model.get_weights()[0], kernel - 0.1 * gradient, rtol=1e-4, atol=1e-6)
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        found = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
        hits = ((model.predict(x, verbose=0) > 0.5) & (y > 0.5)).sum()
        assert found["hits"] == hits
        assert getattr(model, "ddp_model", None) is None

    on_ranks(ENGINE)(program)


@pytest.mark.skipif(not _HAS_OWN, reason="Keras has it from 3.16 on")
def test_a_distribution_of_keras_is_keras_own_affair(on_ranks) -> None:
    """All ranks have one row each of four; Keras's wrapper takes the mean of their gradients."""

    def program() -> tuple[bool, list]:
        import numpy as np
        import torch.distributed

        devices = keras.distribution.list_devices()
        mesh = keras.distribution.DeviceMesh((len(devices),), ["batch"], devices)
        previous = keras.distribution.distribution()
        keras.distribution.set_distribution(keras.distribution.DataParallel(mesh, auto_shard_dataset=False))
        try:
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
            rank = torch.distributed.get_rank()
            x = np.random.default_rng(rank).standard_normal((1, 4)).astype("float32")
            model.train_on_batch(x, np.ones((1, 1), "float32"))
            weights = [np.asarray(weight).tolist() for weight in model.get_weights()]
            return model.ddp_model is not None, weights
        finally:
            keras.distribution.set_distribution(previous)

    found = on_ranks(ENGINE).on_each(program)
    assert all(is_wrapped for is_wrapped, _ in found)
    assert all(weights == found[0][1] for _, weights in found)
