"""Variables are created, loaded and set sharded, with the values of one device; no device ever holds the whole."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.jax import core

from tests.distributions import programs

SHAPE = (8, 52)  # of no other array


def mine(shape: tuple[int, ...], dtype: object = None) -> object:
    """A user's own initialiser, which needs the whole value."""
    return keras.ops.reshape(keras.ops.arange(np.prod(shape), dtype="float32"), shape)


def model_with(initializer: object) -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((SHAPE[0],)),
            keras.layers.Dense(SHAPE[1], name="hidden", kernel_initializer=initializer),
            keras.layers.Dense(4, name="logits"),
        ]
    )


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    """No model of another test lives on."""
    gc.collect()


def whole_on_one_device() -> set[int]:
    """Addresses of arrays of the split variable's shape of which a device holds all."""
    arrays = [a for a in jax.live_arrays() if a.shape == SHAPE and a.sharding.shard_shape(a.shape) == SHAPE]
    return {shard.data.unsafe_buffer_pointer() for a in arrays for shard in a.addressable_shards}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of host arrays that Keras makes a whole device array of."""
    shapes: list[tuple[int, ...]] = []
    original = core.convert_to_tensor

    def spy(x: object, *args: object, **kwargs: object) -> object:
        if isinstance(x, np.ndarray):
            shapes.append(x.shape)
        return original(x, *args, **kwargs)

    monkeypatch.setattr(core, "convert_to_tensor", spy)
    return shapes


def _name(initializer: object) -> str:
    return getattr(initializer, "__name__", str(initializer))


@pytest.mark.parametrize("initializer", ["glorot_uniform", "he_normal", "zeros", "orthogonal", mine], ids=_name)
def test_values_of_one_device_bit_by_bit(initializer: object, sent: list) -> None:
    expected = model_with(initializer).get_weights()
    keras.utils.clear_session()
    gc.collect()
    before = whole_on_one_device()
    with programs.tensor_parallel().scope():
        model = model_with(initializer)
        assert programs.held(programs.variable(model, "hidden/kernel")) == dict.fromkeys(range(4), (8, 13))
        assert whole_on_one_device() <= before
    assert SHAPE not in sent
    for a, b in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_initialiser_by_element_is_drawn_in_blocks_or_only_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Own(keras.initializers.RandomUniform):
        def __call__(self, *args: object, **kwargs: object) -> object:
            made.append(value := super().__call__(*args, **kwargs) + 1.0)
            return value

    with monkeypatch.context() as patched:
        patched.setattr(keras.initializers.RandomUniform, "__call__", lambda *args, **kwargs: pytest.fail("made whole"))
        with programs.tensor_parallel().scope():
            model_with(keras.initializers.RandomUniform())
    with programs.tensor_parallel().scope():
        model = model_with(Own())
    assert len(made) == 1 and isinstance(made[0], jax.core.Tracer)
    assert np.asarray(programs.variable(model, "hidden/kernel").value).min() > 0.9


def test_set_and_loaded_weights_go_slice_by_slice(tmp_path: Path, sent: list) -> None:
    source = model_with("glorot_uniform")
    source.save_weights(tmp_path / "w.weights.h5")
    source.save(tmp_path / "m.keras")
    values, before = source.get_weights(), whole_on_one_device()  # the source's own
    with programs.tensor_parallel().scope():
        model = model_with("zeros")
        sent.clear()
        model.set_weights(values)
        loaded = model_with("zeros")
        loaded.load_weights(tmp_path / "w.weights.h5")
        whole = keras.models.load_model(tmp_path / "m.keras")
        assert whole_on_one_device() <= before
    assert SHAPE not in sent
    for other in (model, loaded, whole):
        for a, b in zip(other.get_weights(), values, strict=True):  # type: ignore[union-attr]
            np.testing.assert_array_equal(a, b)
        assert programs.held(programs.variable(other, "hidden/kernel"))[2] == (8, 13)  # type: ignore[arg-type]


def test_slots_are_made_split() -> None:
    before = whole_on_one_device()
    with programs.tensor_parallel().scope():
        model = model_with("glorot_uniform")
        programs.compile(model)
        model.optimizer.build(model.trainable_variables)
        assert whole_on_one_device() <= before
        slots = [slot for slot in model.optimizer.variables if slot.shape == SHAPE]
        assert len(slots) == 2
        assert all(programs.held(slot)[1] == (8, 13) for slot in slots)
