"""`random="logical"`: draws by logical index are those of NumPy's Philox, under every layout and on every engine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from keras_flow import philox
from tests import sampling

ENGINES = ("jax", "tensorflow", "torch")
#: rows -> the losses of `training`; recorded once, since each engine runs in processes of its own
LOSSES = {
    8: [1.131999, 1.2051567, 0.9881281],
    7: [0.8135676, 0.795453, 0.7002932],
    4: [1.5540589, 0.9373838, 1.2138538],
    3: [1.3186964, 2.4859493, 1.79592],
}
#: layout -> options of `compile`: XLA's own draws are other ones than those of TensorFlow's kernels
OPTIONS: dict[str, dict] = {"one rank, compiled": {"jit_compile": True}, "dp4, eager": {"run_eagerly": True}}


def whole(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, length) for length in shape)


def draws() -> dict[str, np.ndarray]:
    """Draws of `keras.random` outside of a step, with the seed 7."""
    import keras
    from keras import ops

    import keras_flow as kf

    random = keras.random
    with kf.DataParallel(random="logical").scope():
        values = {
            "uniform": random.uniform((5, 7), -1.0, 3.0, seed=7),
            "normal": random.normal((5, 7), 2.0, 3.0, seed=7),
            "truncated_normal": random.truncated_normal((5, 7), seed=7),
            "randint": random.randint((5, 7), -3, 2**30 - 3, seed=7),
            "many": random.randint((3, 1001), 0, 1000, seed=7),
            "vector": random.uniform((6,), seed=7),
            "number": random.uniform((), seed=7),
            "half": random.uniform((64, 64), dtype="bfloat16", seed=7),
            "dropout": random.dropout(ops.ones((5, 7)), 0.3, seed=7),
            "order": random.shuffle(ops.arange(50), seed=7),
            "categorical": random.categorical(ops.zeros((6, 4)), 100, seed=7),
            "gamma": random.gamma((20000,), ops.cast(0.5, "float32"), seed=7),
            "beta": random.beta((20000,), ops.cast(2.0, "float32"), ops.cast(3.0, "float32"), seed=7),
        }
        generator = keras.random.SeedGenerator(7)
        random.uniform((3,), seed=generator)
        values["second"] = random.uniform((5, 7), seed=generator)
    values["half"] = ops.cast(values["half"], "float32")
    return {name: ops.convert_to_numpy(value) for name, value in values.items()}


@pytest.fixture(scope="module")
def drawn_on(on_ranks) -> Callable[[str], dict[str, np.ndarray]]:
    """What an engine draws, once for all tests."""
    return functools.cache(lambda engine: on_ranks(engine)(draws))


@pytest.mark.parametrize("engine", ENGINES)
def test_draws_are_those_of_the_reference(engine: str, drawn_on: Callable[[str], dict[str, np.ndarray]]) -> None:
    drawn = drawn_on(engine)
    fractions = philox.fractions(7, 0, (5, 7), whole((5, 7)))
    np.testing.assert_array_equal(drawn["uniform"], fractions * 4 - 1)
    np.testing.assert_array_equal(drawn["second"], philox.fractions(7, 1, (5, 7), whole((5, 7))))
    np.testing.assert_array_equal(drawn["vector"], philox.fractions(7, 0, (6,), whole((6,))))
    np.testing.assert_array_equal(drawn["number"], philox.fractions(7, 0, (), ()), strict=True)
    kept = fractions >= np.float32(0.3)
    np.testing.assert_allclose(drawn["dropout"], np.where(kept, 1 / 0.7, 0), rtol=1e-6)
    assert (drawn["dropout"] == 0).tolist() == (~kept).tolist()
    np.testing.assert_array_equal(drawn["randint"], philox.offsets(7, 0, (5, 7), whole((5, 7)), 2**30) - 3)
    np.testing.assert_array_equal(drawn["many"], philox.offsets(7, 0, (3, 1001), whole((3, 1001)), 1000))
    keys = philox.fractions(7, 0, (50,), whole((50,)))
    np.testing.assert_array_equal(drawn["order"], np.argsort(keys, kind="stable"))
    # the normal distribution's own function takes normals back to fractions; half a step off, as zero has no inverse
    back = np.vectorize(_normal_cdf)((drawn["normal"].astype("float64") - 2) / 3)
    np.testing.assert_allclose(back, fractions + 2.0**-24, atol=1e-6)
    cut = np.vectorize(_normal_cdf)(drawn["truncated_normal"].astype("float64"))
    np.testing.assert_allclose((cut - _normal_cdf(-2)) / (1 - 2 * _normal_cdf(-2)), fractions + 2.0**-24, atol=1e-6)
    assert drawn["half"].max() < 1


@pytest.mark.parametrize("engine", ENGINES)
def test_moments(engine: str, drawn_on: Callable[[str], dict[str, np.ndarray]]) -> None:
    """Means and variances are those of the distributions, within five standard errors."""
    drawn = drawn_on(engine)
    for name, mean, variance in (("gamma", 0.5, 0.5), ("beta", 0.4, 0.04)):
        values = drawn[name].astype("float64")
        error = 5 * np.sqrt(variance / len(values))
        assert abs(values.mean() - mean) < error, name
        assert abs(values.var() / variance - 1) < 0.15, name
        assert (values > 0).all(), name
    counts = np.bincount(drawn["categorical"].astype(int).ravel(), minlength=4)
    assert (abs(counts - 150) < 5 * np.sqrt(600 * 0.25 * 0.75)).all(), counts
    assert len(np.unique(drawn["categorical"].sum(-1))) > 1  # rows differ


def training() -> dict[int, dict[str, list[float]]]:
    """rows -> layout -> losses of three steps of a model that draws in every way that layers do."""
    import keras
    from keras import layers

    import keras_flow as kf

    split = kf.sbp.split
    mesh = kf.Placement([[0, 1], [2, 3]], ("data", "model"))
    rules = {"up/kernel": {"model": split(1)}, "down/kernel": {"model": split(0)}}
    makers = {
        "one rank": lambda: kf.DataParallel(kf.Placement([0], ("data",)), random="logical"),
        "one rank, compiled": lambda: kf.DataParallel(kf.Placement([0], ("data",)), random="logical"),
        "dp4, eager": lambda: kf.DataParallel(random="logical"),
        "dp4": lambda: kf.DataParallel(random="logical"),
        "2x2": lambda: kf.ModelParallel(mesh, rules=rules, random="logical"),
        "tp4": lambda: kf.ModelParallel(
            kf.Placement(range(4), ("model",)), rules={"up/kernel": {"model": split(1)}}, random="logical"
        ),
    }
    if keras.backend.backend() == "tensorflow":
        makers["mirrored4"] = lambda: kf.DataParallel(strategy="mirrored", random="logical")
    numbers = np.random.default_rng(0)
    losses: dict[int, dict[str, list[float]]] = {}
    # divides by four, does not, one row for each rank, fewer rows than ranks
    for rows in (8, 7, 4, 3):
        x, y = (numbers.normal(size=(rows, width)).astype("float32") for width in (6, 3))
        for name, maker in makers.items():
            with maker().scope():
                keras.utils.set_random_seed(3)
                keras.random.uniform((1,))  # Keras's global generator takes a seed of Python's when it is first used
                keras.utils.set_random_seed(3)
                model = keras.Sequential(
                    [
                        layers.Input((6,)),
                        layers.Dense(8, name="up"),
                        layers.Dropout(0.4),
                        layers.GaussianNoise(0.1),
                        layers.Reshape((2, 4)),
                        layers.Dropout(0.3, noise_shape=(None, 1, 4)),
                        layers.SpatialDropout1D(0.3),
                        layers.Dropout(0.3, noise_shape=(1, 1, 4)),
                        layers.Flatten(),
                        layers.Dense(3, name="down", kernel_initializer="random_normal"),
                    ]
                )
                # on torch neither is possible under a distribution, and both are what "auto" is
                options = {} if keras.backend.backend() == "torch" else OPTIONS.get(name, {})
                model.compile(keras.optimizers.SGD(0.1), "mse", **options)
                losses.setdefault(rows, {})[name] = [float(model.train_on_batch(x, y)) for _ in range(3)]
    return losses


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_training_is_the_same_under_every_layout_and_engine(engine: str, on_ranks) -> None:
    losses = on_ranks(engine)(training)
    for rows, by_layout in losses.items():
        for layout, values in by_layout.items():
            np.testing.assert_allclose(values, by_layout["one rank"], rtol=2e-6, err_msg=f"{rows} rows, {layout}")
        # and on every engine
        np.testing.assert_allclose(by_layout["one rank"], LOSSES[rows], rtol=2e-6)


def last_batch_is_shorter() -> dict[str, list[float]]:
    """Layout -> losses of two epochs of `fit`, whose last batch has fewer rows; TensorFlow's graph knows no length."""
    import keras

    import keras_flow as kf

    x = np.random.default_rng(0).standard_normal((46, 6)).astype("float32")
    losses = {}
    for name, placement in {"one rank": kf.Placement([0], ("data",)), "dp4": kf.Placement(range(4), ("data",))}.items():
        keras.utils.set_random_seed(0)
        with kf.DataParallel(placement, random="logical").scope():
            model = keras.Sequential(
                [
                    keras.layers.Input((6,)),
                    keras.layers.Dense(8),
                    keras.layers.Dropout(0.3, seed=3),
                    keras.layers.GaussianNoise(0.2, seed=4),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
            history = model.fit(x, np.cos(x.sum(1, keepdims=True)), batch_size=16, epochs=2, shuffle=False, verbose=0)
        losses[name] = history.history["loss"]
    return losses


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_last_batch_of_fewer_rows(engine: str, on_ranks) -> None:
    losses = on_ranks(engine)(last_batch_is_shorter)
    np.testing.assert_allclose(losses["dp4"], losses["one rank"], rtol=2e-6)


def initial_weights() -> dict[str, float]:
    """What is split -> largest difference from the weights that nothing splits; drawn in several parts."""
    import keras

    import keras_flow as kf

    placement = kf.Placement(range(4), ("model",))
    found = {}
    for name, rules in {
        "nothing": {"bias": {}},
        "rows": {"kernel": {"model": kf.sbp.split(0)}},
        "columns": {"kernel": {"model": kf.sbp.split(1)}},
    }.items():
        with kf.ModelParallel(placement, rules=rules, random="logical").scope():
            # a generator, which each draw moves on
            seeds = keras.random.SeedGenerator(5)
            layer = keras.layers.Dense(640, kernel_initializer=keras.initializers.RandomNormal(seed=seeds))
            layer.build((None, 1804))
            value = np.asarray(layer.get_weights()[0])
        whole_weights = found.setdefault("nothing", value)
        found[name] = value if name == "nothing" else np.abs(value - whole_weights).max()
    return {name: float(np.abs(value).max()) for name, value in found.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_initial_weights_do_not_depend_on_what_is_split(engine: str, on_ranks) -> None:
    differences = on_ranks(engine)(initial_weights)
    assert differences.pop("nothing") > 0.1
    assert max(differences.values()) < 1e-7, differences


def numbers_of_a_compiled_step() -> set[str]:
    """Shapes of unsigned numbers, which only draws have, in XLA's program of a rank for rows split over four."""
    import re

    import jax
    import jax.numpy as jnp
    import keras
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import keras_flow as kf

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.device_put(jnp.ones((512, 64)), NamedSharding(mesh, PartitionSpec("data")))
    w = jax.device_put(jnp.ones((64, 256)), NamedSharding(mesh, PartitionSpec()))

    def loss(x: jax.Array, w: jax.Array, seed: jax.Array) -> jax.Array:
        return (keras.random.dropout(x @ w, 0.3, seed=seed) ** 2).mean()  # type: ignore[operator, return-value]

    with kf.DataParallel(random="logical").scope():
        program = jax.jit(jax.grad(loss, argnums=1)).lower(x, w, jnp.array([1, 0], jnp.uint32)).compile().as_text()
    return set(re.findall(r"u32\[\d+,\d+\]", program))


def test_xla_cuts_a_draw_as_it_is_used(on_ranks) -> None:
    assert on_ranks("jax")(numbers_of_a_compiled_step) == {"u32[128,256]"}


def elements_of_a_rank() -> list[int]:
    """Elements that this rank draws, of each draw in a step of data parallel on 7 rows."""
    from unittest import mock

    import keras
    from keras import layers

    import keras_flow as kf

    drawn = []
    original = philox.words_of_block

    def counted(*arguments: Any) -> np.ndarray:
        words = original(*arguments)
        drawn.append(words.size)
        return words

    with kf.DataParallel(random="logical").scope():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(8), layers.Dropout(0.4), layers.GaussianNoise(0.1)])
        model.compile("sgd", "mse")
        with mock.patch.object(philox, "words_of_block", counted):
            model.train_on_batch(np.ones((7, 6), "float32"), np.ones((7, 8), "float32"))
    return drawn


def test_a_process_draws_its_own_rows(on_ranks) -> None:
    assert on_ranks("torch").on_each(elements_of_a_rank) == [[2 * 8, 2 * 8]] * 3 + [[8, 8]]


def words_of_draws() -> list[int]:
    """Words that a rank takes of TensorFlow's own generator for each draw, in a step on 4 ranks."""
    from unittest import mock

    import keras
    from keras import layers

    import keras_flow as kf
    from keras_flow.backends.tensorflow import random

    generator = mock.Mock(wraps=random.random_ops.stateless_random_uniform_full_int_v2)
    with kf.DataParallel(random="logical").scope():
        masks = [layers.Dropout(0.4), layers.SpatialDropout1D(0.2)]
        others = [layers.GaussianNoise(0.1), layers.GaussianDropout(0.1), layers.AlphaDropout(0.1)]
        model = keras.Sequential([layers.Input((6, 5)), *masks, *others])
        model.compile("sgd", "mse")
        with mock.patch.object(random.random_ops, "stateless_random_uniform_full_int_v2", generator):
            model.train_on_batch(*[np.ones((8, 6, 5), "float32")] * 2)
    return [call.args[0][0] for call in generator.call_args_list]


def test_on_four_ranks_of_a_mesh_nothing_is_drawn_whole_for_rows(on_ranks) -> None:
    # 2 of 8 rows, of 6 lines with two counters of four words each; a mask of SpatialDropout1D has one line
    assert on_ranks("tensorflow")(words_of_draws) == [96, 16, 96, 96, 96]


def loss_with_masks_of_own_index() -> tuple[float, float]:
    """A step of data parallel, right and with masks that each rank draws as if its rows were the first."""
    from unittest import mock

    import keras
    from keras import layers

    import keras_flow as kf

    original = philox.words_of_block

    def own_index(
        seed: int, stream: int, shape: tuple[int, ...], slices: tuple[slice, ...], *others: Any
    ) -> np.ndarray:
        return original(seed, stream, shape, tuple(slice(0, part.stop - part.start) for part in slices), *others)

    def trained() -> float:
        with kf.DataParallel(random="logical").scope():
            keras.utils.set_random_seed(3)
            model = keras.Sequential([layers.Input((6,)), layers.Dropout(0.4, seed=1), layers.Dense(1, use_bias=False)])
            model.compile("sgd", "mse")
            return float(model.train_on_batch(np.arange(48, dtype="float32").reshape(8, 6), np.ones((8, 1), "float32")))

    right = trained()
    with mock.patch.object(philox, "words_of_block", own_index):
        return right, trained()


def test_a_mask_of_a_ranks_own_index_is_seen(on_ranks) -> None:
    """A net that would let it through is none."""
    right, wrong = on_ranks("torch")(loss_with_masks_of_own_index)
    assert not np.isclose(right, wrong, rtol=1e-3)


def test_a_rank_draws_its_own_elements() -> None:
    """Blocks of a draw are those of the whole, for lines that do not divide by the four elements of a counter."""
    for shape in ((7,), (5, 6), (3, 4, 9)):
        every = philox.words_of_block(11, 2, shape, whole(shape))
        for cut in (slice(0, 1), slice(1, 3), slice(2, 3), slice(3, 3)):
            slices = (*(slice(0, length) for length in shape[:-1]), cut)
            np.testing.assert_array_equal(philox.words_of_block(11, 2, shape, slices), every[slices])
            if len(shape) > 1:
                slices = (cut, *(slice(1, length) for length in shape[1:]))
                np.testing.assert_array_equal(philox.words_of_block(11, 2, shape, slices), every[slices])


def words_on_device() -> None:
    """Of blocks that begin and end anywhere, and of counters above 2**32."""
    import random
    from unittest import mock

    import torch

    from keras_flow.backends.torch import device_draws

    # as on a GPU, without its kernels: a program that is traced with sizes that change
    traced = torch.compile(device_draws._words, backend="aot_eager", dynamic=True)
    chooser = random.Random(5)
    for _ in range(60):
        shape = tuple(chooser.randint(1, 9) for _ in range(chooser.randint(0, 4)))
        if shape and chooser.random() < 0.3:
            shape = (1 << 33, *shape[1:])
        starts = [chooser.randint(max(0, length - 9), length - 1) for length in shape]
        slices = tuple(slice(start, chooser.randint(start, n)) for start, n in zip(starts, shape, strict=True))
        words = chooser.getrandbits(64), chooser.getrandbits(64)
        program = chooser.choice([device_draws._words, traced])
        with mock.patch.object(device_draws, "_COUNTERS", chooser.choice([5, 1 << 20])):
            found = device_draws._of_block(program, torch.int64, "cpu", words, shape, slices).numpy()
        np.testing.assert_array_equal(found, philox.words_of_block(*words, shape, slices), err_msg=f"{shape}")


def draws_on_device() -> dict[str, np.ndarray]:
    """`draws` as on a GPU, whose arithmetic a CPU does as well."""
    from unittest import mock

    from keras_flow.backends.torch import random

    with mock.patch.object(random, "_on_host", lambda: False):
        return draws()


def test_draws_on_a_gpu_are_those_of_the_host(on_ranks, drawn_on: Callable[[str], dict[str, np.ndarray]]) -> None:
    on_ranks("torch")(words_on_device)
    expected, found = drawn_on("torch"), on_ranks("torch")(draws_on_device)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name, strict=True)


def test_compiled_words_are_those_of_numpy() -> None:
    compiled = philox._compiled()
    assert compiled is not None, "the extra for torch has numba"
    for counters in (np.arange(0), np.arange(200), np.array([0, 2**32 - 1, 2**32, 2**63])):
        halves = np.array([0xFFFFFFFF, 7, 2**31, 3], np.uint64)
        found, wanted = (np.zeros((len(counters), 4), np.uint32) for _ in range(2))
        compiled(counters.astype(np.uint64), halves, found)
        philox._fill(counters.astype(np.uint64), halves, wanted)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("how", ["refuses this NumPy", "has no folder for its cache", "compiles nothing"])
def test_numba_that_is_of_no_use(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    def njit(*args: object, cache: bool = False, **options: object) -> Callable:
        if cache:
            raise RuntimeError("cannot cache function '_rounds': no locator available")
        return lambda function: function

    if how == "refuses this NumPy":
        monkeypatch.setitem(sys.modules, "numba", None)
    elif how == "compiles nothing":
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    else:
        monkeypatch.setattr(numba, "njit", njit)
    wanted = philox.words_of_block(11, 2, (5, 9), whole((5, 9)))
    philox._compiled.cache_clear()
    try:
        assert (philox._compiled() is None) == (how != "has no folder for its cache")
        np.testing.assert_array_equal(philox.words_of_block(11, 2, (5, 9), whole((5, 9)), compiled=True), wanted)
    finally:
        philox._compiled.cache_clear()


def test_a_mask_that_names_the_rows_is_that_of_the_micro_batch() -> None:
    from keras_flow.backends import logical_random
    from keras_flow.current import microbatch

    with microbatch.computing(microbatch.Microbatch(start=4, count=2, rows=8)):
        part = logical_random._part_of_microbatch((8, 3), np.zeros((2, 3)), (8, 3), False)
    assert part is not None and part.shape == (8, 3) and part.slices[0] == slice(4, 6)


def test_by_default_draws_are_logical(four_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import keras_flow as kf

    monkeypatch.delenv("KERAS_FLOW_RANDOM", raising=False)
    assert kf.DataParallel(kf.Placement([0])).random == "logical"
    monkeypatch.setenv("KERAS_FLOW_RANDOM", "stock")
    assert kf.DataParallel(kf.Placement([0])).random == "stock"
    assert kf.DataParallel(kf.Placement([0]), random="logical").random == "logical"
    monkeypatch.setenv("KERAS_FLOW_RANDOM", "Stock")
    with pytest.raises(kf.FlowError, match="the environment variable KERAS_FLOW_RANDOM is"):
        kf.DataParallel(kf.Placement([0]))


def test_an_unknown_choice_is_refused() -> None:
    import keras_flow as kf

    with pytest.raises(kf.FlowError, match='random is "logical" or "stock"'):
        kf.ModelParallel(kf.Placement([0], ("data",)), random="philox")


def _normal_cdf(x: float) -> float:
    from math import erf, sqrt

    return 0.5 * (1 + erf(x / sqrt(2)))
