"""Every source file has tests, which `python -m tests.who FILE` names, and `make test` runs a fixed part of all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import sampling, slow, who

SOURCES = [
    str(path.relative_to(who.ROOT))
    for folder in ("backends", "keras_flow")
    for path in sorted((who.ROOT / folder).rglob("*.py"))
    if "backends" not in path.relative_to(who.ROOT / folder).parts
]


def test_every_file_has_tests() -> None:
    tests = {source: who.tests_of(source) for source in SOURCES}
    assert [source for source, found in tests.items() if not found] == []
    assert [test for found in tests.values() for test in found if not (who.ROOT / test).exists()] == []


def test_a_module_of_the_tests_is_tested_by_what_imports_it() -> None:
    assert "tests/parity/test_grid.py" in who.tests_of("tests/parity/cases/layers.py")
    assert who.tests_of("tests/boxing/test_planner.py") == ["tests/boxing/test_planner.py"]


def test_the_tests_of_an_optimizer_on_torch() -> None:
    found = who.tests_of("backends/torch/optimizer.py")
    assert "tests/backends/torch" in found
    assert "tests/parity/test_grid.py" in found
    assert "tests/backends/tensorflow" not in found


class Item:
    """What `sampling.is_run` asks of a test."""

    def __init__(self, nodeid: str, **marks: pytest.Mark):
        self.nodeid, self.marks = nodeid, marks

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


def test_one_engine_is_chosen_for_each_test_and_about_one_test_in_so_many() -> None:
    engines = ("jax", "tensorflow", "torch")
    runs: dict[str, list[str]] = {}
    for case in range(300):
        for engine in engines:
            marks = {"one_of": pytest.mark.one_of(engine, engines).mark, "one_in": pytest.mark.one_in(3).mark}
            if sampling.is_run(Item(f"tests/torch/test_a.py::test_b[{engine}-{case}]", **marks)):  # type: ignore[arg-type]
                runs.setdefault(str(case), []).append(engine)
    assert all(len(found) == 1 for found in runs.values())
    assert 70 < len(runs) < 130
    assert {found[0] for found in runs.values()} == set(engines)


def test_of_those_that_take_long_a_few_are_run_and_the_list_names_tests_that_there_are() -> None:
    names = sampling.slow_tests()
    is_run = [sampling.is_run(Item(name)) for name in names]  # type: ignore[arg-type]
    assert 0 < sum(is_run) < len(names) / 3
    for name in names:
        path, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (who.ROOT / path).read_text(), name


#: files of tests of which `make test` runs none, and why
LEFT_OUT = {
    "backends/torch/test_five_ranks.py": "five processes; test_on_four_ranks.py has the same sums",
    "backends/torch/test_simulated.py": "trains on eight simulated ranks",
    "cli/test_unusual_inputs.py": "165 commands; it writes docs/unusual_input.md",
    "doors/test_presets.py": "takes minutes: three presets of KerasHub",
    "hvd/test_launchers.py": "needs MPI or Slurm",
    "launch/test_hosts.py": "hosts are namespaces of the network, which not every machine allows",
    "launch/test_restarts.py": "test_preemption.py and checkpoint/test_kills.py go on after an end",
    "launch/test_strangers.py": "waits for limits of time",
    "parity/test_reading.py": "takes minutes; backends/reading has the parts",
    "pipelines/test_hosts.py": "hosts are namespaces of the network, which not every machine allows",
    "servers/test_slurm.py": "needs Slurm",
    "sweep/test_sample.py": "the sweep is a run of its own",
    "tensors/test_ranks.py": "three jobs; doors/test_alone.py has the same errors",
}


def test_make_test_runs_those_of_the_daily_list_and_some_of_each_file(request: pytest.FixtureRequest) -> None:
    daily = sampling.daily_tests()
    assert all(sampling.is_run(Item(name)) for name in daily)  # type: ignore[arg-type]
    assert not daily & sampling.slow_tests()
    here = Path(__file__).parent
    collected = {item.nodeid.partition("@")[0] for item in request.session.items}
    files = {name.partition("::")[0] for name in collected}
    silent = {
        str(path.relative_to(here))
        for path in here.rglob("test_*.py")
        if f"tests/{path.relative_to(here)}" not in files
    }
    if len(silent) < len(files):  # all files were asked for
        assert sorted(daily - collected) == []
        assert silent <= set(LEFT_OUT), "add one of its tests to daily.txt, or the reason here"


def test_the_list_of_those_that_take_long_follows_a_run(tmp_path: Path) -> None:
    report = tmp_path / "times.xml"
    cases = [("test_a", "b[torch]@torch", 9.0), ("test_a", "b2[torch]", 0.1), ("test_a", "c", 0.1)]
    cases += [("test_e", "f[jax]", 9.0), ("test_e", "g[jax]", 8.0)]  # one on JAX stays, the quicker one
    cases += [("test_h", "i[jax]", 30.0), ("test_h", "j[torch]", 20.0)]  # one of the file does
    rows = [f'<testcase classname="tests.x.{place}" name="{name}" time="{time}"/>' for place, name, time in cases]
    report.write_text(f"<testsuites><testsuite>{''.join(rows)}</testsuite></testsuites>")
    before = frozenset({"tests/x/test_a.py::c", "tests/x/test_d.py::e"})
    found = slow.updated(before, slow.times(report))
    assert found == [
        "tests/x/test_a.py::b[torch]",
        "tests/x/test_d.py::e",
        "tests/x/test_e.py::f[jax]",
        "tests/x/test_h.py::i[jax]",
    ]


def test_parts_of_all_tests_are_disjoint_and_complete() -> None:
    for number in range(50):
        item = Item(f"tests/test_a.py::test_{number}")
        assert sum(sampling.in_part(item, f"{part}/7") for part in range(1, 8)) == 1  # type: ignore[arg-type]


def test_what_is_collected_does_not_depend_on_the_date() -> None:
    words = subprocess.run(
        ["git", "grep", "-nE", r"date\.today|datetime\.now|TEST_DAY", "--", "tests"],
        cwd=who.ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    assert [line for line in words if not line.startswith("tests/test_who.py")] == []
