"""Models and distributions: laid anew, remembered, forgotten, and usable after an error."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.backends.active import backend
from keras_flow.current import models
from keras_flow.current.keras_places import get_global_attribute
from keras_flow.current.variable_layout import keras_layout
from keras_flow.verify.state import State
from tests.distributions import programs


def again() -> None:
    """Names and seeds as at the start."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)


def check_split(model: keras.Model, distribution: kf.DataParallel | kf.ModelParallel) -> None:
    """Every weight and slot is of this distribution, and physically lies as its layout says."""
    for variable in (*model.variables, *model.optimizer.variables):
        layout = keras_layout(variable)
        assert layout is not None, variable.path
        assert layout.distribution is distribution
        expected = layout.layout
        assert programs.held(variable) == {rank: expected.local_shape(rank) for rank in expected.placement.ranks}
    kernel = programs.variable(model, "hidden/kernel")
    slots = [slot for slot in model.optimizer.variables if "hidden_kernel" in slot.name]
    assert len(slots) == 2
    for slot in slots:
        assert kf.layout_of(slot).layout == kf.layout_of(kernel).layout


@pytest.fixture(scope="module")
def single() -> tuple[list[float], list[np.ndarray]]:
    """Losses of four epochs, and the weights after them, on one device."""
    again()
    model = programs.build()
    return programs.fit(model) + programs.fit(model), model.get_weights()


def test_a_model_without_weights_remembers_its_scope_each_time() -> None:
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Rescaling(2.0)])
    rows = np.ones((8, 4), "float32")
    for _ in range(2):
        np.testing.assert_array_equal(model.predict(rows, verbose=0), 2 * rows)


def test_layouts_in_copies_and_files() -> None:
    with kf.DataParallel().scope() as distribution:
        variable = keras.Variable([1.0, 2.0])
    layout = keras_layout(variable)
    assert layout is not None
    assert layout.distribution is distribution
    assert copy.deepcopy({"of": layout})["of"] is copy.copy(layout) is layout
    assert pickle.loads(pickle.dumps({"of": layout})) == {"of": None}


def close(losses: list[float], model: keras.Model, single: tuple[list[float], list[np.ndarray]]) -> None:
    assert losses == pytest.approx(single[0][-len(losses) :], rel=1e-5)
    for a, b in zip(model.get_weights(), single[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_built_before_the_scope(single: tuple) -> None:
    model = programs.build()
    distribution = programs.tensor_parallel()
    with distribution.scope():
        losses = programs.fit(model) + programs.fit(model)
    close(losses, model, single)
    check_split(model, distribution)
    assert programs.held(programs.variable(model, "hidden/kernel"))[3] == (8, 4)


def test_trained_before_the_scope(single: tuple) -> None:
    model = programs.build()
    losses = programs.fit(model)
    distribution = programs.hybrid()
    with distribution.scope():
        losses += programs.fit(model)
    close(losses, model, single)
    check_split(model, distribution)


def test_slots_of_weights_whose_names_are_alike() -> None:
    """A slot's name has underscores for the slashes of its weight's path."""

    def inner(outer: str, name: str) -> keras.Model:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name=name)], name=outer)

    again()
    model = keras.Sequential([keras.Input((4,)), inner("a_b", "c"), inner("a", "b_c")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    placement = kf.Placement(range(4), axis_names=("model",))
    with kf.ModelParallel(placement, rules={"a_b/c/kernel": {"model": kf.sbp.split(0)}}).scope():
        model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)
    for variable, slot in zip(model.trainable_variables, model.optimizer.momentums, strict=True):
        assert kf.layout_of(slot).layout == kf.layout_of(variable).layout, variable.path


def test_moved_to_another_placement(single: tuple) -> None:
    """Four ranks, then two others in another order; two models of two distributions stand side by side."""
    first = programs.tensor_parallel()
    pair = kf.ModelParallel(kf.Placement([3, 1], axis_names=("model",)), rules=programs.RULES)
    with first.scope():
        model = programs.build()
        losses = programs.fit(model)
    with pair.scope():
        other = keras.models.clone_model(model)
        losses += programs.fit(model)
        programs.compile(other)
        programs.fit(other, epochs=1)
    close(losses, model, single)
    check_split(model, pair)
    assert programs.held(programs.variable(model, "hidden/kernel")) == {3: (8, 8), 1: (8, 8)}


def test_apply_lays_a_built_model() -> None:
    model = programs.build()
    before = model.get_weights()
    distribution = programs.tensor_parallel()
    assert distribution.apply(model) is model
    assert kf.layout_of(programs.variable(model, "hidden/bias")).source == "rule 'hidden/bias'"
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_remembered_outside_the_scope(single: tuple) -> None:
    distribution = programs.hybrid()
    with distribution.scope():
        model = programs.build()
    losses = programs.fit(model) + programs.fit(model)
    close(losses, model, single)
    check_split(model, distribution)
    x, y = programs.rows(7)
    assert model.predict_on_batch(x).shape == (7, 4)
    assert model.predict(x, verbose=0) == pytest.approx(model.predict_on_batch(x), rel=1e-4, abs=1e-5)
    assert np.isfinite(model.train_on_batch(x, y))


def test_clones_and_loaded_models_remember_nothing(tmp_path: Path) -> None:
    with programs.tensor_parallel().scope():
        model = programs.build()
        programs.fit(model, epochs=1)
        model.save(tmp_path / "m.keras")
    clone = keras.models.clone_model(model)
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert isinstance(loaded, keras.Model)
    for other in (clone, loaded):
        assert not any(keras_layout(variable) for variable in other.variables)
        assert all(len(variable.value.sharding.device_set) == 1 for variable in other.variables)
    programs.same(loaded, model)
    x, _ = programs.rows()
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


def test_loaded_inside_a_scope_takes_the_scopes_layouts(tmp_path: Path) -> None:
    model = programs.build()
    programs.fit(model)
    model.save(tmp_path / "m.keras")
    distribution = programs.tensor_parallel()
    with distribution.scope():
        loaded = keras.models.load_model(tmp_path / "m.keras")
        assert isinstance(loaded, keras.Model)
        for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        losses = programs.fit(loaded)
    assert losses == pytest.approx(programs.fit(model), rel=1e-5)
    check_split(loaded, distribution)


def test_layout_of() -> None:
    model = programs.build()
    with pytest.raises(
        kf.FlowError, match="'model/hidden/kernel' has no keras_flow layout: it was made outside a distrib"
    ):
        kf.layout_of(model.variables[0])
    with pytest.raises(kf.FlowError, match="takes a variable, and was given a ndarray"):
        kf.layout_of(np.ones(3))  # type: ignore[arg-type]
    distribution = programs.hybrid()
    with distribution.scope():
        model = programs.build()
    placed = kf.layout_of(programs.variable(model, "hidden/kernel"))
    assert placed.layout == kf.Layout(distribution.placement, "B,S(1)", (8, 16))
    assert (placed.source, placed.note) == ("rule 'hidden/kernel'", "")
    assert kf.layout_of(programs.variable(model, "logits/bias")).source == "default"


def test_shard_on_a_layer_wins_over_rules() -> None:
    with programs.tensor_parallel(**{"logits/kernel": "S(0)", "hidden": "B"}).scope():
        layer = kf.shard(keras.layers.Dense(16, name="hidden"), kernel={"model": kf.sbp.split(1)}, bias="S(0)")
        model = keras.Sequential([keras.Input((8,)), layer, keras.layers.Dense(4, name="logits")])
        programs.compile(model)
        programs.fit(model, epochs=1)
    for name, nd_sbp in (("kernel", "S(1)"), ("bias", "S(0)")):
        assert str(kf.layout_of(programs.variable(model, f"hidden/{name}"))) == f"{nd_sbp} (from kf.shard)"
    assert programs.held(programs.variable(model, "hidden/kernel"))[0] == (8, 4)


def test_shard_on_a_built_and_trained_layer_lays_weight_and_slots_anew(single: tuple) -> None:
    distribution = programs.tensor_parallel(**{"logits/kernel": "S(0)"})
    with distribution.scope():
        model = programs.build()
        losses = programs.fit(model)
        kf.shard(model.get_layer("hidden"), kernel="S(0)")
        assert programs.held(programs.variable(model, "hidden/kernel"))[0] == (2, 16)
        losses += programs.fit(model)
    close(losses, model, single)
    check_split(model, distribution)
    assert programs.held(programs.variable(model, "hidden/kernel"))[0] == (2, 16)


def test_shard_of_names_that_a_layer_has_not() -> None:
    built = programs.build().get_layer("hidden")
    with pytest.raises(
        kf.FlowError, match=r"kf.shard: layer 'hidden' has no variable 'kernle'; it has \['bias', 'kernel'\]"
    ):
        kf.shard(built, kernle="S(0)")
    keras.utils.clear_session()
    with kf.ModelParallel(programs.TENSOR).scope():
        layer = kf.shard(keras.layers.Dense(4, name="hidden"), kernle="S(0)")
        model = keras.Sequential([keras.Input((8,)), layer])
        programs.compile(model)
        with pytest.raises(kf.LayoutError, match=r"kf.shard: layer 'hidden' has no variable 'kernle'"):
            programs.fit(model)


class Fault(keras.layers.Layer):
    """Raises in a step, on request."""

    on = False

    def call(self, inputs: object) -> object:
        if Fault.on:
            raise ValueError("seeded fault")
        return inputs


@pytest.mark.parametrize("method", ["evaluate", "predict", "fit"])
def test_a_layer_that_raises_leaves_usable_weights(method: str) -> None:
    with programs.hybrid().scope():
        model = programs.build(extra=[Fault(name="fault")])
        programs.fit(model, epochs=1)
        before = model.get_weights()
        x, y = programs.rows()
        backend().forget_steps(model)  # so that the step is traced again
        Fault.on = True
        try:
            with pytest.raises(ValueError, match="seeded fault"):
                getattr(model, method)(*((x,) if method == "predict" else (x, y)), verbose=0)
        finally:
            Fault.on = False
        for a, b in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        backend().forget_steps(model)
        assert np.isfinite(programs.fit(model, epochs=1)[0])
        assert programs.held(programs.variable(model, "hidden/kernel"))[0] == (8, 8)


class Stop(keras.callbacks.Callback):
    """Raises after the second step of training, or the first of another loop."""

    def __init__(self, error: type[BaseException]):
        super().__init__()
        self.error = error

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if batch == 1:
            raise self.error("in a callback")

    def on_test_batch_end(self, batch: int, logs: dict | None = None) -> None:
        raise self.error("in a callback")

    on_predict_batch_end = on_test_batch_end


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_callback_that_raises_leaves_the_last_good_weights(error: type[BaseException]) -> None:
    reference = programs.build()
    x, y = programs.rows()
    reference.fit(x[:32], y[:32], batch_size=16, shuffle=False, verbose=0)
    again()
    with programs.tensor_parallel().scope():
        model = programs.build()
        with pytest.raises(error):
            programs.fit(model, callbacks=[Stop(error)])
        programs.same(model, reference)
        assert int(model.optimizer.iterations.numpy()) == 2
        with pytest.raises(error):
            model.evaluate(x, y, batch_size=16, verbose=0, callbacks=[Stop(error)])
        with pytest.raises(error):
            model.predict(x, batch_size=16, verbose=0, callbacks=[Stop(error)])
        programs.same(model, reference)
        np.testing.assert_allclose(model.predict(x, verbose=0), reference.predict(x, verbose=0), rtol=1e-4, atol=1e-5)


def test_the_variables_of_a_model_with_two_optimizers() -> None:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dropout(0.5)(keras.layers.Dense(2)(inputs)))
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse", metrics=["mae"])
    model.d_optimizer = keras.optimizers.SGD(momentum=0.9)
    for optimizer in (model.optimizer, model.d_optimizer):
        optimizer.build(model.trainable_variables)
    model.train_on_batch(np.ones((2, 4)), np.ones((2, 2)))
    weights = [*model.weights, model.layers[-1].seed_generator.state]
    slots = [*model.optimizer.variables, *model.d_optimizer.variables]
    assert set(map(id, models.all_variables(model, metrics=False))) == set(map(id, weights))
    keras.random.uniform((1,))  # Keras makes its generator with the first draw
    seeds = get_global_attribute("global_seed_generator").state
    everything = list(models.all_variables(model, optimizers=True, global_seed=True))
    assert len(everything) == len(set(map(id, everything)))
    for each in (*weights, *slots, *model.metrics_variables, seeds):
        assert any(each is variable for variable in everything), each.path
    # what verify puts back
    state, slot = State(model), model.d_optimizer.variables[-1]
    slot.assign(keras.ops.ones(slot.shape))
    state.restore()
    assert not np.any(slot.numpy())
