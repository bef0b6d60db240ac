"""TensorFlow: collectives in the program of each rank that DTensor made of the training step, read from its dump."""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution

_KINDS = {
    "CollectiveReduceV2": "all_reduce",
    "CollectiveReduceScatterV2": "reduce_scatter",
    "CollectiveGatherV2": "all_gather",
    "CollectiveAllToAllV2": "all_to_all",
    "CollectiveReduce": "all_reduce",
    "CollectiveGather": "all_gather",
}
#: what `memory` needs of TensorFlow
_COUNTED = {"TF_NUM_INTEROP_THREADS": "8", "TF_ENABLE_ONEDNN_OPTS": "1"}
_SIZES = {"i1": 1, "i8": 1, "bf16": 2, "f16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
_folder = Path()
_CONSTANT = re.compile(
    r'(%\w+), %\w+ = tf_executor\.island(?:\([^)]*\))? wraps "tf\.Const"\(\).*?dense<(\d+)> : tensor<i32>'
)
_CALL = re.compile(r'wraps "tf\.(Collective\w+|Send|Recv|_Send|_Recv)"\(([^)]*)\).* : \((.*)\) -> (\S+)')


def collectives(text: str) -> list[dict[str, object]]:
    """The collectives of a module (MLIR text) in TensorFlow's executor dialect."""
    from tests.explainer.counting.collective import Counted

    sizes = {name: int(value) for name, value in _CONSTANT.findall(text)}
    found = []
    for operator, operands, types, result in _CALL.findall(text):
        if operator not in _KINDS:
            raise AssertionError(f"unknown communication {operator}")
        group = sizes[operands.split(", ")[1]]
        tensors = [_elements(kind) for kind in (types.split(", ")[0], result)]
        elements, itemsize = max(tensors)
        found.append(Counted(_KINDS[operator], elements, itemsize, group, result).record())
    return found


def _elements(kind: str) -> tuple[int, int]:
    *dims, dtype = kind.removeprefix("tensor<").rstrip(">").split("x")
    return math.prod(int(dim) for dim in dims), _SIZES[dtype]


def set_environment(folder: Path) -> None:
    """Before TensorFlow is imported: DTensor writes its programs there, and memory is counted alike on every machine.

    Ranks have threads enough, so that what they hold at one time does not depend on the number of cores. Convolutions
    are those of oneDNN, which TensorFlow turns on by itself only for processors with AVX-512: others need more memory
    for a while, and TensorFlow's allocator keeps no statistics without oneDNN (2.21).
    """
    global _folder
    _folder = folder / "programs"
    _folder.mkdir()
    os.environ |= {
        "TF_DUMP_GRAPH_PREFIX": str(_folder),
        "TF_CPP_VMODULE": "dtensor_mlir_passes=2",
    }
    os.environ |= _COUNTED


def count(name: str, layout: str) -> dict:
    """Train one step of a model under a layout: what explain says, and what was counted."""
    from tests.explainer import models

    distribution = models.distribution(name, layout)
    before = set(_folder.iterdir())
    with distribution.scope():
        model = models.compiled(name)
        said = distribution.explain(model, models.BATCH).as_json()["collectives"]
        model.train_on_batch(*models.data(model))
    new = sorted(path for path in set(_folder.iterdir()) - before if "BreakUpIslands" in path.name)
    counted = [found for path in new for found in collectives(path.read_text())]
    return {"explained": said, "counted": counted} | memory(name, distribution)


def memory(name: str, distribution: FlowDistribution) -> dict[str, int]:
    """The most that six steps of a larger model hold, in bytes on all ranks, and what explain says of it.

    `peak` is what TensorFlow's allocator of these devices counts (blocks from 256 KB); `growth` that of the resident
    memory of the process, true of the first model in it only: the allocator keeps what it once had.
    """
    import keras
    import tensorflow as tf

    from benchmarks.memory import peak_of, resident
    from tests.explainer import models

    counter = tf.config.experimental
    keras.utils.clear_session(free_memory=True)
    floor, held = resident(), counter.get_memory_info("CPU:0")["current"]
    with distribution.scope():
        model = models.compiled(name, models.LARGE)
        said = distribution.explain(model, models.LARGE_BATCH)
        x, y = models.data(model, models.LARGE_BATCH)
        counter.reset_memory_stats("CPU:0")
        growth = peak_of(lambda: [model.train_on_batch(x, y) for _ in range(6)]) - floor
    peak = counter.get_memory_info("CPU:0")["peak"] - held
    return {"peak explained": sum(one.peak for one in said.memory.values()), "peak": peak, "growth": growth}


def alone(name: str, layout: str) -> dict[str, int]:
    """The same in a process of its own, after a step of the small model, so that the engine is there."""
    import keras_flow as kf
    from tests.explainer import models

    kf.init(4)
    distribution = models.distribution(name, layout)
    with distribution.scope():
        small = models.compiled(name)
        small.train_on_batch(*models.data(small))
    del small
    return memory(name, distribution)


if __name__ == "__main__":  # python -m tests.explainer.counting.tensorflow mlp tp4
    os.environ |= {"KERAS_BACKEND": "tensorflow", **_COUNTED}
    found = alone(*sys.argv[1:])
    print(*sys.argv[1:], found, f"of the growth: {found['peak explained'] / found['growth']:.2f}")
