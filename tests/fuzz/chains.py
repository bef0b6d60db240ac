"""Chains of boxing plans over random layouts, run by the reference executor on random floats."""

from __future__ import annotations

import itertools
import random as _random
import traceback

import numpy as np

from keras_flow import boxing
from keras_flow.layout import Layout, combine
from keras_flow.placements import Placement
from keras_flow.sbp import PartialSum, Split, text
from tests.fuzz.drawing import Drawing
from tests.fuzz.programs import PLACEMENTS


def chain(random: _random.Random) -> str:
    """Up to six layouts one after the other; what is wrong, or nothing."""
    drawing = Drawing(random)
    shape = drawing.shape()
    layouts = []
    for _ in range(random.randint(2, 6)):
        ranks = layouts[-1].placement if layouts and random.random() < 0.4 else Placement(random.choice(PLACEMENTS))
        layouts.append(Layout(ranks, drawing.spec(np.zeros(ranks.hierarchy), len(shape)), shape))
    seed = random.randrange(1000)
    shards, wanted = _shards(layouts[0], seed)
    said = [f"shards of {shape} by seed {seed}"]
    for source, target in itertools.pairwise(layouts):
        said.append(f"{text(source.nd_sbp)} on {source.placement} -> {text(target.nd_sbp)} on {target.placement}")
        try:
            shards = boxing.simulate(boxing.plan(source, target, "float64"), shards)
        except Exception:
            return "\n".join([*said, traceback.format_exc(limit=-6)])
        found = combine(target, shards)
        if not np.allclose(found, wanted, rtol=1e-12, atol=1e-12):
            return "\n".join([*said, f"found {found.tolist()}\nnot {wanted.tolist()}"])
        if wrong := _unequal(target, shards):
            return "\n".join([*said, wrong])
    return ""


def _shards(layout: Layout, seed: int) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Random floats on each rank, equal where the layout promises it, and the logical tensor that they make."""
    random = np.random.default_rng(seed)
    wholes: dict[tuple[int, ...], np.ndarray] = {}
    shards = {}
    for rank in layout.placement.ranks:
        at = layout.placement.coordinates(rank)
        summand = tuple(index for index, part in zip(at, layout.nd_sbp, strict=True) if isinstance(part, PartialSum))
        if summand not in wholes:
            wholes[summand] = random.normal(size=layout.shape)
        shards[rank] = wholes[summand][layout.local_slices(rank)].copy()
    return shards, sum(wholes.values(), np.zeros(layout.shape))


def _unequal(layout: Layout, shards: dict[int, np.ndarray]) -> str:
    """Copies that differ by more than the order of a sum."""
    first: dict[tuple[int, ...], int] = {}
    for rank in layout.placement.ranks:
        at = zip(layout.placement.coordinates(rank), layout.nd_sbp, strict=True)
        other = first.setdefault(tuple(index for index, part in at if isinstance(part, (PartialSum, Split))), rank)
        if not np.allclose(shards[other], shards[rank], rtol=1e-12, atol=1e-12):
            return f"ranks {other} and {rank} differ only along axes with B, but hold other shards"
    return ""
