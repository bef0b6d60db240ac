"""A process of a training job that fails ends the job within 10 s on every engine, and is named."""

from pathlib import Path

import pytest

from keras_flow.backends.engines import that_train
from tests.launch import faults

pytestmark = pytest.mark.timeout(150)

#: one of each kind for each engine; the others are in `make test-full`
QUICK = {("raises", 2), ("is killed", 2), ("is stopped", 1)}


#: across hosts the error names the process that noticed another one's fault, which is not looked for there
NOT_NAMED = {("leaves early", 2), ("is stopped", 2), ("hangs", 2)}


def cases() -> list:
    return [
        pytest.param(
            backend,
            fault,
            hosts,
            marks=[pytest.mark.xdist_group(backend)] + ([] if (fault, hosts) in QUICK else [pytest.mark.full]),
        )
        for backend in that_train()
        for fault in faults.FAULTS
        for hosts in (1, 2)
    ]


@pytest.mark.parametrize(("backend", "fault", "hosts"), cases())
def test_a_process_that_fails_ends_the_job(backend: str, fault: str, hosts: int, tmp_path: Path) -> None:
    ending = faults.end(backend, fault, hosts, tmp_path)
    # torch's ranks notice one that is stopped or hangs by the stated timeout, the other engines by their heartbeats
    limit = 10 + (faults.TIMEOUT if fault in ("hangs", "is stopped") else 0)
    assert ending.seconds < limit
    assert ending.named or (fault, hosts) in NOT_NAMED, ending.error
    assert all(ending.code)
    assert not ending.left
