"""Time of draws by logical index (`random="logical"`) beside the engine's own, for the same elements on one device.

    python -m benchmarks.random_draws [--elements 1048576] [--repeats 51] [--backends jax,tensorflow,torch]

Compiled where the engine compiles steps (JAX, TensorFlow), eager on torch. Interleaved calls; a ratio is that of the
medians. The last column is what one rank of four takes for its own rows, as a share of the engine's own whole draw.
Exit status 1 where a ratio is above 1.3.

    python -m benchmarks.random_draws --steps 2,4,8

The step of a transformer with dropout on so many ranks of one process (JAX, TensorFlow), 16 rows on each, beside the
same with the engine's own draws (`random="stock"`), which every rank makes whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.parts import measured_apart

TARGET = 1.3
COLUMNS = 1024


def measure(elements: int, repeats: int) -> dict[str, tuple[float, float]]:
    """draw -> its ratio to the engine's own, and that of a quarter of it; in this process, on the active engine."""
    import keras
    from keras import ops

    import keras_flow as kf

    kf.init(1)
    random = keras.random
    out = {}
    rows = elements // COLUMNS
    logical, stock = (
        kf.DataParallel(kf.Placement([0], ("data",)), random=choice).scope for choice in ("logical", "stock")
    )
    draws: dict[str, Callable] = {
        "dropout": lambda x, seed: random.dropout(x, 0.2, seed=seed),
        "uniform": lambda x, seed: random.uniform(x.shape, seed=seed),
        "normal": lambda x, seed: random.normal(x.shape, seed=seed),
        "randint": lambda x, seed: random.randint(x.shape, 0, 1000, seed=seed),
    }
    for name, draw in draws.items():
        ways = []
        for scope, length in ((logical, rows), (stock, rows), (logical, rows // 4)):
            x = ops.ones((length, COLUMNS))
            with scope():
                function = compiled(draw)
                function(x)
            ways.append((scope, function, x))
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(repeats):
            for taken, (scope, function, x) in zip(times, ways, strict=True):
                with scope():
                    begin = time.perf_counter()
                    ops.convert_to_numpy(function(x)[0, 0])
                    taken.append(time.perf_counter() - begin)
        own, engine, quarter = (statistics.median(taken) for taken in times)
        out[name] = own / engine, quarter / engine
    return out


def measure_steps(ranks: int, repeats: int) -> float:
    """The ratio of a step with logical draws to one with the engine's own."""
    import keras
    import numpy as np
    from keras import layers

    import keras_flow as kf

    kf.init(ranks)
    batch, steps = 16 * ranks, 6
    words = np.random.default_rng(0).integers(0, 256, (batch * steps, 65))

    def epochs(choice: str) -> Callable[[], object]:
        keras.utils.set_random_seed(0)
        with kf.DataParallel(random=choice).scope():
            tokens = layers.Input((64,), dtype="int32")
            x = layers.Dropout(0.1)(layers.Embedding(256, 64)(tokens))
            for _ in range(2):
                seen = layers.LayerNormalization()(x)
                x += layers.Dropout(0.1)(layers.MultiHeadAttention(4, 16, dropout=0.1)(seen, seen))
                x += layers.Dropout(0.1)(layers.Dense(64)(layers.Dense(256, "gelu")(x)))
            model = keras.Model(tokens, layers.Dense(256)(x))
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return lambda: model.fit(words[:, :-1], words[:, 1:], batch_size=batch, shuffle=False, verbose=0)

    ways = {choice: epochs(choice) for choice in ("logical", "stock")}
    times: dict[str, list[float]] = {choice: [] for choice in ways}
    for turn in range(repeats + 1):
        for choice in list(ways) if turn % 2 else reversed(list(ways)):
            begin = time.perf_counter()
            ways[choice]()
            if turn:
                times[choice].append(time.perf_counter() - begin)
    return statistics.median(times["logical"]) / statistics.median(times["stock"])


def compiled(draw: Callable) -> Callable:
    """The draw as a step has it: a new program for each way, because each is traced under its own choice."""
    import keras

    # state that moves on, as a layer has it: a constant seed would be computed once, by the compiler
    generator = keras.random.SeedGenerator(1)
    if keras.backend.backend() == "jax":
        import jax

        # a function of its own for each way: JAX keeps programs by function, whatever is active as it is called
        program = jax.jit(lambda x, seed: draw(x, seed))
        return lambda x: program(x, generator.next())
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(lambda x: draw(x, generator))
    return lambda x: draw(x, generator)


def main(arguments: list[str]) -> int:
    """Print a table of all engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--backends", default="jax,tensorflow,torch")
    parser.add_argument("--steps", default="", help="numbers of ranks, with commas: measure training steps instead")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        found = measure_steps(int(options.steps), 9) if options.steps else measure(options.elements, options.repeats)
        options.one.write_text(json.dumps(found))
        return 0
    if options.steps:
        return print_steps(options.steps.split(","))
    print(f"{options.elements} elements, draws by logical index : the engine's own\n")
    print("| engine | draw | ratio | a rank of four |\n|---|---|---|---|")
    worst = 0.0
    for backend in options.backends.split(","):
        sizes = ["--elements", str(options.elements), "--repeats", str(options.repeats)]
        found: Any = measured_apart("benchmarks.random_draws", sizes, backend, Path("random_draws"))
        for name, (whole, quarter) in found.items():
            print(f"| {backend} | {name} | {whole:.2f} | {quarter:.2f} |", flush=True)
            worst = max(worst, whole)
    return int(worst > TARGET)


def print_steps(ranks: list[str]) -> int:
    """Print a table of a transformer's steps."""
    print("a transformer's step with draws by logical index : with the engine's own\n")
    print(f"| engine | {' ranks | '.join(ranks)} ranks |\n|---|{'---|' * len(ranks)}")
    for backend in ("jax", "tensorflow"):
        ratios: list[Any] = [
            measured_apart("benchmarks.random_draws", ["--steps", count], backend, Path("random_draws"))
            for count in ranks
        ]
        print(f"| {backend} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
