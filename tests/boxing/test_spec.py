"""The JSON form: complete, versioned, checked."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from keras_flow.boxing import BoxingPlan, Link, Topology, plan, simulate
from keras_flow.boxing.collectives import KINDS
from keras_flow.boxing.phases import RULES
from keras_flow.errors import FlowError
from keras_flow.layout import Layout, combine
from keras_flow.placements import Placement
from tests.boxing.cases import all_nd_sbps, grid, logical_tensor, shards_of

SCHEMA = Path(__file__).parents[2] / "docs" / "boxing-plan.schema.json"


def a_plan() -> BoxingPlan:
    """One that is an exchange of two phases."""
    return plan(Layout(grid((2, 2)), "S(0),P", (64, 48)), Layout(grid((2, 2)), "S(1),B", (64, 48)))


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


def test_the_schema_has_the_kinds_of_steps_that_there_are():
    step_of_schema = json.loads(SCHEMA.read_text())["$defs"]["step"]["properties"]
    assert step_of_schema["kind"]["enum"] == list(KINDS)
    assert set(step_of_schema["phases"]["items"]["enum"]) == set(RULES)


def broken(change, made: BoxingPlan) -> dict:
    data = copy.deepcopy(json.loads(json.dumps(made.to_json())))
    change(data)
    return data


def step(data: dict) -> dict:
    return data["steps"][0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data.update(version=1), r"has version 1, this keras_flow reads version 2"),
        (lambda data: data.update(version=True), r"has version True, this keras_flow reads version 2"),
        (lambda data: data.update(format="other"), r'it needs "format": "keras_flow.boxing"'),
        (lambda data: data.pop("steps"), r"cannot be read: KeyError: 'steps'"),
        (lambda data: data.update(colour="red"), r"unknown fields \['colour'\]"),
        (lambda data: data.update(dtype="foo"), r"'foo' is not a dtype"),
        (lambda data: data.update(dtype=None), r"dtype and chosen are text, got None"),
        (lambda data: data.update(shape=[64.0, 48]), r"plan.shape\[0\]: 64.0 is neither text nor a whole number"),
        (lambda data: data.update(steps=[]), r"has no steps, but must lead from Layout\(S\(0\),P of"),
        (lambda data: data["placements"][0]["ranks"].update(count=3), r"3 ranks with the hierarchy \[2, 2\]"),
        (lambda data: data["placements"][0].update(hierarchy=[-2, -2]), r"4 ranks with the hierarchy \[-2, -2\]"),
        (lambda data: data["placements"][0].update(type="cuda"), r"is not written as"),
        (lambda data: data["source"].update(placement=-1), r"has 1 placements, a layout names placement -1"),
        (lambda data: data["target"].update(placement=1), r"has 1 placements, a layout names placement 1"),
        (lambda data: data["source"].update(copies=[0]), r"do not fit its sbp 'S\(0\),P'"),
        (lambda data: data["source"].update(summands=[]), r"do not fit its sbp 'S\(0\),P'"),
        (lambda data: data["source"].update(sbp="S(0),S(1)"), r"do not fit its sbp"),
        (
            lambda data: data["target"].update(sbp="B,B", splits=[[], []], copies=[0, 1]),
            r"its target is",
        ),
        (lambda data: step(data).update(kind="teleport"), r"step 0 of the boxing plan: unknown kind 'teleport'"),
        (lambda data: step(data).update(kind="all_gather"), r"with apart \[\] is no all_gather"),
        (lambda data: step(data)["phases"].pop(0), r"its phases are \['gather'\], its layouts need \['reduce', 'gat"),
        (lambda data: step(data)["phases"].reverse(), r"its phases are \['gather', 'reduce'\]"),
        (lambda data: step(data).update(apart=[7]), r"apart is \[7\]"),
        (lambda data: step(data).update(apart=[0]), r"apart is \[0\]"),
    ],
)
def test_bad_json(change, text):
    with pytest.raises(FlowError, match=text):
        BoxingPlan.from_json(broken(change, a_plan()))


@pytest.mark.parametrize(
    ("before", "after", "change", "text"),
    [
        (
            "P,P",
            "B,B",
            lambda data: step(data).update(kind="exchange", phases=["reduce"]),
            r"need \['reduce', 'gather'\]",
        ),
        ("P,B", "B,B", lambda data: step(data).update(apart=[]), r"with apart \[\] is no all_reduce"),
        ("P,B", "B,B", lambda data: step(data).update(apart=[1, 1]), r"apart is \[1, 1\]"),
        ("S(0),B", "S(0),P", lambda data: step(data).update(kind="local_slice"), r"is no local_slice"),
    ],
)
def test_bad_json_of_collectives(before, after, change, text):
    made = plan(Layout(grid((2, 2)), before, (64, 48)), Layout(grid((2, 2)), after, (64, 48)))
    with pytest.raises(FlowError, match=text):
        BoxingPlan.from_json(broken(change, made))


def test_a_wrong_plan_gives_wrong_numbers():
    """The check of the other tests can fail: the plan of another pair of the same shapes does not give the tensor."""
    source, target = Layout(grid((2, 2)), "S(0),P", (64, 48)), Layout(grid((2, 2)), "S(0),S(0)", (64, 48))
    other = plan(Layout(grid((2, 2)), "P,S(0)", (64, 48)), target)
    out = simulate(other, shards_of(source, logical_tensor(source.shape)))
    assert not np.array_equal(combine(target, out), logical_tensor(source.shape))


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


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_host_has_ranks(ranks):
    with pytest.raises(FlowError, match=f"a host has 1 rank or more, got ranks_per_host={ranks}"):
        Topology(ranks)


def test_links_along_axes():
    """Every axis has its link; by time the quick one brings what came over the slow one too."""
    mesh = Placement([[0, 1], [2, 3]], ("host", "chip"))
    slow, quick = Link(1.0, 1024.0), Link(2.0, 4096.0)
    links = Topology(axes={"host": slow, "chip": quick})
    along = plan(Layout(mesh, "S(0),B", (64, 64)), Layout(mesh, "B,B", (64, 64)))
    assert along.time(links) == slow.time(1, 8192)
    across = plan(Layout(mesh, "B,S(0)", (64, 64)), Layout(mesh, "B,B", (64, 64)))
    assert across.time(links) == quick.time(1, 8192)
    both = Layout(mesh, "S(0),S(1)", (64, 64))
    at_once = plan(both, Layout(mesh, "B,B", (64, 64)))
    assert at_once.time(links) == slow.time(2, 8192) + quick.time(1, 4096)
    chosen = plan(both, Layout(mesh, "B,B", (64, 64)), topology=links)
    assert len(chosen.steps) == 2
    assert chosen.time(links) == slow.time(1, 4096) + quick.time(1, 8192)


def test_topology_as_doctor_measured_it(tmp_path):
    from keras_flow.doctor.report import EngineReport, Report, Ring

    rings = [Ring(2, 1e-6, 5e9, {}), Ring(4, 2e-6, 3e9, {})]
    report = Report({}, {}, {}, {}, [], [EngineReport("jax", "1"), EngineReport("torch", "2", rings=rings)])
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps(report.as_json()))
    assert Topology.measured(file, "torch") == Topology(inside=Link(2e-6, 3e9))
    links = {"inside": {"latency": 1e-6, "bandwidth": 1e9}, "between": {"latency": 1e-4, "bandwidth": 1e8}}
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps({"hosts": {"torch": {"ranks_per_host": 2, **links}}}))
    assert Topology.measured(hosts, "torch") == Topology(2, Link(1e-6, 1e9), Link(1e-4, 1e8))
    for wrong in (lambda: Topology.measured(file, "jax"), lambda: Topology.measured(tmp_path / "none.json", "torch")):
        with pytest.raises(FlowError, match="keras-flow doctor --bandwidth --json"):
            wrong()


def test_layouts_keep_their_promise_through_all_chains_of_two():
    """Random numbers as summands, so that a summand in the place of another shows; `simulate` checks the copies."""
    mesh, shape = Placement([[0, 1], [2, 3]]), (4, 6)
    every = [Layout(mesh, nd_sbp, shape) for nd_sbp in all_nd_sbps(2)]
    plans = {(one, other): plan(one, other, "float64") for one in every for other in every}
    logical = np.random.default_rng(0).normal(size=shape)
    for source in every:
        start = shards_of(source, logical)
        for middle in every:
            between = simulate(plans[source, middle], start)
            for target in every:
                out = simulate(plans[middle, target], between)
                assert np.allclose(combine(target, out), logical, rtol=0, atol=1e-9), (source, middle, target)


def test_copies_that_are_not_equal_are_found():
    mesh = Placement([[0, 1], [2, 3]])
    made = plan(Layout(mesh, "B,P", (2,)), Layout(mesh, "B,B", (2,)))
    broken = {0: np.array([1.0, 0]), 1: np.array([0, 2.0]), 2: np.array([0, 2.0]), 3: np.array([1.0, 0])}
    with pytest.raises(FlowError, match="ranks 0 and 2 differ only along axes with B"):
        simulate(made, broken)
