"""Checkpoints of one model by several ways: seconds, blocked seconds, peak memory of a rank, bytes.

    python benchmarks/checkpoints.py [--ranks 4] [--megabytes 400] [--rounds 3] [--folder DIR] [--ways ours dcp ...]

A model of dense layers, float32, whose kernels are split by columns over all ranks. On torch each rank is a process; on
JAX, where Orbax is at home, one process has them all. Each way has a job of its own, so that its peak is its own.

    plain      each rank writes its bytes to a file of its own, and waits for the disk: what the disk can do
    ours       kf.checkpoint.save and load
    dcp        torch.distributed.checkpoint of the same DTensors
    keras      model.save_weights (.weights.h5) and load_weights, under the same layout
    orbax      Orbax's StandardCheckpointer of the same JAX arrays

Printed for saving and loading: the median of the rounds' seconds until all is on the disk or in memory; blocked: until
the program may go on; peak: the highest resident memory of a rank above what it had before (rank 0's of the last
round); written: bytes in the folder.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WAYS = ("plain", "ours", "ours async", "dcp", "dcp async", "keras", "ours on jax", "ours async on jax", "orbax")
UNITS = 2048
MB = 1e6


def build(megabytes: float):
    import keras

    import keras_flow as kf

    count = max(1, round(megabytes * MB / (4 * UNITS * UNITS)))
    mesh = kf.Placement([list(range(kf.env.get_world_size()))], axis_names=("data", "model"))
    with kf.ModelParallel(mesh, rules={"kernel": {"model": "S(1)"}}, batch_axes="data").scope():
        layers = [keras.layers.Dense(UNITS, use_bias=False, kernel_initializer="ones") for _ in range(count)]
        return keras.Sequential([keras.layers.Input((UNITS,)), *layers], name="net")


def memory(name: str) -> int:
    """Bytes that this process has (`VmRSS`), or had at most (`VmHWM`)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def measured(call: Callable[[], Callable[[], object]]) -> tuple[float, float, float]:
    """Seconds, blocked seconds and peak bytes of a call that returns what waits for its end."""
    from keras_flow import comm

    comm.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory counts from here
    before, begun = memory("VmRSS"), time.perf_counter()
    wait = call()
    blocked = time.perf_counter() - begun
    wait()
    comm.barrier()
    return time.perf_counter() - begun, blocked, memory("VmHWM") - before


def done() -> None:
    """Nothing is left to wait for."""


def ways(model, folder: Path) -> dict[str, tuple[Callable, Callable]]:
    """Name -> what saves into a folder, and what loads from it."""
    import numpy as np

    import keras_flow as kf

    def ours(is_async: bool) -> Callable:
        return lambda where: kf.checkpoint.save(where, model, step=1, asynchronous=is_async).wait

    def plain(where: Path) -> Callable:
        from keras_flow.backends.active import backend

        with open(folder / f"plain-{kf.env.process_index()}", "wb") as file:
            for variable in model.variables:
                for shard in backend().shards(variable).values():
                    file.write(np.ascontiguousarray(shard))
            file.flush()
            os.fsync(file.fileno())
        return done

    def dcp(is_async: bool) -> tuple[Callable, Callable]:
        import torch.distributed.checkpoint as checkpoint

        state = {variable.path: variable.value.detach() for variable in model.variables}

        def save(where: Path) -> Callable:
            if is_async:
                return checkpoint.async_save(state, checkpoint_id=where).result
            checkpoint.save(state, checkpoint_id=where)
            return done

        return save, lambda where: checkpoint.load(state, checkpoint_id=where)

    def orbax() -> tuple[Callable, Callable]:
        import orbax.checkpoint

        state = {variable.path: variable.value for variable in model.variables}
        checkpointer = orbax.checkpoint.StandardCheckpointer()

        def save(where: Path) -> Callable:
            checkpointer.save(where / "x", state)
            return checkpointer.wait_until_finished

        return save, lambda where: checkpointer.restore(where / "x", state)

    def keras_save(where: Path) -> Callable:
        model.save_weights(where / "x.weights.h5")
        return done

    load = lambda where: kf.checkpoint.load(where, model)  # noqa: E731
    return {
        "plain": lambda: (plain, done),
        "ours": lambda: (ours(False), load),
        "ours async": lambda: (ours(True), load),
        "ours on jax": lambda: (ours(False), load),
        "ours async on jax": lambda: (ours(True), load),
        "dcp": lambda: dcp(False),
        "dcp async": lambda: dcp(True),
        "keras": lambda: (keras_save, lambda where: model.load_weights(where / "x.weights.h5")),
        "orbax": orbax,
    }


def job(way: str, megabytes: float, rounds: int, folder: str) -> None:
    """Measure one way, in every process; the first one prints a row."""
    import keras_flow as kf
    from keras_flow import comm

    root, model = Path(folder), build(megabytes)
    save, load = ways(model, root)[way]()
    saved, loaded = [], []
    for number in range(rounds):
        where = root / f"{way.replace(' ', '-')}-{number}"
        if kf.env.is_main_process():
            where.mkdir()
        comm.barrier()
        saved.append(measured(lambda where=where: save(where)))
        written = sum(each.stat().st_size for each in where.rglob("*") if each.is_file())
        if load is not done:

            def loading(where=where) -> Callable:
                load(where)
                return done

            loaded.append(measured(loading))
        comm.barrier()
        if kf.env.is_main_process():
            shutil.rmtree(where)
    if kf.env.is_main_process():
        times, blocked, peak = (statistics.median(each) for each in zip(*saved, strict=True))
        row = [way, f"{times:.2f}", f"{blocked:.3f}", f"{peak / MB:.0f}", f"{written / MB:.1f}"]
        if loaded:
            times, _, peak = (statistics.median(each) for each in zip(*loaded, strict=True))
            row += [f"{times:.2f}", f"{peak / MB:.0f}"]
        print("ROW", *row, sep="|", flush=True)


def main(given: argparse.Namespace) -> None:
    """Run each way in a job of its own, and print the table."""
    share = given.megabytes / given.ranks
    print(f"{given.megabytes:.0f} MB of weights, {given.ranks} ranks; on torch a rank has {share:.0f} MB")
    print("| way | save, s | blocked, s | peak, MB | written, MB | load, s | peak, MB |")
    print("|---|---|---|---|---|---|---|")
    folder = tempfile.mkdtemp(prefix="checkpoints-", dir=given.folder)
    try:
        for way in given.ways:
            engine = "jax" if "jax" in way or way == "orbax" else "torch"
            command = [sys.executable, __file__, "--job", way, "--folder", folder, "--ranks", str(given.ranks)]
            command += ["--megabytes", str(given.megabytes), "--rounds", str(given.rounds)]
            ended = subprocess.run(
                command, env={**os.environ, "KERAS_BACKEND": engine}, capture_output=True, text=True, check=False
            )
            rows = [line for line in ended.stdout.splitlines() if "ROW|" in line]
            if not rows:
                print(f"| {way} | {(ended.stderr.strip().splitlines() or ['no output'])[-1][:200]} |", flush=True)
                continue
            row = rows[0].partition("ROW|")[2].split("|")
            print("| " + " | ".join([*row, *[""] * (7 - len(row))]) + " |", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--job", choices=WAYS)
    given = parser.parse_args()
    if given.job is None:
        main(given)
    else:
        import keras_flow as kf

        kf.run(job, devices=given.ranks, args=(given.job, given.megabytes, given.rounds, given.folder), timeout=1200)
