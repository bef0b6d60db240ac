"""Gradients of functions of global tensors: a tape of what operators did, walked back.

The gradient of S is S, of B is P and of P is B: the cotangent of an output is laid as the dual of the output, each rank
takes it through its own part, and what comes out is laid as the dual of the input. Nothing is reduced before the leaf.
On an axis where all inputs and outputs are B every rank does the same, so a cotangent that is whole stays whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_flow import sbp as _sbp
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.sbp import Broadcast, NdSbp, PartialSum, Sbp, SbpSpec
from keras_flow.tensors import engine
from keras_flow.tensors.global_tensor import GlobalTensor, relay, summed


@dataclass
class _Record:
    inputs: Sequence[GlobalTensor]
    laid: Sequence[GlobalTensor]
    results: Sequence[GlobalTensor]
    pullbacks: Mapping[int, Callable[..., list]]
    grad_sbp: SbpSpec | None = None
    is_relay: bool = False


@dataclass
class Tape:
    """What was done to tensors that depend on the arguments, in order."""

    watched: set[int]
    records: list[_Record] = field(default_factory=list)


_tape: ContextVar[Tape | None] = ContextVar("tape", default=None)


def value_and_grad(function: Callable[..., Any], argnums: int | Sequence[int] | None = None) -> Callable[..., Any]:
    """A function that returns the value of `function` and its gradients.

    Args:
        function: of global tensors, or structures of them; returns a global tensor with one element.
        argnums: arguments to differentiate, by place; None: every positional argument.

    Returns:
        A function of the same arguments: (value, gradients). Gradients have the structure of the argument, or of a
        tuple of arguments, and lie as these do, a P argument's as B. `kf.explain` takes it too.

    Raises:
        FlowError: the result is not one number, nothing to differentiate, one inside another, or the engine has no
            gradients.
    """
    return ValueAndGrad(function, argnums)


@dataclass(frozen=True)
class ValueAndGrad:
    """What `value_and_grad` returns."""

    function: Callable[..., Any]
    argnums: int | Sequence[int] | None

    def __str__(self) -> str:
        return f"kf.value_and_grad({getattr(self.function, '__name__', self.function)})"

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[GlobalTensor, Any]:
        from keras import tree

        chosen, value, tape = self.recorded(args, kwargs)
        found = back(tape, [(value, seed_of(value))])
        gradients: Any = tree.map_structure(
            lambda leaf: at_leaf(leaf, found) if isinstance(leaf, GlobalTensor) else None, chosen
        )
        whole = value.to_global(sbp=(_sbp.broadcast,) * value.placement.ndim)
        single = isinstance(self.argnums, int) or (self.argnums is None and len(args) == 1)
        return whole, gradients[0] if single else tuple(gradients)

    def recorded(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list, GlobalTensor, Tape]:
        """The arguments to differentiate, as the function was given them, its value, and the tape."""
        given = list(args)
        places = range(len(args)) if self.argnums is None else np.atleast_1d(self.argnums).tolist()
        for place in places:
            if not -len(args) <= place < len(args):
                raise FlowError(
                    f"kf.value_and_grad: argnums names argument {place}; the function was given {len(args)}"
                )
            given[place] = fresh(args[place])
        chosen = [given[place] for place in places]
        leaves = tensors_of(chosen)
        for leaf in leaves:
            if not _is_float(leaf.dtype):
                raise FlowError(
                    f"kf.value_and_grad: an argument of dtype {leaf.dtype} has no gradient; leave it out by argnums"
                )
        if not leaves:
            raise FlowError("kf.value_and_grad was given no global tensor to differentiate")
        if _tape.get() is not None:
            raise FlowError("kf.value_and_grad inside another: gradients of gradients are not there yet")
        value, tape = record(lambda: self.function(*given, **kwargs), leaves)
        if not isinstance(value, GlobalTensor) or value.size != 1:
            found = f"shape {value.shape}" if isinstance(value, GlobalTensor) else type(value).__name__
            raise FlowError(
                f"kf.value_and_grad: the function must return a global tensor with one element, got {found}"
            )
        return chosen, value, tape


def fresh(structure: Any) -> Any:
    """The structure with other tensors that share the shards: one that is given twice is two to a tape."""
    from keras import tree

    return tree.map_structure(
        lambda leaf: GlobalTensor(leaf.layout, leaf.dtype, leaf._shards) if isinstance(leaf, GlobalTensor) else leaf,
        structure,
    )


def tensors_of(structure: Any) -> list[GlobalTensor]:
    """The global tensors of a structure."""
    from keras import tree

    return [leaf for leaf in tree.flatten(structure) if isinstance(leaf, GlobalTensor)]


def floats_of(structure: Any) -> list[GlobalTensor]:
    """Those that have gradients."""
    return [leaf for leaf in tensors_of(structure) if _is_float(leaf.dtype)]


def record(program: Callable[[], Any], leaves: Sequence[GlobalTensor]) -> tuple[Any, Tape]:
    """What a program returns, and what it did to tensors that depend on the leaves."""
    tape = Tape({id(leaf) for leaf in leaves})
    with _taped_by(tape):
        return program(), tape


@contextlib.contextmanager
def _taped_by(tape: Tape | None) -> Iterator[None]:
    token = _tape.set(tape)
    try:
        yield
    finally:
        _tape.reset(token)


def untaped() -> AbstractContextManager[None]:
    """Inside, nothing is recorded."""
    return _taped_by(None)


def is_taped(inputs: Sequence[GlobalTensor]) -> bool:
    """Whether what is computed from these is to be differentiated."""
    tape = _tape.get()
    return tape is not None and any(id(one) in tape.watched and _is_float(one.dtype) for one in inputs)


def note(
    inputs: Sequence[GlobalTensor],
    laid: Sequence[GlobalTensor],
    results: Sequence[GlobalTensor],
    pullbacks: Mapping[int, Callable[..., list]],
) -> None:
    """What an operator did. The record holds the tensors, so that their ids stay their own."""
    tape = _tape.get()
    assert tape is not None
    tape.records.append(_Record(list(inputs), list(laid), list(results), dict(pullbacks)))
    tape.watched |= {id(one) for one in results}


def note_relay(before: GlobalTensor, after: GlobalTensor, grad_sbp: SbpSpec | None) -> None:
    """A change of layout: the gradient passes as it is, or is laid as `grad_sbp`."""
    tape = _tape.get()
    if tape is not None and id(before) in tape.watched:
        tape.records.append(_Record([before], [before], [after], {}, grad_sbp, is_relay=True))
        tape.watched.add(id(after))


def differentiated(
    compute: Callable[..., list], values: Sequence[Any], inputs: Sequence[GlobalTensor], dtypes: Sequence[str]
) -> tuple[list, Callable[..., list]]:
    """Results on a rank, and the function from cotangents of its float results to those of its float inputs."""
    floats = [place for place, one in enumerate(inputs) if _is_float(one.dtype)]
    kept = [place for place, dtype in enumerate(dtypes) if _is_float(dtype)]
    rest: list[Any] = []

    def of_floats(*given: Any) -> list:
        filled = list(values)
        for place, value in zip(floats, given, strict=True):
            filled[place] = value
        rest[:] = compute(*filled)
        return [rest[place] for place in kept]

    results, pullback = engine.tensor_engine().vjp(of_floats, [values[place] for place in floats])
    if len(kept) == len(dtypes):
        return results, pullback
    plain = compute(*values)  # whole numbers beside (top_k): not part of what is differentiated
    for place, value in zip(kept, results, strict=True):
        plain[place] = value
    return plain, pullback


def seed_of(result: GlobalTensor) -> GlobalTensor:
    """Ones, laid as the gradient of a result lies at no cost: as the result does, but B for P."""
    from keras_flow.tensors import creation

    return creation.ones(result.shape, placement=result.placement, sbp=summed(result.sbp), dtype=result.dtype)


def back(tape: Tape, seeds: Sequence[tuple[GlobalTensor, GlobalTensor]]) -> dict[int, GlobalTensor]:
    """id of a tensor -> its gradient, in whatever layout it came.

    Args:
        tape: what was done.
        seeds: results, each with its gradient.
    """
    from keras_flow.tensors import ops

    found = {id(result): seed for result, seed in seeds}

    def gather(tensor: GlobalTensor, gradient: GlobalTensor) -> None:
        before = found.get(id(tensor))
        found[id(tensor)] = gradient if before is None else ops.add(before, gradient)

    for record in reversed(tape.records):
        cotangents = [found.get(id(one)) for one in record.results]
        if all(one is None for one in cotangents):
            continue
        if record.is_relay:
            (cotangent,), (before,) = cotangents, record.inputs
            assert cotangent is not None
            target = cotangent.layout
            if record.grad_sbp is not None:
                target = Layout(before.placement, record.grad_sbp, before.shape)
            elif cotangent.placement != before.placement:
                target = Layout(before.placement, summed(before.sbp), before.shape)
            gather(before, relay(cotangent, target))
            continue
        for tensor, gradient in _through(record, cotangents):
            if id(tensor) in tape.watched:
                gather(tensor, gradient)
    return found


def _through(record: _Record, cotangents: Sequence[GlobalTensor | None]) -> list[tuple[GlobalTensor, GlobalTensor]]:
    """Gradients of the float inputs of an operator."""
    from keras_flow.tensors import creation

    placement = record.laid[0].placement
    parts = [one.sbp for one in (*record.laid, *record.results)]
    given = [one for one in cotangents if one is not None]
    # an axis on which every rank does the same: a whole cotangent gives whole gradients, a partial one partial ones
    same: list[Sbp | None] = [
        (_sbp.partial_sum if any(isinstance(one.sbp[axis], PartialSum) for one in given) else _sbp.broadcast)
        if all(isinstance(part[axis], Broadcast) for part in parts)
        else None
        for axis in range(placement.ndim)
    ]
    laid = []
    for result, cotangent in zip(record.results, cotangents, strict=True):
        if not _is_float(result.dtype):
            continue
        wanted = Layout(placement, _dual(result.sbp, same), result.shape)
        if cotangent is None:
            cotangent = creation.full_like_layout(result, np.zeros(result.shape))
        laid.append(relay(cotangent, wanted))
    floats = [(tensor, one) for tensor, one in zip(record.inputs, record.laid, strict=True) if _is_float(one.dtype)]
    shards: list[dict[int, Any]] = [{} for _ in floats]
    for rank, pullback in record.pullbacks.items():
        with engine.on_rank(rank):
            for held, value in zip(shards, pullback(*[one._shards[rank] for one in laid]), strict=True):
                held[rank] = value
    return [
        (tensor, GlobalTensor(Layout(placement, _dual(one.sbp, same), one.shape), one.dtype, held))
        for (tensor, one), held in zip(floats, shards, strict=True)
    ]


def _dual(nd_sbp: NdSbp, same: Sequence[Sbp | None]) -> NdSbp:
    swapped = {_sbp.broadcast: _sbp.partial_sum, _sbp.partial_sum: _sbp.broadcast}
    return tuple(swapped.get(part, part) if one is None else one for part, one in zip(nd_sbp, same, strict=True))


def at_leaf(leaf: GlobalTensor, found: Mapping[int, GlobalTensor]) -> GlobalTensor:
    """The gradient of an argument, laid as this is, but B for P."""
    from keras_flow.tensors import creation

    target = Layout(leaf.placement, summed(leaf.sbp), leaf.shape)
    gradient = found.get(id(leaf))
    if gradient is None:
        gradient = creation.full_like_layout(leaf, np.zeros(leaf.shape))
    return relay(gradient, target)


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))
