"""The workers of the grid: in turn, two at once at the end, and a failure is never silent."""

import json
import time

import pytest

from tests.parity.results import Grid, Schedule
from tests.parity.support import run_all

pytestmark = pytest.mark.timeout(60)


def worker(body: str, limit: float = 50.0) -> Grid:
    """A grid whose worker is a small program; `say(case)` writes a result."""
    grid = Grid("jax", limit=limit)
    say = f"say = lambda case: open({str(grid._file)!r}, 'a').write({json.dumps({'layout': 'dp4'})[:-1]!r} + "
    grid._command = ["-c", f"import time\n{say}', \"case\": \"' + case + '\"}}\\n')\n{body}"]
    return grid


def cases(grid: Grid) -> list[str]:
    return [result["case"] for result in grid.results()]


def test_one_after_another_then_two_at_once() -> None:
    grids = [worker("say('a'); time.sleep(99)"), worker("say('b'); time.sleep(99)"), worker("say('c')")]
    schedule = Schedule(grids)
    assert grids[0].result("a", "dp4") == {"case": "a", "layout": "dp4"}
    time.sleep(0.5)
    assert [grid.running for grid in grids] == [True, False, False]
    schedule.only_the_grid_is_left()
    assert grids[1].result("b", "dp4")["case"] == "b"
    assert not grids[2].results()
    schedule.stop()
    assert not any(grid.running for grid in grids)
    assert not grids[2].results(), "none starts after the end"


def test_a_worker_that_fails_is_told_with_the_end_of_its_log() -> None:
    grid = worker("say('a'); raise ValueError('boom')").start()
    assert grid.result("a", "dp4")["case"] == "a"
    with pytest.raises(AssertionError, match=r"(?s)no result for b dp4; the worker ended with 1:.*ValueError: boom"):
        grid.result("b", "dp4")
    with pytest.raises(AssertionError, match=r"(?s)jax: the worker ended with 1:.*boom"):
        grid.finish()


def test_run_all_says_how_far_it_is_and_ends_what_runs_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    grids = [worker("say('a'); time.sleep(1)"), worker("say('b'); time.sleep(99)", limit=2.0), worker("say('c')")]
    found, failed = run_all(grids, every=0.5)
    assert [[result["case"] for result in results] for results in found] == [["a"], ["b"], ["c"]]
    assert failed
    out = capsys.readouterr().out
    assert "jax: 1 results in " in out
    assert "last b dp4" in out
    assert "jax: the worker ended with -15" in out
    assert run_all([worker("say('a')")]) == ([[{"layout": "dp4", "case": "a"}]], False)
