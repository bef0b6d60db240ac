"""Pipelines whose models change between steps: batches by hand, compile, freezing, other layouts, files."""

from __future__ import annotations

from typing import Any

import pytest

from tests import sampling

ENGINES = ("jax", "tensorflow", "torch")


def _by_hand(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        with distribution.scope():
            model = models.dropout()
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        given: dict[str, Any] = {"sample_weight": models.WEIGHTS, "return_dict": True}
        logs = [model.train_on_batch(models.X, models.Y, **given) for _ in range(3)]
        logs.append(model.test_on_batch(models.X, models.Y, **given))
        numbers = [float(each[name]) for each in logs for name in sorted(each)]
        found.append({"logs": numbers, "predictions": model.predict_on_batch(models.X), "weights": model.get_weights()})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_steps_on_batches_by_hand(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_by_hand, "1f1b") == []


def _compiled_again(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        with distribution.scope():
            model = models.blocks()
        frozen = [layer for layer in model.layers if layer.weights][1:3]
        logs: list[float] = []
        for loss, metric, number in (("mse", "mae", None), ("mae", "mse", None), ("mae", "mse", 0), ("mae", "mse", 1)):
            for index, layer in enumerate(frozen):
                layer.trainable = index != number
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=[metric])
            for _ in range(2):
                history = model.fit(models.X, models.Y, batch_size=13, shuffle=False, verbose=0).history
                logs += [history[name][0] for name in sorted(history)]
        found.append({"logs": logs, "weights": model.get_weights()})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_is_compiled_again(engine: str, on_ranks: Any) -> None:
    """It trains the new loss, and the weights that are trained now: as many, of the same shapes, as before."""
    assert on_ranks(engine)(_compiled_again, "1f1b") == []


def _other_losses(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        with distribution.scope():
            model = models.two_outputs()
        logs: list[float] = []
        for loss in ({"q": "mse"}, {"p": "mse", "q": "mae"}, {"p": "mse"}):
            model.compile(keras.optimizers.SGD(0.1), loss)
            y = {"p": models.Y, "q": models.Y[:, ::-1].copy()}
            logs += model.fit(models.X, y, batch_size=13, epochs=2, shuffle=False, verbose=0).history["loss"]
        found.append({"logs": logs, "weights": model.get_weights()})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


def test_losses_of_other_outputs(on_ranks: Any) -> None:
    """What has a gradient at a cut depends on the loss: torch's messages tell it anew after `compile`."""
    assert on_ranks("torch")(_other_losses, "1f1b", timeout=60.0) == []


def _in_loops_of(steps: int) -> dict[str, Any] | str:
    import keras

    import keras_flow as kf
    from tests.pipelines import models

    keras.utils.set_random_seed(3)
    with models.pipeline("1f1b").scope():
        model = models.dropout()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], steps_per_execution=steps)
    given: dict[str, Any] = {"batch_size": 4, "verbose": 0}
    try:
        logs = model.fit(models.X, models.Y, epochs=2, shuffle=False, **given).history
    except kf.FlowError as error:
        return str(error)
    return {"logs": logs, "weights": model.get_weights(), "predictions": model.predict(models.X, **given)}


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES[:2]))
def test_several_steps_per_execution(engine: str, on_ranks: Any) -> None:
    """Four batches, of which three are taken at a time."""
    from tests.pipelines import models

    one, other = on_ranks(engine)(_in_loops_of, 1), on_ranks(engine)(_in_loops_of, 3)
    assert models.distance(one, other) < 1e-6


def test_several_steps_per_execution_on_torch(on_ranks: Any) -> None:
    assert "steps_per_execution=3 cannot be used on torch" in on_ranks("torch")(_in_loops_of, 3)


def _draws() -> list[int]:
    import keras
    import numpy as np

    from tests.pipelines import models

    with models.pipeline("1f1b").scope():
        model = models.dropout()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(models.X, models.Y, batch_size=13, epochs=2, verbose=0)
    return [
        int(np.asarray(variable)[1]) for variable in model.variables if variable.path.endswith("seed_generator_state")
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_rank_sees_how_often_each_stage_has_drawn(engine: str, on_ranks: Any) -> None:
    """A checkpoint holds what the first process sees."""
    assert on_ranks(engine).on_each(_draws) == [[2, 2, 2]] * (4 if engine == "torch" else 1)


def _changed(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        numbers: list[Any] = []
        with distribution.scope():
            model = keras.Sequential([keras.Input((5,)), *(keras.layers.Dense(width) for width in (8, 7, 6, 5, 3))])
            for change in (lambda: None, model.pop, lambda: model.add(keras.layers.Dense(4)), model.pop):  # noqa: B023
                change()
                y = models.X[:, :1].repeat(model.output_shape[-1], 1)
                model.compile(keras.optimizers.SGD(0.1), "mse")
                numbers.append(model.predict(models.X, batch_size=13, verbose=0))
                numbers.append(model.fit(models.X, y, batch_size=13, verbose=0).history["loss"])
        found.append({"numbers": numbers, "weights": model.get_weights()})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_model_whose_layers_change(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_changed, "1f1b") == []


def _laid_otherwise(way: str) -> list[str]:
    import keras

    import keras_flow as kf
    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        with distribution.scope():
            model, optimizer = models.dense(), keras.optimizers.SGD(0.1, momentum=0.9)
        given: dict[str, Any] = {"batch_size": 13, "shuffle": False, "verbose": 0}
        for clipnorm in (None, 0.05):
            optimizer.clipnorm = clipnorm
            model.compile(optimizer, "mse")
            model.fit(models.X, models.Y, **given)
            with kf.DataParallel().scope():
                model.evaluate(models.X, models.Y, batch_size=13, verbose=0)
            with distribution.scope():
                model.fit(models.X, models.Y, **given)
        found.append(model.get_weights())
    return [] if models.distance(*found) < 2e-5 else ["weights"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_is_laid_otherwise_and_an_optimizer_that_changes(engine: str, on_ranks: Any) -> None:
    """What is compiled for an update has the optimizer's settings, and the variables of then."""
    assert on_ranks(engine)(_laid_otherwise, "1f1b") == []


def _shared(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        given: dict[str, Any] = {"batch_size": 13, "shuffle": False, "verbose": 0}
        numbers: list[Any] = []
        with distribution.scope():
            # the small layers are one stage of the whole, and several of what ends with them
            layers = [keras.layers.Dense(width, activation="tanh") for width in (4, 4, 4, 4, 16, 16, 16, 3)]
            model = keras.Sequential([keras.Input((5,)), *layers])
            every = [keras.Model(model.inputs, keras.layers.Dense(3)(layers[number].output)) for number in (2, 3)]
            for each in (*every, model):
                each.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
            for each in (*every, model, *every):
                numbers.append(each.fit(models.X, models.Y, **given).history["loss"])
        found.append({"numbers": numbers, "weights": [each.get_weights() for each in (*every, model)]})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


@pytest.mark.parametrize("engine", ENGINES)
def test_models_that_call_a_layer_in_other_stages(engine: str, on_ranks: Any) -> None:
    """Its weights are where the model that is used calls it: on torch another rank has no memory for them."""
    assert on_ranks(engine)(_shared, "1f1b") == []


def _tied_and_frozen(way: str) -> list[str]:
    import keras

    from tests.pipelines import models

    found = []
    for distribution in models.one_device_and(way):
        given: dict[str, Any] = {"batch_size": 13, "shuffle": False, "verbose": 0}
        numbers: list[Any] = []
        with distribution.scope():
            model = models.tied_dense()
            shared = next(layer for layer in model.layers if len(layer._inbound_nodes) == 2)
            adapters = {"a_initializer": keras.initializers.GlorotUniform(seed=9), "b_initializer": "ones"}
            changes: dict[str, Any] = {
                "frozen": lambda: setattr(shared, "trainable", False),  # noqa: B023
                "trained": lambda: setattr(shared, "trainable", True),  # noqa: B023
                "frozen again": lambda: setattr(shared, "trainable", False),  # noqa: B023
                "adapters": lambda: (setattr(shared, "trainable", True), shared.enable_lora(2, **adapters)),  # noqa: B023
            }
            for change in changes.values():
                change()
                model.compile(keras.optimizers.SGD(0.1), "mse")
                numbers.append(model.fit(models.X, models.Y, **given).history["loss"])
                numbers.append(model.predict(models.X, batch_size=13, verbose=0))
        found.append({"numbers": numbers, "weights": model.get_weights()})
    one, other = found
    return [key for key, value in one.items() if models.distance(value, other[key]) > 2e-5]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_of_several_stages_that_is_frozen(engine: str, on_ranks: Any) -> None:
    """Before the first step, after it, and by adapters: the other ranks get copies, as of weights that are trained."""
    assert on_ranks(engine)(_tied_and_frozen, "1f1b") == []


def _loaded(folder: str) -> list[float]:
    import keras

    import keras_flow as kf
    from tests.pipelines import models

    given: dict[str, Any] = {"batch_size": 13, "shuffle": False, "verbose": 0}
    with models.pipeline("1f1b").scope():
        model = models.skips()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(models.X, models.Y, **given)
        model.save_weights(f"{folder}/of.weights.h5")
        kf.comm.barrier()
        before = model.get_weights()
        model.fit(models.X, models.Y, **given)
        model.load_weights(f"{folder}/of.weights.h5")
    return models.distance(before, model.get_weights())


@pytest.mark.parametrize("engine", sampling.on_one(ENGINES))
def test_a_functional_model_is_loaded_after_a_step(engine: str, on_ranks: Any, tmp_path: Any) -> None:
    """Keras loads what the model's attributes hold: its stages are none of it."""
    assert on_ranks(engine)(_loaded, str(tmp_path)) == 0.0


def _with_a_scalar(folder: str) -> list[float]:
    import keras
    import numpy as np

    import keras_flow as kf
    from tests.pipelines import models

    class Scaled(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

        def call(self, x: Any) -> Any:
            return x * self.scale

    with models.pipeline("1f1b").scope():
        model = keras.Sequential([keras.Input((5,)), *(keras.layers.Dense(width) for width in (4, 4, 3)), Scaled()])
        model.compile("sgd", "mse")
    model.fit(models.X, models.Y, batch_size=13, verbose=0)
    model.save_weights(f"{folder}/of.weights.h5")
    kf.comm.barrier()
    scale = float(np.asarray(model.get_weights()[-1]))
    model.layers[-1].scale.assign(0.0)
    model.load_weights(f"{folder}/of.weights.h5")
    return [scale, float(np.asarray(model.get_weights()[-1]))]


def test_a_weight_without_dims_is_saved(on_ranks: Any, tmp_path: Any) -> None:
    """The last stage's, which another rank writes."""
    before, after = on_ranks("torch")(_with_a_scalar, str(tmp_path))
    assert before == after != 1.0
