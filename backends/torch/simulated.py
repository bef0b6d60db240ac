"""Boxing and collectives between ranks that this process simulates (`kf.init(n, simulate=True)`).

All their arrays are in this process. torch's own way to simulate ranks, `LocalTensorMode`, computes each operator of a
DTensor for all ranks. Global tensors do that themselves, and so need no private module of torch; Keras's training loop
would.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from keras_flow.backends.collective_engine import Counts, Pending
from keras_flow.backends.torch.tensors import as_numpy, put
from keras_flow.boxing.simulate import simulate
from keras_flow.boxing.spec import BoxingPlan


def redistribute(plan: BoxingPlan, shards: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Run a plan by the reference executor, on numpy's copies."""
    results = simulate(plan, {rank: as_numpy(value) for rank, value in shards.items()}, check_copies=False)
    return {rank: put(value, rank) for rank, value in results.items()}


def exchange(ranks: tuple[int, ...], values: Mapping[int, torch.Tensor], counts: Counts) -> Pending:
    """Parts of each rank's flat array for each member."""
    parts = {
        rank: torch.split(values[rank].detach(), list(row)) for rank, row in zip(ranks, counts.table, strict=True)
    }  # sender -> by receiver
    arrived = {rank: torch.cat([parts[sender][place] for sender in ranks]) for place, rank in enumerate(ranks)}
    return Pending(lambda: arrived)


def gather_all(ranks: tuple[int, ...], values: Mapping[int, torch.Tensor]) -> Pending:
    """All flat arrays, on each."""
    joined = torch.cat([values[sender].detach() for sender in ranks])
    return Pending(lambda: {rank: joined.clone() for rank in ranks})
