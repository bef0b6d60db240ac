"""The table of cases; modules of this folder fill it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.doors.stage import Stage

Case = Callable[[Stage], Any]

#: door -> its case
CASES: dict[str, Case] = {}
#: door -> what it makes where the model is made
MAKERS: dict[str, Callable[[Stage], dict[str, Any]]] = {}


def door(*names: str, make: Callable[[Stage], dict[str, Any]] | None = None) -> Callable[[Case], Case]:
    """Declare a function as the case of one or several doors.

    Args:
        names: doors, as `names.public` calls them.
        make: makes objects beside the model, before or in the scope, as the setting says.
    """

    def declared(case: Case) -> Case:
        for name in names:
            assert name not in CASES, f"{name} has two cases"
            CASES[name] = case
            if make is not None:
                MAKERS[name] = make
        return case

    return declared


def weights(model: Any) -> list[Any]:
    """Return all values of a model, of its optimizer and of its metrics' totals: what a later step depends on."""
    return [*model.get_weights(), *values(model.optimizer.variables if model.optimizer else [])]


def values(variables: Any) -> list[Any]:
    """Return the values of variables, in their order."""
    import keras

    return [keras.ops.convert_to_numpy(variable.value) for variable in variables]
