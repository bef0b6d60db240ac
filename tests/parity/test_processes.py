"""Several processes give the numbers of one device: training, callbacks, files, rows that do not divide."""

import functools
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from tests import sampling
from tests.launch import programs
from tests.parity.cases import CASES
from tests.parity.results import Grid
from tests.parity.support import SMALL

pytestmark = pytest.mark.timeout(240)

JOB = Path(__file__).with_name("job.py")

#: largest difference between a job and one device, of what is of the size of 1; measured: below 2e-6
TOLERANCE = 1e-5

#: engine -> layout -> options of `keras-flow launch`
PROCESSES = {
    "jax": {"dp": ("--nproc_per_node", "3"), "2x2": ("--nproc_per_node", "2", "--devices_per_proc", "2")},
    "tensorflow": {
        "dp": ("--nproc_per_node", "3"),
        "2x2": ("--nproc_per_node", "2", "--devices_per_proc", "2"),
        "mirrored": ("--nproc_per_node", "3"),
        "mirrored, 2 each": ("--nproc_per_node", "2", "--devices_per_proc", "2"),
    },
    "torch": {"dp": ("--nproc_per_node", "3"), "2x2": ("--nproc_per_node", "4")},
}


@functools.cache
def on_one_device(backend: str, folder: Path) -> dict[str, np.ndarray]:
    """The numbers of plain Keras."""
    alone = folder / f"{backend}-one"
    alone.mkdir()
    code, _, err = programs.finish(programs.start([str(JOB), "one", str(alone)], backend), 100)
    assert code == 0, err
    return dict(np.load(alone / "process-0.npz"))


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


def engines() -> list:
    return [
        pytest.param(backend, layout, marks=[pytest.mark.xdist_group(backend), sampling.one_in(7)])
        for backend, layouts in PROCESSES.items()
        for layout in layouts
    ]


@pytest.mark.parametrize(("backend", "layout"), engines())
def test_several_processes_give_the_numbers_of_one_device(
    backend: str, layout: str, tmp_path: Path, common: Path
) -> None:
    expected = on_one_device(backend, common)
    options = PROCESSES[backend][layout]
    # the draws of plain Keras on this engine, which one device is compared with
    program = [str(JOB), layout.partition(",")[0], str(tmp_path)]
    command = ["-m", "keras_flow.launch", *options, "--timeout", "100", *program]
    # a process of JAX may have more devices than its share
    environment = {"KERAS_FLOW_RANDOM": "stock", "JAX_NUM_CPU_DEVICES": "3"}
    code, _, err = programs.finish(programs.start(command, backend, **environment), 150)
    assert code == 0, err
    jobs = sorted(tmp_path.glob("process-*.npz"))
    assert len(jobs) == int(options[1])
    for path in jobs:
        found = dict(np.load(path))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            worst = float(np.max(np.abs(found[name] - value)))
            assert worst < TOLERANCE, f"{path.name}: {name} differs by {worst:.1e}"
    # written once, by one process
    assert sorted(path.name for path in tmp_path.glob("*.keras")) == ["epoch-1.keras", "epoch-2.keras"]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3, "a heading and two epochs"
    assert (tmp_path / "backup" / "latest.weights.h5").exists()


@sampling.one_in(3)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("layout", ["dp4", "2x2", "tp4"])
@pytest.mark.parametrize("backend", sampling.on_one(("jax", "tensorflow")))
def test_two_processes_give_the_grids_numbers(backend: str, layout: str, half: int) -> None:
    """Half of the small grid under one layout; under one, a placement too of which a process has no rank."""
    options = ("--processes", "2", "--layouts", layout, "--trace")
    chosen = (*SMALL, "rnn")[half::2]
    only = "|".join(f"^{re.escape(name)}$" for name in (*chosen, "two placements"))
    found = Grid(backend, *options, "--only", only, limit=230).start().finish()
    refused = {line["case"]: str(line.get("over") or line["error"]) for line in found if line["status"] != "ok"}
    if layout == "tp4":
        assert refused.pop("two placements").startswith("no rank of the placement [0, 1] is of the process that drives")
    assert not refused
    asked = [name for name in (*chosen, "two placements") if layout in CASES[name].on(backend)]
    assert sorted(line["case"] for line in found) == sorted(asked)


METHODS = ("predict", "evaluate", "fit", "train_on_batch", "test_on_batch", "predict_on_batch")
OTHER_DATA = """
import sys
import numpy as np
import keras_flow as kf
kf.init()
import keras
keras.utils.set_random_seed(0)
own = np.random.default_rng(kf.env.process_index())  # a seed of its own
x, y = own.standard_normal((32, 4)).astype("float32"), np.zeros((32, 1), "float32")
for strategy in sys.argv[1:]:
    with kf.DataParallel(strategy=None if strategy == "default" else strategy).scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        for name, given in {
            "predict": (x, 8), "evaluate": (x, y, 8), "fit": (x, y, 8),
            "train_on_batch": (x, y), "test_on_batch": (x, y), "predict_on_batch": (x,),
        }.items():
            try:
                getattr(model, name)(*given)
            except kf.FlowError as error:
                print("SAID", strategy, name, error, flush=True)
with kf.DataParallel().scope():
    model.fit(x, y, batch_size=8, verbose=0)
"""


@pytest.mark.parametrize("backend", sampling.on_one(("jax", "tensorflow")))
def test_processes_that_read_other_data(backend: str, tmp_path: Path) -> None:
    """torch's are among its own tests."""
    script = programs.write(tmp_path, OTHER_DATA)
    strategies = ("default", "mirrored") if backend == "tensorflow" else ("default",)
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", str(script), *strategies]
    code, out, err = programs.finish(programs.start(command, backend), 100)
    assert code == 1
    different = "the ranks are fed different batches: input 'x' of batch 0 differs on rank 1 from rank 0"
    assert different in err
    for strategy, name in itertools.product(strategies, METHODS):
        assert f"SAID {strategy} {name} {different}" in out, (strategy, name)
    assert "float32 of shape [8, 4]" in err


OTHER_LENGTHS = """
import numpy as np
import keras_flow as kf
kf.init()
import keras
class Batches(keras.utils.PyDataset):
    num_batches = 3 + kf.env.process_index()
    def __getitem__(self, index):
        return np.ones((8, 4), "float32"), np.zeros((8, 1), "float32")
with kf.DataParallel().scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(Batches(), verbose=0)
"""


@pytest.mark.parametrize("backend", sampling.on_one(("jax", "tensorflow")))
def test_processes_whose_data_have_other_lengths(backend: str, tmp_path: Path) -> None:
    """The longer ones would wait for the others; torch's are among its own tests."""
    script = programs.write(tmp_path, OTHER_LENGTHS)
    command = ["-m", "keras_flow.launch", "--nproc_per_node", "2", str(script)]
    code, _, err = programs.finish(programs.start(command, backend), 100)
    assert code == 1
    assert "the ranks are fed data of different lengths: rank 0 has 3 batches, rank 1 has 4" in err
