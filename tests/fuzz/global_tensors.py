"""Random programs of global tensors and random chains of boxing plans, judged by numpy.

KERAS_BACKEND=numpy python -m tests.fuzz.global_tensors --programs 20000 --seed 1
KERAS_BACKEND=numpy python -m tests.fuzz.global_tensors --only 1/137 prints and runs program 137 of seed 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keras_flow as kf
from tests.fuzz.chains import chain
from tests.fuzz.judging import gradients, program
from tests.fuzz.programs import RANKS

#: what is run -> its share of all programs
KINDS: dict[str, tuple[Callable[[random.Random], str], float]] = {
    "programs": (program, 0.7),
    "gradients": (gradients, 0.1),
    "chains": (chain, 0.2),
}

#: how many hypothesis draws in the test
EXAMPLES = {"programs": 100, "gradients": 30, "chains": 60}


def small() -> dict[str, str]:
    """A fixed number of each kind, drawn and shrunk by hypothesis: kind -> what is wrong, or nothing."""
    return {name: _by_hypothesis(KINDS[name][0], examples) for name, examples in EXAMPLES.items()}


def _by_hypothesis(run: Callable[[random.Random], str], examples: int) -> str:
    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=HealthCheck)
    @given(st.randoms(use_true_random=False))
    def holds(drawn: random.Random) -> None:
        said = run(drawn)
        assert not said, said

    try:
        holds()
    except Exception:
        return traceback.format_exc()
    return ""


def one(seed: str, kind: str | None = None) -> tuple[str, str]:
    """The kind of one program, and what is wrong with it."""
    drawn = random.Random(seed)
    (name,) = drawn.choices(list(KINDS), [share for _, share in KINDS.values()])
    name = kind or name
    return name, KINDS[name][0](drawn)


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--only", help="SEED/NUMBER of one program")
    parser.add_argument("--kind", choices=KINDS, help="all programs are of this kind")
    parser.add_argument("--small", action="store_true", help="the fixed programs of the test; prints JSON")
    given_arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    kf.init(RANKS)
    if given_arguments.small:
        print(json.dumps(small()))
        return 0
    if given_arguments.only:
        print(*one(given_arguments.only))
        return 0
    counts: collections.Counter[str] = collections.Counter()
    failures = 0
    start = time.monotonic()
    for number in range(given_arguments.first, given_arguments.first + given_arguments.programs):
        if time.monotonic() - start > given_arguments.seconds:
            break
        name, said = one(f"{given_arguments.seed}/{number}", given_arguments.kind)
        counts[name] += 1
        if said:
            failures += 1
            print(f"---- {given_arguments.seed}/{number} ({name})\n{said}", flush=True)
    print(f"{sum(counts.values())} run {dict(counts)}, {failures} failed, {time.monotonic() - start:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
