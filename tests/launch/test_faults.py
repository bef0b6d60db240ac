"""A process of a training job that fails ends the job within 10 s on every engine, and is named."""

from pathlib import Path

import pytest

from keras_flow.backends.engines import that_train
from tests import sampling
from tests.launch import faults

pytestmark = pytest.mark.timeout(150)

#: kinds of which about a third are run; the others are in `make test-full`
QUICK = {("raises", 2), ("is killed", 2), ("is stopped", 1)}


def cases() -> list:
    return [
        pytest.param(
            backend,
            fault,
            hosts,
            marks=[
                pytest.mark.xdist_group(backend),
                sampling.one_in(3) if (fault, hosts) in QUICK else pytest.mark.full,
            ],
        )
        for backend in that_train()
        for fault in faults.FAULTS
        for hosts in ((2,) if fault == faults.NETWORK else (1, 2))
    ]


@pytest.mark.parametrize(("backend", "fault", "hosts"), cases())
def test_a_process_that_fails_ends_the_job(backend: str, fault: str, hosts: int, tmp_path: Path) -> None:
    ending = faults.end(backend, fault, hosts, tmp_path)
    limit = 10 + (faults.TIMEOUT if fault == "hangs" else 0)
    assert ending.seconds < limit
    assert ending.named, ending.error
    assert all(ending.code)
    assert not ending.left
