"""`batch_statistics="replica"`: what it refuses."""

import keras
import numpy as np
import pytest

import keras_flow as kf


def _renormalized() -> None:
    with kf.DataParallel(batch_statistics="replica").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(renorm=True, name="renorm")])
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
        assert model.evaluate(x, x, batch_size=8, verbose=0) > 0  # moving statistics have no groups
        with pytest.raises(kf.FlowError, match="layer 'renorm': renorm=True needs batch_statistics=\"global\""):
            model.fit(x, x, batch_size=8, verbose=0)


@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_batch_renormalization_by_groups_is_refused(engine: str, on_ranks) -> None:
    on_ranks(engine)(_renormalized)
