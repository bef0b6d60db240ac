"""Processes that read their own rows train as one device that reads all of them, with each source of data."""

import functools
from pathlib import Path

import numpy as np
import pytest

from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(300)

JOB = Path(__file__).with_name("reading_job.py")
ROOT = Path(__file__).parents[2]

#: largest difference between a job and one device; measured: below 1e-6
TOLERANCE = 1e-5

#: engine and layout -> options of `keras-flow launch`, processes, and rows of a full batch that each reads
PROCESSES = {
    ("jax", "dp"): (("--nproc_per_node", "4"), 4, 4),
    ("tensorflow", "2x2"): (("--nproc_per_node", "2", "--devices_per_proc", "2"), 2, 8),
    ("torch", "2x2"): (("--nproc_per_node", "4"), 4, 8),
}


@functools.cache
def on_one_device(backend: str, folder: Path) -> dict[str, np.ndarray]:
    alone = folder / f"{backend}-one"
    alone.mkdir()
    code, _, err = programs.finish(programs.start([str(JOB), "one", str(alone)], backend, PYTHONPATH=str(ROOT)), 150)
    assert code == 0, err
    return dict(np.load(alone / "process-0.npz"))


@pytest.mark.parametrize(
    ("backend", "layout"),
    [pytest.param(*case, marks=[pytest.mark.xdist_group(case[0]), sampling.one_in(5)]) for case in PROCESSES],
)
def test_processes_that_read_their_rows_give_the_numbers_of_one_device(
    backend: str, layout: str, tmp_path: Path
) -> None:
    expected = on_one_device(backend, tmp_path)
    options, count, rows = PROCESSES[backend, layout]
    command = ["-m", "keras_flow.launch", *options, "--timeout", "120", str(JOB), layout, str(tmp_path)]
    settings = {"KERAS_FLOW_RANDOM": "stock", "PYTHONPATH": str(ROOT)}
    code, _, err = programs.finish(programs.start(command, backend, **settings), 200)
    assert code == 0, err
    assert "reads whole batches of the generator" in err and err.count("reads whole batches") == 1
    jobs = sorted(tmp_path.glob("process-*.npz"))
    assert len(jobs) == count
    for path in jobs:
        found = dict(np.load(path))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if not name.startswith("read/"):
                worst = float(np.max(np.abs(found[name] - value)))
                assert worst < TOLERANCE, f"{path.name}: {name} differs by {worst:.1e}"
        # two epochs and an evaluation of 4 full batches and 7 rows: of three in each loop as many rows more are
        # compared, those of 7 may be read whole, and Keras may read a batch to build the model
        most = 3 * (4 * rows + 7 + 3 * rows) + 16
        assert found["read/PyDataset"] <= most
        # the first batch is read whole by each loop
        assert found["read/DataLoader"] <= most + 3 * 16
