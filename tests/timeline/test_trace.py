"""`kf.trace` on each engine: a file that is a trace, with ranks, steps and collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keras_flow.backends.engines import ENGINES, that_train
from tests import sampling
from tests.ranks import Pool
from tests.timeline import perfetto

pytestmark = pytest.mark.timeout(280)


def traced(folder: str, fails: bool) -> list[dict[str, Any]]:
    """On every rank: train two steps inside of a trace."""
    from pathlib import Path

    import keras
    import numpy as np

    import keras_flow as kf

    mesh = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    rules = {"up/kernel": {"model": "S(1)"}, "down/kernel": {"model": "S(0)"}}
    keras.utils.set_random_seed(0)
    with kf.ModelParallel(mesh, rules=rules).scope():
        layers = [keras.layers.Input((8,)), keras.layers.Dense(8, name="up"), keras.layers.Dense(4, name="down")]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
        model.fit(x, x[:, :4], batch_size=16, verbose=0)
        path = Path(folder) / "run.json"
        try:
            with kf.trace(path):
                model.fit(x, x[:, :4], batch_size=16, verbose=0)
                if fails:
                    raise ValueError("inside")
        except ValueError as error:
            assert fails and str(error) == "inside"
    return json.loads(path.read_text())["traceEvents"] if kf.env.is_main_process() else []


def told(folder: str, layout: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """On every rank: train two steps inside of a trace, after some; the collectives of the trace and of explain."""
    from pathlib import Path

    import keras
    import numpy as np

    import keras_flow as kf

    rules = {"up/kernel": {"model": "S(1)"}, "up/bias": {"model": "S(0)"}, "down/kernel": {"model": "S(0)"}}
    distribution = {
        "data": lambda: kf.DataParallel(),
        "tensor": lambda: kf.ModelParallel(kf.Placement(range(4), axis_names=("model",)), rules=rules, batch_axes=()),
        "hybrid": lambda: kf.ModelParallel(kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model")), rules=rules),
        "weights by rows": lambda: kf.ModelParallel(
            kf.Placement(range(4), axis_names=("data",)), rules={"kernel": {"data": "S(0)"}}, batch_axes="data"
        ),
    }[layout]()
    keras.utils.set_random_seed(0)
    with distribution.scope():
        sizes = {"first_up": 16, "first_down": 4, "second_up": 16, "second_down": 4}
        layers = [keras.layers.Dense(size, name=name) for name, size in sizes.items()]
        model = keras.Sequential([keras.layers.Input((8,)), *layers], name="model")
        model.compile("adam", "mse")
        said = distribution.explain(model, 16).as_json()["collectives"]
        x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
        model.fit(x, x[:, :4], batch_size=16, verbose=0)
        path = Path(folder) / "run.json"
        # the threads of a trace of TensorFlow need not settle whose each is: then its collectives have no rank
        for _ in range(6 if keras.backend.backend() == "tensorflow" else 1):
            with kf.trace(path):
                model.fit(x, x[:, :4], batch_size=16, verbose=0)
            events = json.loads(path.read_text())["traceEvents"] if kf.env.is_main_process() else []
            found = [event for event in events if event.get("cat") == "collective"]
            if all(event["pid"] < 4 for event in found):
                break
    return found, said  # type: ignore[return-value]


def pipeline(folder: str) -> list[str]:
    """On every rank: the names of a step of a pipeline."""
    from pathlib import Path

    import keras
    import numpy as np

    import keras_flow as kf

    with kf.PipelineParallel(kf.Placement(range(4), axis_names=("pipe",)), microbatches=2).scope():
        model = keras.Sequential([keras.layers.Input((4,)), *(keras.layers.Dense(4) for _ in range(4))])
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)
    path = Path(folder) / "run.json"
    with kf.trace(path):
        model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)
    return [each["name"] for each in json.loads(path.read_text())["traceEvents"]] if kf.env.is_main_process() else []


@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_a_pipelines_stages_and_micro_batches(on_ranks, backend: str, tmp_path: Path) -> None:
    names = on_ranks(backend)(pipeline, str(tmp_path))
    assert {f"{stage}{kind}{part} on rank {stage}" for stage in range(4) for kind in "FB" for part in range(2)} <= {
        *names
    }


def late(folder: str) -> list[dict[str, Any]]:
    """On every process: the second one begins 0.6 s after the first."""
    import time
    from pathlib import Path

    import keras
    import numpy as np

    import keras_flow as kf
    from keras_flow.backends.active import backend

    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        x = np.ones((16, 8), "float32")
        model.fit(x, x[:, :4], verbose=0)
        path = Path(folder) / "run.json"
        with kf.trace(path):
            time.sleep(0.6 * kf.env.process_index())
            with backend().annotated("here"):
                time.sleep(0.01)
            model.fit(x, x[:, :4], verbose=0)
    return json.loads(path.read_text())["traceEvents"] if kf.env.is_main_process() else []


@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_processes_have_one_clock_and_ranks_of_their_own(backend: str, tmp_path: Path) -> None:
    each = 2 if ENGINES[backend].drives_all_ranks else 1
    pool = Pool(backend, tmp_path / "pool", ranks=2 * each, processes=2)
    try:
        events = pool(late, str(tmp_path))
    finally:
        pool.close()
    first, second = sorted(event["ts"] for event in events if event["name"] == "here")
    assert 0.4e6 < second - first < 3e6, "microseconds"
    assert min(event["ts"] for event in events if event["ph"] == "X") < 1, "the trace begins with its first event"
    if backend != "tensorflow":  # whose threads need not settle whose each is
        assert {event["pid"] for event in events if event.get("cat") == "collective"} == {*range(2 * each)}


def overlapping(events: list[dict[str, Any]]) -> list[str]:
    """Events that overlap another one of their lane and are not inside it: Perfetto drops these."""
    lanes: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin, duration = round(1e3 * event["ts"]), round(1e3 * event["dur"])
            lanes.setdefault((event["pid"], event["tid"]), []).append((begin, -duration, event["name"]))
    found = []
    for lane in lanes.values():
        open_ends: list[int] = []
        for begin, duration, name in sorted(lane):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if open_ends and begin - duration > open_ends[-1]:
                found.append(name)
            open_ends.append(begin - duration)
    return found


@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
@pytest.mark.parametrize("fails", [False, True], ids=["well", "crashed"])
def test_a_timeline(on_ranks, backend: str, fails: bool, tmp_path: Path) -> None:
    events = on_ranks(backend)(traced, str(tmp_path), fails)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"rank 0", "rank 3"} <= names
    assert {event["ph"] for event in events} == {"X", "M"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    assert overlapping(events) == []
    assert {"step 1", "step 2"} <= {event["name"] for event in events}
    found = [event for event in events if event.get("cat") == "collective"]
    assert "all_reduce" in {event["name"] for event in found}
    assert {1, 2} <= {event["args"].get("step") for event in found}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"], "nothing is left beside it"
    if not perfetto.missing():
        counts = "select count(*) as slices, count(distinct upid) as lanes from slice join thread_track on track_id = "
        counts += "thread_track.id join thread using (utid)"
        lost, (drawn,) = perfetto.query(tmp_path / "run.json", perfetto.LOST, counts)
        assert lost == []
        assert drawn["slices"] == sum(event["ph"] == "X" for event in events)
        assert drawn["lanes"] == len({event["pid"] for event in events if event["ph"] == "X"})


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        *sampling.each_on_one(that_train(), ("data", "tensor", "hybrid")),
        # torch exchanges otherwise there (docs/timeline.md)
        *sampling.each_on_one(("jax", "tensorflow"), ("weights by rows",)),
    ],
)
def test_collectives_are_those_of_explain(on_ranks, backend: str, layout: str, tmp_path: Path) -> None:
    """In the second step: in the first, processes compare their data and random states, which is no part of a step."""
    found, said = on_ranks(backend)(told, str(tmp_path), layout)
    assert found, "no collectives"
    assert all(event["args"].get("step") in (1, 2) for event in found)
    assert all(event["args"].get("bytes", 0) > 0 for event in found)
    for rank in range(4):
        of_step = [event["args"] for event in found if event["pid"] == rank and event["args"]["step"] == 2]
        assert sum(args["bytes"] for args in of_step) == sum(each["bytes"] for each in said)
        whose = [args["layer"] for args in of_step if "layer" in args]
        whose += [layer for args in of_step for layer in args.get("layers", ())]
        for each in said:
            if each["phase"] in ("forward", "gradients"):
                assert set(each["path"].split(", ")) <= set(whose), (each, whose)
    # where the engine numbers its groups of ranks, these are the rows and the columns of the mesh
    groups: dict[int, set[int]] = {}
    for event in found:
        if "group" in event["args"]:
            groups.setdefault(event["args"]["group"], set()).add(event["pid"])
    legal = [{0, 1}, {2, 3}, {0, 2}, {1, 3}] if layout == "hybrid" else [{0, 1, 2, 3}]
    assert all(ranks in legal for ranks in groups.values()), groups


@pytest.mark.usefixtures("four_ranks")
def test_what_a_failed_run_has_left_is_not_merged(tmp_path: Path) -> None:
    import keras_flow as kf

    for name in (".run.json.parts", ".run.json.0.parts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.json").write_text("what a process wrote too late")
    with kf.trace(tmp_path / "run.json"):
        pass
    assert "traceEvents" in json.loads((tmp_path / "run.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.json.parts", "run.json"]
