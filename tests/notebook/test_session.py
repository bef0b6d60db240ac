"""`kf.notebook` without workers: ranks in the kernel, and requests that are refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from keras_flow.errors import FlowError, FlowWarning
from keras_flow.notebook import session, workers
from tests import sampling
from tests.notebook.kernel import TRAIN, WEIGHTS, assert_children_end_with, kernel


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", sampling.on_one(("jax", "tensorflow")))
def test_one_process_that_drives_all_ranks_needs_no_workers(backend: str, tmp_path: Path) -> None:
    with kernel(backend, str(tmp_path)) as notebook:
        assert not notebook.run("import keras_flow as kf\nkf.notebook.start(4)").failed
        assert notebook.run("%%ranks\nhidden = kf.env.get_world_size()\nhidden").text.strip() == "4"
        assert notebook.run("kf.notebook.pull('hidden')").text.strip() == "4"
        assert notebook.run("kf.notebook.push(rate=0.5)").text == ""
        assert notebook.run("%%ranks\nrate * 2").text.strip() == "1.0"
        assert notebook.run("kf.notebook.run(lambda: kf.env.get_world_size(), 4)").text.strip() == "[4]"
        assert notebook.run("%%ranks --quiet\nprint('nothing')").text == ""
        failed = notebook.run("%%ranks\n1 / 0")
        assert failed.failed and failed.text.count("ZeroDivisionError: division by zero") >= 1
        for asked in ("%%ranks --rank 7\n1", "%%ranks --rank 0,4\n1", "kf.notebook.pull('hidden', rank=4)"):
            refused = notebook.run(asked)
            assert refused.failed and "this notebook has ranks 0 to 3" in refused.text, refused.text
        assert "driven by this kernel" in notebook.run("kf.notebook.restart()").text
        # a wrong use is one line, without frames of ours
        assert notebook.run("kf.notebook.pull('nope')").text.startswith(
            "FlowError: kf.notebook.pull: the cells have no"
        )
        assert "no.py, which does not exist" in notebook.run("kf.notebook.compare('no.py')").text
        notebook.run("kf.notebook.stop()")
        assert "no ranks were started" in notebook.run("%%ranks\n1").text
        assert not [each for each in notebook.children() if "ipyparallel" in " ".join(each.cmdline())]
        picture = notebook.run("kf.Placement([[0, 1], [2, 3]], axis_names=('data', 'model'))")
        assert picture.html.startswith("<svg") and "placement of 4 ranks" in picture.html


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", sampling.on_one(("jax", "tensorflow")))
def test_processes_that_share_the_ranks(backend: str, tmp_path: Path) -> None:
    with kernel(backend, str(tmp_path)) as notebook:
        started = notebook.run("import keras_flow as kf\nkf.notebook.start(4, processes=2)")
        assert not started.failed, started.text
        shown = notebook.run("%%ranks\nimport keras_flow as kf\nkf.env.process_count(), kf.env.local_ranks()")
        assert "[ranks 0-1] (2, (0, 1))" in shown.text and "[ranks 2-3] (2, (2, 3))" in shown.text, shown.text
        assert notebook.run("%%ranks\nprint('ready')").text.strip() == "[ranks 0-3] ready"
        assert notebook.run("%%ranks --rank 3\nprint('ready')").text.strip() == "[ranks 2-3] ready"
        failed = notebook.run("%%ranks\nif kf.env.process_index():\n    1 / 0")
        assert "ranks 2-3 failed first: ZeroDivisionError" in failed.text, failed.text
        notebook.run("kf.notebook.push(rate=0.5)")
        assert "1.0" in notebook.run("%%ranks\nrate * 2").text
        assert not notebook.run("kf.notebook.stop()").failed


@pytest.mark.timeout(420)
@pytest.mark.parametrize("backend", sampling.some(("jax", "tensorflow"), every=5))
def test_workers_on_engines_that_form_no_group_anew(backend: str, tmp_path: Path) -> None:
    """They stay usable where a rank is between collectives; a rank inside of one takes all workers with it."""
    with kernel(backend, str(tmp_path)) as notebook:
        assert not notebook.run("import keras_flow as kf\nkf.notebook.start(2, processes=2)").failed
        notebook.run("%%ranks\nimport keras, numpy as np, keras_flow as kf")
        assert not notebook.run(TRAIN).failed
        stopped = notebook.run("%%ranks\nmodel.fit(x, y, batch_size=2, epochs=9999, verbose=0)", interrupt_after=4)
        assert "the cell was stopped on ranks 0-1 before step" in stopped.text, stopped.text
        assert notebook.run(WEIGHTS).text.startswith("[ranks 0-1] ")
        # ranks meet before a loop: one that is alone waits there
        alone = "%%ranks --timeout 4\nif kf.env.get_rank():\n    model.fit(x, y, verbose=0)"
        shown = notebook.run(alone)
        assert "rank 0: has finished the cell" in shown.text and "The workers are usable" in shown.text, shown.text
        assert "last entered: model.fit()" in shown.text, shown.text
        assert not notebook.run(TRAIN).failed
        shown = notebook.run("%%ranks --timeout 4 --rank 1\nkf.comm.all_reduce(np.ones(3, 'float32'))")
        assert "called in line 2 of the cell; last entered: kf.comm.all_reduce" in shown.text, shown.text
        assert "all workers were ended. kf.notebook.restart() starts new workers" in shown.text, shown.text
        assert not notebook.run("kf.notebook.restart()").failed
        assert notebook.run("%%ranks\n1 + 1").text.strip() == "[ranks 0-1] 2"
        assert_children_end_with(notebook)


def test_without_ipyparallel_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FlowError, match=r"ipyparallel, which is not installed.*pip install 'keras-flow\[notebook\]'"):
        workers.require_ipyparallel()


def test_other_versions_than_the_kernel_are_named() -> None:
    with pytest.raises(
        FlowError, match=r"worker 2 has other versions .*: keras is 3\.15\.1 in the kernel and 3\.14\.0"
    ):
        workers._require_equal({"keras": "3.15.1", "numpy": "2.4"}, {"keras": "3.14.0", "numpy": "2.4"}, 2)


def test_more_workers_than_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with pytest.warns(FlowWarning, match="4 worker processes share 2 cores"):
        workers._warn_of_cores(4)


def test_requests_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FlowError, match=r"devices=0; legal is a whole number of at least 1"):
        session.start(0)
    with pytest.raises(FlowError, match="3 processes cannot share 4 ranks equally"):
        session.start(4, processes=3)
    with pytest.raises(FlowError, match=r"no ranks run in this notebook: call kf.notebook.start\(4\)"):
        session.pull("history")
    with pytest.raises(FlowError, match="needs the name of a variable"):
        session.pull()
    with pytest.raises(FlowError, match="no ranks were started"):
        session.restart()
    with pytest.raises(FlowError, match=r"kf.notebook.run\(timeout=...\) 0: legal is a number of seconds above 0"):
        session.run(print, timeout=0)
    monkeypatch.setattr(session, "_started", lambda: workers.Workers.__new__(workers.Workers))
    with pytest.raises(FlowError, match=r"kf.notebook.push cannot send rows \(generator\) to the workers: "):
        session.push(rows=(row for row in range(3)))
