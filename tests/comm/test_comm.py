"""`kf.comm` against numpy: every op, dtype and size of group, in one process and between several."""

import json
import os
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.backends.engines import that_train
from keras_flow.comm import group, objects, point_to_point, repeated
from keras_flow.launch.environment import free_port
from tests import sampling
from tests.comm import cases
from tests.launch import programs

pytestmark = pytest.mark.timeout(280)

JOB = Path(__file__).with_name("job.py")

#: all, two of them, three in another order, one
GROUPS = [[0, 1, 2, 3], [1, 3], [3, 0, 2], [2]]


#: of which one process drives all ranks
SINGLE = ["jax", "tensorflow"]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_four_ranks(backend: str, on_ranks) -> None:
    assert on_ranks(backend)(cases.everything, GROUPS) == len(GROUPS)


@sampling.one_in(3)
@pytest.mark.parametrize("backend", sampling.on_one(SINGLE))
def test_four_ranks_of_one_process(backend: str, on_ranks) -> None:
    assert on_ranks(backend)(cases.everything, GROUPS[:2], True) == 2


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", SINGLE)
def test_four_ranks_of_one_process_in_every_dtype(backend: str, on_ranks) -> None:
    # every op, dtype, shape and group is a program that is compiled
    assert on_ranks(backend)(cases.everything, GROUPS, timeout=1700.0) == len(GROUPS)


#: processes, ranks of each, groups of ranks; torch's four ranks above are processes
JOBS = {
    "2 processes": (2, 1, [[0, 1], [1]]),
    "3 processes": (3, 1, [[2, 0, 1], [0, 2]]),
    "2 processes of 2 ranks": (2, 2, [[0, 1, 2, 3], [3, 0], [2, 3], [1, 2, 3]]),
}


@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize(("backend", "job"), sampling.each_on_one(SINGLE, list(JOBS), every=3))
def test_between_processes(backend: str, job: str, is_short: bool) -> None:
    run_job(backend, *JOBS[job], is_short)


def test_one_rank_has_itself() -> None:
    run_job("torch", 1, 1, [[0]], is_short=True)


def run_job(backend: str, processes: int, share: int, groups: list[list[int]], is_short: bool) -> None:
    groups = groups[:2] if is_short else groups
    command = ["-m", "keras_flow.launch", "--nproc_per_node", str(processes), "--devices_per_proc", str(share)]
    command += ["--timeout", "100", str(JOB), json.dumps(groups), *(["short"] if is_short else [])]
    root = str(Path(__file__).parents[2])
    code, out, err = programs.finish(programs.start(command, backend, PYTHONPATH=root), 250 if is_short else 1700)
    assert code == 0, err[-4000:]
    assert json.loads(out.splitlines()[-1]) == {
        "world": processes * share,
        "processes": processes,
        "groups": len(groups),
    }


@sampling.one_in(2)
@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_distributed_data_parallel(backend: str) -> None:
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", "--timeout", "100", str(JOB.with_name("ddp_job.py"))]
    root = str(Path(__file__).parents[2])
    code, out, err = programs.finish(programs.start(command, backend, PYTHONPATH=root), 250)
    assert code == 0, err[-4000:]
    assert out.splitlines()[-1] == "done"


def pair() -> kf.Placement:
    return kf.Placement([0, 1])


def test_what_is_refused(on_ranks) -> None:
    def program() -> None:
        def everywhere(x: object) -> dict[int, object]:
            return dict.fromkeys(range(4), x)

        ones = everywhere(np.ones(3, "float32"))
        wrong = {
            "op is one of sum, mean, min, max, product": lambda: kf.comm.all_reduce(ones, op="median"),
            "the mean of int32 is no int32": lambda: kf.comm.all_reduce(everywhere([1, 2]), op="mean"),
            r"nothing given for ranks \[2, 3\]": lambda: kf.comm.all_reduce({0: [1], 1: [2]}),
            r"this process drives ranks \[0, 1, 2, 3\]; give a tensor for each": lambda: kf.comm.all_reduce([1.0]),
            "rank 0 calls all_reduce sum float32.3. where rank 1 calls": lambda: kf.comm.all_reduce(
                {**ones, 1: np.ones(2, "float32")}
            ),
            r"rank 5 is not in the group \[0, 1\]": lambda: kf.comm.broadcast(ones, 5, group=pair()),
            r"the group has ranks \[7\]; the job has 0 to 3": lambda: kf.comm.barrier(kf.Placement([0, 7])),
            "group is a kf.Placement of ranks": lambda: kf.comm.barrier([0, 1]),  # type: ignore[arg-type]
            "dim 0 of .3. must be a multiple of the 4 ranks": lambda: kf.comm.reduce_scatter_tensor(ones),
            "must give a list with one tensor for each of the 4 ranks": lambda: kf.comm.all_to_all(everywhere([[1.0]])),
            "complex numbers have no order": lambda: kf.comm.all_reduce(everywhere(np.ones(2, "complex64")), op="min"),
            "takes tensors of one rank, and this is a global tensor": lambda: kf.comm.all_reduce(
                everywhere(kf.ones((4,), placement=kf.Placement(range(4)), sbp="S(0)"))
            ),
            "'max' has no gradient": lambda: cases.differentiated(
                lambda x: keras.ops.sum(kf.comm.all_reduce(x, "max")[0]),
                {rank: keras.ops.array(one) for rank, one in ones.items()},
            ),
            "dst=9 is no rank of the job": lambda: kf.comm.send({0: [1.0]}, dst=9),
            "dst=1 is a rank of this process": lambda: kf.comm.send({0: [1.0]}, dst=1),
            "recv takes shape and dtype, or neither": lambda: kf.comm.recv(1, shape=(2,), rank=0),
            "scatter takes shape and dtype, or neither": lambda: kf.comm.scatter(ones, 0, shape=(2,)),
            r"rank 0 calls scatter from 0 of float32.3., float32.2. where rank 1 .* of float32.2.": lambda: (
                kf.comm.scatter(
                    {0: [np.ones(3, "float32"), np.ones(2, "float32")], 1: None}, 0, pair(), (2,), "float32"
                )
            ),
            r"rank 0 calls all_to_all of same_shape: \[.1,., .2,.\] where rank 1 calls": lambda: kf.comm.all_to_all(
                {0: [[1.0], [1.0, 2.0]], 1: [[1.0], [2.0]]}, pair(), same_shape=True
            ),
            r"rank 0 calls all_to_all of same_shape: \[.1,., .3,.\], which differ": lambda: kf.comm.all_to_all(
                {0: [[1.0], [1.0, 2.0, 3.0]], 1: [[1.0], [1.0, 2.0, 3.0]]}, pair(), same_shape=True
            ),
            "rank 0 calls all_gather of same_shape float32.3. where rank 1": lambda: kf.comm.all_gather(
                {**ones, 1: np.ones(2, "float32")}, same_shape=True
            ),
        }
        for text, call in wrong.items():
            with pytest.raises(kf.FlowError, match=text):
                call()

    on_ranks("jax")(program)


def test_a_mean_of_half_precision_is_in_range_where_the_sum_is_not(on_ranks) -> None:
    def program() -> None:
        given = {rank: np.full(4, 30000, "float16") for rank in range(4)}
        lists = {rank: [np.full(1, 30000, "float16")] * 4 for rank in range(4)}
        for found in (
            kf.comm.all_reduce(given, "mean"),
            {0: kf.comm.reduce(given, 0, "mean")[0]},
            kf.comm.reduce_scatter(lists, "mean"),
            kf.comm.reduce_scatter_tensor(given, "mean"),
        ):
            for value in found.values():
                assert set(np.asarray(value).tolist()) == {30000}

    on_ranks("jax")(program)


def test_a_plan_takes_shards_of_its_dtype(on_ranks) -> None:
    def program() -> None:
        source, target = (kf.Layout(kf.Placement(ranks), "S(0)", (4,)) for ranks in ([0, 1], [2, 3]))
        shards = {rank: np.ones(2, "int32") for rank in (0, 1)}
        with pytest.raises(kf.FlowError, match="the boxing plan is of float32, the shards are of int32"):
            kf.boxing.execute(kf.boxing.plan(source, target), shards)

    on_ranks("jax")(program)


def test_a_send_that_tells_its_shape_meets_no_recv_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    engine = mock.Mock(world=lambda: mock.Mock(size=2, local_ranks=(0,), process_of=lambda rank: rank))
    monkeypatch.setattr(point_to_point, "tensor_engine", lambda: engine)
    monkeypatch.setattr(point_to_point.repeated, "find", lambda *given: None)
    monkeypatch.setattr(point_to_point.meeting, "meet_some", lambda words, processes: said.append(words) or 1 / 0)
    for call in (
        lambda: kf.comm.send([1.0], 1),
        lambda: kf.comm.send([1.0], 1, send_meta=False),
        lambda: kf.comm.recv(1),
        lambda: kf.comm.recv(1, (), "float32"),
    ):
        with pytest.raises(ZeroDivisionError):
            call()
    kinds = ["tells dtype" in words for words in said]
    assert kinds == [True, False, True, False], said


def test_lists_have_one_dtype() -> None:
    for lists, wanted in (
        ([[True], [False, True]], "bool"),
        ([[], [1]], "int32"),
        ([[], []], "int32"),
        ([[True], [2]], "int32"),
        ([[1], [0.5]], "float32"),
    ):
        assert {str(each.dtype) for each in group._of_one_dtype(lists)} == {wanted}


def test_an_object_that_nobody_of_the_job_signed_is_not_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Writes:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "written"),)

    monkeypatch.setenv("KERAS_FLOW_TOKEN", "that of a stranger")
    sealed = objects._sealed(Writes())
    monkeypatch.setenv("KERAS_FLOW_TOKEN", "that of the job")
    with pytest.raises(kf.FlowError, match="no process of this job has signed"):
        objects._opened(sealed)
    assert not (tmp_path / "written").exists()
    monkeypatch.delenv("KERAS_FLOW_TOKEN")
    with pytest.raises(kf.FlowError, match="no process of this job has signed"):
        objects._opened(sealed)
    assert not (tmp_path / "written").exists()


def test_without_a_secret_only_literals_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERAS_FLOW_TOKEN", raising=False)
    for value in (
        3,
        -0.5,
        "ü",
        b"\x00",
        None,
        True,
        (1, [2.0]),
        {"epoch": 3, 4: {5, 6}},
        float("-inf"),
        {"inf": (float("inf"), "-inf")},
    ):
        found = objects._opened(objects._sealed(value))
        assert found == value and type(found) is type(value)
    found = objects._opened(objects._sealed({"nan": [float("nan"), float("inf")]}))
    assert repr(found) == "{'nan': [nan, inf]}"
    for value in (
        np.ones(2),
        np.float32(1),
        [type("Inf", (), {"__repr__": lambda self: "inf"})()],
        [Path()],
        lambda: 0,
        {"a": np.float64(2)},
    ):
        with pytest.raises(kf.FlowError, match=r"is no number, text, .*: start the job with keras-flow launch"):
            objects._opened(objects._sealed(value))
    plain = objects._sealed("text")
    monkeypatch.setenv("KERAS_FLOW_TOKEN", "that of the job")
    with pytest.raises(kf.FlowError, match="no process of this job has signed"):
        objects._opened(plain)


def test_an_object_that_cannot_be_pickled_travels_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank sends says so, since the others wait for it."""
    monkeypatch.setenv("KERAS_FLOW_TOKEN", "that of the job")
    with pytest.raises(kf.FlowError, match=r"an object \(dict\) cannot be pickled: .*local"):
        objects._opened(objects._sealed({"f": lambda: 0}))


def test_objects_whose_keys_are_ranks(on_ranks) -> None:
    def program() -> None:
        kf.init()
        given = {0: "cat", 1: "dog"}
        assert kf.comm.broadcast_object(given, src=0) == given
        assert kf.comm.all_gather_object(dict.fromkeys(range(4), kf.env.get_rank()))[2] == dict.fromkeys(range(4), 2)
        with pytest.raises(kf.FlowError, match="cannot be pickled"):  # on every rank
            kf.comm.broadcast_object({"f": (each for each in given)}, 0)

    on_ranks("torch")(program)


WAITS = """
import sys, time
import keras_flow as kf
kf.init()
kf.comm.barrier()
if kf.env.get_rank() == 1:
    time.sleep(12)
else:
    try:
        kf.comm.all_reduce([1.0])
    except kf.FlowError as error:
        print(error)
"""


@sampling.one_in(2)
def test_a_process_that_does_not_call_is_waited_for_until_the_limit(tmp_path: Path) -> None:
    """Without a launcher, on the engine whose operations have no limit of their own."""
    script = str(programs.write(tmp_path, WAITS))
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
    processes = [
        programs.start(
            [script],
            "tensorflow",
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
            KERAS_FLOW_TIMEOUT="4",
        )
        for index in range(2)
    ]
    (_, out, err), _ = (programs.finish(process) for process in processes)
    assert "process 1 of 2 did not answer within 4 s" in out, err[-2000:]


def test_ranks_that_call_different_things_are_told(on_ranks) -> None:
    def program() -> float:
        # a call that all ranks have made before is not compared again, and tests before this one made some
        repeated.begin_anew()
        odd = np.ones((2, 5, 1), "float32")
        with pytest.raises(
            kf.FlowError,
            match=r"all_reduce sum float32.2, 5, 1. .* needs all ranks: rank 0 .*is in kf.comm.all_gather fl",
        ):
            kf.comm.all_reduce(odd) if kf.env.get_rank() == 0 else kf.comm.all_gather(odd)
        return float(kf.comm.all_reduce(1.0))  # all were told, so all go on

    assert on_ranks("torch")(program) == 4.0


def test_ddp_takes_a_model_of_keras() -> None:
    with pytest.raises(kf.FlowError, match="takes a Keras model, and was given a object: write it of Keras layers"):
        kf.DistributedDataParallel(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", sampling.on_one(SINGLE))
def test_gradients_are_those_of_the_weights_that_are_trained_now(engine: str, on_ranks) -> None:
    def program(engine: str) -> list[list[float]]:
        import importlib

        replica = importlib.import_module(f"keras_flow.backends.{engine}.replica")
        layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer=start) for start in ("ones", "zeros")]
        model = keras.Sequential([keras.Input((1,)), *layers])
        step = replica.make_replica(model, (0,), 1, False).gradients_of(lambda x: keras.ops.sum(model(x)), False)
        x = keras.ops.ones((1, 1))
        found = []
        for first, second in ((True, True), (True, False), (False, True)):  # the loss is x * 1 * 0
            layers[0].trainable, layers[1].trainable = first, second
            found.append([float(np.asarray(each)[0, 0]) for each in step(x)[1]])
        return found

    assert on_ranks(engine)(program, engine) == [[0.0, 1.0], [0.0], [1.0]]
