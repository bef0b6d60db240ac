"""Every door of Keras has a case or a reason, and gives one device's numbers in the setting that its name chooses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import sampling
from tests.doors import names, run, stage
from tests.doors.cases import CASES, MAKERS, REASONS
from tests.ranks import Pool

ENGINES = ("jax", "tensorflow", "torch")
#: doors that are opened one after the other in one call of the ranks
SIZE = 12
#: of an engine's share of the doors about one in so many is in `make test`; all on all engines are in `make test-full`
EVERY = {"jax": 3, "tensorflow": 6, "torch": 3}

_DOORS = sorted(CASES)
_GROUPS = [tuple(_DOORS[start : start + SIZE]) for start in range(0, len(_DOORS), SIZE)]


def test_every_door_has_a_case_or_a_reason() -> None:
    public = names.public()
    assert len(public) > 150
    assert [door for door in public if door not in CASES and door not in REASONS] == []
    assert [door for door in REASONS if door not in public or door in CASES] == []


#: doors that Keras opens itself, or that a case opens by another name -> how
_BY_KERAS = {
    "Layer.quantized_build": "`quantize` calls it",
    "Layer.quantized_call": "a call of a quantized layer is one",
    "distillation.DistillationLoss": "the base class of the losses of its case",
    "models.Model": "is `keras.Model`",
    "models.Sequential": "is `keras.Sequential`",
}


def test_every_case_touches_its_door() -> None:
    """A door that stands in a case's name only is never opened."""
    untouched = []
    for door, case in CASES.items():
        owner, dot, name = door.partition(".")
        if not dot or " " in owner:  # no name of Keras
            continue
        text = names.opened_in(case, MAKERS.get(door))
        said = name if owner in names.CLASSES or owner == "callbacks" else door
        if not re.search(rf"\b{re.escape(said.partition(',')[0])}\b", text):
            untouched.append(door)
    assert set(untouched) == set(_BY_KERAS)


#: Orbax lets all processes of JAX wait for each other, and the run on one device that is compared with is process 0's
_NOT_ALONE = {"jax": ("callbacks.OrbaxCheckpoint",)}


def bad(results: list[dict]) -> list[dict]:
    return [line for line in results if line["status"] != "right"]


@pytest.mark.parametrize("engine", ENGINES)
def test_doors_have_the_numbers_of_one_device(engine: str, on_ranks, tmp_path: Path) -> None:
    mine = [door for door in _DOORS if sampling.chosen(door, ENGINES) == engine]
    mine = [door for door in mine if sampling.is_chosen(f"{door} is opened", EVERY[engine])]
    results = on_ranks(engine)(run.run, [(door, stage.setting_of(door)) for door in mine], str(tmp_path))
    assert len(results) == len(mine)
    assert bad(results) == []


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", _GROUPS, ids=lambda group: group[0])
@pytest.mark.parametrize("engine", ENGINES)
def test_doors_in_all_settings(engine: str, group: tuple[str, ...], on_ranks, tmp_path: Path) -> None:
    tasks = [(door, setting) for door in group for setting in stage.settings()]
    assert bad(on_ranks(engine)(run.run, tasks, str(tmp_path), timeout=1100)) == []


@pytest.mark.timeout(400)
def test_doors_in_two_processes(two_processes: Callable[[str, int], Pool], tmp_path: Path) -> None:
    mine = [door for door in _DOORS if door not in _NOT_ALONE["jax"]]
    mine = [door for door in mine if sampling.is_chosen(f"{door} is opened in two processes", 16)]
    tasks = [(door, stage.setting_of(door)) for door in mine]
    results = two_processes("jax", 4)(run.run, tasks, str(tmp_path))
    assert len(results) == len(mine)
    assert bad(results) == []


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", _GROUPS, ids=lambda group: group[0])
@pytest.mark.parametrize("engine", ["jax", "tensorflow"])  # a rank of torch is a process
def test_all_doors_in_two_processes(engine: str, group: tuple[str, ...], two_processes, tmp_path: Path) -> None:
    tasks = [(door, stage.setting_of(door)) for door in group if door not in _NOT_ALONE.get(engine, ())]
    assert bad(two_processes(engine, 4)(run.run, tasks, str(tmp_path), timeout=1100)) == []


def test_functions_made_after_the_scope_are_those_of_the_scope(on_ranks, tmp_path: Path) -> None:
    # on the other engines they are fitted where they are called
    after = [one for one in stage.settings() if one.layout == "2x2" and one.used == "after"]
    tasks = [("Model.make_predict_function", setting) for setting in after]
    assert bad(on_ranks("tensorflow")(run.run, tasks, str(tmp_path))) == []


def _orbax(folder: str) -> list[tuple[float, list[str]]]:
    """How far predictions are off after each layout has read what the other one has trained and Orbax has saved."""
    import keras

    from tests.doors.stage import Stage, distribution

    callback = keras.callbacks.OrbaxCheckpoint
    found = []
    for trains, reads in (("dp4", "2x2"), ("2x2", "dp4")):
        stage_ = Stage(stage.settings()[0], Path(folder))
        x, y = stage_.data()
        path = str(Path(folder) / trains)
        with distribution(trains).scope():
            model = stage_.build()
            model.fit(x, y, batch_size=5, epochs=3, verbose=0, callbacks=[callback(path, max_to_keep=2)])
            expected = model.predict(x, verbose=0)
        with distribution(reads).scope():
            again = stage_.build()
            before = again.predict(x, verbose=0)
            again.load_weights(path)
            off = float(np.abs(again.predict(x, verbose=0) - expected).max())
        assert np.abs(before - expected).max() > 0.1
        found.append((off, sorted(each.name for each in Path(path).iterdir())))
    return found


@pytest.mark.timeout(400)
def test_orbax_in_two_processes_of_jax(two_processes: Callable[[str, int], Pool], tmp_path: Path) -> None:
    for found in two_processes("jax", 4).on_each(_orbax, str(tmp_path)):
        for off, left in found:
            assert off <= 1e-6
            assert left == ["1", "2"]


def _adapters(folder: str) -> list[float]:
    """How far a file is off whose layer has adapters: it has the sum, which process 0 computes of a split kernel."""
    import keras

    import keras_flow as kf

    mesh, found = kf.Placement([[0, 1, 2, 3]], axis_names=("data", "model")), []
    x = np.eye(6, dtype="float32")
    for mode in (None, "int8"):
        with kf.ModelParallel(mesh, rules={"hidden/kernel": {"model": kf.sbp.split(1)}}, batch_axes="data").scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, name="hidden")])
            if mode is not None:
                model.layers[0].quantize(mode)
            model.layers[0].enable_lora(2)
            model.layers[0].lora_kernel_b.assign(np.ones((2, 8), "float32"))
            model.save(f"{folder}/model.keras")
            expected = model.predict(x, verbose=0)
        again = keras.models.load_model(f"{folder}/model.keras")
        found.append(float(np.abs(again.predict(x, verbose=0) - expected).max()))
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["jax", pytest.param("tensorflow", marks=pytest.mark.full)])
def test_adapters_of_a_split_kernel_are_saved(
    engine: str, two_processes: Callable[[str, int], Pool], tmp_path: Path
) -> None:
    for exact, quantized in two_processes(engine, 4).on_each(_adapters, str(tmp_path)):
        assert exact <= 1e-6
        assert quantized <= 2e-2  # adapters are added to integers, and rounded again


def test_two_factors_meet_in_all_pairs_of_levels() -> None:
    factors = list(stage.FACTORS)
    for first in factors:
        for second in factors:
            if first != second:
                pairs = {(getattr(one, first), getattr(one, second)) for one in stage.settings()}
                assert len(pairs) == 4


def test_differences_are_seen() -> None:
    expected = {"a": [np.array([1.0, 2.0]), "x", None], "b": np.array(3)}
    assert run.differences(expected, {"a": [np.array([1.0, 2.0 + 1e-6]), "x", None], "b": np.array(3)}) == []
    assert run.differences(expected, {"a": [np.array([1.0, 2.001]), "x", None], "b": np.array(3)})
    assert run.differences(expected, {"a": [np.array([1.0, 2.0]), "y", None], "b": np.array(3)})
    assert run.differences(expected, {"a": [np.array([1.0, 2.0]), "x", np.array(1)], "b": np.array(3)})
    assert run.differences(expected, {"a": [np.array([1.0, np.nan]), "x", None], "b": np.array(3)})
