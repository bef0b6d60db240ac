"""TensorFlow: collectives in the program of each rank that DTensor made of the training step, read from its dump."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

_KINDS = {
    "CollectiveReduceV2": "all_reduce",
    "CollectiveReduceScatterV2": "reduce_scatter",
    "CollectiveGatherV2": "all_gather",
    "CollectiveAllToAllV2": "all_to_all",
    "CollectiveReduce": "all_reduce",
    "CollectiveGather": "all_gather",
}
_SIZES = {"i1": 1, "i8": 1, "bf16": 2, "f16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
_folder = Path()
_CONSTANT = re.compile(
    r'(%\w+), %\w+ = tf_executor\.island(?:\([^)]*\))? wraps "tf\.Const"\(\).*?dense<(\d+)> : tensor<i32>'
)
_CALL = re.compile(r'wraps "tf\.(Collective\w+|Send|Recv|_Send|_Recv)"\(([^)]*)\).* : \((.*)\) -> (\S+)')


def collectives(text: str) -> list[dict[str, object]]:
    """The collectives of a module (MLIR text) in TensorFlow's executor dialect."""
    from tests.explain.counting.collective import Counted

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
    """Before TensorFlow is imported: DTensor writes its programs there."""
    global _folder
    _folder = folder
    os.environ |= {"TF_DUMP_GRAPH_PREFIX": str(folder), "TF_CPP_VMODULE": "dtensor_mlir_passes=2"}


def main() -> dict[str, dict]:
    """Train one step of each model under each layout: what explain says, and what was counted."""
    from tests.explain import models

    results = {}
    for name, layout, distribution in models.all_layouts():
        before = set(_folder.iterdir())
        with distribution.scope():
            model = models.compiled(name)
            said = distribution.explain(model, models.BATCH).as_json()["collectives"]
            model.train_on_batch(*models.data(name))
        new = sorted(path for path in set(_folder.iterdir()) - before if "BreakUpIslands" in path.name)
        counted = [found for path in new for found in collectives(path.read_text())]
        results[f"{name} {layout}"] = {"explained": said, "counted": counted}
    results["wide mlp dp4"] = _memory()
    return results


def _memory() -> dict[str, int]:
    """What two steps of a larger model add to the process, which has all ranks: resident, so an upper bound.

    Measured once: what a second model takes is partly what the first one gave back.
    """
    import keras

    from benchmarks.memory import peak_of, resident
    from tests.explain import models

    distribution = models.distribution("mlp", "dp4")
    keras.utils.clear_session(free_memory=True)
    floor = resident()
    with distribution.scope():
        model = models.compiled("wide")
        said = distribution.explain(model, models.BATCH)
        peak = peak_of(lambda: [model.train_on_batch(*models.data("mlp")) for _ in range(2)])
    return {"peak explained": sum(memory.peak for memory in said.memory.values()), "peak": peak - floor}
