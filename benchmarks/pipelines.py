"""A pipeline's step beside its simulation, and on torch beside `torch.distributed.pipelining` around the same layers.

    python -m benchmarks.pipelines [--engines torch,jax] [--sizes 1,10] [--schedule 1f1b] [--microbatches 8]
    python -m benchmarks.pipelines --beside zb1p        another schedule beside 1f1b
    python -m benchmarks.pipelines --cut        a 24-layer transformer's cut beside the best one

Two stages on two ranks; eight layers of equal width, batches of 128 rows, Adam. A round is an epoch of each, in turn;
ratios are medians of the rounds. Printed:

- the step without the update, over the makespan of its schedule with F and B as measured: an action's time without
  waiting for messages;
- the update: Keras's Adam;
- the step over that of `Schedule1F1B` of torch, in a loop by hand, with torch's Adam;
- bytes between stages, as counted in `Transfers.send`, over those that `explain` says;
- messages: the share that costs the receiver less than a tenth of F after it was sent and asked for.

With `--beside`: F, B and the parts of B, each as the mean of the stages; the step over that of `--schedule`, as
measured and by the makespans of both with these times.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

ROWS, LAYERS, STEPS, FEATURES = 128, 8, 8, 64
#: width for so many million parameters
WIDTHS = {1: 376, 10: 1194}


def main(arguments: list[str]) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="torch,jax")
    parser.add_argument("--sizes", default="1,10", help="millions of parameters")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--beside", default="", help="another schedule, of which the step is compared")
    parser.add_argument("--cut", action="store_true", help="compare a cut by cost with all cuts")
    options = parser.parse_args(arguments)
    if options.cut:
        print(cut())
        return 0
    if len(options.engines.split(",")) > 1:  # an engine to a process
        for engine in options.engines.split(","):
            words = [
                f"--{name}={getattr(options, name)}"
                for name in ("sizes", "schedule", "microbatches", "rounds", "beside")
            ]
            os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-m", __spec__.name, f"--engines={engine}", *words])
        return 0
    os.environ["KERAS_BACKEND"] = options.engines
    import keras_flow as kf

    schedules = [name for name in (options.schedule, options.beside) if name]
    args = ([int(size) for size in options.sizes.split(",")], schedules, options.microbatches, options.rounds)
    if options.engines == "torch":
        lines = kf.run(run, devices=2, args=args)
    else:
        kf.init(2)
        lines = run(*args)
    print(f"{options.engines}, {', '.join(schedules)}, {options.microbatches} micro-batches, {options.rounds} rounds\n")
    if options.beside:
        times = "F, ms | B, ms | I, ms | W, ms | step, ms | update, ms"
        print(f"| parameters | {times} | step over {options.schedule} | without updates | by their makespans |")
        print("\n".join(["|---|---|---|---|---|---|---|---|---|---|", *lines]))
        return 0
    heads = ("parameters", "step, ms", "update, ms", "rest over its simulation", "step over torch's own")
    print(f"| {' | '.join(heads)} | bytes over explain's | messages hidden |\n|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    return 0


def run(sizes: list[int], schedules: list[str], microbatches: int, rounds: int) -> list[str]:
    """On every rank: each size in turn."""
    line = _line if len(schedules) == 1 else _line_of_two
    return [line(size, schedules, microbatches, rounds) for size in sizes]


def _data() -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    return tuple(random.normal(size=(STEPS * ROWS, FEATURES)).astype("float32") for _ in range(2))


def _ours(size: int, schedule: str, microbatches: int, x: Any, y: Any) -> tuple[Any, Any, Callable[[], float]]:
    import keras

    import keras_flow as kf

    ranks = kf.Placement([0, 1], axis_names=("pipe",))
    pipeline = kf.PipelineParallel(ranks, microbatches=microbatches, schedule=schedule)
    keras.utils.set_random_seed(0)
    with pipeline.scope():
        model = _model(WIDTHS[size])
        model.compile(keras.optimizers.Adam(1e-4), "mse")
    return pipeline, model, lambda: model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history["loss"][0]


def _in_turn(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each way in each round; they train alike."""
    first = {name: way() for name, way in ways.items()}  # warm, and the same training
    off = max(first.values()) - min(first.values())
    assert off < 1e-3 * max(first.values()), f"the losses of two ways differ: {first}"
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            _meet()
            began = time.perf_counter()
            way()
            times[name].append((time.perf_counter() - began) / STEPS)
    return times


def _line_of_two(size: int, schedules: list[str], microbatches: int, rounds: int) -> str:
    import keras

    x, y = _data()
    made = {name: _ours(size, name, microbatches, x, y) for name in schedules}
    times = _in_turn({name: way for name, (*_, way) in made.items()}, rounds)
    watches = {name: _Watch(keras.backend.backend() == "torch") for name in made}
    for name, (*_, way) in made.items():
        with watches[name]:
            way()
    stages = made[schedules[0]][0].schedule.stages
    found = [watches[name].costs(stages) for name in schedules]
    makespans = [pipeline.schedule.makespan(cost) for (pipeline, *_), cost in zip(made.values(), found, strict=True)]
    (forward, whole, _), (_, inputs, weights) = found
    means = [statistics.mean(each) for each in (forward, whole, inputs, weights)]
    updates = [watch.update() for watch in watches.values()]
    pairs = [*zip(*times.values(), strict=True)]
    step = statistics.median(times[schedules[1]])
    over = statistics.median(two / one for one, two in pairs)
    without = statistics.median((two - updates[1]) / (one - updates[0]) for one, two in pairs)
    columns = [*(f"{1e3 * each:.1f}" for each in (*means, step, updates[1])), f"{over:.3f}", f"{without:.3f}"]
    return f"| {size} M | {' | '.join(columns)} | {makespans[1] / makespans[0]:.3f} |"


def _line(size: int, schedules: list[str], microbatches: int, rounds: int) -> str:
    import keras

    x, y = _data()
    pipeline, model, ours = _ours(size, schedules[0], microbatches, x, y)
    is_torch = keras.backend.backend() == "torch"
    ways: dict[str, Callable[[], Any]] = {"ours": ours}
    if is_torch:
        ways["by hand"] = _by_hand(WIDTHS[size], x, y, microbatches)
    times = _in_turn(ways, rounds)
    watch = _Watch(is_torch)
    with watch:
        ours()
    costs = watch.costs(pipeline.schedule.stages)
    makespan = pipeline.schedule.makespan(costs)
    step = statistics.median(times["ours"])
    said = sum(row.sends + row.gets_back for row in pipeline.explain(model, ROWS).stages)
    peer = bytes_of = hidden = "-"
    if is_torch:
        pairs = zip(times["ours"], times["by hand"], strict=True)
        peer = f"{statistics.median(mine / theirs for mine, theirs in pairs):.2f}"
        bytes_of, hidden = f"{watch.bytes() / STEPS / said:.4f}", f"{watch.hidden(min(costs[0])):.0%}"
    update = watch.update()
    rest = (step - update) / makespan
    return f"| {size} M | {1e3 * step:.0f} | {1e3 * update:.0f} | {rest:.2f} | {peer} | {bytes_of} | {hidden} |"


def _model(width: int) -> Any:
    import keras

    inner = [keras.layers.Dense(width, "relu", name=f"layer_{number}") for number in range(LAYERS)]
    return keras.Sequential([keras.Input((FEATURES,)), *inner, keras.layers.Dense(FEATURES, name="head")])


def _by_hand(width: int, x: Any, y: Any, microbatches: int) -> Callable[[], float]:
    """The pipeline of torch around the same layers; each process has its half."""
    import keras
    import torch
    from torch.distributed import get_rank
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    keras.utils.set_random_seed(0)
    model = _model(width)
    rank, half = get_rank(), LAYERS // 2
    own = model.layers[:half] if rank == 0 else model.layers[half:]
    part = torch.nn.Sequential(*own)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=torch.nn.MSELoss())
    optimizer = torch.optim.Adam(part.parameters(), 1e-4, eps=1e-7)
    inputs, targets = torch.tensor(x), torch.tensor(y)

    def epoch() -> float:
        total = 0.0
        for start in range(0, len(inputs), ROWS):
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(inputs[start : start + ROWS])
            else:
                schedule.step(target=targets[start : start + ROWS], losses=losses)
                total += float(torch.stack(losses).mean())
            optimizer.step()
        loss = torch.tensor([total / (len(inputs) // ROWS)])
        torch.distributed.broadcast(loss, 1)
        return float(loss)

    return epoch


def _meet() -> None:
    import keras

    if keras.backend.backend() == "torch":
        from torch.distributed import barrier

        barrier()


class _Watch:
    """Times of actions and messages while a pipeline runs; of all ranks, by one clock of the host."""

    def __init__(self, has_messages: bool):
        self._has_messages = has_messages
        self._times: dict[tuple[int, str], list[float]] = {}
        self._updates: list[float] = []
        self._waited = 0.0
        self._sent: list[tuple[object, float, int]] = []
        self._got: list[tuple[object, float, float]] = []
        self._step = 0

    def __enter__(self) -> None:
        from keras_flow.pipelines import staged_model
        from keras_flow.pipelines.passes import Pass
        from keras_flow.pipelines.transfers import Transfers

        self._before = [
            (Pass, "do", Pass.do),
            (Transfers, "take", Transfers.take),
            (Transfers, "send", Transfers.send),
        ]
        self._before += [(Transfers, "begin", Transfers.begin), (staged_model, "update", staged_model.update)]
        do, take, send, begin, update = (found for *_, found in self._before)
        watch = self

        def updates(*args: Any) -> None:
            began = time.monotonic()
            update(*args)
            watch._updates.append(time.monotonic() - began)

        def timed(run: Any, action: Any, sums: Any) -> None:
            began, watch._waited = time.monotonic(), 0.0
            do(run, action, sums)
            if not watch._has_messages:
                watch._settle(run, action)
            spent = time.monotonic() - began - watch._waited
            watch._times.setdefault((action.stage, action.kind), []).append(spent)

        def taken(lane: Any, stage: int, kind: str, number: int) -> Any:
            asked = time.monotonic()
            value = take(lane, stage, kind, number)
            got = time.monotonic()
            watch._waited += got - asked
            watch._got.append(((watch._step, stage, kind, number), asked, got))
            return value

        def sends(lane: Any, stage: int, kind: str, number: int, signature: object) -> None:
            import keras
            import torch

            key = (stage + 1, "RECV_F", number) if kind == "SEND_F" else (stage - 1, "RECV_B", number)
            leaves = keras.tree.flatten(lane._leaving[key])
            size = sum(leaf.nbytes for leaf in leaves if torch.is_tensor(leaf))
            watch._sent.append(((watch._step, *key), time.monotonic(), size))
            send(lane, stage, kind, number, signature)

        def begins(lane: Any) -> None:
            watch._step += 1
            begin(lane)

        Pass.do, Transfers.take, Transfers.begin = timed, taken, begins  # type: ignore[method-assign]
        staged_model.update = updates
        if self._has_messages:
            Transfers.send = sends  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        for owner, name, found in self._before:
            setattr(owner, name, found)

    def _settle(self, run: Any, action: Any) -> None:
        """Wait for what an engine computes behind the program."""
        import jax

        held = (run._held, run.gradients, run._blocks, run.lane._ready, run.lane._leaving)
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(held) if isinstance(leaf, jax.Array)])

    def costs(self, stages: int) -> tuple[list[float], list[float], list[float]]:
        """Seconds of F, of I or the whole backward pass, and of W, for each stage."""
        found = {key: statistics.median(times) for key, times in self._times.items()}
        for other in _of_all_ranks(found):
            found.update(other)
        backward = [found.get((stage, "B"), found.get((stage, "I"), 0.0)) for stage in range(stages)]
        later = [found.get((stage, "W"), 0.0) for stage in range(stages)]
        return [found[stage, "F"] for stage in range(stages)], backward, later

    def update(self) -> float:
        """Seconds of an update, of the rank that needs longest."""
        return max(statistics.median(times) for times in _of_all_ranks(self._updates))

    def bytes(self) -> int:
        """Bytes of all messages of all ranks."""
        return sum(size for sent in _of_all_ranks(self._sent) for *_, size in sent)

    def hidden(self, forward: float) -> float:
        """The share of receives that cost less than a tenth of F, from when both sides were there."""
        sent = {key: at for found in _of_all_ranks(self._sent) for key, at, _ in found}
        got = [each for found in _of_all_ranks(self._got) for each in found if each[0] in sent]
        cheap = [end - max(asked, sent[key]) < 0.1 * forward for key, asked, end in got]
        return sum(cheap) / len(cheap)


def _of_all_ranks(value: Any) -> list[Any]:
    import keras

    if keras.backend.backend() != "torch":
        return [value]
    from torch.distributed import all_gather_object, get_world_size

    found: list[Any] = [None] * get_world_size()
    all_gather_object(found, value)
    return found


def cut(stages: int = 4) -> str:
    """The slowest stage of a cut by cost over that of the best of all cuts, for a 24-layer transformer."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    from keras_flow.pipelines import cutting, graph

    layers = keras.layers
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(8192, 128)(inputs)
    for _ in range(24):
        seen = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(seen, seen)])
        x = layers.Add()([x, layers.Dense(128)(layers.Dense(512, "gelu")(layers.LayerNormalization()(x)))])
    calls = graph.of(keras.Model(inputs, layers.Dense(8192)(x)))
    costs = [cutting.operations(calls, call) for call in calls.calls]
    before = [0.0, *itertools.accumulate(costs)]
    places = [place for place in range(1, len(costs)) if costs[place - 1] > 0]

    def slowest(starts: tuple[int, ...]) -> float:
        return max(before[end] - before[start] for start, end in itertools.pairwise((0, *starts, len(costs))))

    best = min(slowest(starts) for starts in itertools.combinations(places, stages - 1))
    found = cutting.by_cost(calls, stages)
    ours = slowest(tuple(found.index(stage) for stage in range(1, stages)))
    return f"{len(costs)} calls, {stages} stages: slowest stage {ours / best:.3f} of the best cut"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
