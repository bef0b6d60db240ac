"""The part of `benchmarks/memory.py` on data parallel: a rank's peak on 2 and on 8 ranks, with as many rows on each.

By the engine's own counters: XLA's buffer assignment for one device (JAX), the most that the allocator of a process
with one rank had (TensorFlow: ranks of one process share an allocator, and its peak tells how many of them are at one
place at one time), and what a step of one rank has allocated at most by the profiler (torch).
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

RANKS, ROWS, GROWTH = (2, 8), 8, 1.03
WIDTH, LENGTH, WORDS = 256, 64, 256


def table(backends: list[str]) -> tuple[str, list[str]]:
    """The page's part, and the targets that were missed."""
    lines, missed = [], []
    for backend in backends:
        ways = ("default", "mirrored") if backend == "tensorflow" else ("default",)
        for way in ways:
            peaks = [_apart(backend, ranks, way) for ranks in RANKS]
            growth = peaks[1] / peaks[0]
            name = backend if way == "default" else f'{backend}, strategy="mirrored"'
            lines.append(f"| {name} | {peaks[0] / 1e6:.1f} | {peaks[1] / 1e6:.1f} | {growth:.3f} |")
            print(lines[-1], file=sys.stderr)
            if growth > GROWTH:
                missed.append(f"{name}: a rank's peak on {RANKS[1]} ranks is {growth:.2f} times that on {RANKS[0]}")
    return (
        f"""## Data parallel: a rank's peak as ranks are added

A transformer block with dropout, {ROWS} rows on each rank, `random="logical"`: most MB of a rank in a step, by the
engine's own counters (JAX: XLA's buffer assignment; TensorFlow: the allocator's peak, a process for each rank; torch:
the profiler).

| engine | {RANKS[0]} ranks | {RANKS[1]} ranks | growth |
|---|---|---|---|
{chr(10).join(lines)}
""",
        missed,
    )


def _apart(backend: str, ranks: int, way: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peak.json"
        command = [sys.executable, "-m", "benchmarks.memory_growth", str(ranks), way, str(out)]
        subprocess.run(command, check=True, env={**os.environ, "KERAS_BACKEND": backend}, stderr=subprocess.DEVNULL)
        return json.loads(out.read_text())


def peak(ranks: int, way: str, programs: str) -> float:
    """A few steps; on torch on every rank."""
    import keras
    import numpy as np

    import keras_flow as kf

    options: dict[str, Any] = {"strategy": "mirrored"} if way == "mirrored" else {}
    distribution = kf.DataParallel(kf.Placement(range(ranks), axis_names=("data",)), random="logical", **options)
    with distribution.scope():
        keras.utils.set_random_seed(0)
        model = _transformer()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    random = np.random.default_rng(0)
    x, y = (random.integers(0, WORDS, (ROWS * ranks, LENGTH)) for _ in range(2))
    backend = keras.backend.backend()
    if backend == "torch":
        from benchmarks.weak_scaling import most_allocated

        for _ in range(3):
            model.train_on_batch(x, y)
        return min(most_allocated(lambda: model.train_on_batch(x, y)) for _ in range(3))
    if backend == "jax":
        model.train_on_batch(x, y)
        reports = [path.read_text() for path in Path(programs).glob("*jit_step*memory-usage-report*")]
        return max(int(re.search(r"Total bytes: (\d+)", report)[1]) for report in reports)  # type: ignore[index]
    import tensorflow as tf

    for _ in range(3):
        model.train_on_batch(x, y)
    tf.config.experimental.reset_memory_stats("CPU:0")
    for _ in range(6):
        model.train_on_batch(x, y)
    return max(kf.comm.all_gather_object(tf.config.experimental.get_memory_info("CPU:0")["peak"]))


def _transformer() -> Any:
    import keras

    words = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(words)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(4, WIDTH // 4, dropout=0.1)(x, x)])
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Dropout(0.1)(keras.layers.Dense(4 * WIDTH, "relu")(x))
    return keras.Model(words, keras.layers.Dense(WORDS)(x))


def main(ranks: int, way: str, out: Path) -> None:
    """One engine, in processes of its own."""
    with tempfile.TemporaryDirectory() as programs:
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={programs} --xla_dump_hlo_as_text "
            "--xla_dump_hlo_module_re=.*jit_step.*"
        )
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
        import keras_flow as kf

        processes = ranks if os.environ["KERAS_BACKEND"] == "tensorflow" else None
        found = kf.run(peak, devices=ranks, processes=processes, args=(ranks, way, programs))
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
