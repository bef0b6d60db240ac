"""Variables that a model reaches, by attributes and by the functions that the user wrote."""

from __future__ import annotations

import functools
from typing import Any

import keras

from keras_flow.current import reachable


class Holder:
    """A class of a user's own."""

    def __init__(self) -> None:
        self.table = {"kept": [keras.Variable(1.0, name="kept")]}

    def measure(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(y_true - y_pred)


def paths(*roots: object) -> set[str]:
    return {variable.path for variable, _ in reachable.variables(*roots)}


def test_metrics_of_compile_before_they_are_built() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="d")])
    model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
    assert not any(variable.path.startswith("mae/") for variable in model.metrics_variables)
    assert {"mae/total", "mae/count", "sequential/d/kernel", "sgd/learning_rate"} <= paths(model)


def test_owners_are_the_innermost_objects() -> None:
    layer = keras.Sequential([keras.layers.Dropout(0.5)])
    layer.metric = keras.metrics.Mean(name="seen")
    owners = {variable.path: type(owner).__name__ for variable, owner in reachable.variables(layer)}
    assert owners.pop("seen/total") == owners.pop("seen/count") == "Mean"
    assert list(owners.values()) == ["SeedGenerator"]


def test_closures_partials_methods_and_own_classes() -> None:
    metric, scale = keras.metrics.Mean(name="inner"), keras.Variable(2.0, name="scale")

    def loss(factor: float, y_true: Any, y_pred: Any) -> Any:
        metric.update_state(y_true)
        return factor * scale * y_pred

    assert {"inner/total", "scale"} <= paths(functools.partial(loss, 2.0))
    assert paths(Holder().measure) == {"kept"}


def test_slots_attributes_of_classes_and_defaults_by_name() -> None:
    own, of_class, default = (keras.Variable(1.0, name=name) for name in ("own", "of_class", "default"))

    class Slotted:
        __slots__ = ("own", "unset")
        shared = (of_class,)

        def measure(self, y_true: Any, *, scale: Any = default) -> Any:
            return scale * y_true

    slotted = Slotted()
    slotted.own = own
    assert paths(slotted) == {"own", "of_class", "default"}


def test_globals_that_a_function_of_the_users_reads() -> None:
    namespace: dict[str, Any] = {"SEEN": keras.Variable(0.0, name="seen"), "OTHER": keras.Variable(0.0, name="other")}
    source = "def step(self):\n    return SEEN + self.OTHER"
    exec(compile(source, "/home/user/train.py", "exec"), namespace)
    assert paths(namespace["step"]) == {"seen"}


def test_libraries_arrays_and_texts_are_not_walked() -> None:
    assert paths(keras.ops.mean, "text", 3, {"rows": range(3)}, keras) == set()
