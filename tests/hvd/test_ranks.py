"""The places of ranks on hosts that have different numbers of processes; names that are not there."""

from __future__ import annotations

import pytest

from keras_flow import hvd
from keras_flow.current.processes import Processes
from keras_flow.errors import FlowError
from keras_flow.hvd import ranks


@pytest.mark.parametrize(
    ("index", "local", "count", "wanted"), [(0, 0, 2, (0, 2)), (1, 1, 2, (0, 1)), (2, 0, 1, (1, 2))]
)
def test_hosts_of_unlike_sizes(
    index: int, local: int, count: int, wanted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Processes(index=index, count=3, local_index=local, local_count=count)
    monkeypatch.setattr(ranks, "find", lambda: here)
    monkeypatch.setattr(ranks, "_places", ((0, 2), (1, 2), (0, 1)))
    assert (ranks.cross_rank(), ranks.cross_size()) == wanted
    assert not ranks.is_homogeneous()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("allreduce_async", r"use hvd\.allreduce, which waits, or kf\.comm\.all_reduce\(x, async_op=True\)"),
        ("DistributedGradientTape", r"kf\.DistributedDataParallel\(model\)"),
        ("nccl_built", "keras-flow launch --check-build"),
        ("of_no_library", r"from_horovod\.md"),
    ],
)
def test_a_name_that_is_not_there_says_what_is(name: str, instead: str) -> None:
    with pytest.raises(FlowError, match=rf"hvd\.{name} is not in keras_flow\.hvd\. Instead: .*{instead}"):
        getattr(hvd, name)
    assert not hasattr(hvd, name)
