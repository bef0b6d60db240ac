"""`keras_flow.compat.oneflow` against NumPy and plain Keras, on four ranks of every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from keras_flow.backends.engines import that_train
from tests import sampling
from tests.compat import programs
from tests.launch import programs as jobs

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "older_worlds"


@pytest.mark.parametrize("backend", sampling.on_one(that_train()))
def test_the_reference_programs(backend: str, on_ranks: Callable) -> None:
    on_ranks(backend)(programs.small)


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
@pytest.mark.parametrize(
    "program",
    [
        programs.consistent_lenet,
        programs.variables_of_ones_own,
        programs.grid_of_devices,
        programs.optimizers,
        programs.older_config,
    ],
)
def test_more_programs(backend: str, program: Callable, on_ranks: Callable) -> None:
    on_ranks(backend)(program)


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
def test_checkpoints(backend: str, on_ranks: Callable, tmp_path: object) -> None:
    on_ranks(backend)(programs.checkpoints, str(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("backend", that_train())
@pytest.mark.parametrize("name", ["mlp", "lenet", "mirrored", "hybrid", "pipeline"])
def test_examples(name: str, backend: str, tmp_path: Path) -> None:
    command = ["-m", "keras_flow.launch", "--devices", "2", "--timeout", "120", str(EXAMPLES / f"oneflow_{name}.py")]
    save = ["--save", str(tmp_path / "models")] if name == "lenet" else []
    code, out, err = jobs.finish(jobs.start([*command, "--small", *save], backend, PYTHONPATH=str(ROOT)), 250)
    assert code == 0, err[-4000:]
    losses = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("epoch")]
    assert losses[-1] < 0.75 * losses[0], out
    assert not save or "'outlayer/kernel'" in out
