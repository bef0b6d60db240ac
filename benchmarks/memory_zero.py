"""`zero=`: what a rank holds and receives in a step, beside the formulas of ZeRO.

    python -m benchmarks.memory_zero [--backends jax,torch]

16 dense layers of 1024 with float32 Adam, P bytes of weights, few rows. Held: bytes of weights and slots, by the
engine's live arrays. Peak of a step by the engine's own counters: XLA's buffer assignment for one device (JAX), what a
step allocates at most by the profiler, and what is held (torch). Received: by a rank in a step, as rings, counted in
XLA's compiled program and around the calls to torch.distributed. TensorFlow is left out: its ranks share an allocator;
`tests/explainer` counts what they receive.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RANKS, STAGES, LAYERS, WIDTH, ROWS = (2, 4), (0, 1, 2, 3), 16, 1024, 8
P = 4 * LAYERS * (WIDTH + 1) * WIDTH


def formula(stage: int, ranks: int) -> float:
    """What a rank holds at the update, in bytes of the weights: weights, gradients and Adam's two slots."""
    return {0: 4.0, 1: 2 + 2 / ranks, 2: 1 + 3 / ranks, 3: 4 / ranks}[stage]


def table(backends: list[str]) -> str:
    """The table of docs/measurements.md."""
    lines = []
    for backend in backends:
        for ranks in RANKS:
            for stage, found in zip(STAGES, _apart(backend, ranks), strict=True):
                cells = [f"{found[what] / P:.2f}" for what in ("held", "peak", "received")]
                expected = f"{formula(stage, ranks):.2f} | {(3 if stage == 3 else 2) * (ranks - 1) / ranks:.2f}"
                lines.append(f"| {backend} | {ranks} | {stage} | {' | '.join(cells)} | {expected} |")
                print(lines[-1], file=sys.stderr)
    return f"""## Data parallel with `zero=`

{LAYERS} dense layers of {WIDTH}, float32 Adam, {ROWS} rows on each rank; in units of the weights' bytes P. Formulas: 4P
without, 2P + 2P/N with stage 1, P + 3P/N with stage 2, 4P/N with stage 3; received 2P(N - 1)/N, with stage 3
3P(N - 1)/N.

| engine | ranks | zero | weights and slots held | peak of a step | received | formula: held with gradients | received |
|---|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""


def _apart(backend: str, ranks: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.memory_zero", "--one", str(ranks), str(out)]
        subprocess.run(command, check=True, env={**os.environ, "KERAS_BACKEND": backend}, stderr=subprocess.DEVNULL)
        return json.loads(out.read_text())


def measure(folder: str) -> list[dict[str, float]]:
    """On every rank: a step under each stage."""
    import keras

    return [_measured(stage, Path(folder), keras.backend.backend()) for stage in STAGES]


def _measured(stage: int, folder: Path, engine: str) -> dict[str, float]:
    import keras
    import numpy as np

    import keras_flow as kf
    from keras_flow.backends.active import backend

    ranks = kf.env.get_world_size()
    keras.utils.clear_session()
    distribution = kf.DataParallel(zero=stage)
    with distribution.scope():
        layers = [keras.layers.Dense(WIDTH, name=f"dense{index}") for index in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile("adam", "mse", run_eagerly=False)
        x, y = np.ones((ROWS * ranks, WIDTH), "float32"), np.zeros((ROWS * ranks, WIDTH), "float32")
        before = set(folder.iterdir())
        model.train_on_batch(x, y)
        model.train_on_batch(x, y)
        own = min(backend().world().local_ranks)
        variables = (*model.weights, *model.optimizer.variables)
        held = sum(backend().shards(each)[own].nbytes for each in variables if len(each.shape))
        measured: Any = {"jax": _of_jax, "torch": _of_torch}[engine]
        return {"held": float(held), **measured(model, x, y, held, sorted(set(folder.iterdir()) - before))}


def _of_jax(model: Any, x: Any, y: Any, held: int, files: list[Path]) -> dict[str, float]:
    from tests.explainer.counting.jax import collectives

    programs = [path.read_text() for path in files if path.name.endswith("after_optimizations.txt")]
    reports = [path.read_text() for path in files if "memory-usage-report" in path.name]
    received = sum(each["received"] for text in programs for each in collectives(text))  # type: ignore[misc]
    peak = max(int(re.search(r"Total bytes: (\d+)", text)[1]) for text in reports)  # type: ignore[index]
    return {"peak": float(peak), "received": received}


def _of_torch(model: Any, x: Any, y: Any, held: int, files: list[Path]) -> dict[str, float]:
    from keras_flow.backends.torch import gradient_buckets
    from keras_flow.current.distribution import expected
    from tests.explainer.counting.torch import _most_allocated, watching

    with watching() as counted:
        model.train_on_batch(x, y)
    memory = gradient_buckets.reducer(expected().placement)._memory._tensors
    received = sum(each["received"] for each in counted)  # type: ignore[misc]
    return {"peak": held + sum(flat.nbytes for flat, _ in memory) + _most_allocated(model, x, y), "received": received}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--one"]:
        import keras_flow as kf

        with tempfile.TemporaryDirectory() as folder:
            os.environ["XLA_FLAGS"] = (
                f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*jit_step.*"
            )
            found = kf.run(measure, devices=int(arguments[1]), args=(folder,))
        Path(arguments[2]).write_text(json.dumps(found))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="jax,torch")
    print(table(parser.parse_args(arguments).backends.split(",")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
