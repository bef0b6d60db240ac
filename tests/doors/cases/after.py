"""Doors that are opened once a model is trained: distillation, export, wrappers, copies, files."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import keras
import numpy as np

from tests.doors.cases.registry import door, weights
from tests.doors.stage import Stage


def _student(s: Stage) -> dict[str, Any]:
    student = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, name="s")], name="student")
    s.fill(student)
    return {"student": student}


@door(
    "distillation.Distiller",
    "distillation.LogitsDistillation",
    "distillation.DistillationLoss",
    "distillation.FeatureDistillation",
    make=_student,
)
def distillation(s: Stage) -> Any:
    distiller = keras.distillation.Distiller(
        teacher=s.model,
        student=s.extra["student"],
        distillation_losses=[
            keras.distillation.LogitsDistillation(temperature=2.0),
            keras.distillation.FeatureDistillation("mse", s.model.layers[-1].name, "s"),
        ],
        distillation_loss_weights=[1.0, 0.5],
        student_loss_weight=0.5,
    )
    distiller.compile(keras.optimizers.SGD(0.1), "mse")
    loss = distiller.fit(s.x, s.y, batch_size=len(s.x), epochs=2, verbose=0).history["loss"]
    return loss, s.extra["student"].get_weights()


@door("Model.export")
def export(s: Stage) -> Any:
    if keras.backend.backend() == "torch":  # TensorFlow is not needed for torch's own format
        s.model.export(s.folder / "m.pt2", format="torch", verbose=False)
        return (s.folder / "m.pt2").exists()
    import tensorflow as tf

    s.model.export(s.folder / "saved", verbose=False)
    loaded = tf.saved_model.load(str(s.folder / "saved"))  # its variables live as long as it
    return np.asarray(loaded.serve(s.x))


@door("export.ExportArchive")
def archive(s: Stage) -> Any:
    if keras.backend.backend() == "torch":
        return None  # Keras's own fails on one device: torch.export is given inputs of another structure
    import tensorflow as tf

    signature = [keras.InputSpec(shape=(None, 6), dtype="float32")]
    made = keras.export.ExportArchive()
    made.track(s.model)
    made.add_endpoint("serve", lambda x: s.model(x, training=False), signature)
    made.add_endpoint("hidden", s.model.layers[0].call, signature)
    if keras.backend.backend() == "tensorflow":  # it writes what weights are then; JAX, what they were
        s.model.fit(s.x, s.y, batch_size=len(s.x), verbose=0)
    (s.folder / "archive" / "of the user").mkdir(parents=True, exist_ok=True)
    made.write_out(str(s.folder / "archive"), verbose=False)
    assert {each.name for each in (s.folder / "archive").iterdir()} > {"of the user", "saved_model.pb"}
    loaded = tf.saved_model.load(str(s.folder / "archive"))
    served = [np.asarray(keras.tree.flatten(getattr(loaded, name)(s.x))[0]) for name in made._endpoint_names]
    return served, s.model.predict(s.x, verbose=0)


@door("wrappers.SKLearnRegressor")
def sklearn(s: Stage) -> Any:
    def make(X: Any, y: Any) -> Any:
        return s.build([keras.layers.Input((6,)), keras.layers.Dense(1, name="h")])  # a number for each row

    model = keras.wrappers.SKLearnRegressor(make, fit_kwargs={"batch_size": len(s.x), "verbose": 0, "epochs": 2})
    model.fit(s.x, s.y[:, 0])
    return model.predict(s.x)


@door("wrappers.SKLearnClassifier")
def sklearn_classifier(s: Stage) -> Any:
    def make(X: Any, y: Any) -> Any:  # scikit-learn's names
        return s.build()

    classes = np.arange(len(s.x)) % 3
    model = keras.wrappers.SKLearnClassifier(make, fit_kwargs={"batch_size": len(s.x), "verbose": 0})
    model.fit(s.x, classes)
    return model.predict(s.x)


@door("saving.serialize_keras_object", "saving.deserialize_keras_object")
def serialized(s: Stage) -> Any:
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(s.model))
    again.set_weights(s.model.get_weights())
    return again.predict(s.x, verbose=0)


@door("saving.KerasFileEditor")
def file_editor(s: Stage) -> Any:
    s.model.save_weights(s.folder / "m.weights.h5")
    editor = keras.saving.KerasFileEditor(str(s.folder / "m.weights.h5"))
    return _leaves(editor.weights_dict)


def _leaves(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The arrays of a tree of dicts, by path."""
    parts = ((f"{path}/{name}", value) for name, value in tree.items())
    return {
        name: leaf
        for part, value in parts
        for name, leaf in (_leaves(value, part) if isinstance(value, dict) else {part: np.asarray(value)}).items()
    }


@door("copy.deepcopy")
def deepcopy(s: Stage) -> Any:
    again = copy.deepcopy(s.model)
    trained = again.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"]
    return again.predict(s.x, verbose=0), trained, weights(again), s.model.get_weights()


@door("pickle")
def pickled(s: Stage) -> Any:
    again = pickle.loads(pickle.dumps(s.model))
    return again.predict(s.x, verbose=0), again.fit(s.x, s.y, batch_size=len(s.x), verbose=0).history["loss"]
