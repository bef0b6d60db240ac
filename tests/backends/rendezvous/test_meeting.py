"""A call that one process makes alone: it works where the others are not needed, else all are told within 10 s."""

import re
import time
from pathlib import Path

import pytest

from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(240)

#: one step an epoch; after each, process 0 alone does something
PROGRAM = """
import sys, time
import numpy as np, keras
import keras_flow as kf
kf.init()
layout, file, *acts = sys.argv[1:]
x, y = np.ones((8, 6), "float32"), np.ones((8, 4), "float32")
if layout == "1x2":
    grid = kf.Placement([[0, 1]], axis_names=("data", "model"))
    dist = kf.ModelParallel(grid, batch_axes="data", rules={"h/kernel": {"model": kf.sbp.split(1)}})
else:
    dist = kf.DataParallel()
def act(model, what):
    if what == "save":
        model.save(file)
        keras.distribution.set_distribution(None)  # a model of all ranks is loaded by all of them
        loaded = keras.models.load_model(file).get_weights()[0]
        keras.distribution.set_distribution(dist)
        assert np.allclose(loaded, model.get_weights()[0])
    if what == "weights":
        assert [weight.shape for weight in model.get_weights()] == [(6, 4), (4,)]
    if what == "call":
        assert model(x).shape == (8, 4)
    if what == "predict":
        print("predicted", float(model.predict(x, batch_size=3, verbose=0).sum()), flush=True)
    if what == "evaluate":
        print("evaluated", model.evaluate(x, y, verbose=0), flush=True)
    if what == "batch":
        print("batch", float(model.predict_on_batch(x).sum()), model.test_on_batch(x, y), flush=True)
    if what == "train":
        model.train_on_batch(x, y)
    if what == "reduce":
        kf.comm.all_reduce([1.0])
    if what == "sleep":
        time.sleep(5)
class Alone(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if acts[epoch] == "all":
            self.model.save(file)
            print("evaluated", self.model.evaluate(x, y, verbose=0), flush=True)
        elif kf.env.is_main_process():
            print("BEGUN", time.time(), flush=True)
            act(self.model, acts[epoch])
            print("DONE", acts[epoch], flush=True)
with dist.scope():
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4, name="h")])
    model.compile("sgd", "mse")
    model.fit(x, y, epochs=len(acts), verbose=0, callbacks=[Alone()])
"""


def run(engine: str, layout: str, acts: str, folder: Path) -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr, and the seconds from the last act to the end."""
    program = programs.write(folder, PROGRAM)
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", "--timeout", "100"]
    started = programs.start([*command, str(program), layout, str(folder / "model.keras"), *acts.split()], engine)
    code, out, err = programs.finish(started, 200)
    begun = [float(text) for text in re.findall(r"BEGUN (\S+)", out)]
    return code, out, err, time.time() - begun[-1]


@pytest.mark.parametrize("engine", sampling.some(("torch", "jax", "tensorflow"), 3))
def test_what_needs_no_other_process_works_on_one(engine: str, tmp_path: Path) -> None:
    # evaluate in the last epoch, too: the others are at the end of `fit`, and compare what it has assigned
    acts = "save all weights call sleep predict evaluate evaluate batch all save all evaluate"
    code, out, err, _ = run(engine, "dp", acts, tmp_path)
    assert code == 0, err
    assert re.findall(r"DONE (\w+)", out) == [act for act in acts.split() if act != "all"]


CASES = [
    ("torch", "dp", "train", "model.train_on_batch()"),
    ("torch", "dp", "all reduce", "kf.comm.all_reduce sum float32[1]"),
    ("torch", "1x2", "evaluate", "model.evaluate()"),
    ("torch", "1x2", "all predict", "model.predict()"),
    ("torch", "1x2", "save", "writing a file of the model"),
    ("torch", "1x2", "weights", "reading a split variable or tensor"),
    ("torch", "1x2", "call", "calling a model or layer with split weights"),
    ("jax", "dp", "train", "model.train_on_batch()"),
    ("jax", "dp", "all reduce", "kf.comm.all_reduce sum float32[1]"),
    ("jax", "1x2", "save", "writing a file of the model"),
    ("jax", "1x2", "all weights", "reading a split variable or tensor"),
    ("tensorflow", "dp", "train", "model.train_on_batch()"),
    ("tensorflow", "1x2", "save", "writing a file of the model"),
    ("tensorflow", "1x2", "all weights", "reading a split variable or tensor"),
    ("tensorflow", "1x2", "call", "calling a model or layer with split weights"),
]


@pytest.mark.parametrize("case", sampling.some(CASES, 6))
def test_what_needs_all_is_an_error_that_names_both_calls(case: tuple[str, str, str, str], tmp_path: Path) -> None:
    engine, layout, acts, name = case
    code, _, err, seconds = run(engine, layout, f"{acts} sleep sleep", tmp_path)
    assert code == 1, err
    said = " ".join(err.split())
    # whichever rank finds it first
    alone, others = rf"{re.escape(name)} \(program.py, line \d+\)", r"a step of model.fit\(\) \(program.py, line \d+\)"
    one = f"{alone} needs all ranks: rank 0 called it, where rank 1 is in {others}"
    other = f"{others} needs all ranks: rank 1 called it, where rank 0 is in {alone}"
    assert re.search(f"{one}|{other}", said), err
    assert "exchange of facts" not in said
    assert seconds < 10, f"{seconds:.0f} s"


@pytest.mark.parametrize("process", [0, 1])
def test_what_process_0_decided_stays_for_the_others(process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from unittest import mock

    from keras_flow.backends.rendezvous import meeting

    store, here = mock.Mock(), mock.Mock(process_count=2, process_index=process)
    monkeypatch.setattr(meeting, "store", lambda: store)
    monkeypatch.setattr(meeting, "tensor_engine", lambda: mock.Mock(world=lambda: here))
    monkeypatch.setattr(meeting, "enter", mock.Mock())
    monkeypatch.setattr(meeting.whereabouts, "take_back", mock.Mock())
    monkeypatch.setattr(meeting, "_come_together", mock.Mock(side_effect=meeting._Apart))
    assert not meeting.meet("model.predict()", may_leave=True)
    assert store.delete_text.call_count == process


def test_the_end_is_told_last(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading
    from collections import deque

    from keras_flow.backends.rendezvous import whereabouts

    ended, told = threading.Event(), []

    def telling() -> None:
        ended.wait()
        time.sleep(0.2)
        told.append("before the end")

    thread = threading.Thread(target=telling)
    thread.start()
    monkeypatch.setattr(whereabouts, "_watching", (thread, ended))
    monkeypatch.setattr(whereabouts, "_entries", deque([whereabouts.Entry(0, "the beginning", "")]))
    monkeypatch.setattr(whereabouts, "tell", lambda: told.append(whereabouts.now().name))
    whereabouts._leave()
    assert told == ["before the end", whereabouts.END]


def test_an_error_leaves_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from keras_flow.backends.rendezvous import whereabouts

    entry = whereabouts.Entry(1, "a step", "")
    monkeypatch.setattr(whereabouts, "_inside", entry)
    with pytest.raises(ValueError), whereabouts.in_store():
        assert whereabouts._inside is None
        raise ValueError
    assert whereabouts._inside is entry


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch):
    """`processes(index, number, done)`: from here on this is the process `index`, in its entry of this number."""
    from collections import Counter, deque
    from unittest import mock

    from keras_flow.backends.rendezvous import meeting, whereabouts
    from keras_flow.current import joining

    texts: dict[str, str] = {}
    here = mock.Mock(process_count=3, size=3)

    def get_text(key: str, seconds: float) -> str:
        if key not in texts:
            raise joining.SilentProcess(1, 3, seconds, TimeoutError())
        return texts[key]

    engine = mock.Mock(world=lambda: here, put_text=texts.__setitem__, get_text=get_text)
    for module in (meeting, whereabouts):
        monkeypatch.setattr(module, "store", lambda: engine)
        monkeypatch.setattr(module, "tensor_engine", lambda: engine)

    def become(index: int, number: int, done: dict[str, int]) -> None:
        here.process_index = index
        entries = [whereabouts.Entry(each, f"call {each}", "", each) for each in range(1, number + 1)]
        monkeypatch.setattr(whereabouts, "_entries", deque(entries))
        monkeypatch.setattr(whereabouts, "_done", Counter(done))

    return become


@pytest.mark.parametrize("arrived", [2, 3])
def test_a_letter_that_is_on_its_way_is_no_proof(arrived: int, processes) -> None:
    from keras_flow.backends.rendezvous import whereabouts

    processes(1, 5, {"letters": 3})  # has sent three, and gone on
    whereabouts.tell()
    processes(0, 4, {"letters": arrived})
    with whereabouts.waiting_for((1,), "a message", "letters", missing=1):
        assert (whereabouts._proof() is None) == (arrived == 2)


def test_calls_of_some_processes_are_compared_by_their_count(processes) -> None:
    from keras_flow.backends.rendezvous import meeting, whereabouts
    from keras_flow.errors import FlowError

    some = whereabouts.group_of((0, 1))
    for made, number, is_told in ((2, 5, False), (1, 5, True), (1, 4, False)):
        processes(1, number, {some: made})
        whereabouts.tell()
        processes(0, 4, {some: 2})
        with whereabouts.waiting_for((0, 1), "kf.comm.broadcast"):
            assert (whereabouts._proof() is not None) == is_told, (made, number)
    for made, is_told in ((1, False), (2, True), (3, False)):
        processes(1, 4, {some: made})
        with whereabouts.waiting_for((0, 1), "kf.comm.all_reduce"):
            whereabouts.tell()
        processes(0, 4, {some: 2})
        with whereabouts.waiting_for((0, 1), "kf.comm.broadcast of float32[1]", in_engine=False):
            assert (whereabouts.elsewhere(1) is not None) == is_told, made
    processes(1, 4, {some: 2})
    with whereabouts.waiting_for((0, 1), "kf.comm.all_reduce"):
        whereabouts.tell()
    processes(0, 4, {some: 2})
    with pytest.raises(FlowError, match=r"kf.comm.broadcast .*needs all ranks: .* rank 1 is in kf.comm.all_reduce"):
        meeting.meet_some("kf.comm.broadcast", (0, 1))
