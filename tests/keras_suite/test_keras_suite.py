"""Keras's own tests pass in a scope as they do without one; a few of them here, all in `make test-full`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sampling
from tests.keras_suite import refusals, runner, session

#: layouts of each engine; torch has a process for each rank
LAYOUTS = {"jax": ("dp4", "2x2"), "tensorflow": ("dp4", "2x2"), "torch": ("dp2", "1x2")}
#: a quick module of those that meet a distribution most
QUICK = "keras.src.callbacks.swap_ema_weights_test"


def worse(engine: str, layout: str, module: str, folder: Path) -> list[str]:
    """Return the tests of a module that pass on one device and fail in the scope, without being refused as listed."""
    lines: list[dict] = []
    for each in ("1", layout):
        out = folder / f"{each}.jsonl"
        runner.run(engine, each, [module], out)
        lines += [json.loads(line) for line in out.read_text().splitlines()]
    found = runner.compared(lines)
    found[layout] += runner.on_others(lines, out)
    assert [line for line in lines if line.get("layout") == layout and line.get("outcome") == "passed"], "nothing ran"
    return [f"{line['test']}: {line['error']}" for line in found[layout] if runner.is_fault(engine, line)]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("engine", sampling.on_one(list(LAYOUTS)))
def test_a_few_of_kerass_tests_pass_in_a_scope(engine: str, tmp_path: Path) -> None:
    assert worse(engine, LAYOUTS[engine][0], QUICK, tmp_path) == []


@pytest.mark.full
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("module", runner.modules(""))
@pytest.mark.parametrize(
    ("engine", "layout"), [(engine, layout) for engine, layouts in LAYOUTS.items() for layout in layouts]
)
def test_kerass_tests_pass_in_a_scope(engine: str, layout: str, module: str, tmp_path: Path) -> None:
    assert worse(engine, layout, module, tmp_path) == []


def test_what_is_worse_in_a_scope() -> None:
    passed = {"test": "a", "outcome": "passed", "error": "", "is_refusal": False}
    failed = {"test": "b", "outcome": "failed", "error": "E", "is_refusal": False}
    alone = [{**passed, "layout": "1"}, {**failed, "layout": "1"}]
    within = [{**failed, "test": "a", "layout": "dp4"}, {**failed, "layout": "dp4"}]
    assert [line["test"] for line in runner.compared([*alone, *within])["dp4"]] == ["a"]
    assert runner.compared([*alone, {**passed, "layout": "dp4"}])["dp4"] == []


def test_a_failure_that_was_not_run_alone_is_not_hidden() -> None:
    failed = {"layout": "dp4", "test": "b", "outcome": "failed", "error": "E", "is_refusal": False}
    alone = {**failed, "layout": "1", "test": "a"}
    assert runner.compared([alone, failed])["dp4"] == [failed]
    assert runner.compared([alone, {**failed, "outcome": "skipped"}])["dp4"] == []


def test_a_failure_on_another_process_alone_is_seen(tmp_path: Path) -> None:
    passed = {"layout": "dp2", "test": "a", "outcome": "passed", "error": "", "is_refusal": False}
    failed = {**passed, "outcome": "failed", "error": "E"}
    (tmp_path / "torch-dp2.process1.jsonl").write_text(f"{json.dumps(failed)}\n{json.dumps({**failed, 'test': 'b'})}\n")
    assert runner.on_others([passed, {**failed, "test": "b"}], tmp_path / "torch-dp2.jsonl") == [failed]


def test_a_test_has_one_name_in_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-learn's checks print the address of a function, another one in each process."""
    program = "import pytest\n@pytest.mark.parametrize('x', [1], ids=['f at {}'])\ndef test(x): pass\n"
    names = []
    for each, address in enumerate(("0x7fd141ddd760", "0x7f00aa0bb1c0")):
        monkeypatch.delitem(sys.modules, "test_addresses", raising=False)
        folder = tmp_path / str(each)
        folder.mkdir()
        (folder / "test_addresses.py").write_text(program.replace("{}", address))
        recorder = session.Recorder("1", folder / "out", set(), None)
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", os.devnull]
        assert pytest.main([*options, "--import-mode=importlib", str(folder)], [recorder]) == 0
        lines = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
        names.append([line["test"] for line in lines if "test" in line])
    assert names[0] == names[1] != []


def test_a_file_that_cannot_be_imported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody saw that the tests of seven files were never run: two of them ask for Keras's own `conftest`."""
    monkeypatch.setitem(sys.modules, "conftest", None)
    (tmp_path / "bad_test.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "good_test.py").write_text("from conftest import skip_if_backend\ndef test(): pass\n")
    session.stand_in_for_conftest()
    recorder = session.Recorder("1", tmp_path / "out", set(), None)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", os.devnull, "--import-mode=importlib"]
    pytest.main([*options, "--continue-on-collection-errors", *map(str, tmp_path.glob("*_test.py"))], [recorder])
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    outcomes = {line["test"]: line for line in lines if "test" in line}
    assert outcomes["good_test.py::test"]["outcome"] == "passed"
    assert runner.is_uncollected(outcomes["bad_test.py"])
    assert "No module named 'a_package_that_is_not_there'" in outcomes["bad_test.py"]["error"]


def test_a_refusal_is_in_the_list_or_a_fault() -> None:
    line = {"test": "a.py::a", "is_refusal": True, "error": "FlowError: a sparse input of shape [2, 4] cannot be split"}
    assert not runner.is_fault("jax", line)
    assert runner.is_fault("torch", line)
    assert runner.is_fault("jax", {**line, "error": "FlowError: something new"})
    assert runner.is_fault("jax", {**line, "is_refusal": False})


def test_the_last_digits_of_a_test_are_no_fault_where_it_is_listed() -> None:
    line = {"is_refusal": False, "test": f"a.py::{refusals.ROUNDED['torch'][0]}", "error": "Not equal to tolerance"}
    assert not runner.is_fault("torch", line)
    assert runner.is_fault("torch", {**line, "error": "TypeError"})
    assert runner.is_fault("torch", {**line, "test": "a.py::another"})
    assert runner.is_fault("jax", line)


def test_the_page_of_features_has_the_list() -> None:
    page = Path(__file__).parents[2] / "docs" / "features.md"
    assert refusals.section() in page.read_text()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("open('out', 'w').close(); time.sleep(100)", "did not end in 2 s"),
        ("os.abort()", "ended the process (status -6)"),
    ],
)
def test_a_test_that_hangs_or_ends_its_process(
    program: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LIMIT", 2.0)
    command = [sys.executable, "-c", f"import os, time; {program}"]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    assert runner._watched(process, tmp_path / "out", float("inf")) == said
    assert process.wait(10.0) != 0
