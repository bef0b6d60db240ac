"""Doors that are no name of a class: inner models, features, one row, plots, embeddings in TensorBoard, KerasTuner."""

from __future__ import annotations

import contextlib
import importlib.util
from contextlib import AbstractContextManager
from typing import Any

import keras

from tests.doors.cases.registry import door
from tests.doors.stage import Stage


def _scope(s: Stage) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if s.distribution is None else s.distribution.scope()


@door("an inner model")
def inner_model(s: Stage) -> Any:
    inner = keras.Model(s.model.inputs, s.model.get_layer("h").output)
    before = inner.predict(s.x, verbose=0)
    loss = s.model.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"]
    return before, loss, inner.predict(s.x, verbose=0)  # it shares its weights with the model


@door("features of all layers")
def features(s: Stage) -> Any:
    extractor = keras.Model(s.model.inputs, [layer.output for layer in s.model.layers])
    return extractor.predict(s.x, verbose=0), [keras.ops.convert_to_numpy(value) for value in extractor(s.x)]


@door("a head on frozen features")
def head(s: Stage) -> Any:
    with _scope(s):
        base = keras.Model(s.model.inputs, s.model.get_layer("h").output)
        base.trainable = False
        inputs = keras.Input((6,))
        model = keras.Model(inputs, keras.layers.Dense(3, name="head")(base(inputs, training=False)))
        s.fill(model)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        loss = model.fit(s.x, s.y, batch_size=5, shuffle=False, verbose=0).history["loss"]
    return loss, model.predict(s.x, verbose=0), s.model.get_weights()


@door("one row")
def one_row(s: Stage) -> Any:
    return s.model.predict(s.x[:1], verbose=0), keras.ops.convert_to_numpy(s.model(s.x[:1]))


@door("Model.get_config", "Model.from_config")
def config(s: Stage) -> Any:
    again = type(s.model).from_config(s.model.get_config())
    again.set_weights(s.model.get_weights())
    return again.predict(s.x, verbose=0), again.get_config()["name"]


@door("utils.model_to_dot")
def dot(s: Stage) -> Any:
    try:
        graph = keras.utils.model_to_dot(s.model, show_shapes=True)
    except ImportError as error:  # pydot
        return str(error)
    return len(graph.get_nodes()), len(graph.get_edges())


@door("utils.plot_model")
def plots(s: Stage) -> Any:
    try:
        keras.utils.plot_model(s.model, s.folder / "model.png", show_shapes=True)
    except ImportError as error:  # pydot, or the program graphviz
        return str(error)
    return (s.folder / "model.png").exists()


@door("embeddings and histograms in TensorBoard")
def embeddings(s: Stage) -> Any:
    import keras_flow as kf

    layers = keras.layers
    with _scope(s):
        model = s.build(
            [
                layers.Input((6,), dtype="int32"),
                layers.Embedding(2, 4, "zeros", name="e"),
                layers.Flatten(),
                layers.Dense(8, "tanh", name="h"),  # the rules of the layouts match it
                layers.Dense(3, name="o"),
            ]
        )
        (s.folder / "tb").mkdir(exist_ok=True)  # Keras writes the projector's configuration before it makes the folder
        callback = keras.callbacks.TensorBoard(
            s.folder / "tb", histogram_freq=1, embeddings_freq=1, embeddings_metadata="names.tsv", write_graph=False
        )
        rows = (s.x > 0).astype("int32")
        loss = model.fit(rows, s.y, batch_size=len(rows), epochs=2, verbose=0, callbacks=[callback]).history["loss"]
    if not kf.env.is_main_process():  # which alone writes
        return loss
    from tensorboard.backend.event_processing import event_accumulator

    events = event_accumulator.EventAccumulator(str(s.folder / "tb" / "train"))
    events.Reload()
    tags = sorted(events.Tags()["tensors"])
    written = sorted(path.name for path in (s.folder / "tb").iterdir() if path.is_file())
    return loss, tags, [len(events.Tensors(tag)) for tag in tags], written, (s.folder / "tb/train").is_dir()


@door("KerasTuner")
def tuner(s: Stage) -> Any:
    if importlib.util.find_spec("keras_tuner") is None:
        return "keras-tuner is not installed"
    import keras_tuner

    def build(choices: Any) -> Any:
        with _scope(s):  # of each trial its own
            model = s.build()
            rate = choices.Choice("rate", [0.1, 0.01])
            model.compile(keras.optimizers.SGD(rate), "mse")
            return model

    found = keras_tuner.GridSearch(
        build, keras_tuner.Objective("loss", "min"), directory=str(s.folder), project_name="tuned"
    )
    found.search(s.x, s.y, batch_size=len(s.x), epochs=2, verbose=0)
    trials = sorted((trial.hyperparameters.values["rate"], trial.score) for trial in found.oracle.trials.values())
    best = found.get_best_models(1)[0]
    return trials, best.predict(s.x, verbose=0), found.get_best_hyperparameters(1)[0].values
