"""The part of `benchmarks/weak_scaling.py` on JAX and TensorFlow: one process drives all ranks, and programs are read.

Bytes are those of the collectives in the compiled step, by a ring; on JAX the peak is XLA's buffer assignment for one
device. Beside keras_flow on JAX stands stock `keras.distribution`. TensorFlow's allocator counts blocks of 256 KB, so
that it cannot tell these models apart.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OURS, STOCK = "keras_flow", "keras.distribution"


def apart(engine: str, ranks: int, rows: int) -> dict[str, dict[str, float]]:
    """Each model on so many ranks, in a process of its own: `model/way` -> bytes received by a rank, and its peak."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.weak_scaling_compiled", engine, str(ranks), str(rows), str(out)]
        subprocess.run(command, check=True, env={**os.environ, "KERAS_BACKEND": engine}, stderr=subprocess.DEVNULL)
        return json.loads(out.read_text())


def main(engine: str, ranks: int, rows: int, out: Path) -> None:
    """In that process."""
    # the counters by which explain is tested
    from tests.explainer.counting import jax as of_jax
    from tests.explainer.counting import tensorflow as of_tensorflow

    programs = Path(tempfile.mkdtemp())
    (of_jax if engine == "jax" else of_tensorflow).set_environment(programs)
    # the step of stock Keras has another name than ours
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "").replace(".*jit_step.*", ".*step.*")
    import keras_flow as kf

    kf.init(ranks)
    from benchmarks.weak_scaling import MODELS

    found: dict[str, Any] = {}
    for name in MODELS:
        for way in (OURS, STOCK) if engine == "jax" and ranks > 1 else (OURS,):
            before = set((programs / "programs").iterdir())
            _train(name, way, ranks, rows)
            new = [path for path in (programs / "programs").iterdir() if path not in before]
            ending = "after_optimizations.txt" if engine == "jax" else "BreakUpIslands"
            counter = of_jax if engine == "jax" else of_tensorflow
            counted = [each for path in new if ending in path.name for each in counter.collectives(path.read_text())]
            reports = [path.read_text() for path in new if "memory-usage-report" in path.name]
            peaks = [int(re.search(r"Total bytes: (\d+)", report)[1]) for report in reports]  # type: ignore[index]
            received = sum(float(each["received"]) for each in counted)  # type: ignore[arg-type]
            found[f"{name}/{way}"] = {"bytes": received, "peak": max(peaks, default=0)}
    out.write_text(json.dumps(found))


def _train(name: str, way: str, ranks: int, rows: int) -> None:
    """A step of a model."""
    import keras

    import keras_flow as kf
    from benchmarks.weak_scaling import compiled, data_for

    placement = kf.Placement(range(ranks), axis_names=("data",))
    distribution: Any
    if way == OURS:
        distribution = kf.DataParallel(placement, random="logical")
    else:
        distribution = keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:ranks])
    with distribution.scope():
        model = compiled(name)
        model.train_on_batch(*data_for(model, rows * ranks))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
