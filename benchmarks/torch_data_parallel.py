"""Ways of data parallel training on torch, around the same Keras model: seconds of a step, and what is communicated.

    python -m benchmarks.torch_data_parallel [--width 640] [--ranks 2] [--rounds 15] [--rate 2gbit]

With `--rate` there are two ranks on two network namespaces, joined by a link that sends no faster (Linux `tc`; root).

The ways take turns in one run, so that their ratios hold when the machine's speed drifts. Printed: median and spread
of a step, the ratio to torch's DistributedDataParallel written by hand, and the all-reduces of one step with their
bytes, counted by a wrapper around torch.distributed.
"""

import argparse
import itertools
import os
import statistics
import time

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

import keras_flow as kf

BATCH, FEATURES, CLASSES = 128, 256, 10


def build(width: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.layers.Input((FEATURES,)), *hidden, keras.layers.Dense(CLASSES)])
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def by_hand(width: int, x: np.ndarray, y: np.ndarray):
    """torch's DistributedDataParallel around the Keras model, each rank with its rows: means over equal parts only."""
    import torch
    import torch.distributed as dist

    model = build(width)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    rows = slice(
        dist.get_rank() * BATCH // dist.get_world_size(), (dist.get_rank() + 1) * BATCH // dist.get_world_size()
    )
    own_x, own_y = torch.tensor(x[rows]), torch.tensor(y[rows])

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(own_x), own_y).backward()
        optimizer.step()

    return step


def fully_sharded(width: int, x: np.ndarray, y: np.ndarray):
    """torch's FSDP2 around the same layers of torch: those of Keras read a parameter that it has taken away."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    widths = (FEATURES, width, width, width)
    layers = [torch.nn.Sequential(torch.nn.Linear(*pair), torch.nn.ReLU()) for pair in itertools.pairwise(widths)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, CLASSES))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    own = np.array_split(np.arange(BATCH), dist.get_world_size())[dist.get_rank()]
    own_x, own_y = torch.tensor(x[own]), torch.tensor(y[own])

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(own_x), own_y).backward()
        optimizer.step()

    return step


def scoped(distribution: object, width: int, x: np.ndarray, y: np.ndarray):
    with distribution.scope():
        model = build(width)
    return lambda: model.train_on_batch(x, y)


def count_collectives(step) -> tuple[int, int]:
    """All-reduces of one step and their bytes."""
    import torch.distributed as dist

    original, seen = dist.all_reduce, []

    def counted(tensor, *args, **kwargs):
        seen.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        step()
    finally:
        dist.all_reduce = original
    return len(seen), sum(seen)


def main(width: int, rounds: int) -> list[str]:
    import torch.distributed as dist

    random = np.random.default_rng(0)
    x = random.standard_normal((BATCH, FEATURES)).astype("float32")
    y = random.integers(0, CLASSES, BATCH)
    mesh = kf.Placement(range(kf.env.get_world_size()), axis_names=("data",))
    ways = {
        "torch DDP by hand": by_hand(width, x, y),
        "kf.DataParallel (own rows)": scoped(kf.DataParallel(mesh), width, x, y),
        "torch FSDP2 by hand": fully_sharded(width, x, y),
        "kf.DataParallel(zero=2)": scoped(kf.DataParallel(mesh, zero=2), width, x, y),
        "kf.DataParallel(zero=3)": scoped(kf.DataParallel(mesh, zero=3), width, x, y),
        "consistent view (DTensor)": scoped(kf.ModelParallel(mesh), width, x, y),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name, step in ways.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if turn > 1:
                seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["torch DDP by hand"])
    lines = [
        f"{build(width).count_params():,} parameters, {kf.env.get_world_size()} ranks, {BATCH} rows, {rounds} rounds"
    ]
    for name, step in ways.items():
        times = seconds[name]
        count, size = count_collectives(step)
        lines.append(
            f"{name:28} median {1000 * statistics.median(times):7.1f} ms "
            f"({1000 * min(times):.1f} to {1000 * max(times):.1f}), "
            f"ratio {statistics.median(times) / base:5.2f}; {count} all-reduces called from Python, {size / 1e6:.2f} MB"
        )
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--width", type=int, default=640, help="width of the hidden layers (640: about 1 million parameters)"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rate", help="of a link between two ranks")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        kf.init()
        lines = main(options.width, options.rounds)
    elif options.rate:
        from tests.launch import namespaces, programs

        command = ["-m", "benchmarks.torch_data_parallel", "--here"]
        command += ["--width", str(options.width), "--rounds", str(options.rounds)]
        with namespaces.joined(options.rate) as hosts:
            launchers = hosts.start(command, "torch", processes=1, timeout=200)
            outputs = [programs.finish(launcher, 580) for launcher in launchers]
        lines = [outputs[0][1]] if not any(code for code, _, _ in outputs) else [outputs[0][2], outputs[1][2]]
    else:
        lines = kf.run(main, devices=options.ranks, args=(options.width, options.rounds))
    if not options.here or kf.env.is_main_process():
        print("\n".join(lines))
