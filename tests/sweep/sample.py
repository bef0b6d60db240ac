"""A sample of the sweep: what the tests run in a minute for each engine."""

from __future__ import annotations

import random
from dataclasses import asdict

from tests.sweep.design import Setting, covering

#: groups of pieces, and pieces in a group, that an engine trains in a minute
GROUPS = {"jax": (2, 8), "tensorflow": (1, 8), "torch": (3, 8)}


def chosen(backend: str) -> list[tuple[tuple[str, ...], Setting]]:
    """Groups of pieces and a setting for each. Optimizers are not among them: each trains a model alone."""
    from tests.sweep.cases import PIECES

    drawn = random.Random(f"a sample for {backend}")
    names = sorted(name for name in PIECES if not name.startswith("optimizers."))
    groups, size = GROUPS[backend]
    return [(tuple(drawn.sample(names, size)), drawn.choice(covering(drawn.randrange(12)))) for _ in range(groups)]


def train(group: int) -> list[dict]:
    """Train a group of the sample on this rank: a result for each piece."""
    import keras

    from tests.sweep import worker

    names, setting = chosen(keras.backend.backend())[group]
    return [line for lines in worker.train(names, asdict(setting), {}) for line in lines]
