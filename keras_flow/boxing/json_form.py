"""The JSON form of a plan: the shared specification, read by every executor (docs/boxing-spec.md)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from keras_flow import sbp as _sbp
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.pieces import Piece, Share
from keras_flow.boxing.spec import KINDS, BoxingPlan, Step
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import Broadcast, PartialSum, Split

FORMAT, VERSION = "keras_flow.boxing", 1
PHASES = ("move", "merge", "combine", "reduce", "gather")


def to_json(plan: BoxingPlan) -> dict:
    """The plan as plain data."""
    placements: list[Placement] = []

    def layout(value: Layout) -> dict:
        if value.placement not in placements:
            placements.append(value.placement)
        parts = list(enumerate(value.nd_sbp))
        return {
            "placement": placements.index(value.placement),
            "sbp": _sbp.text(value.nd_sbp),
            # the same in closed form: block i of n of a length L starts at i * (L // n) + min(i, L mod n)
            "splits": [
                [{"axis": axis, "parts": value.placement.hierarchy[axis]} for axis, part in parts if part == Split(dim)]
                for dim in range(len(value.shape))
            ],
            "copies": [axis for axis, part in parts if isinstance(part, Broadcast)],
            "summands": [axis for axis, part in parts if isinstance(part, PartialSum)],
        }

    data = {
        "format": FORMAT,
        "version": VERSION,
        "shape": list(plan.source.shape),
        "dtype": plan.dtype,
        "chosen": plan.chosen,
        "source": layout(plan.source),
        "target": layout(plan.target),
        "steps": [
            {
                "kind": step.kind,
                "phases": list(step.phases),
                "source": layout(step.exchange.source),
                "target": layout(step.exchange.target),
                "apart": list(step.exchange.apart),
                "shares": [
                    {
                        "box": [list(bounds) for bounds in box],
                        "ranges": [[one.merger, one.owner, one.piece.start, one.piece.stop] for one in shares],
                    }
                    for box, shares in step.exchange.table.items()
                ],
            }
            for step in plan.steps
        ],
    }
    data["placements"] = [
        {"type": one.type, "ranks": _ranks(one), "hierarchy": list(one.hierarchy), "axis_names": list(one.axis_names)}
        for one in placements
    ]
    return data


def _ranks(placement: Placement) -> object:
    """Ranks as `{"first", "stride", "count"}` where they are evenly spaced, else listed."""
    first, *_ = ranks = placement.ranks
    strides = {after - before for before, after in itertools.pairwise(ranks)} or {1}
    if len(strides) == 1:
        return {"first": first, "stride": strides.pop(), "count": len(ranks)}
    return list(ranks)


def from_json(data: object) -> BoxingPlan:
    """The plan from its plain data; every number is checked.

    Raises:
        FlowError: not such a plan, another version, or ranges that do not fit.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise FlowError(f'this is not a boxing plan: it needs "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise FlowError(
            f"the boxing plan has version {data.get('version')!r}, this keras_flow reads version {VERSION}: "
            "make the plan anew with kf.boxing.plan"
        )
    try:
        return _read(data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FlowError(
            f"the boxing plan cannot be read: {type(error).__name__}: {error}. See docs/boxing-spec.md"
        ) from error


def _read(data: Mapping) -> BoxingPlan:
    shape = tuple(data["shape"])
    placements = [_placement(one) for one in data["placements"]]

    def layout(value: Mapping) -> Layout:
        made = Layout(placements[value["placement"]], value["sbp"], shape)
        expected = [
            [[axis, made.placement.hierarchy[axis]] for axis, part in enumerate(made.nd_sbp) if part == Split(dim)]
            for dim in range(len(shape))
        ]
        if [[[one["axis"], one["parts"]] for one in dim] for dim in value["splits"]] != expected:
            raise FlowError(f"the boxing plan's splits {value['splits']} do not fit its sbp {value['sbp']!r}")
        return made

    source, target = layout(data["source"]), layout(data["target"])
    steps = []
    at = source
    for number, step in enumerate(data["steps"]):
        if step["kind"] not in KINDS or not step["phases"] or any(phase not in PHASES for phase in step["phases"]):
            raise FlowError(
                f"step {number} of the boxing plan: unknown kind {step['kind']!r} or phases {step['phases']}"
            )
        exchange = Exchange(layout(step["source"]), layout(step["target"]), tuple(step["apart"]))
        table = {}
        for row in step["shares"]:
            box = tuple((int(start), int(stop)) for start, stop in row["box"])
            table[box] = tuple(
                Share(merger, owner, Piece(box, start, stop)) for merger, owner, start, stop in row["ranges"]
            )
        exchange = Exchange(exchange.source, exchange.target, exchange.apart, table)
        exchange.check(f"step {number} of the boxing plan")
        if exchange.source != at:
            raise FlowError(
                f"step {number} of the boxing plan starts from {exchange.source}, the one before ended at {at}"
            )
        at = exchange.target
        steps.append(Step(step["kind"], tuple(step["phases"]), exchange))
    if steps and at != target:
        raise FlowError(f"the boxing plan ends at {at}, its target is {target}")
    return BoxingPlan(source, target, data["dtype"], tuple(steps), data["chosen"])


def _placement(value: Mapping) -> Placement:
    import numpy as np

    ranks = value["ranks"]
    if isinstance(ranks, Mapping):
        ranks = [ranks["first"] + ranks["stride"] * k for k in range(ranks["count"])]
    return Placement(np.asarray(ranks).reshape(value["hierarchy"]), tuple(value["axis_names"]), value["type"])
