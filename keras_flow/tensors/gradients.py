"""`kf.value_and_grad`: gradients of functions of global tensors, by walking back a tape of what operators did.

The gradient of S is S, of B is P and of P is B: the *dual* layout. At each operator the cotangents of its results are
boxed to the duals of the results' layouts, each rank takes its part back through its pullback, and what comes out has
the duals of the inputs' layouts. So gradients of broadcast weights stay partial sums, and are reduced once, at the
leaf.

On an axis where all inputs and all results are B every rank computes the same. There a whole cotangent gives whole
gradients on every rank, which must not be summed; a partial one gives partial ones.

Example: `sum(x * w)` with `x` of layout S(0) and `w` of layout B on 2 ranks. `x * w` is S(0), the sum P. The cotangent
of the sum is a one, B. That of `x * w` is S(0), and from it each rank gets its rows of the gradient of `x`, S(0), and a
summand of the gradient of `w`, P, which an all-reduce makes B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import tree

from keras_flow import sbp as _sbp
from keras_flow.backends.active import tensor_engine
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.sbp import Broadcast, NdSbp, PartialSum, Sbp
from keras_flow.tensors import creation, ops, tape
from keras_flow.tensors.dtypes import is_float
from keras_flow.tensors.global_tensor import GlobalTensor, change_layout, without_partial
from keras_flow.tensors.tape import BoxingRecord, OperatorRecord, Tape


def value_and_grad(function: Callable[..., object], argnums: int | Sequence[int] | None = None) -> ValueAndGrad:
    """A function that returns the value of `function` and its gradients.

    Args:
        function: takes global tensors, or structures of them; returns a global tensor with one element.
        argnums: arguments to differentiate, by place; None: every positional argument.

    Returns:
        A function of the same arguments: (value, gradients). Gradients have the structure of the argument, or of a
        tuple of arguments, and their layouts, with B for P. `kf.explain` takes it too.

    Raises:
        FlowError: when it is called: the result is not one number, no argument can be differentiated, one call inside
            another, or the engine has no gradients.

    Example:
        >>> import keras_flow as kf
        >>> x = kf.tensor([1.0, 2.0, 3.0], placement=kf.Placement([0, 1]), sbp="S(0)")
        >>> value, gradient = kf.value_and_grad(lambda x: kf.ops.sum(x * x))(x)
        >>> float(value), gradient.sbp, [round(g, 3) for g in gradient.numpy().tolist()]
        (14.0, (S(0),), [2.0, 4.0, 6.0])
    """
    return ValueAndGrad(function, argnums)


@dataclass(frozen=True)
class ValueAndGrad:
    """The function that `value_and_grad` returns; its arguments are those of `value_and_grad`."""

    function: Callable[..., object]
    argnums: int | Sequence[int] | None

    def __str__(self) -> str:
        return f"kf.value_and_grad({getattr(self.function, '__name__', self.function)})"

    def __call__(self, *args: object, **kwargs: object) -> tuple[GlobalTensor, Any]:
        """The value, B on every axis, and the gradients."""
        chosen, value, records = self.record(args, kwargs)
        by_id = walk_back(records, [(value, cotangent_of_ones(value))])
        gradients: Any = tree.map_structure(
            lambda leaf: at_leaf(leaf, by_id) if isinstance(leaf, GlobalTensor) else None, chosen
        )
        single = isinstance(self.argnums, int) or (self.argnums is None and len(args) == 1)
        return value_as_read(value), gradients[0] if single else tuple(gradients)

    def record(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[list[object], GlobalTensor, Tape]:
        """Run the function; returns the arguments to differentiate, as it was given them, its value, and the tape."""
        given = list(args)
        # by number, so that -1 names the last argument, as in JAX
        places = range(len(args)) if self.argnums is None else np.atleast_1d(self.argnums).tolist()
        for place in places:
            if not -len(args) <= place < len(args):
                raise FlowError(
                    f"kf.value_and_grad: argnums names argument {place}; the function was given {len(args)}"
                )
            # f(x, x) has two gradients, one for each place
            given[place] = distinct(args[place])
        chosen = [given[place] for place in places]
        leaves = tensors_of(chosen)
        for leaf in leaves:
            if not is_float(leaf.dtype):
                raise FlowError(
                    f"kf.value_and_grad: an argument of dtype {leaf.dtype} has no gradient; leave it out by argnums"
                )
        if not leaves:
            raise FlowError("kf.value_and_grad was given no global tensor to differentiate")
        # the tape has what operators did, not what walking back did: a second derivative would miss terms
        if tape.is_recording():
            raise FlowError("kf.value_and_grad inside another: gradients of gradients are not there yet")
        value, records = tape.record(lambda: self.function(*given, **kwargs), leaves)
        if not isinstance(value, GlobalTensor) or value.size != 1:
            found = f"shape {value.shape}" if isinstance(value, GlobalTensor) else type(value).__name__
            raise FlowError(
                f"kf.value_and_grad: the function must return a global tensor with one element, got {found}"
            )
        return chosen, value, records


def distinct(structure: Any) -> Any:
    """The structure with new tensors on the same shards.

    The tape tells arguments apart by identity, and one tensor may be given twice.
    """
    return tree.map_structure(
        lambda leaf: GlobalTensor(leaf.layout, leaf.dtype, leaf._shards) if isinstance(leaf, GlobalTensor) else leaf,
        structure,
    )


def tensors_of(structure: object) -> list[GlobalTensor]:
    """The global tensors of a structure, in order."""
    return [leaf for leaf in tree.flatten(structure) if isinstance(leaf, GlobalTensor)]


def floats_of(structure: object) -> list[GlobalTensor]:
    """The global tensors of a structure that have gradients."""
    return [leaf for leaf in tensors_of(structure) if is_float(leaf.dtype)]


def value_as_read(value: GlobalTensor) -> GlobalTensor:
    """A value, B on every axis: a loss may come out as a partial sum, and what the program reads is the sum."""
    return value.to_global(sbp=(_sbp.broadcast,) * value.placement.ndim)


def cotangent_of_ones(result: GlobalTensor) -> GlobalTensor:
    """Ones in the dual layout of a result, B for P; every rank makes its own."""
    return creation.ones(result.shape, placement=result.placement, sbp=without_partial(result.sbp), dtype=result.dtype)


def walk_back(
    records: Tape, cotangents_of_results: Sequence[tuple[GlobalTensor, GlobalTensor]]
) -> dict[int, GlobalTensor]:
    """Gradients of all tensors on the tape, last operator first.

    Args:
        records: what the program did.
        cotangents_of_results: its results, each with its cotangent.

    Returns:
        id of a tensor -> its gradient, in the layout in which it came out of the operators.
    """
    gradients = {id(result): cotangent for result, cotangent in cotangents_of_results}

    def add(tensor: GlobalTensor, gradient: GlobalTensor) -> None:
        # a tensor that several operators used has the sum of their gradients
        before = gradients.get(id(tensor))
        gradients[id(tensor)] = gradient if before is None else ops.add(before, gradient)

    # all that used a tensor stand after what made it, so its gradient is complete when its maker is reached
    for record in reversed(records.records):
        if isinstance(record, BoxingRecord):
            cotangent = gradients.get(id(record.after))
            if cotangent is not None:
                add(record.before, _through_boxing(record, cotangent))
            continue
        cotangents = [gradients.get(id(result)) for result in record.results]
        if any(cotangent is not None for cotangent in cotangents):
            for tensor, gradient in _through_operator(record, cotangents):
                if id(tensor) in records.watched:
                    add(tensor, gradient)
    return gradients


def _through_boxing(record: BoxingRecord, cotangent: GlobalTensor) -> GlobalTensor:
    """The gradient of a tensor before its layout changed: the same values, boxed only if asked or on other ranks."""
    before = record.before
    if record.grad_sbp is not None:
        return change_layout(cotangent, Layout(before.placement, record.grad_sbp, before.shape))
    # an operator needs its cotangents on the ranks where it computed
    if cotangent.placement != before.placement:
        return change_layout(cotangent, Layout(before.placement, without_partial(before.sbp), before.shape))
    return cotangent


def _through_operator(
    record: OperatorRecord, cotangents: Sequence[GlobalTensor | None]
) -> list[tuple[GlobalTensor, GlobalTensor]]:
    """The float inputs of an operator, each with the gradient that this operator adds to it."""
    placement = record.boxed[0].placement
    fixed = _axes_of_equal_work(record, cotangents)
    boxed = []
    for result, cotangent in zip(record.results, cotangents, strict=True):
        # indices and truth values have no cotangent
        if not is_float(result.dtype):
            continue
        if cotangent is None:  # the program did not use this result
            cotangent = _zeros(result)
        boxed.append(change_layout(cotangent, Layout(placement, _dual(result.sbp, fixed), result.shape)))
    inputs = [pair for pair in zip(record.inputs, record.boxed, strict=True) if is_float(pair[1].dtype)]
    shards: list[dict[int, Any]] = [{} for _ in inputs]
    for rank, pullback in record.pullbacks.items():
        # each rank alone: summands stay summands, and no engine's partitioner is asked
        with tensor_engine().on_rank(rank):
            gradients = pullback(*[cotangent._shards[rank] for cotangent in boxed])
        for of_input, value in zip(shards, gradients, strict=True):
            of_input[rank] = value
    return [
        (
            tensor,
            GlobalTensor(
                Layout(placement, _dual(boxed_input.sbp, fixed), boxed_input.shape), boxed_input.dtype, of_input
            ),
        )
        for (tensor, boxed_input), of_input in zip(inputs, shards, strict=True)
    ]


def _axes_of_equal_work(record: OperatorRecord, cotangents: Sequence[GlobalTensor | None]) -> list[Sbp | None]:
    """For each axis on which every rank computes the same, the sbp of cotangents and gradients there; None for others.

    That is B, or P where a cotangent is partial: an operator's derivative is linear, so summands stay summands.
    """
    # B everywhere: each rank did all of the work, so each has the whole gradient and not a summand of it
    layouts = [tensor.sbp for tensor in (*record.boxed, *record.results)]
    given = [cotangent.sbp for cotangent in cotangents if cotangent is not None]
    return [
        (_sbp.partial_sum if any(isinstance(nd_sbp[axis], PartialSum) for nd_sbp in given) else _sbp.broadcast)
        if all(isinstance(nd_sbp[axis], Broadcast) for nd_sbp in layouts)
        else None
        for axis in range(record.boxed[0].placement.ndim)
    ]


_DUAL: dict[Sbp, Sbp] = {_sbp.broadcast: _sbp.partial_sum, _sbp.partial_sum: _sbp.broadcast}


def _dual(nd_sbp: NdSbp, fixed: Sequence[Sbp | None]) -> NdSbp:
    """The layout of the gradient of a tensor: B for P and P for B, except on axes where it is fixed."""
    return tuple(
        _DUAL.get(part, part) if on_axis is None else on_axis for part, on_axis in zip(nd_sbp, fixed, strict=True)
    )


def at_leaf(leaf: GlobalTensor, gradients: Mapping[int, GlobalTensor]) -> GlobalTensor:
    """The gradient of an argument in the argument's layout, with B for P; zeros where nothing depends on it."""
    target = Layout(leaf.placement, without_partial(leaf.sbp), leaf.shape)
    gradient = gradients.get(id(leaf))
    if gradient is None:
        return _zeros(leaf)
    return change_layout(gradient, target)


def _zeros(like: GlobalTensor) -> GlobalTensor:
    """Zeros in the layout of a tensor, with B for P; each rank makes its own part."""
    return creation.zeros(like.shape, placement=like.placement, sbp=without_partial(like.sbp), dtype=like.dtype)
