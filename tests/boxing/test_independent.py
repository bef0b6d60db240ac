"""An executor written from docs/boxing-spec.md alone: it reads the JSON form and calls nothing of keras_flow.

That it gives the right tensors proves that the specification is complete.
"""

from __future__ import annotations

import itertools
import json
import random
from math import prod

import numpy as np
import pytest

from keras_flow.boxing import BoxingPlan, plan
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from tests.boxing.cases import all_nd_sbps, copies, families, grid, logical_tensor, shards_of


class Side:
    """A layout of the JSON form: the box and the coordinates of every rank."""

    def __init__(self, data, layout):
        placement = data["placements"][layout["placement"]]
        ranks, self.sizes = placement["ranks"], placement["hierarchy"]
        if isinstance(ranks, dict):
            ranks = [ranks["first"] + ranks["stride"] * k for k in range(ranks["count"])]
        self.shape, self.layout, self.ranks = data["shape"], layout, ranks
        self.split = sorted(one["axis"] for dim in layout["splits"] for one in dim)
        self.copies, self.summands = layout["copies"], layout["summands"]
        self.at = dict(zip(ranks, itertools.product(*map(range, self.sizes)), strict=True))
        self.rank_at = {at: rank for rank, at in self.at.items()}
        self.box = {rank: self.box_of(at) for rank, at in self.at.items()}

    def box_of(self, at):
        box = []
        for length, splits in zip(self.shape, self.layout["splits"], strict=True):
            start = 0
            for one in splits:
                index, parts = at[one["axis"]], one["parts"]
                start += index * (length // parts) + min(index, length % parts)
                length = length // parts + (index < length % parts)
            box.append((start, start + length))
        return tuple(box)

    def on(self, rank, axes):
        return tuple(self.at[rank][axis] for axis in axes)

    def number(self, axes, coords):
        value = 0
        for axis, index in zip(axes, coords, strict=True):
            value = value * self.sizes[axis] + index
        return value


class Step:
    """The messages of each phase: (sender, receiver, box, start, stop, buffer that it is read from)."""

    def __init__(self, data, step):
        self.source, self.target = Side(data, step["source"]), Side(data, step["target"])
        self.apart, self.phases = step["apart"], step["phases"]
        self.messages = {phase: [] for phase in self.phases}
        source, target = self.source, self.target
        self.same = (source.ranks, source.sizes) == (target.ranks, target.sizes)
        fixed = [axis for axis in range(len(target.sizes)) if axis in target.split or axis in self.apart]
        of_cell = {}
        for rank in target.ranks:
            of_cell.setdefault(target.on(rank, fixed), []).append(rank)
        for wanting in of_cell.values():
            for cell, of_source in {source.on(rank, source.split): source.box[rank] for rank in source.ranks}.items():
                pairs = zip(of_source, target.box[wanting[0]], strict=True)
                box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
                if all(start < stop for start, stop in box):
                    self.atom(cell, box, wanting)

    def atom(self, cell, box, wanting):
        source, target, size = self.source, self.target, prod(stop - start for start, stop in box)
        group = target.at[wanting[0]]
        summands = list(
            itertools.product(
                *([group[axis]] if axis in self.apart else range(source.sizes[axis]) for axis in source.summands)
            )
        )
        shared = [axis for axis in target.summands if axis not in self.apart]
        own = [axis for axis in range(len(target.sizes)) if axis not in shared]
        members = {}
        for rank in wanting:
            members.setdefault(target.on(rank, own), []).append(rank)
        has = {rank: source.on(rank, source.summands) for rank in wanting if self.holds(rank, cell)}
        copies = {}  # member -> its ranks, one in each family
        for rank in wanting:
            copies.setdefault(target.on(rank, shared), []).append(rank)
        holding = {
            one: {member: sum(has.get(rank) == one for rank in ranks) for member, ranks in copies.items()}
            for one in summands
        }
        p, m = len(summands), len(members)
        fewest = p + m - 2 + (not has)
        lacking = sum(m - max(counts.values()) for counts in holding.values())
        if "move" in self.phases or ("merge" in self.phases and lacking <= fewest):
            phase = "move" if "move" in self.phases else "merge"
            for summand in summands:
                number = source.number(source.split, cell)
                number += source.number(source.summands, summand) if phase == "merge" else 0
                most = max(holding[summand].values())
                best = sorted(member for member, count in holding[summand].items() if count == most)
                for receiver in copies[best[0 if most == m else number % len(best)]]:
                    sender = self.sender(cell, summand, receiver)
                    self.messages[phase].append((sender, receiver, box, 0, size, "source"))
            return
        owners = [rank for rank in wanting if rank in has] or wanting
        base, more = divmod(size, len(owners))
        starts = [k * base + min(k, more) for k in range(len(owners) + 1)]
        for k, owner in enumerate(owners):
            bounds = starts[k], starts[k + 1]
            for summand in summands:
                self.messages["reduce"].append((self.sender(cell, summand, owner), owner, box, *bounds, "source"))
            for rank in copies[target.on(owner, shared)]:
                if rank != owner:
                    self.messages["gather"].append((owner, rank, box, *bounds, "result"))

    def holds(self, rank, cell):
        return rank in self.source.at and self.source.on(rank, self.source.split) == cell

    def sender(self, cell, summand, receiver):
        source, at = self.source, {}
        if self.holds(receiver, cell) and source.on(receiver, source.summands) == summand:
            return receiver
        at.update(zip(source.split, cell, strict=True))
        at.update(zip(source.summands, summand, strict=True))
        if receiver not in self.target.at or self.same:
            copy = source.on(receiver, source.copies)
        else:
            number = self.target.ranks.index(receiver) % prod(source.sizes[axis] for axis in source.copies)
            copy = list(itertools.product(*(range(source.sizes[axis]) for axis in source.copies)))[number]
        at.update(zip(source.copies, copy, strict=True))
        return source.rank_at[tuple(at[axis] for axis in range(len(source.sizes)))]

    def run(self, shards):
        shape = {rank: [stop - start for start, stop in box] for rank, box in self.target.box.items()}
        result = {rank: np.zeros(shape[rank]) for rank in self.target.ranks}
        buffers = {"source": shards, "result": result}
        for phase in self.phases:
            sent = [
                (one, self.region(buffers[one[5]], one[5], one[0], one[2]).reshape(-1)[one[3] : one[4]].copy())
                for one in self.messages[phase]
            ]
            for (_, receiver, box, start, stop, _), values in sent:
                region = self.region(result, "result", receiver, box)
                flat = region.reshape(-1).copy()
                flat[start:stop] += values
                region[...] = flat.reshape(region.shape)
        return result

    def region(self, buffer, name, rank, box):
        whole = (self.target if name == "result" else self.source).box[rank]
        inside = [slice(a - c, b - c) for (a, b), (c, _) in zip(box, whole, strict=True)]
        return buffer[rank][(*inside, ...)]


def execute(data, shards):
    """The shards after all steps, and the elements that each rank received from others."""
    received = {}
    for one in data["steps"]:
        step = Step(data, one)
        for sender, receiver, _, start, stop, _ in itertools.chain(*step.messages.values()):
            if sender != receiver:
                received[receiver] = received.get(receiver, 0) + stop - start
        shards = step.run(shards)
    return shards, received


def check(made: BoxingPlan) -> None:
    logical = logical_tensor(made.source.shape)
    out, received = execute(json.loads(json.dumps(made.to_json())), shards_of(made.source, logical))
    for summands, slices in families(made.target):
        assert np.array_equal(sum(out[rank] for rank in summands), logical[slices]), made
    for ranks in copies(made.target):
        assert all(np.array_equal(out[rank], out[ranks[0]]) for rank in ranks), made
    assert {rank: 8 * n for rank, n in received.items() if n} == {rank: n for rank, n in made.loads.items() if n}, made


@pytest.mark.parametrize("shape", [(8, 12), (5, 7)])
def test_every_pair_on_2x2(shape):
    for before, after in itertools.product(all_nd_sbps(2), repeat=2):
        made = plan(Layout(grid((2, 2)), before, shape), Layout(grid((2, 2)), after, shape), "float64")
        check(made)


@pytest.mark.parametrize(("hierarchy", "shape"), [((2, 4), (13, 11)), ((2, 2, 2), (8, 12)), ((3, 2, 2), (5, 7))])
def test_more_ranks(hierarchy, shape):
    every = all_nd_sbps(len(hierarchy))
    for before, after in random.Random(0).sample([(one, other) for one in every for other in every], 60):
        check(plan(Layout(grid(hierarchy), before, shape), Layout(grid(hierarchy), after, shape), "float64"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([0, 1, 2, 3], [[0, 1], [2, 3]]),
        ([[0, 1], [2, 3]], [1, 3]),
        ([[0, 1], [2, 3]], [[4, 5, 6], [7, 8, 9]]),
        ([[3, 1], [0, 2]], [[0, 1, 5], [6, 2, 3]]),
        ([2], [[0, 1], [2, 3]]),
    ],
)
def test_other_placements(one, other):
    one, other = Placement(one), Placement(other)
    pairs = list(itertools.product(all_nd_sbps(one.ndim), all_nd_sbps(other.ndim)))
    for before, after in random.Random(0).sample(pairs, min(len(pairs), 60)):
        check(plan(Layout(one, before, (5, 7)), Layout(other, after, (5, 7)), "float64"))
