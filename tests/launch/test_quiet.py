"""A right run shows the lines of the program and ours, and none of the engines' own libraries."""

import re
from pathlib import Path

import pytest

from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(300)

PROGRAM = str(Path(__file__).parent / "quiet.py")
_OURS = re.compile(
    rf"{re.escape(PROGRAM)}:\d+: ComputedWhole: .*|  model\.(?:fit|evaluate)\(x, y, batch_size=4, verbose=0\)"
)
JOBS = [
    ("jax", ("--devices", "4")),
    ("jax", ("--nproc_per_node", "2", "--devices_per_proc", "2")),
    ("tensorflow", ("--devices", "4")),
    ("tensorflow", ("--nproc_per_node", "2", "--devices_per_proc", "2")),
    ("torch", ("--devices", "4")),
]


@pytest.mark.parametrize(("backend", "options"), [pytest.param(*job, marks=sampling.one_in(2)) for job in JOBS])
def test_every_line_of_a_right_run(backend: str, options: tuple[str, ...]) -> None:
    command = ["-m", "keras_flow.cli.app", "launch", *options, PROGRAM]
    code, out, err = programs.finish(programs.start(command, backend), 280)
    assert code == 0, err
    # fewer rows than ranks, or rows that do not divide, are told of by a warning of ours and its line of source
    own = [line for line in err.splitlines() if not _OURS.fullmatch(line)]
    assert (out, own) == ("trained\n", ["and said so"]), err
