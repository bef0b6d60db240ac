"""Values that a program reads from DTensors (`float(x)`, `if x > 0`, `print(x)`): those of the logical tensor.

DTensor's own `item()` is that of this rank's piece, or of its summand of a partial sum; ranks would go on with
different numbers. Here all ranks gather and sum first, so each of these is a collective where the tensor is split or a
sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed.tensor import DTensor

from keras_flow.backends.hooking import always, hook
from keras_flow.backends.rendezvous import meeting
from keras_flow.backends.torch.devices import world
from keras_flow.backends.torch.operators.gathering import whole
from keras_flow.backends.torch.step import current_step


def meet_to_read(*values: object) -> None:
    """Before a read by the program itself: the ranks that have parts of a tensor take part."""
    if current_step() is None:
        meet_holders(values, meeting.READS)


def meet_holders(values: Iterable[object], name: str) -> None:
    """Before a call that gathers: the ranks that hold parts of a value meet; those outside of its mesh need not call.

    Args:
        values: DTensors, and others, of which ranks hold no parts.
        name: what calls.
    """
    shared = (v for v in values if isinstance(v, DTensor) and not all(part.is_replicate() for part in v.placements))
    held = next((value for value in shared if value.device_mesh.size() > 1), None)
    if held is None:
        return
    if held.device_mesh.size() == world().size:
        meeting.meet(name)
    else:
        meeting.meet_some(name, held.device_mesh.mesh.flatten().tolist())


def local_scalar(operator: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of `item()`, and with it of float, int, bool and `if`."""
    # a collective: ranks that read a number must all read it
    meet_to_read(args[0])
    return operator(whole(args[0]))


def equal(operator: Callable[..., bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Handler of `torch.equal`; DTensor's asks all ranks of the job, also those that do not compute."""
    meet_to_read(*args)
    return operator(*map(whole, args))


#: a hook on what reads a DTensor
_reads = functools.partial(
    hook,
    "torch.distributed.tensor",
    why="read values are the logical tensor's; DTensor raises, or shows this rank's piece",
    when=always,
)


@_reads("DTensor.numpy")
def to_numpy(_: object, original: Callable[..., object], tensor: DTensor, *args: object, **kwargs: object) -> object:
    """Hook on `DTensor.numpy`: the logical value."""
    meet_to_read(tensor)
    return whole(tensor.detach()).cpu().numpy(*args, **kwargs)


@_reads("DTensor.tolist")
def to_list(_: object, original: Callable[..., object], tensor: DTensor) -> object:
    """Hook on `DTensor.tolist`: the logical value."""
    meet_to_read(tensor)
    return whole(tensor.detach()).tolist()


@_reads("DTensor.__repr__")
def to_text(_: object, original: Callable[..., str], tensor: DTensor, **options: object) -> str:
    """Hook on `DTensor.__repr__`: the logical value and the placements."""
    meet_to_read(tensor)
    return (
        f"DTensor({whole(tensor.detach())!r}, placements={tuple(tensor.placements)}, mesh={tensor.device_mesh.shape})"
    )


@_reads("DTensor.__format__")
def formatted(_: object, original: Callable[..., str], tensor: DTensor, spec: str) -> str:
    """Hook on `DTensor.__format__`: the logical value."""
    meet_to_read(tensor)
    return format(whole(tensor.detach()), spec)
