"""Why a door has no case."""

from __future__ import annotations

_TEXT = "a function of names and classes, which touches no value"
_ALIAS = "has a case under its own module's name"

#: door -> the reason
REASONS = {
    "callbacks.RemoteMonitor": "sends logs to a server, which the tests have not",
    "distribution.DataParallel": "Keras's own: tests/backends/test_keras_distribution.py has it",
    "distribution.ModelParallel": "Keras's own: tests/backends/test_keras_distribution.py has it",
    "distribution.initialize": "joins processes, once in each: tests/backends/test_keras_distribution.py has it",
    "saving.CustomObjectScope": _TEXT,
    "saving.custom_object_scope": _TEXT,
    "saving.get_custom_objects": _TEXT,
    "saving.get_registered_name": _TEXT,
    "saving.get_registered_object": _TEXT,
    "saving.register_keras_serializable": _TEXT,
    "wrappers.SKLearnTransformer": "`fit` and `transform` are those of SKLearnRegressor, with other names",
}
