"""Lives of a pipeline's model: drawn sequences of what people do with one between two fits, compared with one device.

    python -m tests.doors.lives --backend torch --lives 40 --seed 1
    python -m tests.doors.lives --backend jax --only 1/7             prints life 7 of seed 1, and runs it

A life is a model and six acts. Each act draws from its own name, so that a life without one of them has the others as
they were (`--without 2,4`). After each act its numbers and all weights are looked at.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests import quick
from tests.doors.acts import ACTS, Life

#: acts of a life
ACTS_EACH = 6
#: of what follows from trained weights, as in tests/fuzz/model_programs.py
TOLERANCE = 1e-4
MODELS = ("dense", "dropout", "skips", "two_outputs", "regularized", "tied_dense", "nested", "blocks")


def acts_of(seed: str) -> list[str]:
    """Return the names of a life's acts."""
    drawn = random.Random(f"{seed} acts")
    return [drawn.choice([*ACTS, "compile_again", "fit"]) for _ in range(ACTS_EACH)]


def live(seed: str, folder: str, distributed: bool, without: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """Live a life; each act's name and numbers, when they are there."""
    import keras

    from tests.pipelines import models

    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    drawn = random.Random(f"{seed} model")
    name = drawn.choice(MODELS)
    first, other = _distributions(drawn)
    life = Life(seed, first() if distributed else None, other() if distributed else None, Path(folder))
    with life.scope() if drawn.random() < 0.8 else contextlib.nullcontext():
        life.model = getattr(models, name)()
        # a model that is made outside of a scope has draws of its engine
        values = np.random.default_rng(5)
        life.model.set_weights([values.normal(0, 0.3, each.shape) for each in life.model.get_weights()])
        life.model.compile(keras.optimizers.SGD(0.02), "mse", metrics=None if name == "two_outputs" else ["mae"])
    for place, act in enumerate(acts_of(seed)):
        if place in without:
            continue
        chosen = random.Random(f"{seed} {act} {place}")
        with life.scope():
            found = ACTS[act](life, chosen)
        life.seen[f"{place} {act}"] = [found, life.model.get_weights()]
        yield f"{place} {act} of {name}", life.seen[f"{place} {act}"]


def _distributions(drawn: random.Random) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What makes the pipeline, and the other distribution."""
    import keras_flow as kf

    ranks = kf.env.get_world_size()
    schedule, parts = drawn.choice(["1f1b", "gpipe", "zb1p"]), drawn.choice([2, 3, 4])
    shapes = [[0, 1]] if ranks < 4 else [[0, 1], [0, 1, 2, 3], [[0, 2], [1, 3]]]
    grid = drawn.choice(shapes)
    names = ("pipe", "data")[: np.ndim(grid)]

    def pipeline(schedule: str, parts: int) -> Callable[[], Any]:
        return lambda: kf.PipelineParallel(kf.Placement(grid, names), schedule=schedule, microbatches=parts)

    others = [pipeline("gpipe", 5), pipeline("1f1b", parts), kf.DataParallel]
    return pipeline(schedule, parts), drawn.choice(others)


# ---- lives and their comparison


def result(seed: str, without: Collection[int] = ()) -> dict[str, Any]:
    """What a life gave, on every rank: `state`, and the first act whose numbers are off or that was refused."""
    import keras_flow as kf
    from tests.fuzz.further import agreed
    from tests.one_device import one_device

    line: dict[str, Any] = {"seed": seed, "acts": acts_of(seed)}
    expected: list[tuple[str, Any]] = []
    with tempfile.TemporaryDirectory() as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kf.env.process_index() == 0:
            try:
                with one_device():
                    acts = live(seed, tempfile.mkdtemp(dir=own), False, without)
                    expected.extend(itertools.takewhile(lambda act: _is_stable(act[1]), acts))
            except Exception:
                line["alone"] = traceback.format_exc()[-1500:]
        folder, count = agreed((own, len(expected)), True)
        found: list[tuple[str, Any]] = []
        begun = time.monotonic()
        try:
            acts = live(seed, folder, True, without)
            for _ in range(count):
                found.append(next(acts))
        except kf.FlowError as refusal:
            line |= {"state": "refused", "error": str(refusal)[:1500]}
        except Exception:
            line |= {"state": "crash", "error": traceback.format_exc()[-3000:]}
        line["seconds"] = round(time.monotonic() - begun, 1)
        agreed(True, True)  # before the folder goes
    for (act, one), (_, two) in zip(expected, found, strict=False):
        if off := differences(one, two):
            line |= {"state": "wrong", "act": act, "over": off[:6]}
            break
    return {"state": "one device" if "alone" in line else "right", **line}


def _is_stable(numbers: Any) -> bool:
    """Whether training has not diverged, which makes much of rounding."""
    import keras

    values = [each for each in keras.tree.flatten(numbers) if each is not None and not isinstance(each, str)]
    return all(np.abs(np.asarray(each)).max(initial=0.0) < 100 for each in values)


def differences(one: Any, two: Any) -> list[str]:
    """Where two structures of numbers differ."""
    import keras

    keras.tree.assert_same_structure(one, two)
    found = []
    for place, (a, b) in enumerate(zip(keras.tree.flatten(one), keras.tree.flatten(two), strict=True)):
        if isinstance(a, str) or a is None:
            found += [f"{a} is {b}"] if a != b else []
            continue
        a, b = (np.asarray(value, "float64") for value in (a, b))
        if a.shape != b.shape:
            found.append(f"{place}: shape {a.shape} is {b.shape}")
        elif a.size:
            off = np.abs(a - b).max() / max(1.0, np.abs(a).max())
            found += [] if off <= TOLERANCE else [f"{place} of shape {a.shape}: off by {off:.1e}"]
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True, choices=("jax", "tensorflow", "torch"))
    parser.add_argument("--lives", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first life")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="SEED/NUMBER of one life")
    parser.add_argument("--without", default="", help="numbers of acts that are left out")
    options = parser.parse_args(arguments)
    quick.set_environment(options.backend)
    os.environ["KERAS_FLOW_RANDOM"] = "logical"
    import keras_flow as kf

    numbers = range(options.first, options.first + options.lives)
    seeds = [options.only] if options.only else [f"{options.seed}/{number}" for number in numbers]
    without = [int(number) for number in options.without.split(",") if number]
    kf.run(_run, devices=options.ranks, args=(options.backend, seeds, without), timeout=120.0)
    return 0


def _run(backend: str, seeds: list[str], without: list[int]) -> None:
    """Run on every rank."""
    import keras_flow as kf

    quick.set_options(backend)
    states: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        if kf.env.process_index() == 0:
            print(seed, flush=True)
        line = result(seed, without)
        states[line["state"]] += 1
        if kf.env.process_index() == 0 and (line["state"] != "right" or len(seeds) == 1):
            print(json.dumps(line, indent=1).replace("\\n", "\n"), flush=True)
    if kf.env.process_index() == 0:
        print(backend, dict(states), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
