"""Prints the orders of torch's own schedules as CSV: torch's classes are asked, with stages that have no layers.

python -m tests.schedules.torch_orders ScheduleZBVZeroBubble:4:8:2        4 ranks, 8 micro-batches, 2 stages of a rank

After each stands what torch makes of it, as `_dump_csv` writes it: messages, sums, gathers of weights.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from torch.distributed.pipelining import schedules


class Stage:
    """What torch's schedules read of a stage."""

    def __init__(self, ranks: int, stages: int, index: int):
        self.group_size, self.num_stages, self.group_rank, self.stage_index = ranks, stages, 0, index
        self.group = self.submod = None
        self.has_backward, self.device = False, "cpu"
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.stage_index_to_group_rank = {stage: stage % ranks for stage in range(stages)}


def csv_of(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[str, str]:
    """Return the CSV of one of torch's schedules: of what is computed, and of all that is done."""
    stages = ranks * chunks
    is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    own = [0, stages - 1] if is_v else [chunk * ranks for chunk in range(chunks)]
    made = getattr(schedules, name)([Stage(ranks, stages, index) for index in own], microbatches, loss_fn=lambda *_: 0)
    return _text(made.pipeline_order, ranks), _text(made.pipeline_order_with_comms, ranks)


def _text(order: Mapping[int, Sequence[object]], ranks: int) -> str:
    lines = [order[rank] for rank in range(ranks)]
    return "".join(",".join("" if action is None else str(action) for action in line) + "\n" for line in lines)


if __name__ == "__main__":
    for arguments in sys.argv[1:]:
        name, *numbers = arguments.split(":")
        for text in csv_of(name, *map(int, numbers)):
            print(text, end="\n\n")
