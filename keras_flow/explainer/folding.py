"""Folds collectives that are alike into one row of a table, so that a deep model does not bury what is special."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keras_flow.explainer.explanation import Collective
from keras_flow.units import counted

#: so many rows that are alike are still listed, and so many layers of one row named
_LISTED = 3
#: passes in which every weight has a collective of its own -> what is sent of it
_OF_WEIGHTS = {"gradients": "gradients", "update": "new values"}


def folded(collectives: Sequence[Collective], stages: bool) -> list[tuple[Collective, int]]:
    """The collectives with those that are alike as one, at the place of the first, and how many each stands for.

    Alike are those of one pass and kind, over the same axes, for the same reason, in the same stage; in the passes of
    weights whatever the weight, in the others of one tensor. Bytes are summed.

    Args:
        collectives: of a step, in order.
        stages: whether the model is a pipeline, whose rows name their stage.
    """
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for number, sent in enumerate(collectives):
        tensor = "" if sent.phase in _OF_WEIGHTS else sent.tensor
        # a collective of many weights at once is a row of its own already
        own = number if len(_layers(sent)) > _LISTED and sent.phase in _OF_WEIGHTS else -1
        groups.setdefault((sent.phase, sent.kind, sent.axes, sent.why, sent.stage, tensor, own), []).append(sent)
    listed = {id(sent): [sent] for alike in groups.values() if len(alike) <= _LISTED for sent in alike}
    listed |= {id(alike[0]): alike for alike in groups.values() if len(alike) > _LISTED}
    return [(_one_of(listed[id(sent)], stages), len(listed[id(sent)])) for sent in collectives if id(sent) in listed]


def _one_of(alike: Sequence[Collective], stages: bool) -> Collective:
    first = alike[0]
    if len(alike) == 1:
        count = len(_layers(first))
        return replace(first, path=counted(count, "layer")) if count > _LISTED else first
    path, tensor = f"{first.path} and {len(alike) - 1} more", first.tensor
    if first.phase in _OF_WEIGHTS:
        weights = len({(sent.path, sent.tensor) for sent in alike})
        path, tensor = counted(weights, "weight"), _OF_WEIGHTS[first.phase]
        path += f" of stage {first.stage}" if stages else ""
    sizes = sum(sent.bytes for sent in alike), sum(sent.received for sent in alike)
    return replace(first, bytes=sizes[0], received=sizes[1], path=path, tensor=tensor)


def _layers(sent: Collective) -> list[str]:
    return sent.path.split(", ")
