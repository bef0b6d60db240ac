"""The JSON form of a plan: the shared specification, read by every executor (docs/boxing-spec.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from keras_flow import sbp as _sbp
from keras_flow.boxing.blocks import Box
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.messages import Piece, Share
from keras_flow.boxing.search import fits_kind
from keras_flow.boxing.spec import KINDS, BoxingPlan, Step
from keras_flow.errors import FlowError
from keras_flow.layout import Layout, itemsize
from keras_flow.placements import Placement
from keras_flow.sbp import Broadcast, PartialSum, Split

FORMAT, VERSION = "keras_flow.boxing", 1
FIELDS = {"format", "version", "shape", "dtype", "chosen", "placements", "source", "target", "steps"}
STEP_FIELDS = {"kind", "phases", "source", "target", "apart", "shares"}


def to_json(plan: BoxingPlan) -> dict:
    """The plan as plain data."""
    placements: list[Placement] = []

    def layout(value: Layout) -> dict:
        if value.placement not in placements:
            placements.append(value.placement)
        return _layout(value, placements.index(value.placement))

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
    data["placements"] = [_placement(one) for one in placements]
    return data


def _layout(value: Layout, placement: int) -> dict:
    parts = list(enumerate(value.nd_sbp))
    return {
        "placement": placement,
        "sbp": _sbp.text(value.nd_sbp),
        # the same in closed form: block i of n of a length L starts at i * (L // n) + min(i, L mod n)
        "splits": [
            [{"axis": axis, "parts": value.placement.hierarchy[axis]} for axis, part in parts if part == Split(dim)]
            for dim in range(len(value.shape))
        ],
        "copies": [axis for axis, part in parts if isinstance(part, Broadcast)],
        "summands": [axis for axis, part in parts if isinstance(part, PartialSum)],
    }


def _placement(value: Placement) -> dict:
    return {
        "type": value.type,
        "ranks": _ranks(value),
        "hierarchy": list(value.hierarchy),
        "axis_names": list(value.axis_names),
    }


def _ranks(placement: Placement) -> object:
    """Ranks as `{"first", "stride", "count"}` where they are evenly spaced, else listed."""
    first, *_ = ranks = placement.ranks
    strides = {after - before for before, after in itertools.pairwise(ranks)} or {1}
    if len(strides) == 1:
        return {"first": first, "stride": strides.pop(), "count": len(ranks)}
    return list(ranks)


def from_json(data: object) -> BoxingPlan:
    """The plan from its plain data; every field is checked, also those that follow from others.

    Raises:
        FlowError: not such a plan, another version, or ranges that do not fit.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise FlowError(f'this is not a boxing plan: it needs "format": "{FORMAT}"')
    if data.get("version") != VERSION or data["version"] is True:
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
    _check_leaves(data, "plan")
    _check_fields(data, FIELDS, "the boxing plan")
    shape = tuple(data["shape"])
    placements = [_read_placement(one) for one in data["placements"]]

    def layout(value: Mapping) -> Layout:
        number = value["placement"]
        if number not in range(len(placements)):
            raise FlowError(f"the boxing plan has {len(placements)} placements, a layout names placement {number}")
        made = Layout(placements[number], value["sbp"], shape)
        if value != _layout(made, number):
            raise FlowError(
                f"the boxing plan's layout {dict(value)}: its fields do not fit its sbp {value['sbp']!r}, which makes "
                f"it {_layout(made, number)}"
            )
        return made

    source, target = layout(data["source"]), layout(data["target"])
    if not isinstance(data["dtype"], str) or not isinstance(data["chosen"], str):
        raise FlowError(f"the boxing plan: dtype and chosen are text, got {data['dtype']!r} and {data['chosen']!r}")
    itemsize(data["dtype"])
    steps = []
    at = source
    for number, value in enumerate(data["steps"]):
        where = f"step {number} of the boxing plan"
        step = _read_step(value, layout(value["source"]), layout(value["target"]), where)
        if step.exchange.source != at:
            raise FlowError(f"{where} starts from {step.exchange.source}, the one before ended at {at}")
        at = step.exchange.target
        steps.append(step)
    if steps and at != target:
        raise FlowError(f"the boxing plan ends at {at}, its target is {target}")
    if not steps and not (Exchange(source, target).same_placement and source.nd_sbp == target.nd_sbp):
        raise FlowError(f"the boxing plan has no steps, but must lead from {source} to {target}")
    return BoxingPlan(source, target, data["dtype"], tuple(steps), data["chosen"])


def _read_step(value: Mapping, source: Layout, target: Layout, where: str) -> Step:
    _check_fields(value, STEP_FIELDS, where)
    if value["kind"] not in KINDS:
        raise FlowError(f"{where}: unknown kind {value['kind']!r}, legal are {', '.join(KINDS)}")
    table: dict[Box, tuple[Share, ...]] = {}
    for row in value["shares"]:
        _check_fields(row, {"box", "ranges"}, f"{where}, shares")
        box = tuple((start, stop) for start, stop in row["box"])
        if box in table:
            raise FlowError(f"{where}: the box {row['box']} stands twice in its shares")
        table[box] = tuple(
            Share(merger, owner, Piece(box, start, stop)) for merger, owner, start, stop in row["ranges"]
        )
    exchange = Exchange(source, target, tuple(value["apart"]), table)
    exchange.check(where)
    step = Step(value["kind"], tuple(value["phases"]), exchange)
    if step.phases != exchange.phases:
        raise FlowError(f"{where}: its phases are {list(step.phases)}, its layouts need {list(exchange.phases)}")
    if not fits_kind(step):
        raise FlowError(
            f"{where}: from {_sbp.text(source.nd_sbp)} to {_sbp.text(target.nd_sbp)} with apart {value['apart']} is no "
            f"{step.kind}"
        )
    return step


def _read_placement(value: Mapping) -> Placement:
    import numpy as np

    ranks, hierarchy = value["ranks"], value["hierarchy"]
    count = ranks["count"] if isinstance(ranks, Mapping) else len(ranks)
    if min(hierarchy) < 1 or count != math.prod(hierarchy):
        raise FlowError(f"the boxing plan has a placement of {count} ranks with the hierarchy {hierarchy}")
    if isinstance(ranks, Mapping):
        ranks = [ranks["first"] + ranks["stride"] * k for k in range(count)]
    made = Placement(np.asarray(ranks).reshape(hierarchy), tuple(value["axis_names"]), value["type"])
    if {**_placement(made), "ranks": value["ranks"]} != value:
        raise FlowError(f"the boxing plan's placement {dict(value)} is not written as {_placement(made)}")
    return made


def _check_fields(value: Mapping, fields: set[str], where: str) -> None:
    """Whether the fields are those that are published."""
    if value.keys() - fields:
        raise FlowError(f"{where}: unknown fields {sorted(value.keys() - fields)}, it has {sorted(fields)}")


def _check_leaves(value: object, where: str) -> None:
    """Whether there is nothing but text, whole numbers and null."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            _check_leaves(part, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _check_leaves(part, f"{where}[{index}]")
    elif type(value) not in (str, int, type(None)):
        raise FlowError(f"{where}: {value!r} is neither text nor a whole number")
