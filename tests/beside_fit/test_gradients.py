"""Gradients outside of `fit`: by inputs, by a layer's output, by weights, twice; in the scope and after it."""

from __future__ import annotations

from typing import Any

import pytest

from tests import sampling
from tests.beside_fit.models import MODELS

#: layout, whether in the scope, rows: the default suite has each way, rows that divide and rows that do not
SOME = [("data", False, 4), ("2x2", True, 3), ("2x2", False, 4)]
ALL = [(layout, inside, rows) for layout in ("data", "1x2", "2x2") for inside in (True, False) for rows in (4, 3)]
#: engine -> the cases of the default suite, where not all: JAX compiles each
ONLY = {"jax": ("by_layer", "penalty", "by_example", "own_loop")}
#: engine -> the module of its cases
MODULES = {engine: f"tests.beside_fit.by_{engine}" for engine in ("jax", "tensorflow", "torch")}


def _failures(module: str, names: tuple[str, ...], contexts: list, only: tuple[str, ...] = ()) -> list[str]:
    import importlib

    from tests.beside_fit import models

    cases = importlib.import_module(module).CASES
    return models.failures(names, {name: case for name, case in cases.items() if not only or name in only}, contexts, 4)


@pytest.mark.parametrize("engine", sampling.on_one(tuple(MODULES)))
def test_those_of_one_device(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_failures, MODULES[engine], ("dense",), SOME, ONLY.get(engine, ())) == []


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", MODULES)
def test_of_every_model(engine: str, name: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_failures, MODULES[engine], (name,), ALL, timeout=900.0) == []


def _refusals(layout: str) -> list[str]:
    from tests.beside_fit import by_tensorflow, models

    said: list[str] = []

    def case(model: Any, x: Any) -> None:
        said.extend(by_tensorflow.in_functions(model, x))
        said.extend(by_tensorflow.seeded_in_a_function(model, x))

    models.computed("dense", case, models.scope(layout), True, 4)
    return said


@pytest.mark.parametrize("layout", ["data", "2x2"])
def test_a_function_of_ones_own_is_refused_by_name(layout: str, on_ranks: Any) -> None:
    said = on_ranks("tensorflow")(_refusals, layout)
    assert len(said) == 6
    for text in said:
        assert "FlowError: " in text and "on several ranks, in a tf.function of your own" in text, text
        assert "write a SavedModel with model.export(path)" in text
