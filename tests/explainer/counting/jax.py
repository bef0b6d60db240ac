"""JAX: collectives of the training step that XLA compiled, read from its dump."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_folder = Path()
_LINE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\((?P<rest>.*)"
)


def collectives(text: str) -> list[dict[str, object]]:
    """The collectives of a compiled module (HLO text). A tuple is several tensors in one."""
    from tests.explainer.counting.collective import Counted

    found = []
    for match in _LINE.finditer(text):
        rest = match["rest"]
        group = _group(rest)
        name = re.search(r'op_name="([^"]*)"', rest)
        listed = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
        pairs = [a != b for a, b in re.findall(r"(\d+),(\d+)", listed[1])] if listed else []
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match["shape"]):
            elements = math.prod(int(dim) for dim in dims.split(",") if dim)
            if match["kind"] == "reduce-scatter":
                elements *= group
            kind, note = _KINDS[match["kind"]], name[1] if name else ""
            found.append(Counted(kind, elements, _SIZES[dtype], group, note, sum(pairs)).record())
    return found


def _group(rest: str) -> int:
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(match[2])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{('[^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    assert "source_target_pairs" in rest, rest
    return 2


def set_environment(folder: Path) -> None:
    """Before JAX is imported: XLA writes the programs of training steps there."""
    global _folder
    _folder = folder / "programs"
    _folder.mkdir()
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={_folder} --xla_dump_hlo_as_text "
        "--xla_dump_hlo_module_re=.*jit_step.*"
    )


def count(name: str, layout: str) -> dict:
    """Train one step of a model under a layout: what explain says, and what was counted."""
    from tests.explainer import models

    distribution = models.distribution(name, layout)
    before = set(_folder.iterdir())
    with distribution.scope():
        model = models.compiled(name)
        said = distribution.explain(model, models.BATCH)
        model.train_on_batch(*models.data(model))
    new = sorted(set(_folder.iterdir()) - before)
    programs = [path.read_text() for path in new if path.name.endswith("after_optimizations.txt")]
    return {
        "explained": said.as_json()["collectives"],
        "counted": [found for text in programs for found in collectives(text)],
        "peak explained": said.memory[0].peak,
        "peak": max(_total(path.read_text()) for path in new if "memory-usage-report" in path.name),
    }


def _total(report: str) -> int:
    """Bytes that XLA's buffer assignment gives a program on one device: arguments, results and temporaries."""
    return int(re.search(r"Total bytes: (\d+)", report)[1])  # type: ignore[index]
