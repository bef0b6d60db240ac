"""The JSON form of a plan, which is the shared specification: what it holds, and reading it with every field checked.

docs/boxing-spec.md says what the fields mean, docs/boxing-plan.schema.json which there are.

    >>> from keras_flow.boxing import plan
    >>> pair = Placement([0, 1])
    >>> data = plan(Layout(pair, "S(0)", (2, 2)), Layout(pair, "B", (2, 2))).to_json()
    >>> data["steps"][0]["kind"], data["steps"][0]["phases"], data["source"]["splits"]
    ('all_gather', ['move'], [[{'axis': 0, 'parts': 2}], []])
"""

# pyright: basic
# what is read has no types until every field of it is checked, which is what this file does

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from keras_flow import sbp as _sbp
from keras_flow.boxing.collectives import KINDS, fits_kind
from keras_flow.boxing.exchange import Exchange
from keras_flow.boxing.step import Step
from keras_flow.errors import FlowError
from keras_flow.layout import Layout, itemsize
from keras_flow.placements import Placement
from keras_flow.sbp import Broadcast, PartialSum, Split

if TYPE_CHECKING:
    from keras_flow.boxing.spec import BoxingPlan

FORMAT, VERSION = "keras_flow.boxing", 2
FIELDS = {"format", "version", "shape", "dtype", "chosen", "placements", "source", "target", "steps"}
STEP_FIELDS = {"kind", "phases", "source", "target", "apart"}


def to_json(plan: BoxingPlan) -> dict[str, object]:
    """The plan as plain data."""
    # placements are listed once, and layouts name them by number
    placements: list[Placement] = []

    def layout(value: Layout) -> dict[str, object]:
        if value.placement not in placements:
            placements.append(value.placement)
        return _layout(value, placements.index(value.placement))

    data: dict[str, object] = {
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
            }
            for step in plan.steps
        ],
    }
    data["placements"] = [_placement(placement) for placement in placements]
    return data


def _layout(value: Layout, placement: int) -> dict[str, object]:
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


def _placement(value: Placement) -> dict[str, object]:
    return {
        "type": value.type,
        "ranks": _ranks(value),
        "hierarchy": list(value.hierarchy),
        "axis_names": list(value.axis_names),
    }


def _ranks(placement: Placement) -> object:
    """Ranks as `{"first", "stride", "count"}` where they are evenly spaced, otherwise listed."""
    first, *_ = ranks = placement.ranks
    # a placement of 65,536 ranks in order is then one line; a single rank has stride 1
    strides = {after - before for before, after in itertools.pairwise(ranks)} or {1}
    if len(strides) == 1:
        return {"first": first, "stride": strides.pop(), "count": len(ranks)}
    return list(ranks)


#: source, target, dtype, steps, chosen: the fields of a `BoxingPlan`
PlanFields = tuple[Layout, Layout, str, tuple[Step, ...], str]


def read_plan(data: object) -> PlanFields:
    """The fields of a plan from its plain data; everything is checked, also what follows from something else.

    Raises:
        FlowError: not such a plan, another version, or ranges that do not fit.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise FlowError(f'this is not a boxing plan: it needs "format": "{FORMAT}"')
    # True == 1 in Python, but not in JSON
    if data.get("version") != VERSION or data["version"] is True:
        raise FlowError(
            f"the boxing plan has version {data.get('version')!r}, this keras_flow reads version {VERSION}: "
            "make the plan anew with kf.boxing.plan"
        )
    try:
        return _read(data)
    # whatever a file of another program has in a field's place becomes one kind of error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FlowError(
            f"the boxing plan cannot be read: {type(error).__name__}: {error}. See docs/boxing-spec.md"
        ) from error


def _read(data: Mapping) -> PlanFields:
    # before anything is computed: 64.0 or True would pass as a length and fail much later
    _check_leaves(data, "plan")
    _check_fields(data, FIELDS, "the boxing plan")
    shape = tuple(data["shape"])
    placements = [_read_placement(value) for value in data["placements"]]

    def layout(value: Mapping) -> Layout:
        number = value["placement"]
        if number not in range(len(placements)):
            raise FlowError(f"the boxing plan has {len(placements)} placements, a layout names placement {number}")
        # fields that follow from sbp are for executors without this package; they must not contradict it
        result = Layout(placements[number], value["sbp"], shape)
        if value != _layout(result, number):
            raise FlowError(
                f"the boxing plan's layout {dict(value)}: its fields do not fit its sbp {value['sbp']!r}, which makes "
                f"it {_layout(result, number)}"
            )
        return result

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
    return source, target, data["dtype"], tuple(steps), data["chosen"]


def _read_step(value: Mapping, source: Layout, target: Layout, where: str) -> Step:
    _check_fields(value, STEP_FIELDS, where)
    if value["kind"] not in KINDS:
        raise FlowError(f"{where}: unknown kind {value['kind']!r}, legal are {', '.join(KINDS)}")
    exchange = Exchange(source, target, tuple(value["apart"]))
    _check_exchange(exchange, where)
    step = Step(value["kind"], tuple(value["phases"]), exchange)
    # phases follow from the layouts; the file says them for readers that do not compute
    if step.phases != exchange.phases:
        raise FlowError(f"{where}: its phases are {list(step.phases)}, its layouts need {list(exchange.phases)}")
    # a kind decides which collective an engine calls, whatever the messages say
    if not fits_kind(step):
        raise FlowError(
            f"{where}: from {_sbp.text(source.nd_sbp)} to {_sbp.text(target.nd_sbp)} with apart {value['apart']} is no "
            f"{step.kind}"
        )
    return step


def _check_exchange(exchange: Exchange, where: str) -> None:
    """Check that the axes fit the layouts.

    Raises:
        FlowError: layouts of two shapes, or an axis that does not exist.
    """
    source, target, apart = exchange.source, exchange.target, exchange.apart
    if source.shape != target.shape:
        raise FlowError(f"{where}: layouts of two shapes, {list(source.shape)} and {list(target.shape)}")
    axes = range(source.placement.ndim)
    if apart and not (
        exchange.same_placement
        and sorted(set(apart)) == list(apart)
        and all(axis in axes and source.nd_sbp[axis] == target.nd_sbp[axis] for axis in apart)
    ):
        raise FlowError(
            f"{where}: groups along axes need one placement that has the axes, in order, and leave what they hold; "
            f"apart is {list(apart)}"
        )


def _read_placement(value: Mapping) -> Placement:
    ranks, hierarchy = value["ranks"], value["hierarchy"]
    count = ranks["count"] if isinstance(ranks, Mapping) else len(ranks)
    if min(hierarchy) < 1 or count != math.prod(hierarchy):
        raise FlowError(f"the boxing plan has a placement of {count} ranks with the hierarchy {hierarchy}")
    if isinstance(ranks, Mapping):
        ranks = [ranks["first"] + ranks["stride"] * k for k in range(count)]
    placement = Placement(np.asarray(ranks).reshape(hierarchy), tuple(value["axis_names"]), value["type"])
    if {**_placement(placement), "ranks": value["ranks"]} != value:
        raise FlowError(f"the boxing plan's placement {dict(value)} is not written as {_placement(placement)}")
    return placement


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
