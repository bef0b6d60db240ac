"""Workers on torch: cells on all ranks, failures, the stop button, deadlocks, deaths, the end of the kernel."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import sampling
from tests.notebook.kernel import TRAIN, WEIGHTS, Kernel, assert_children_end_with, kernel

pytestmark = [pytest.mark.timeout(420), pytest.mark.xdist_group("workers of a notebook")]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel("torch", str(tmp_path_factory.mktemp("notebook"))) as running:
        started = running.run("import keras_flow as kf\nkf.notebook.start(2)")
        assert not started.failed, started.text
        ready = running.run("%%ranks\nimport keras, numpy as np, keras_flow as kf\nprint(kf.env.get_world_size())")
        assert ready.text.strip() == "[ranks 0-1] 2", ready.text
        yield running


def test_output_is_folded_and_labelled(notebook: Kernel) -> None:
    shown = notebook.run("%%ranks\nprint('ready')\nprint('I am', kf.env.get_rank())\n6 * 7")
    assert shown.text.strip().splitlines() == [
        "[ranks 0-1] ready",
        "[rank 0] I am 0",
        "[rank 1] I am 1",
        "[ranks 0-1] 42",
    ]
    assert notebook.run("%%ranks --rank 1\nprint(kf.env.get_rank())").text.strip() == "[rank 1] 1"
    assert notebook.run("%%ranks --quiet\nprint('nothing')").text == ""
    assert "ranks 0 to 1" in notebook.run("%%ranks --rank 7\n1").text
    assert notebook.run("kf.notebook.push(rate=[0.5])").text == ""
    assert notebook.run("%%ranks\nrate[0] * 2").text.strip() == "[ranks 0-1] 1.0"


def test_output_that_is_late_is_waited_for(notebook: Kernel) -> None:
    relay = _output_relay(notebook)
    relay.suspend()
    threading.Timer(3.0, relay.resume).start()
    assert notebook.run("%%ranks\nprint('late')").text.strip() == "[ranks 0-1] late"


def test_output_that_is_there_before_the_kernel_looks_is_shown(notebook: Kernel) -> None:
    slow = """
from ipyparallel import DirectView
import time

def late(view, *args, _execute=DirectView.execute, **kwargs):
    answers = _execute(view, *args, **kwargs)
    time.sleep(1)
    return answers

stock, DirectView.execute = DirectView.execute, late
"""
    notebook.run(slow)
    for ranks, name in (("--rank 1", "rank 1"), ("", "ranks 0-1")):
        assert notebook.run(f"%%ranks {ranks}\nprint('early')").text.strip() == f"[{name}] early"
    notebook.run("DirectView.execute = stock")


def _output_relay(notebook: Kernel) -> psutil.Process:
    """The process that hands the ranks' output to the notebook."""
    children = notebook.children()
    (file,) = {part[7:] for child in children for part in child.cmdline() if part.startswith("--file=")}
    client = json.loads(Path(file.replace("-engine", "-client")).read_text())
    for child in children:
        if client["iopub"] in {connection.laddr.port for connection in child.net_connections()}:
            return child
    raise AssertionError("no process hands on the output")


def test_a_name_of_the_notebook_alone_says_how_it_is_sent(notebook: Kernel) -> None:
    notebook.run("threshold = 0.5")
    shown = notebook.run("%%ranks\nthreshold * 2").text
    assert "NameError: name 'threshold' is not defined" in shown
    assert "kf.notebook.push(threshold=threshold) gives it to them" in shown, shown
    assert "kf.notebook.push" not in notebook.run("%%ranks\nnowhere * 2").text


def test_training_shows_one_bar_and_gives_its_history(notebook: Kernel) -> None:
    shown = notebook.run(TRAIN)
    bars = [line for line in shown.text.splitlines() if "8/8" in line]
    assert not shown.failed, shown.text
    assert len(bars) == 2 and all(bar.startswith("[ranks 0-1] 8/8") for bar in bars), shown.text
    pulled = notebook.run("history = kf.notebook.pull('history')\n[round(loss, 4) for loss in history.history['loss']]")
    assert eval(pulled.text)[0] > eval(pulled.text)[1]


def test_a_function_of_a_cell_runs_on_all_ranks(notebook: Kernel) -> None:
    source = "offset = 10\ndef f(n):\n    return kf.env.get_rank() * n + offset\nkf.notebook.run(f, args=(3,))"
    assert notebook.run(source).text.strip() == "[10, 13]"
    assert notebook.run("%%ranks\n'_keras_flow_result' in globals()").text.strip() == "[ranks 0-1] False"
    failed = notebook.run(
        "def g():\n    if kf.env.get_rank():\n        raise ValueError('no')\nkf.notebook.run(g)"
    ).text
    assert "raise ValueError('no')" in failed and "rank 1 failed first: ValueError: no" in failed, failed
    assert "kf.notebook.run takes a function, got 3" in notebook.run("kf.notebook.run(3)").text
    assert "kf.notebook.pull: the cells have no variable nothing" in notebook.run("kf.notebook.pull('nothing')").text


def test_a_variable_of_one_rank_is_pulled_from_it(notebook: Kernel) -> None:
    """What a collective would bring, and only that, needs the others."""
    whole = "kf.ones((4,), placement=kf.Placement([0, 1]), sbp='S(0)')"
    made = f"%%ranks\nboth = {whole}\nif kf.env.get_rank() == 1:\n    mine, split = {{'a': [1]}}, both"
    assert not notebook.run(made).failed
    assert notebook.run("kf.notebook.pull('mine', rank=1)").text.strip() == "{'a': [1]}"
    assert "split may lie on several ranks, and rank 0 has no" in notebook.run("kf.notebook.pull('split', rank=1)").text
    assert "the cells have no variable mine" in notebook.run("kf.notebook.pull('mine', rank=0)").text
    assert notebook.run("kf.notebook.pull('mine', 'both', rank=1)[1].sum()").text.strip().endswith("4.0)")


def test_a_cell_that_fails_on_one_rank_leaves_no_call_behind(notebook: Kernel) -> None:
    """The other rank went on to the end: it has made fewer calls, or more, than the one that failed."""
    reduce = "kf.comm.all_reduce(keras.ops.ones(3)"
    assert not notebook.run(f"%%ranks\nfor _ in range(3): {reduce})").failed
    begun = notebook.run(
        f"%%ranks\nif kf.env.get_rank():\n    {reduce} * 5, async_op=True)\n    raise ValueError('no')"
    )
    assert "rank 1 failed first: ValueError: no" in begun.text, begun.text
    shown = notebook.run(f"%%ranks --timeout 20\nprint(float({reduce}).sum()))")
    assert shown.text.strip() == "[ranks 0-1] 6.0", shown.text


def test_the_stop_button_after_a_fit_of_the_same_cell(notebook: Kernel) -> None:
    notebook.run(TRAIN)
    source = "%%ranks\nmodel.fit(x, y, batch_size=32, verbose=0)\nimport time; time.sleep(60)"
    began = time.monotonic()
    shown = notebook.run(source, interrupt_after=6)
    assert shown.failed and "the cell was stopped on ranks 0-1" in shown.text, shown.text
    assert time.monotonic() - began < 20


def test_a_failure_names_the_line_and_the_rank_and_leaves_the_others_usable(notebook: Kernel) -> None:
    notebook.run(TRAIN)
    shown = notebook.run("%%ranks\nif kf.env.get_rank() == 1:\n    1 / 0\nmodel.fit(x, y, batch_size=32, verbose=0)")
    assert shown.failed
    assert re.search(r"-> 3 +1 / 0", shown.text), shown.text
    assert f"Cell In[{shown.number}], line 3" in shown.text, "the number that the cell has in the notebook"
    assert "rank 1 failed first: ZeroDivisionError: division by zero" in shown.text
    assert "Rank 0 waited for it and was stopped." in shown.text
    assert "The workers are usable, with their variables" in shown.text
    again = notebook.run(TRAIN)
    assert not again.failed and "8/8" in again.text, again.text


def test_the_stop_button_stops_all_ranks_before_the_same_step(notebook: Kernel) -> None:
    notebook.run(TRAIN)
    shown = notebook.run("%%ranks\nmodel.fit(x, y, batch_size=2, epochs=9999, verbose=0)", interrupt_after=4)
    assert shown.failed
    assert "the cell was stopped on ranks 0-1 before step" in shown.text, shown.text
    # with the same weights on both: one line for both ranks
    assert notebook.run(WEIGHTS).text.startswith("[ranks 0-1] ")
    assert not notebook.run("%%ranks\nmodel.fit(x, y, batch_size=32, verbose=0)").failed


def test_the_stop_button_frees_a_rank_that_waits_for_another(notebook: Kernel) -> None:
    waits = "kf.ones((4,), placement=kf.Placement([0, 1]), sbp='S(0)').numpy()"
    source = f"%%ranks\nif kf.env.get_rank():\n    {waits}\nelse:\n    import time; time.sleep(99)"
    shown = notebook.run(source, interrupt_after=3)
    assert shown.failed and "the cell was stopped on ranks 0-1" in shown.text, shown.text
    ones = "%%ranks\nprint(kf.ones((4,), placement=kf.Placement([0, 1]), sbp='S(0)').numpy().sum())"
    assert notebook.run(ones).text.strip() == "[ranks 0-1] 4.0"


def test_a_deadlock_is_told_with_the_last_collective_of_each_rank(notebook: Kernel) -> None:
    waits = "kf.ones((4,), placement=kf.Placement([0, 1]), sbp='S(0)').numpy()"
    shown = notebook.run(f"%%ranks --timeout 4\nif kf.env.get_rank():\n    {waits}")
    assert shown.failed
    assert "the cell made no progress for 4 s" in shown.text, shown.text
    assert "rank 0: has finished the cell" in shown.text
    # it waits in the job's store, before the engine's collective
    said = r"rank 1: waits for other ranks \(\w+\.py:\d+\), called in line 3 of the cell; last entered: boxing S\(0\)"
    assert re.search(said, shown.text), shown.text
    # the first collective of a worker, too, leaves it usable
    assert "The workers are usable" in shown.text
    again = notebook.run("%%ranks --rank 1 --timeout 4\nkf.comm.all_reduce(np.ones(3))")
    assert "rank 0: was left out" in again.text, again.text
    # where the rank is now, not where it was the last time
    said = r"rank 1: all_reduce \(\w+\.py:\d+\), called in line 2 of the cell; last entered: kf.comm.all_reduce"
    assert re.search(said, again.text), again.text


def test_a_worker_that_dies_is_named_and_restart_starts_new_ones(notebook: Kernel) -> None:
    shown = notebook.run("%%ranks --rank 1\nimport os; os._exit(7)")
    assert shown.failed and "a worker died. rank 1: exit code 7" in shown.text, shown.text
    assert "kf.notebook.restart() starts new workers" in shown.text
    assert "have ended" in notebook.run("%%ranks\n1").text
    shown = notebook.run("kf.notebook.restart()")
    assert not shown.failed
    assert (
        "kf.notebook.restart: the variables of the %%ranks cells are gone; run the cells that make them" in shown.text
    )
    assert notebook.run("%%ranks\n1 + 1").text.strip() == "[ranks 0-1] 2"


@sampling.one_in(3)
def test_workers_of_other_versions_are_refused(notebook: Kernel) -> None:
    notebook.run("import keras\nversion, keras.__version__ = keras.__version__, '9.9.9'")
    shown = notebook.run("kf.notebook.restart()")
    assert "worker 0 has other versions than the notebook's kernel: keras is 9.9.9 in the kernel" in shown.text
    assert "restart the kernel" in shown.text
    notebook.run("keras.__version__ = version")
    assert not notebook.run("kf.notebook.start(2)").failed
    assert notebook.run("%%ranks\n1 + 1").text.strip() == "[ranks 0-1] 2"


def test_workers_end_with_a_kernel_that_is_killed(notebook: Kernel) -> None:
    """The last one: it takes the kernel away."""
    notebook.run("%%ranks\nhidden = 1")
    said = notebook.run("kf.notebook.start(1)").text
    assert "the 2 workers that were started before are ended, and the variables of their %%ranks cells are gone" in said
    notebook.run("kf.notebook.start(2)")
    assert len(notebook.children()) >= 4, "two workers, the controller, guardians"
    assert_children_end_with(notebook)
