"""Weak scaling of data parallel training: what a rank receives and holds as ranks are added, at fixed rows per rank.

    python -m benchmarks.weak_scaling [--ranks 1,2,4,8,16] [--rows 8] [--steps 10]

On torch bytes are counted by the operating system, on the loopback, per rank and step; beside keras_flow stands torch's
DistributedDataParallel around the same Keras model. Memory is the peak of what a step allocates, by torch's profiler;
rows are those that a rank reads in a step of `fit`, elements the random numbers that it draws. On JAX and TensorFlow
bytes and memory are those of the compiled programs (`benchmarks/weak_scaling_compiled.py`).
Beyond, to 65,536 ranks, it is what `dist.explain` says. Exit status 1 where 8 ranks receive more than 1.8 times what 2
do or have a peak over 1.03 times theirs, or any number of ranks receives more than 1.05 times DistributedDataParallel's
bytes and 20 kB of scalars and counters. keras_flow is judged with `random="logical"`: the stock draws are whole.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks import weak_scaling_compiled

if TYPE_CHECKING:
    import keras
    import numpy as np

WORDS = 4096
#: of 8 ranks against 2, and of keras_flow against DistributedDataParallel with this much beside it
GROWTH, OVER_DDP, SCALARS = 1.8, 1.05, 20_000
#: most growth of a rank's peak memory from 2 ranks to 8
PEAK = 1.03
BEYOND = (16, 256, 4096, 65536)


def asked_of_explain(ranks: Sequence[int]) -> list[int]:
    """The numbers of ranks that are run, and those beyond."""
    return sorted({*ranks, *BEYOND})


def classifier() -> keras.Model:
    """A classifier over many words: its outputs are larger than its weights."""
    import keras

    layers = [keras.Input((32,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(WORDS)]
    return keras.Sequential(layers, name="classifier")


def cnn() -> keras.Model:
    """Convolutions with BatchNormalization."""
    import keras

    layers = [keras.Input((16, 16, 3))]
    for filters in (64, 128):
        layers += [keras.layers.Conv2D(filters, 3, activation="relu"), keras.layers.BatchNormalization()]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    return keras.Sequential(layers, name="cnn")


def transformer() -> keras.Model:
    """A block with attention and dropout, and a word for each place of the sequence."""
    import keras

    words = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(256, 64)(words)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x)])
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Dropout(0.1)(keras.layers.Dense(256, "relu")(x))
    return keras.Model(words, keras.layers.Dense(256)(x), name="transformer")


MODELS: dict[str, Callable[[], keras.Model]] = {"classifier": classifier, "cnn": cnn, "transformer": transformer}


def compiled(name: str) -> keras.Model:
    """The model, with the loss and the metric that users take."""
    import keras

    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def data_for(model: keras.Model, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """One batch."""
    import numpy as np

    random = np.random.default_rng(0)
    classes = model.output_shape[-1]
    y = random.integers(0, classes, (rows, *model.output_shape[1:-1]))
    if model.name == "transformer":
        return random.integers(0, 256, (rows, *model.input_shape[1:])), y
    return random.standard_normal((rows, *model.input_shape[1:])).astype("float32"), y


def loopback() -> int:
    """Bytes that all processes of this machine received on the loopback, ever."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise RuntimeError("/proc/net/dev has no lo; this benchmark needs Linux")


def measure(step: Callable[[], object], steps: int, ranks: int) -> dict[str, float]:
    """Bytes that a rank received in a step, on average, and those that a step had allocated at most."""
    import torch.distributed as dist

    def together() -> None:
        if ranks > 1:
            dist.barrier()

    for _ in range(3):  # all is made, and the ranks are connected
        step()
    together()
    before = loopback()
    together()
    for _ in range(steps):
        step()
    together()
    return {"bytes": (loopback() - before) / ranks / steps, "peak": min(most_allocated(step) for _ in range(3))}


def most_allocated(step: Callable[[], object]) -> int:
    """Most bytes that a step has allocated at one time, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes), default=0)


def read_and_drawn(name: str, rows: int, ranks: int, steps: int) -> dict[str, float]:
    """Rows that a rank reads and random elements that it draws in a step of `fit`, after the batches that are compared.

    Elements are those of keras_flow's generator.
    """
    import numpy as np

    import keras_flow as kf
    from keras_flow import philox

    with kf.DataParallel(random="logical").scope():
        model = compiled(name)
    x, y = data_for(model, rows * ranks)
    counts: dict[str, int] = {"rows": 0, "elements": 0}
    drawn = philox.words_of_block

    class Rows(np.ndarray):
        """Counts the rows that are taken of it."""

        def __getitem__(self, index: object) -> np.ndarray:
            found = np.asarray(self).__getitem__(index)
            counts["rows"] += len(found) if found.ndim == self.ndim else 1
            return found

    def counted(*arguments: Any) -> np.ndarray:
        found = drawn(*arguments)
        counts["elements"] += found.size
        return found

    def total(number: int) -> dict[str, int]:
        counts.update(rows=0, elements=0)
        data = np.concatenate([x] * number).view(Rows), np.concatenate([y] * number)
        model.fit(*data, batch_size=rows * ranks, shuffle=False, verbose=0)
        return dict(counts)

    with mock.patch.object(philox, "words_of_block", counted):
        total(1)  # the model is built, from a batch of its own
        # the first three batches are read whole
        short, long = total(3), total(3 + steps)
    return {name: (long[name] - short[name]) / steps for name in counts}


def by_ddp(name: str, rows: int, ranks: int) -> Callable[[], object]:
    """DistributedDataParallel around the Keras model, each rank with its own rows; no logs are reduced."""
    import keras
    import torch
    import torch.distributed as dist

    model = compiled(name)
    x, y = data_for(model, rows * ranks)
    model(x[:1])
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    own = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    own_x, own_y = keras.ops.convert_to_tensor(x[own]), keras.ops.convert_to_tensor(y[own])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step() -> None:
        optimizer.zero_grad()
        loss(own_y, parallel(own_x, training=True)).backward()
        optimizer.step()

    return step


def by_keras_flow(name: str, rows: int, ranks: int, random: str = "logical") -> Callable[[], object]:
    """`train_on_batch` under `kf.DataParallel`."""
    import keras_flow as kf

    with kf.DataParallel(random=random).scope():
        model = compiled(name)
    x, y = data_for(model, rows * ranks)
    return lambda: model.train_on_batch(x, y)


LOGICAL = 'random="logical"'
WAYS = {
    LOGICAL: by_keras_flow,
    'random="stock"': functools.partial(by_keras_flow, random="stock"),
    "DistributedDataParallel": by_ddp,
}


def run(rows: int, steps: int, out: str) -> None:
    """On every rank: each model in each way. Rank 0 writes."""
    import torch

    import keras_flow as kf

    torch.set_num_threads(1)
    ranks = kf.env.get_world_size()
    found = {}
    for name in MODELS:
        for way, make in WAYS.items():
            if ranks > 1 or way != "DistributedDataParallel":
                found[f"{name}/{way}"] = measure(make(name, rows, ranks), steps, ranks)
        found[f"{name}/{LOGICAL}"] |= read_and_drawn(name, rows, ranks, steps)
    if kf.env.get_rank() == 0:
        Path(out).write_text(json.dumps(found))


def explained(name: str, rows: int, ranks: int) -> tuple[int, int]:
    """Bytes that a rank receives in a step on so many ranks, and those that it holds at the peak, by `explain`."""
    import keras_flow as kf
    from keras_flow.distributions.dry_run import dry_run

    with dry_run(ranks):
        distribution = kf.DataParallel(kf.Placement(range(ranks), axis_names=("data",)))
        with distribution.scope():
            found = distribution.explain(compiled(name), rows * ranks)
    return sum(collective.received for collective in found.collectives), found.memory[0].peak


def main(arguments: list[str]) -> int:
    """Run, print and write the table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8,16", help="numbers of ranks that are run, with commas")
    parser.add_argument("--rows", type=int, default=8, help="rows of each rank")
    parser.add_argument("--steps", type=int, default=10, help="steps that are counted")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/weak_scaling.md"))
    options = parser.parse_args(arguments)
    os.environ["KERAS_BACKEND"] = "torch"
    ranks = [int(part) for part in options.ranks.split(",")]
    import keras_flow as kf

    found: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in ranks:
            path = Path(folder) / f"{count}.json"
            kf.run(run, devices=count, args=(options.rows, options.steps, str(path)))
            found[count] = json.loads(path.read_text())
            print(f"torch, {count} ranks done", file=sys.stderr)
    compiled_found: dict[str, dict[int, dict[str, dict[str, float]]]] = {}
    for engine in ("jax", "tensorflow"):
        compiled_found[engine] = {count: weak_scaling_compiled.apart(engine, count, options.rows) for count in ranks}
        print(f"{engine} done", file=sys.stderr)
    counts = asked_of_explain(ranks)
    beyond = {name: [explained(name, options.rows, count) for count in counts] for name in MODELS}
    text, missed = table(found, compiled_found, beyond, ranks, options.rows)
    options.out.write_text(text)
    plot(found, beyond, ranks, options.out.with_suffix(".png"))
    print(text)
    return int(bool(missed))


def table(
    found: dict[int, dict[str, dict[str, float]]],
    programs: dict[str, dict[int, dict[str, dict[str, float]]]],
    beyond: dict[str, list[tuple[int, int]]],
    ranks: Sequence[int],
    rows: int,
) -> tuple[str, list[str]]:
    """The page, and the targets that were missed."""
    missed: list[str] = []
    lines = []
    for name in MODELS:
        for way in WAYS:
            lines.append(line(f"torch, {name}, {way}", [found[count].get(f"{name}/{way}") for count in ranks]))
        for engine, by_count in programs.items():
            ways = sorted({key for cells in by_count.values() for key in cells if key.startswith(f"{name}/")})
            for key in ways:
                title = f"{engine}, {name}, {key.partition('/')[2]}"
                lines.append(line(title, [by_count[count].get(key) for count in ranks]))
        by_rank = {count: found[count][f"{name}/{LOGICAL}"] for count in ranks}
        own = {count: cell["bytes"] for count, cell in by_rank.items()}
        if {2, 8} <= own.keys() and own[8] > GROWTH * own[2]:
            missed.append(f"{name}: 8 ranks receive {own[8] / own[2]:.2f} times what 2 do")
        if {2, 8} <= own.keys() and by_rank[8]["peak"] > PEAK * by_rank[2]["peak"]:
            missed.append(
                f"{name}: the peak of 8 ranks is {by_rank[8]['peak'] / by_rank[2]['peak']:.2f} times that of 2"
            )
        if len({(cell["rows"], cell["elements"]) for cell in by_rank.values()}) > 1:
            missed.append(f"{name}: rows read or elements drawn depend on the ranks")
        for engine, by_count in programs.items():
            cells = {count: by_count[count][f"{name}/{weak_scaling_compiled.OURS}"] for count in ranks}
            if {2, 8} <= cells.keys() and cells[8]["bytes"] > GROWTH * cells[2]["bytes"]:
                missed.append(f"{engine}, {name}: bytes grow {cells[8]['bytes'] / cells[2]['bytes']:.2f} times")
            if {2, 8} <= cells.keys() and cells[8]["peak"] > PEAK * cells[2]["peak"]:
                missed.append(f"{engine}, {name}: the peak grows {cells[8]['peak'] / cells[2]['peak']:.2f} times")
        for count in ranks[1:] if ranks[0] == 1 else ranks:
            ddp = found[count][f"{name}/DistributedDataParallel"]["bytes"]
            if own[count] > OVER_DDP * ddp + SCALARS:
                missed.append(f"{name}, {count} ranks: {own[count] / ddp:.2f} times DistributedDataParallel's bytes")
    own_cells = {name: [found[count][f"{name}/{LOGICAL}"] for count in ranks] for name in MODELS}
    read = [
        f"| {name} | " + " | ".join(f"{cell['rows']:g}, {cell['elements']:,g}" for cell in cells) + " |"
        for name, cells in own_cells.items()
    ]
    counts = asked_of_explain(ranks)
    further = [
        f"| {name} | " + " | ".join(f"{received / 1e6:.3f}, {peak / 1e6:.2f}" for received, peak in cells) + " |"
        for name, cells in beyond.items()
    ]
    heads = " | ".join(f"{count} rank{'s' * (count > 1)}" for count in ranks)
    return (
        f"""# Weak scaling

Written by `python -m benchmarks.weak_scaling`: {rows} rows on each rank. MB that a rank receives in a step (torch:
counted by the operating system on the loopback; others: in the compiled program), and the most MB that a step has
allocated at one time.

| | {heads} | {" | ".join(f"peak, {count}" for count in ranks)} |
|---|{"---|" * 2 * len(ranks)}
{chr(10).join(lines)}

Rows that a rank reads and random elements that it draws in a step, on torch:

| | {heads} |
|---|{"---|" * len(ranks)}
{chr(10).join(read)}

![MB that a rank receives in a step, by ranks](weak_scaling.png)

By `dist.explain`: MB received by a rank in a step, and MB that it holds at the peak.

| | {" | ".join(f"{count:,}" for count in counts)} |
|---|{"---|" * len(counts)}
{chr(10).join(further)}

Targets missed: {"; ".join(missed) or "none"}.
""",
        missed,
    )


def line(title: str, cells: Sequence[dict[str, float] | None]) -> str:
    """A row of the table: bytes, then peaks; – where there is none."""
    of_bytes = " | ".join("–" if cell is None else f"{cell['bytes'] / 1e6:.3f}" for cell in cells)
    of_peak = " | ".join("–" if cell is None or not cell["peak"] else f"{cell['peak'] / 1e6:.2f}" for cell in cells)
    return f"| {title} | {of_bytes} | {of_peak} |"


def plot(
    found: dict[int, dict[str, dict[str, float]]],
    beyond: dict[str, list[tuple[int, int]]],
    ranks: Sequence[int],
    path: Path,
) -> None:
    """Bytes by ranks: measured on torch, DistributedDataParallel's, and what explain says beyond."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(MODELS), figsize=(11, 3.2), layout="constrained")
    several = [count for count in ranks if count > 1]
    for axis, name in zip(axes, MODELS, strict=True):
        said = [(count, received) for count, (received, _) in zip(asked_of_explain(ranks), beyond[name], strict=True)]
        axis.plot(*zip(*[(count, received / 1e6) for count, received in said if count > 1], strict=True), "--")
        for way, mark in ((LOGICAL, "o"), ("DistributedDataParallel", "x")):
            axis.plot(several, [found[count][f"{name}/{way}"]["bytes"] / 1e6 for count in several], mark)
        axis.set(title=name, xscale="log", xlabel="ranks", ylim=(0, None))
    axes[0].set_ylabel("MB received by a rank in a step")
    axes[0].legend(["dist.explain", "measured on torch", "DistributedDataParallel"], loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
