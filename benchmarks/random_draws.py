"""Time of draws by logical index (`random="logical"`) beside the engine's own, for the same elements on one device.

    python -m benchmarks.random_draws [--elements 1048576] [--repeats 51] [--backends jax,tensorflow,torch]

Compiled where the engine compiles steps (JAX, TensorFlow), eager on torch. Interleaved calls; a ratio is that of the
medians. The last column is what one rank of four takes for its own rows, as a share of the engine's own whole draw.
Exit status 1 where a ratio is above 1.3.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

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
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(measure(options.elements, options.repeats)))
        return 0
    print(f"{options.elements} elements, draws by logical index : the engine's own\n")
    print("| engine | draw | ratio | a rank of four |\n|---|---|---|---|")
    worst = 0.0
    for backend in options.backends.split(","):
        command = [sys.executable, "-m", "benchmarks.random_draws", "--here"]
        command += ["--elements", str(options.elements), "--repeats", str(options.repeats)]
        done = subprocess.run(
            command, env={**os.environ, "KERAS_BACKEND": backend}, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        for name, (whole, quarter) in json.loads(done.stdout.splitlines()[-1]).items():
            print(f"| {backend} | {name} | {whole:.2f} | {quarter:.2f} |", flush=True)
            worst = max(worst, whole)
    return int(worst > TARGET)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
