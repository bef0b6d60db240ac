"""The JSON form: complete, versioned, checked."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from keras_flow.boxing import BoxingPlan, Link, Topology, plan, simulate
from keras_flow.errors import FlowError
from keras_flow.layout import Layout, combine
from tests.boxing.cases import grid, logical_tensor, shards_of

SCHEMA = Path(__file__).parents[2] / "docs" / "boxing-plan.schema.json"


def a_plan() -> BoxingPlan:
    """One with a table of shares."""
    made = plan(Layout(grid((2, 2)), "S(0),P", (64, 48)), Layout(grid((2, 2)), "S(1),S(0)", (64, 48)))
    assert made.steps[0].exchange.table
    return made


def test_json_text_is_enough_to_run_it():
    made = a_plan()
    data = json.loads(json.dumps(made.to_json()))
    logical = logical_tensor(made.source.shape)
    out = simulate(data, shards_of(made.source, logical))
    assert np.array_equal(combine(made.target, out), logical)


def test_schema_accepts_plans_and_refuses_others():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    for before, after in (("P,P", "B,B"), ("S(0),P", "S(1),S(0)"), ("B,B", "B,B")):
        made = plan(Layout(grid((2, 2)), before, (64, 48)), Layout(grid((2, 2)), after, (64, 48)))
        jsonschema.validate(json.loads(json.dumps(made.to_json())), schema)
    broken = a_plan().to_json()
    broken["steps"][0]["kind"] = "teleport"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(json.dumps(broken)), schema)


def broken(change) -> dict:
    data = copy.deepcopy(json.loads(json.dumps(a_plan().to_json())))
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data.update(version=2), r"has version 2, this keras_flow reads version 1"),
        (lambda data: data.update(format="other"), r'it needs "format": "keras_flow.boxing"'),
        (lambda data: data.pop("steps"), r"cannot be read: KeyError: 'steps'"),
        (lambda data: data["steps"][0].update(kind="teleport"), r"step 0 of the boxing plan: unknown kind 'teleport'"),
        (lambda data: data["steps"][0]["shares"][0]["ranges"][0].__setitem__(3, 5), r"do not fill its"),
        (lambda data: data["steps"][0]["shares"][0]["ranges"][0].__setitem__(1, 9), r"is not in the layouts"),
        (lambda data: data["steps"][0].update(apart=[7]), r"apart is \[7\]"),
        (lambda data: data["target"].update(sbp="B,B", splits=[[], []]), r"its target is"),
        (lambda data: data["source"].update(sbp="S(0),S(1)"), r"do not fit its sbp"),
    ],
)
def test_bad_json(change, text):
    with pytest.raises(FlowError, match=text):
        BoxingPlan.from_json(broken(change))


def test_a_wrong_plan_gives_wrong_numbers():
    """The check of the other tests can fail: a plan whose mergers were exchanged does not give the tensor."""
    data = a_plan().to_json()
    ranges = data["steps"][0]["shares"][0]["ranges"]
    ranges[0][1] = data["steps"][0]["shares"][-1]["ranges"][0][1]  # another owner
    made = a_plan()
    logical = logical_tensor(made.source.shape)
    out = simulate(data, shards_of(made.source, logical))
    assert not np.array_equal(combine(made.target, out), logical)


def test_missing_shard():
    made = a_plan()
    shards = shards_of(made.source, logical_tensor(made.source.shape))
    del shards[2]
    with pytest.raises(FlowError, match=r"shard of rank 2: expected shape \[32, 48\], found none"):
        simulate(made, shards)


def test_explain_names_steps_bytes_and_bound():
    text = plan(Layout(grid((2, 2)), "P,S(0)", (64, 48)), Layout(grid((2, 2)), "B,S(0)", (64, 48))).explain()
    assert "all_reduce in groups along axis0" in text
    assert "24.58 kB by all ranks together (at the lower bound), at most 6.144 kB by one" in text


def test_topology_prefers_fewer_bytes_between_hosts():
    """Two hosts of four ranks with a slow link: gathering between the hosts first sends each byte over once."""
    source = Layout(grid((2, 4)), "S(0),S(0)", (4096, 64))
    target = Layout(grid((2, 4)), "B,B", (4096, 64))
    hosts = Topology(4, inside=Link(1e-6, 200e9), between=Link(1e-5, 1e9))
    quick, few = plan(source, target, topology=hosts), plan(source, target)
    assert quick.time(hosts) < few.time(hosts)
    assert len(quick.steps) == 2
    assert "time on the given topology" in quick.chosen
    logical = logical_tensor(source.shape)
    assert np.array_equal(combine(target, simulate(quick, shards_of(source, logical))), logical)


def test_bad_link():
    with pytest.raises(FlowError, match="bandwidth above 0"):
        Link(0.0, 0.0)


def test_topology_as_doctor_measured_it(tmp_path):
    from keras_flow.doctor.report import EngineReport, Report, Ring

    rings = [Ring(2, 1e-6, 5e9, {}), Ring(4, 2e-6, 3e9, {})]
    report = Report({}, {}, {}, {}, [], [EngineReport("jax", "1"), EngineReport("torch", "2", rings=rings)])
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps(report.as_json()))
    assert Topology.measured(file, "torch") == Topology(inside=Link(2e-6, 3e9))
    for wrong in (lambda: Topology.measured(file, "jax"), lambda: Topology.measured(tmp_path / "none.json", "torch")):
        with pytest.raises(FlowError, match="keras-flow doctor --bandwidth --json"):
            wrong()
