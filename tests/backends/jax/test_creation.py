"""Stock random values of split variables on JAX: bit by bit those of one device, and cut."""

import keras
import numpy as np
import pytest

import keras_flow as kf
from tests import sampling

pytestmark = pytest.mark.usefixtures("four_ranks")
INITIALIZERS = keras.initializers
CASES = {
    "glorot_uniform": INITIALIZERS.GlorotUniform,
    "he_normal": INITIALIZERS.HeNormal,
    "variance, not truncated": lambda seed: INITIALIZERS.VarianceScaling(
        2.0, "fan_out", "untruncated_normal", seed=seed
    ),
    "normal": lambda seed: INITIALIZERS.RandomNormal(0.3, 2.0, seed=seed),
    "truncated": lambda seed: INITIALIZERS.TruncatedNormal(0.1, 0.7, seed=seed),
    "uniform": lambda seed: INITIALIZERS.RandomUniform(-0.2, 0.9, seed=seed),
}


@pytest.mark.parametrize("name", sampling.some(list(CASES), every=8))
def test_bits_are_those_of_one_device(name: str) -> None:
    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    for shape, spec in (
        ((52, 36), {"data": kf.sbp.split(0), "model": kf.sbp.split(1)}),
        ((3, 3, 8, 12), {"model": kf.sbp.split(3)}),
    ):
        whole = np.asarray(CASES[name](7)(shape))
        with kf.ModelParallel(mesh, rules={"kernel": spec}).scope():
            variable = keras.Variable(CASES[name](7), shape=shape, name="kernel")
        assert np.array_equal(np.asarray(variable.value), whole), (shape, spec)
        held = {shard.data.shape for shard in variable.value.addressable_shards}
        assert held == {variable._layout.layout.local_shape(0)}


def test_a_seed_generator_moves_on_once() -> None:
    mesh = kf.Placement([0, 1, 2, 3], axis_names=("model",))
    drawn = {}
    for name, rules in (("split", {"kernel": {"model": kf.sbp.split(0)}}), ("whole", {})):
        seeds = keras.random.SeedGenerator(3)
        with kf.ModelParallel(mesh, rules=rules).scope():
            made = [
                keras.Variable(INITIALIZERS.RandomNormal(seed=seeds), shape=(8, 4), name="kernel") for _ in range(2)
            ]
        drawn[name] = [np.asarray(one.value) for one in made]
    assert np.array_equal(drawn["split"], drawn["whole"])
    assert not np.array_equal(*drawn["split"])
