"""Boxing plans between processes of TensorFlow; prints what was wrong, and the elements that were sent and planned."""

from __future__ import annotations

import json
import random
from unittest import mock

import numpy as np

import keras_flow as kf
from keras_flow.boxing import BoxingPlan, plan, simulate
from keras_flow.boxing.phases import receives
from tests.boxing.cases import logical_tensor, shards_of
from tests.conformance.boxing_worker import pairs


def planned(made: BoxingPlan, share: int) -> int:
    """Elements that the ranks of this process are to send to those of others, of which each has `share`."""
    process = kf.env.process_index()
    elements = 0
    for step in made.steps:
        for phase in step.phases:
            receivers = step.exchange.source if phase == "combine" else step.exchange.target
            for receiver in receivers.placement.ranks:
                for message in receives(step.exchange, receiver, phase):
                    if message.sender // share == process != receiver // share:
                        elements += message.piece.size
    return elements


def main() -> None:
    from keras_flow.backends.tensorflow import boxing, collectives, tensors

    kf.init()
    here = kf.env.local_ranks()
    wrong, sent, wanted = [], 0, 0

    def counted(flat, *args):
        nonlocal sent
        sent += flat.shape[0]
        return original(flat, *args)

    original = collectives.send
    with mock.patch.object(collectives, "send", counted):
        for source, target in random.Random(1).sample(pairs(), 60):
            made = plan(source, target)
            whole = shards_of(source, logical_tensor(source.shape))
            values = {rank: value.astype("float32") for rank, value in whole.items()}
            expected = simulate(made, values)
            out = boxing.redistribute(made, {rank: tensors.put(values[rank], rank) for rank in values if rank in here})
            wanted += planned(made, len(here))
            if any(not np.array_equal(out[rank], value) for rank, value in expected.items() if rank in here):
                wrong.append(f"{source} -> {target}")
    facts = {"wrong": wrong, "sent": sent, "planned": wanted}
    found = kf.comm.all_gather_object(dict.fromkeys(here, facts))
    if kf.env.is_main_process():
        print(json.dumps(found[here[0]]))


if __name__ == "__main__":
    main()
