"""Jobs on a Ray cluster of two nodes, which are two raylets of one machine."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from keras_flow.launch import on_ray
from keras_flow.launch.failure import RankError
from keras_flow.launch.job import Job
from tests import sampling
from tests.launch import programs

pytestmark = [pytest.mark.timeout(280), pytest.mark.xdist_group("ray"), pytest.mark.filterwarnings("default")]

TRAINS = """
import json, os, sys
import keras_flow as kf
kf.init()
import keras, numpy as np
keras.utils.set_random_seed(0)
x = np.linspace(-1, 1, 48).reshape(12, 4).astype("float32")
with kf.DataParallel().scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = model.fit(x, np.cos(x.sum(1, keepdims=True)), batch_size=6, epochs=2, verbose=0).history["loss"]
print(json.dumps({"rank": kf.env.process_index(), "world": kf.env.get_world_size(), "losses": losses,
                  "nodes": kf.env.get_node_size(), "local": int(os.environ["LOCAL_RANK"])}), flush=True)
if len(sys.argv) > 1 and kf.env.process_index() == 1:
    sys.exit(int(sys.argv[1]))
kf.comm.barrier()
"""

RUNS = """
import keras_flow as kf

def main(offset):
    total = kf.comm.all_reduce([float(kf.env.get_rank() + offset)])
    return float(total[0]), kf.env.get_world_size()

def fails():
    if kf.env.get_rank() == 1:
        raise ValueError("boom")
    kf.comm.barrier()

if __name__ == "__main__":
    print(kf.run(main, devices=2, on="ray", args=(10,)))
    try:
        kf.run(fails, devices=2, on="ray")
    except kf.LaunchError as error:
        print(str(error).splitlines()[0])
    try:
        kf.run(main, devices=64, on="ray", args=(1,))
    except kf.LaunchError as error:
        print(str(error).splitlines()[0])
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes, with two CPUs and one."""
    utilities = pytest.importorskip("ray.cluster_utils")
    cluster = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


SEES = """
import os
import keras_flow as kf
from keras_flow import settings

def main():
    seen = (os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get(settings.OWN_ACCELERATORS))
    return kf.comm.all_gather_object(seen)

if __name__ == "__main__":
    print(kf.run(main, devices=2, on="ray"))
    try:
        kf.run(main, devices=3, on="ray")
    except kf.LaunchError as error:
        print(error)
    os.environ["KERAS_TORCH_DEVICE"] = "cpu"
    print(kf.run(main, devices=3, on="ray"))
"""


@sampling.one_in(3)
def test_gpus_of_a_cluster(tmp_path: Path) -> None:
    """Ray is told of two GPUs: each process has one of its own, and there are none for a third."""
    utilities = pytest.importorskip("ray.cluster_utils")
    cluster = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "num_gpus": 2})
    try:
        code, out, err = run([str(programs.write(tmp_path, SEES))], "torch", cluster.address)
    finally:
        cluster.shutdown()
    assert code == 0, err
    first, refused, on_cpu = [line for line in out.splitlines() if line.startswith(("[", "a job"))]
    assert sorted(eval(first)) == [("0", "1"), ("1", "1")]
    assert refused.startswith("a job of 3 processes with 1 GPU each does not fit the Ray cluster, whose nodes have 2.")
    assert "KERAS_TORCH_DEVICE=cpu" in refused
    assert {mine for _, mine in eval(on_cpu)} == {None}


def run(command: list[str], backend: str, address: str) -> tuple[int, str, str]:
    # Ray's workers look for the package where this process found it
    variables = {"RAY_ADDRESS": address, "RAY_DEDUP_LOGS": "0", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return programs.finish(programs.start(command, backend, **variables), 200)


def lines(out: str) -> list[dict]:
    """What ranks printed, which Ray streams with their names before it."""
    return [json.loads(line[line.index("{") :]) for line in out.splitlines() if '"losses"' in line]


@sampling.one_in(3)
@pytest.mark.parametrize("backend", sampling.some(["torch", "jax", "tensorflow"]))
def test_a_script(backend: str, cluster: str, tmp_path: Path) -> None:
    script = programs.write(tmp_path, TRAINS)
    options = ["--on", "ray", "--ranks", "3", "--all-output", "--timeout", "100"]
    code, out, err = run(["-m", "keras_flow.launch", *options, str(script)], backend, cluster)
    assert code == 0, out + err
    found = lines(out + err)
    assert sorted(each["rank"] for each in found) == [0, 1, 2]
    assert {each["world"] for each in found} == {3}
    assert sorted(each["local"] for each in found) == [0, 0, 1], "two on one node, one on the other"
    assert found[0]["losses"] == found[1]["losses"] == found[2]["losses"]
    assert found[0]["losses"][1] < found[0]["losses"][0]
    code, out, err = run(["-m", "keras_flow.launch", *options, str(script), "7"], backend, cluster)
    assert code == 7
    assert "rank 1 of 3" in err and "left with exit code 7" in err


@sampling.one_in(3)
def test_a_function(cluster: str, tmp_path: Path) -> None:
    code, out, err = run([str(programs.write(tmp_path, RUNS))], "torch", cluster)
    assert code == 0, err
    printed = [line for line in out.splitlines() if not line.startswith("(")]
    assert printed[0] == "(21.0, 2)" or "(21.0, 2)" in out
    assert "rank 1 of 2" in out and "ValueError: boom" in out
    assert "a job of 64 processes needs as many CPUs of the Ray cluster, which has 3 on 2 nodes" in out


class _TaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class _ActorError(Exception):
    pass


class _FakeRay:
    """Ray as far as results of actors go: each is an error, which arrive in this order."""

    exceptions = SimpleNamespace(RayTaskError=_TaskError, RayActorError=_ActorError)

    def wait(self, waiting: list[Exception], timeout: float | None) -> tuple[list[Exception], list[Exception]]:
        return waiting[:1], waiting[1:]

    def get(self, found: Exception) -> None:
        raise found


def test_a_lost_node_is_the_cause_whoever_is_heard_of_first() -> None:
    lost, blamed = _ActorError("node died"), RankError("rank 0 failed: Connection closed", 0)
    for order in ([_TaskError(blamed), lost], [lost, _TaskError(blamed)]):
        with pytest.raises(_ActorError):
            on_ray._results(_FakeRay(), {each: rank for rank, each in enumerate(order)})
    with pytest.raises(RankError):
        on_ray._results(_FakeRay(), {_TaskError(blamed): 0})


def test_attempts_are_counted_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The launchers of the actors start nothing again: their logs go on, and the number is that of the job."""
    tried: list[tuple[int, int]] = []

    def placed(ray: object, job: Job, payload: object, gpus: float) -> bytes:
        tried.append((job.attempt, job.restarts))
        if len(tried) == 1:
            raise _ActorError("node died")
        if len(tried) == 2:
            raise RankError("rank 1 failed", 1, 3)
        return b"result"

    fake = SimpleNamespace(
        is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 2.0}, nodes=list, exceptions=_FakeRay.exceptions
    )
    monkeypatch.setattr(on_ray, "_ray", lambda: fake)
    monkeypatch.setattr(on_ray, "_placed", placed)
    assert on_ray.launch(Job(2, ["true"], 60.0, restarts=2)) == b"result"
    assert tried == [(0, 0), (1, 1), (2, 2)]
    out, err = capsys.readouterr()
    assert out == "" and "restart 1 of 2" in err and "rank 1 failed\nkeras-flow: restart 2 of 2" in err


def test_without_ray(tmp_path: Path) -> None:
    body = (
        "import sys\nsys.modules['ray'] = None\nsys.argv = ['keras-flow', 'launch', '--on', 'ray', '--ranks', '2', "
        f"{str(programs.write(tmp_path, ''))!r}]\nfrom keras_flow.cli.app import main\nmain()"
    )
    code, _, err = programs.finish(programs.start(["-c", body], "torch"))
    assert code == 1
    assert "pip install 'keras-flow[ray]'" in err
