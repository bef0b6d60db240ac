"""`keras_flow.hvd` against Horovod's formulas, in jobs of processes on every engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from keras_flow.backends.engines import that_train
from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def launched(backend: str, *options: str, limit: float = 500) -> tuple[int, str, str]:
    """Status, output and errors of a job."""
    command = ["-m", "keras_flow.launch", "--timeout", "120", *options]
    return programs.finish(programs.start(command, backend, PYTHONPATH=str(ROOT)), limit)


@sampling.one_in(2)
@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_two_ranks(backend: str, tmp_path: Path) -> None:
    code, out, err = launched(backend, "--nproc_per_node", "2", str(HERE / "job.py"), str(tmp_path))
    assert code == 0, err[-4000:]
    assert out.splitlines()[-1] == "done"
    # once for each of the two calls of `init` after which hvd is new
    assert err.count("keras_flow.hvd: 2 ranks; batch_size counts the rows of one rank, of the data that it is") == 2


@pytest.mark.full
def test_three_ranks(tmp_path: Path) -> None:
    code, out, err = launched("torch", "--nproc_per_node", "3", str(HERE / "job.py"), str(tmp_path))
    assert code == 0, err[-4000:]
    assert out.splitlines()[-1] == "done"


@sampling.one_in(2)
@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_a_program_that_fails_goes_on_from_its_commit(backend: str) -> None:
    options = ("--nproc_per_node", "2", "--max_restarts", "1", str(HERE / "elastic_job.py"))
    code, out, err = launched(backend, *options)
    assert code == 0, err[-4000:]
    assert "restart 1 of 1" in err
    assert "began at epoch 2 batch 0" in out and out.splitlines()[-1] == "done"


@pytest.mark.parametrize("backend", sampling.on_one(("jax", "tensorflow")))
def test_a_process_of_several_ranks_is_refused(backend: str) -> None:
    code, _, err = launched(backend, "--devices", "2", "-m", "tests.hvd.several")
    assert code != 0
    assert "a process is a rank, and this one drives ranks [0, 1]" in err
    assert "keras-flow launch --nproc_per_node 2" in err


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
def test_run_returns_what_each_rank_returned(backend: str) -> None:
    code, out, err = programs.finish(programs.start(["-m", "tests.hvd.function"], backend, PYTHONPATH=str(ROOT)), 200)
    assert code == 0, err[-4000:]
    assert out.splitlines()[-1] == "[(5, 3.0), (15, 3.0)]"


@sampling.one_in(2)
@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_the_example_of_horovod(backend: str) -> None:
    code, out, err = launched(backend, "--nproc_per_node", "2", str(HERE / "digits.py"))
    assert code == 0, err[-4000:]
    assert float(out.rpartition("accuracy ")[2].split()[0]) > 0.8, out


def test_check_build() -> None:
    code, out, err = launched("torch", "--check-build")
    assert code == 0, err
    assert "[X] PyTorch" in out and "[X] keras-flow launch" in out
