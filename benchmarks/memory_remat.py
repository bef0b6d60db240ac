"""`remat="block"`: what a step holds at most, and what it takes, beside the same without.

    python -m benchmarks.memory_remat [--backends jax,tensorflow,torch] [--blocks 8] [--rounds 15]

Blocks of two dense layers, 256 to 1024 (gelu) to 256, 4096 rows on each of two ranks, plain SGD. Peak of a step:
XLA's buffer assignment for one device (JAX), what a step allocates at most by the profiler (torch), half of what
TensorFlow's allocator counts for both ranks. "jax by hand" is the same in plain JAX on one device, with
`jax.checkpoint`. Seconds are medians of steps that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS, WIDTH, INNER, ROWS = 2, 256, 1024, 4096


def measure(blocks: int, rounds: int, folder: str) -> list[list[float]]:
    """On every rank: peak bytes and seconds of a step, without `remat=` and with it."""
    import keras
    import numpy as np

    import keras_flow as kf

    engine: str = keras.backend.backend()
    x = np.random.default_rng(0).normal(size=(ROWS * RANKS, WIDTH)).astype("float32")
    models, peaks = [], []
    for remat in (None, "block"):
        before = set(Path(folder).iterdir())
        with kf.DataParallel(remat=remat).scope():
            layers = keras.layers
            parts = [
                keras.Sequential([layers.Dense(INNER, "gelu"), layers.Dense(WIDTH)], name=f"block_{index}")
                for index in range(blocks)
            ]
            model: Any = keras.Sequential([keras.Input((WIDTH,)), *parts])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        model.train_on_batch(x, x)
        peaks.append(_peak(engine, model, x, sorted(set(Path(folder).iterdir()) - before)))
        models.append(model)
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for model, found in zip(models, seconds, strict=True):
            begun = time.perf_counter()
            model.train_on_batch(x, x)
            found.append(time.perf_counter() - begun)
    return [[peak, statistics.median(found)] for peak, found in zip(peaks, seconds, strict=True)]


def _peak(engine: str, model: Any, x: Any, files: list[Path]) -> float:
    if engine == "jax":
        reports = [path.read_text() for path in files if "memory-usage-report" in path.name]
        return max(float(re.search(r"Total bytes: (\d+)", text)[1]) for text in reports)  # type: ignore[index]
    if engine == "torch":
        from tests.explainer.counting.torch import _most_allocated

        return float(_most_allocated(model, x, x))
    import tensorflow as tf

    counter = tf.config.experimental
    held = counter.get_memory_info("CPU:0")["current"]
    counter.reset_memory_stats("CPU:0")
    for _ in range(3):
        model.train_on_batch(x, x)
    return float(counter.get_memory_info("CPU:0")["peak"] - held) / RANKS


def _by_hand(blocks: int) -> list[float]:
    """Bytes of the step in plain JAX, without `jax.checkpoint` and with it."""
    import jax
    import jax.numpy as jnp

    def block(weights: Any, x: Any) -> Any:
        return jax.nn.gelu(x @ weights[0] + weights[1], approximate=False) @ weights[2] + weights[3]

    shapes = ((WIDTH, INNER), (INNER,), (INNER, WIDTH), (WIDTH,))
    weights = [[jnp.zeros(shape) for shape in shapes] for _ in range(blocks)]
    x = jnp.zeros((ROWS, WIDTH))
    found = []
    for each in (block, jax.checkpoint(block)):

        def loss(weights: Any, x: Any, y: Any, each: Any = each) -> Any:
            for own in weights:
                x = each(own, x)
            return ((x - y) ** 2).mean()

        def step(weights: Any, x: Any, y: Any, loss: Any = loss) -> Any:
            gradients = jax.grad(loss)(weights, x, y)
            return jax.tree.map(lambda value, gradient: value - 0.01 * gradient, weights, gradients)

        memory: Any = jax.jit(step, donate_argnums=0).lower(weights, x, x).compile().memory_analysis()
        found.append(float(memory.temp_size_in_bytes + memory.argument_size_in_bytes))
    return found


def main(arguments: list[str]) -> int:
    """Measure each engine in a job of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--backends", default="jax,tensorflow,torch")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.out:
        import keras_flow as kf

        with tempfile.TemporaryDirectory() as folder:
            os.environ["XLA_FLAGS"] = (
                f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*jit_step.*"
            )
            found = kf.run(measure, devices=RANKS, args=(given.blocks, given.rounds, folder))
        Path(given.out).write_text(json.dumps(found))
        return 0
    print("| engine | peak of a step, MB | peak with remat, MB | ratio of peaks | ratio of seconds of a step |")
    print("|---|---|---|---|---|")
    for backend in given.backends.split(","):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [sys.executable, "-m", "benchmarks.memory_remat", "--out", str(out)]
            command += ["--blocks", str(given.blocks), "--rounds", str(given.rounds)]
            environment = {**os.environ, "KERAS_BACKEND": backend, "TF_ENABLE_ONEDNN_OPTS": "1"}
            subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
            (plain, before), (again, after) = json.loads(out.read_text())
        print(f"| {backend} | {plain / 1e6:.1f} | {again / 1e6:.1f} | {again / plain:.2f} | {after / before:.2f} |")
        if backend == "jax":
            plain, again = _by_hand(given.blocks)
            print(f"| jax by hand | {plain / 1e6:.1f} | {again / 1e6:.1f} | {again / plain:.2f} | |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
