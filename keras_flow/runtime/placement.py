"""`kf.placement`: OneFlow's spellings of a placement."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keras_flow.errors import FlowError
from keras_flow.placements import Placement
from keras_flow.runtime import env

_DEVICE_STRING = re.compile(r"^(\d+):(\d+)(?:-(\d+))?$")


class PlacementFunction:
    """OneFlow's spellings: `kf.placement(type, ranks)` and `kf.placement.all(type)`.

    Example:
        >>> PlacementFunction()("cpu", "0:0-3").ranks
        (0, 1, 2, 3)
    """

    def __call__(self, type: str, ranks: object, axis_names: Sequence[str] | None = None) -> Placement:
        """A placement from ranks, or from an old device string `"machine:first-last"` (one host: machine 0)."""
        if isinstance(ranks, str):
            ranks = _ranks_of_device_string(ranks)
        elif isinstance(ranks, Sequence) and ranks and all(isinstance(part, str) for part in ranks):
            ranks = [rank for part in ranks for rank in _ranks_of_device_string(str(part))]
        return Placement(ranks, axis_names, type)

    def all(self, type: str, axis_names: Sequence[str] | None = None) -> Placement:
        """All ranks of the job, as a 1-d placement."""
        return Placement(range(env.get_world_size()), axis_names, type)


def _ranks_of_device_string(device: str) -> list[int]:
    match = _DEVICE_STRING.match(device.strip())
    if match is None:
        raise FlowError(f'cannot read the device string {device!r}: it is "machine:first-last", for example "0:0-3"')
    machine, first, last = int(match[1]), int(match[2]), int(match[3] or match[2])
    if machine != 0:
        raise FlowError(
            f"device string {device!r} names machine {machine}; device strings are read for one host (machine 0). "
            "Give the ranks themselves, for example ranks=[4, 5, 6, 7]"
        )
    if last < first:
        raise FlowError(f"device string {device!r} ends before it begins: write the smaller device first")
    return list(range(first, last + 1))


placement = PlacementFunction()
