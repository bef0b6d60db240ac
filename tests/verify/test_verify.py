"""`dist.verify` proves right steps right, finds a doubled gradient, and leaves the model as it was."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest

from tests.launch import programs
from tests.sampling import each_on_one, on_one

ENGINES = ("jax", "tensorflow", "torch")


def run(name: str, *args: object) -> object:
    from tests.verify import worker  # its Keras is that of the ranks

    return getattr(worker, name)(*args)


@pytest.mark.parametrize(("backend", "view"), each_on_one(ENGINES, ["consistent", "mirrored"]))
def test_right_steps_are_proved_and_nothing_changes(backend: str, view: str, on_ranks) -> None:
    found = on_ranks(backend)(run, "proved", view)
    assert found["ok"], found["text"]
    assert found["as it was"]
    rows = found["rows"]
    assert {row["quantity"] for row in rows} == {"gradient", "update", "loss", "metric", "output"}
    assert {row["mode"] for row in rows} == {"training", "evaluation", "inference"}
    assert len({row["batch"] for row in rows}) == 2
    assert "verified" in found["text"]


@pytest.mark.parametrize("backend", on_one(ENGINES))
def test_a_pipeline(backend: str, on_ranks) -> None:
    found = on_ranks(backend)(run, "pipeline")
    assert found["right"] == []
    assert found["as it was"]
    assert found["batches"] == ["11 rows (do not divide by 6)", "12 rows"]
    assert found["wrong"] == {"gradient", "update"}
    assert "has no stages" in found["by layer"]


@pytest.mark.parametrize("backend", on_one(ENGINES))
def test_a_train_step_of_the_users_own(backend: str, on_ranks) -> None:
    note = "not verified: evaluation, for which the model has no loss"
    assert on_ranks(backend)(run, "own_step") == (True, True, note)


@pytest.mark.parametrize("backend", on_one(ENGINES))
def test_each_layer_by_itself(backend: str, on_ranks) -> None:
    by_layer = on_ranks(backend)(run, "by_layer")
    assert by_layer["as it was"]
    assert by_layer["wrong"] == ["doubled/input_0_gradient"]
    for path in ("hidden/kernel", "hidden/input_0_gradient", "query/kernel", "/gamma", "loss/input_0_gradient"):
        assert any(name.endswith(path) for name in by_layer["right"]), by_layer["right"]
    assert by_layer["note"].startswith("layer by layer (as asked for); not verified: what a `call` of the user's own")


@pytest.mark.parametrize("backend", on_one(ENGINES))
def test_double_precision_is_of_a_copy(backend: str, on_ranks) -> None:
    expected = {"ok": True, "is double": True, "as it was": True, "floatx": "float32"}
    assert on_ranks(backend)(run, "in_double") == expected


@pytest.mark.parametrize("backend", ENGINES)
def test_a_doubled_gradient_is_found_and_not_trained(backend: str, on_ranks) -> None:
    found = on_ranks(backend)(run, "fault")
    assert not found["ok"]
    assert found["worst"]["share"] > 1000
    assert "gradient of verified" in found["raises"] or "update of verified" in found["raises"]
    assert "times the tolerance" in found["first batch"]
    assert found["untrained"]


@pytest.mark.parametrize("backend", on_one(ENGINES))
def test_first_batch_of_a_generator_is_trained_on_too(backend: str, on_ranks) -> None:
    assert on_ranks(backend)(run, "steps_of_a_generator") == 2


@pytest.mark.usefixtures("four_ranks")
def test_a_look_at_the_first_batch_leaves_generators_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a DataLoader, and what follows it in torch's own generator, are those of a `fit` without it."""
    import keras
    import torch

    from keras_flow.verify import first_batch

    monkeypatch.setattr(first_batch, "verify", lambda *_: mock.Mock())
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    sampler = torch.utils.data.RandomSampler(range(8), generator=generators[0])
    loader = torch.utils.data.DataLoader(torch.arange(8), 4, sampler=sampler, generator=generators[1])
    states = [each.get_state() for each in (*generators, torch.default_generator)]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    first_batch.verified(mock.Mock(), model, keras.Model.fit, (loader,), {})
    for each, state in zip((*generators, torch.default_generator), states, strict=True):
        assert torch.equal(each.get_state(), state)


@pytest.mark.parametrize("backend", on_one(ENGINES))
def test_refusals(backend: str, on_ranks) -> None:
    refused = on_ranks(backend)(run, "refusals")
    assert "is not built" in refused["not built"]
    assert "equally many rows" in refused["rows"]
    assert re.search(r"optimizers \['\w*more', 'inner\.\w+'\] besides", refused["optimizers"]), refused["optimizers"]
    assert "on one device either" in refused["features"]
    assert "randomness of its own" in refused["random"]
    assert "dtype='int8' is none of ['float32', 'float64']" in refused["dtype"]
    assert "Give its layers a get_config()" in refused["no configuration"]
    assert 'verify is None or "first_batch"' in refused["option"]


IN_TWO_PROCESSES = """
import keras, numpy as np, keras_flow as kf
kf.init()
distribution = kf.DataParallel()
with distribution.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
try:
    distribution.verify(model, np.ones((4, 2)), np.ones((4, 1)))
except kf.FlowError as error:
    print("SAID", error, flush=True)
"""


@pytest.mark.parametrize("backend", on_one(["jax", "tensorflow"]))
def test_several_processes_are_refused_by_name(backend: str, tmp_path: Path) -> None:
    """The error was that of the placement of one rank, which the user never wrote."""
    script = tmp_path / "two.py"
    script.write_text(IN_TWO_PROCESSES)
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", str(script)]
    code, out, err = programs.finish(programs.start(command, backend), 150)
    assert code == 0, err
    assert f"SAID verify on {backend} is for one process that drives all ranks" in out
