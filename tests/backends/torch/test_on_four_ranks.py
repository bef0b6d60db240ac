"""What the parity grid does not show of torch, on four processes."""

import pytest

from tests import sampling
from tests.backends.torch import registry

ENGINE = "torch"


def run(name: str) -> None:
    registry.load()[name]()


@pytest.mark.parametrize("name", sampling.some(list(registry.load()), every=5))
def test_check(name: str, on_ranks) -> None:
    on_ranks(ENGINE)(run, name)


def _sums_in_any_order() -> list[float]:
    import torch
    import torch.distributed as dist

    import keras_flow as kf
    from keras_flow.backends.torch.collectives import process_group

    rank, found = kf.env.get_rank(), []
    # the stages of two pipelines may have the same ranks in other orders
    for ranks in ((1, 3), (3, 1), (2, 0, 3, 1), (0, 3, 2), (3, 2, 0)):
        if rank in ranks:
            value = torch.tensor([float(rank)])
            dist.all_reduce(value, group=process_group(ranks))
            found.append(float(value) - sum(ranks))
    return found


def test_ranks_in_any_order_are_one_group(on_ranks) -> None:
    assert set(on_ranks(ENGINE)(_sums_in_any_order)) == {0.0}
