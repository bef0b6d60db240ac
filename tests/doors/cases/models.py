"""Doors of `keras.Model`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.doors.cases.registry import door, values, weights
from tests.doors.stage import Stage


@door("Model.fit")
def fit(s: Stage) -> Any:
    history = s.model.fit(
        s.x, s.y, batch_size=len(s.x), epochs=2, validation_data=(s.x[:5], s.y[:5]), verbose=0
    ).history
    return {name: history[name] for name in sorted(history)}, weights(s.model)


@door("Model.evaluate")
def evaluate(s: Stage) -> Any:
    return s.model.evaluate(s.x, s.y, batch_size=5, verbose=0, return_dict=True)


@door("Model.predict")
def predict(s: Stage) -> Any:
    return s.model.predict(s.x, batch_size=5, verbose=0), s.model.predict(s.x[:1], verbose=0)


@door("Model.train_on_batch")
def train_on_batch(s: Stage) -> Any:
    return [s.model.train_on_batch(s.x, s.y, return_dict=True) for _ in range(2)], weights(s.model)


@door("Model.test_on_batch")
def test_on_batch(s: Stage) -> Any:
    return s.model.test_on_batch(s.x, s.y, return_dict=True)


@door("Model.predict_on_batch")
def predict_on_batch(s: Stage) -> Any:
    return s.model.predict_on_batch(s.x)


@door("Model.compile")
def compile_again(s: Stage) -> Any:
    s.model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mae", metrics=["mse"], weighted_metrics=["mae"])
    history = s.model.fit(s.x, s.y, batch_size=len(s.x), epochs=2, sample_weight=np.arange(len(s.x)) / 7, verbose=0)
    return sorted(history.history.items()), weights(s.model)


@door("Model.get_compile_config", "Model.compile_from_config")
def compile_from_config(s: Stage) -> Any:
    s.model.compile_from_config(s.model.get_compile_config())
    return s.model.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"], weights(s.model)


@door("Model.compute_loss")
def compute_loss(s: Stage) -> Any:
    return float(s.model.compute_loss(s.x, s.y, s.model(s.x)))


@door("Model.compute_metrics", "Model.get_metrics_result", "Model.reset_metrics")
def compute_metrics(s: Stage) -> Any:
    s.model.reset_metrics()
    s.model.test_on_batch(s.x, s.y)
    s.model.compute_metrics(s.x, s.y, s.model(s.x), None)
    found = {name: float(value) for name, value in s.model.get_metrics_result().items() if name == "mae"}
    s.model.reset_metrics()
    return found


@door("Model.metrics_names", "Model.layers", "Model.get_layer", "Model.run_eagerly")
def said_of_it(s: Stage) -> Any:
    s.model.evaluate(s.x, s.y, verbose=0)
    s.model.run_eagerly = True
    eager = s.model.evaluate(s.x, s.y, verbose=0)
    return s.model.metrics_names, [layer.name for layer in s.model.layers], s.model.get_layer("h").get_weights(), eager


@door("Model.jit_compile")
def jit_compile(s: Stage) -> Any:
    is_compiled = s.model.jit_compile
    s.model.jit_compile = False
    loss = s.model.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"]
    return type(is_compiled).__name__, s.model.jit_compile, loss, weights(s.model)


@door("Model.make_train_function", "Model.make_test_function", "Model.make_predict_function")
def made_functions(s: Stage) -> Any:
    for make in (s.model.make_train_function, s.model.make_test_function, s.model.make_predict_function):
        make(force=True)
    return s.model.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"], s.model.predict(s.x, verbose=0)


class OwnSteps(keras.Sequential):
    """Steps that call their originals and change what they return."""

    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)

    def test_step(self, *args: Any) -> Any:
        return super().test_step(*args)

    def predict_step(self, *args: Any) -> Any:
        return super().predict_step(*args)


def _own_steps(s: Stage) -> dict[str, Any]:
    model = OwnSteps(
        [keras.layers.Input((6,)), keras.layers.Dense(8, "tanh", name="h"), keras.layers.Dense(3, name="o")]
    )
    s.fill(model)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return {"model": model}


@door("Model.train_step", "Model.test_step", "Model.predict_step", make=_own_steps)
def own_steps(s: Stage) -> Any:
    model = s.extra["model"]
    loss = model.fit(s.x, s.y, batch_size=len(s.x), epochs=2, verbose=0).history["loss"]
    return loss, model.evaluate(s.x, s.y, verbose=0), model.predict(s.x, verbose=0), weights(model)


@door("Model.summary")
def summary(s: Stage) -> Any:
    lines: list[str] = []
    s.model.summary(print_fn=lines.append)
    return len(lines) > 0


@door("Model.to_json", "models.model_from_json")
def to_json(s: Stage) -> Any:
    again = keras.models.model_from_json(s.model.to_json())
    again.set_weights(s.model.get_weights())
    return again.predict(s.x, verbose=0)


@door("Model.get_state_tree", "Model.set_state_tree")
def state_tree(s: Stage) -> Any:
    tree = s.model.get_state_tree(value_format="numpy_array")
    s.model.set_weights([np.zeros_like(value) for value in s.model.get_weights()])
    s.model.set_state_tree(tree)
    return s.model.predict(s.x, verbose=0), s.model.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"]


@door("Model.save")
def save(s: Stage) -> Any:
    path = s.folder / "m.keras"
    s.model.save(path)
    return _loaded(s, keras.models.load_model(path))


@door("models.save_model", "models.load_model")
def models_save_model(s: Stage) -> Any:
    path = s.folder / "m.keras"
    keras.models.save_model(s.model, path)
    return _loaded(s, keras.models.load_model(path))


@door("saving.save_model", "saving.load_model")
def saving_save_model(s: Stage) -> Any:
    path = s.folder / "m.keras"
    keras.saving.save_model(s.model, path)
    return _loaded(s, keras.saving.load_model(path))


def _loaded(s: Stage, again: keras.Model) -> Any:
    return (
        again.predict(s.x, verbose=0),
        again.fit(s.x, s.y, batch_size=len(s.x), epochs=2, verbose=0).history["loss"],
        weights(again),
    )


@door("saving.save_weights", "saving.load_weights")
def saving_save_weights(s: Stage) -> Any:
    keras.saving.save_weights(s.model, s.folder / "m.weights.h5")
    again = s.again()
    keras.saving.load_weights(again, s.folder / "m.weights.h5")
    return again.predict(s.x, verbose=0), again.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"]


@door("Model.save_weights", "Model.load_weights")
def save_weights(s: Stage) -> Any:
    s.model.save_weights(s.folder / "m.weights.h5")
    again = s.again()
    again.load_weights(s.folder / "m.weights.h5")
    return again.predict(s.x, verbose=0), again.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"]


@door("models.Model", "models.Sequential")
def made_of_its_parts(s: Stage) -> Any:
    features = keras.Model(s.model.inputs, s.model.get_layer("h").output)
    tower = keras.Sequential([*s.model.layers[:2], keras.layers.Dense(2, kernel_initializer="ones", name="new")])
    tower.compile(keras.optimizers.SGD(0.1), "mse")
    loss = tower.fit(s.x, s.y[:, :2], batch_size=len(s.x), verbose=0).history["loss"]
    return features.predict(s.x, verbose=0), loss, tower.predict(s.x[:1], verbose=0)


@door("models.clone_model")
def clone_model(s: Stage) -> Any:
    again = keras.models.clone_model(s.model)
    again.set_weights(s.model.get_weights())
    again.compile(keras.optimizers.SGD(0.1), "mse")
    return again.predict(s.x, verbose=0), again.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"]


@door("Model.get_quantization_layer_structure")
def quantization_structure(s: Stage) -> Any:
    found = s.model.get_quantization_layer_structure(mode="gptq")
    return None if found is None else sorted(found)


@door("Layer.add_metric")
def add_metric(s: Stage) -> Any:
    try:
        s.model.layers[0].add_metric()
    except NotImplementedError as error:
        return type(error).__name__
    return None


@door("Layer.stateless_call")
def stateless_call(s: Stage) -> Any:
    outputs, state = s.model.stateless_call(*_state(s.model), s.x)
    return keras.ops.convert_to_numpy(outputs), len(state)


def _state(model: keras.Model) -> list[list[Any]]:
    return [
        [variable.value for variable in kind] for kind in (model.trainable_variables, model.non_trainable_variables)
    ]


@door("Model.stateless_compute_loss")
def stateless_compute_loss(s: Stage) -> Any:
    model = s.model
    if not hasattr(model, "stateless_compute_loss"):
        return None
    model.evaluate(s.x, s.y, verbose=0)
    outputs, _ = model.stateless_call(*_state(model), s.x)
    of_metrics = [variable.value for variable in model.metrics_variables]
    loss, state = model.stateless_compute_loss(*_state(model), of_metrics, x=s.x, y=s.y, y_pred=outputs)
    return float(loss), len(state)


@door("Model.compute_loss_and_updates", "Model.jax_state_sync")
def on_jax(s: Stage) -> Any:
    if keras.backend.backend() != "jax":
        return None  # the trainers of the other engines have no such method
    s.model.jax_state_sync()
    loss, _ = s.model.compute_loss_and_updates(
        [variable.value for variable in s.model.trainable_variables],
        [variable.value for variable in s.model.non_trainable_variables],
        [variable.value for variable in s.model.metrics_variables],
        s.x,
        s.y,
        None,
        training=False,
    )
    return float(loss), values(s.model.trainable_variables)
