"""Checkpoints of one model by several ways: seconds, blocked seconds, peak memory of a rank, bytes.

    python benchmarks/checkpoints.py [--ranks 4] [--megabytes 400] [--rounds 5] [--folder DIR] [--engines torch jax]

A model of dense layers, float32, whose kernels are split by columns over all ranks. On torch each rank is a process; on
JAX, where Orbax is at home, one process has them all.

    plain      each rank writes its bytes to a file of its own, and waits for the disk: what the disk can do
    ours       kf.checkpoint.save and load
    dcp        torch.distributed.checkpoint of the same DTensors
    keras      model.save_weights (.weights.h5) and load_weights, under the same layout
    orbax      Orbax's StandardCheckpointer of the same JAX arrays

The ways of an engine take turns in one job: a round is one save and one load of each, and a first round, in which
packages are loaded, does not count. Each round begins with another way. Printed are medians over rounds. Seconds: until
all is on the disk or in memory, and how many times those of `plain` in the same round. Blocked: seconds until the
program may go on, and which part that is of the same way when it does not write in a thread. Peak: the highest resident
memory of a rank above what it had before. Written: bytes in the folder. Keras's own way does not wait for the disk.
Loading reads from the system's cache.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

WAYS = {
    "torch": ("plain", "ours", "ours async", "dcp", "dcp async", "keras"),
    "jax": ("plain", "ours", "ours async", "orbax"),
}
UNITS = 2048
MB = 1e6


def build(megabytes: float):
    import keras

    import keras_flow as kf

    count = max(1, round(megabytes * MB / (4 * UNITS * UNITS)))
    mesh = kf.Placement([list(range(kf.env.get_world_size()))], axis_names=("data", "model"))
    with kf.ModelParallel(mesh, rules={"kernel": {"model": "S(1)"}}, batch_axes="data").scope():
        layers = [keras.layers.Dense(UNITS, use_bias=False) for _ in range(count)]  # values that no one can compress
        return keras.Sequential([keras.layers.Input((UNITS,)), *layers], name="net")


def memory(name: str) -> int:
    """Bytes that this process has (`VmRSS`), or had at most (`VmHWM`)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def measured(call: Callable[[], Callable[[], object]]) -> tuple[float, float, float]:
    """Seconds, blocked seconds and peak bytes of a call that returns what waits for its end."""
    from keras_flow import comm

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what other ways have freed is not free memory of this one
    os.sync()
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


def ways(model) -> dict[str, tuple[Callable, Callable]]:
    """Name -> what saves into a folder, and what loads from it."""
    import numpy as np

    import keras_flow as kf

    def ours(is_async: bool) -> Callable:
        return lambda where: kf.checkpoint.save(where, model, step=1, asynchronous=is_async).wait

    def plain(where: Path) -> Callable:
        from keras_flow.backends.active import backend

        with open(where / f"{kf.env.process_index()}", "wb") as file:
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
        "dcp": lambda: dcp(False),
        "dcp async": lambda: dcp(True),
        "keras": lambda: (keras_save, lambda where: model.load_weights(where / "x.weights.h5")),
        "orbax": orbax,
    }


def job(names: list[str], megabytes: float, rounds: int, folder: str) -> None:
    """Measure the ways in turn, in every process; the first one prints a row of each."""
    import keras_flow as kf
    from keras_flow import comm
    from keras_flow.backends.rendezvous import agreement

    model = build(megabytes)
    made = {name: ways(model)[name]() for name in names}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            save, load = made[name]
            where = Path(folder, f"{name.replace(' ', '-')}-{number}")
            if kf.env.is_main_process():
                where.mkdir()
            comm.barrier()
            seconds, blocked, peak = measured(lambda save=save, where=where: save(where))
            written = sum(each.stat().st_size for each in where.rglob("*") if each.is_file())
            row = {"seconds": seconds, "blocked": blocked, "peak": peak, "written": written}
            if load is not done:

                def loading(load=load, where=where) -> Callable:
                    load(where)
                    return done

                row["load"], _, row["load peak"] = measured(loading)
            of_all = [json.loads(each) for each in agreement.exchange(json.dumps(row))]
            found[name].append({key: max(each[key] for each in of_all) for key in row})
            if kf.env.is_main_process():
                shutil.rmtree(where)
    if kf.env.is_main_process():
        for name in names:
            print("ROW " + row_of(name, {each: found[each][1:] for each in names}), flush=True)


def row_of(name: str, found: dict[str, list[dict[str, float]]]) -> str:
    """A row of the table, of what was measured round by round."""

    def median(key: str, other: str = "", other_key: str = "seconds") -> float:
        others = [each[other_key] for each in found[other]] if other else [1.0] * len(found[name])
        return statistics.median(each[key] / beside for each, beside in zip(found[name], others, strict=True))

    at_once = name.removesuffix(" async")
    part = f" ({median('blocked', at_once):.1%})" if at_once != name else ""
    row = [name, f"{median('seconds'):.2f} ({median('seconds', 'plain'):.2f})", f"{median('blocked'):.3f}{part}"]
    row += [f"{median('peak') / MB:.0f}", f"{median('written') / MB:.1f}"]
    row += [f"{median('load'):.2f}", f"{median('load peak') / MB:.0f}"] if "load" in found[name][0] else ["", ""]
    return "| " + " | ".join(row) + " |"


def main(given: argparse.Namespace) -> None:
    """Run each engine's ways in a job of its own, and print the tables."""
    folder = tempfile.mkdtemp(prefix="checkpoints-", dir=given.folder)
    try:
        for engine in given.engines:
            share = given.megabytes / (given.ranks if engine == "torch" else 1)
            print(
                f"\n{engine}: {given.megabytes:.0f} MB of weights, {given.ranks} ranks, {share:.0f} MB in a process\n"
            )
            print(
                "| way | save, s (of plain) | blocked, s (of at once) | peak, MB | written, MB | load, s | peak, MB |"
            )
            print("|---|---|---|---|---|---|---|", flush=True)
            command = [sys.executable, __file__, "--job", engine, "--folder", folder, "--ranks", str(given.ranks)]
            command += ["--megabytes", str(given.megabytes), "--rounds", str(given.rounds)]
            environment = {**os.environ, "KERAS_BACKEND": engine}
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            rows = [line.partition("ROW ")[2] for line in ended.stdout.splitlines() if "ROW " in line]
            print("\n".join(rows or ended.stderr.splitlines()[-12:]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder")
    parser.add_argument("--engines", nargs="+", default=tuple(WAYS), choices=WAYS)
    parser.add_argument("--job", choices=WAYS)
    given = parser.parse_args()
    if given.job is None:
        main(given)
    else:
        import keras_flow as kf

        arguments = (list(WAYS[given.job]), given.megabytes, given.rounds, given.folder)
        kf.run(job, devices=given.ranks, args=arguments, timeout=3000)
