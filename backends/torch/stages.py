"""Stages of a pipeline on torch: autograd on this rank, or on DTensors of the ranks that compute a lane together."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import torch
import torch.distributed as torch_distributed
from keras import tree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keras_flow.backends.torch import layouts, local_tensors, split_backward, trainer
from keras_flow.backends.torch.collectives import process_group
from keras_flow.backends.torch.layers import pin
from keras_flow.backends.torch.split_backward import Later
from keras_flow.backends.torch.stage_messages import local
from keras_flow.backends.torch.step import RunningStep, running
from keras_flow.backends.torch.variables import from_logical, to_logical
from keras_flow.current.distribution import Distribution, holding
from keras_flow.current.keras_places import engine_core as core
from keras_flow.current.variable_layout import keras_layout


class _EagerStage:
    """A stage as it is: torch computes and differentiates what runs.

    Args:
        function: takes weights, tensors and others, and returns what has gradients, and all else.
        split: what lays tensors over this rank and others, which compute together; None for no others.
    """

    def __init__(self, function: Callable[..., Any], split: Distribution | None):
        self._function, self._place = function, functools.partial(on, 0, split=split)
        self._within = functools.partial(_within, split)

    def run(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any]:
        """Compute the stage without gradients."""
        with torch.no_grad(), self._within():
            outputs, rest = self._function(list(weights), list(tensors), self._place(others))
            return [pin(output) for output in outputs], rest

    def forward(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any, Any]:
        """Compute the stage; also what its backward pass needs."""
        sources = [value.detach().requires_grad_() for value in (*weights, *tensors)]
        with torch.enable_grad(), self._within():
            outputs, rest = self._function(sources[: len(weights)], sources[len(weights) :], self._place(others))
            outputs: list[Any] = [pin(output) for output in outputs]  # no partial sum leaves a stage
        rest = _mapped(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, rest)
        return [output.detach() for output in outputs], rest, (outputs, sources, len(weights))

    def backward(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], list[Any]]:
        """Gradients by the weights, and by the tensors that were received.

        Args:
            held: what `forward` returned.
            from_next: gradients by the tensors sent, from the stage that got them; None for no such.
            scale: the gradient by the sum of the stage's losses.
        """
        outputs, gradients, sources, weights = self._used(held, from_next, scale)
        if not outputs:
            return [None] * weights, [None] * (len(sources) - weights)
        with self._within():
            found = torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
            return list(found[:weights]), self._laid(found[weights:], sources[weights:])

    def backward_inputs(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], Later]:
        """Gradients by the tensors that were received, and what `backward_weights` needs."""
        outputs, gradients, sources, weights = self._used(held, from_next, scale)
        if not outputs:
            return [None] * (len(sources) - weights), Later(sources[:weights], [None] * weights, [])
        with self._within():
            found, later = split_backward.by_inputs(outputs, gradients, sources[:weights], sources[weights:])
            return self._laid(found, sources[weights:]), later

    def backward_weights(self, later: Later) -> list[Any]:
        """Gradients by the weights."""
        with self._within():
            return later.finish()

    @staticmethod
    def _used(held: Any, from_next: Any, scale: float) -> tuple[list[Any], list[Any], list[Any], int]:
        """The outputs that have gradients, these, what the stage was computed from, and how many of it are weights."""
        outputs, sources, weights = held
        given = [None] * (len(outputs) - 1) if from_next is None else from_next
        pairs = [*zip(outputs[:-1], given, strict=True), (outputs[-1], torch.full_like(outputs[-1], scale))]
        used = [(output, gradient) for output, gradient in pairs if gradient is not None and output.requires_grad]
        return [output for output, _ in used], [gradient for _, gradient in used], sources, weights

    @staticmethod
    def _laid(gradients: Sequence[Any], sources: Sequence[torch.Tensor]) -> list[Any]:
        return [_laid(gradient, source) for gradient, source in zip(gradients, sources, strict=True)]


@contextlib.contextmanager
def _within(split: Distribution | None) -> Iterator[None]:
    """Compute under what splits a stage: logical tensors, or plain ones where slots alone are split."""
    if split is None:
        yield
        return
    with holding(split), running(RunningStep(split, consistent=not split.mirrored_view)):
        yield


def _laid(value: Any, like: torch.Tensor) -> Any:
    """A tensor in the layout of another; None as it is."""
    if not isinstance(value, DTensor) or not isinstance(like, DTensor) or value.placements == like.placements:
        return value
    return value.redistribute(like.device_mesh, like.placements)


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """A structure with a function of each leaf; Keras's own walk takes as long as a small layer."""
    if isinstance(structure, dict):
        return {name: _mapped(function, each) for name, each in structure.items()}
    if type(structure) in (list, tuple):
        return type(structure)(_mapped(function, each) for each in structure)
    return tree.map_structure(function, structure) if isinstance(structure, tuple) else function(structure)


def stage_program(
    function: Callable[..., Any], rank: int, compiled: bool, split: Distribution | None = None
) -> _EagerStage:
    """A stage's function as what computes it, and its gradients."""
    return _EagerStage(function, split)


def compiled(function: Callable[..., Any], rank: int, is_compiled: bool) -> Callable[..., Any]:
    """A function of values that is computed without gradients."""

    def call(*values: Any) -> Any:
        with torch.no_grad():
            return function(*on(rank, values))

    return call


def on(rank: int, structure: Any, split: Distribution | None = None) -> Any:
    """A structure with its arrays as tensors, whole ones; or as DTensors of the ranks that compute a lane together."""
    mesh = None if split is None else layouts.mesh(split.placement)

    def put(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        if torch.is_tensor(leaf):
            return to_logical(leaf) if mesh is None else leaf
        tensor = core.convert_to_tensor(leaf)
        return tensor if mesh is None or not tensor.ndim else from_logical(tensor, mesh, layouts.replicated(mesh))

    return _mapped(put, structure)


def add(total: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Add gradients one by one; None where there is neither summand.

    The first sum has memory of its own, to which others are added in place: autograd may give one tensor to two
    weights, or what it was given itself.
    """
    return [
        other if one is None else one if other is None else _added(one, other)
        for one, other in zip(total, more, strict=True)
    ]


def _added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not isinstance(one, DTensor) or not isinstance(other, DTensor):
        return one.add_(other) if hasattr(one, _IS_SUM) else _marked(one + other)
    if one.placements != other.placements:
        one = local_tensors.summed(one)
        other = local_tensors.summed(other).redistribute(one.device_mesh, one.placements)
    # summands add up as well
    if hasattr(one, _IS_SUM):
        one._local_tensor.add_(other._local_tensor)
        return one
    local_sum = one._local_tensor + other._local_tensor
    return _marked(local_tensors.from_local(local_sum, one.shape, one.device_mesh, one.placements))


#: the attribute of a tensor that `add` has made
_IS_SUM = "_keras_flow_is_sum"


def _marked(total: torch.Tensor) -> torch.Tensor:
    setattr(total, _IS_SUM, True)
    return total


def read(variable: keras.Variable) -> torch.Tensor:
    """The value of a variable."""
    return variable._value.detach()


def write(variable: keras.Variable, value: torch.Tensor) -> None:
    """Give a variable a value."""
    with torch.no_grad():
        variable.assign(value)


def apply_gradients(
    optimizer: Any,
    parts: Sequence[tuple[int, list[keras.Variable], list[Any]]],
    is_compiled: bool,
    programs: dict[Any, Any],
) -> None:
    """Update the weights of this rank."""
    ((_, variables, gradients),) = parts
    found = keras_layout(variables[0])
    split = None if found is None or found.distribution.has_one_rank else found.distribution
    with torch.no_grad(), _within(split):
        optimizer.apply(gradients, variables)


def step_function(model: keras.Model, name: str, step: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the function that Keras's loop calls: it takes a list with one batch."""
    trainer.refuse_settings(model)
    return lambda data: step(data[0])


# ---- sums over ranks


def sum_over_processes(value: Any) -> Any:
    """Return the sum of a scalar over all processes, in each of them."""
    total = core.convert_to_tensor(value).detach().clone()
    if torch_distributed.is_initialized():
        torch_distributed.all_reduce(total)
    return total


def sum_over_ranks(
    ranks: tuple[int, ...],
    given: Sequence[list[Any]],
    weights: Sequence[keras.Variable],
    split: Distribution | None = None,
) -> Callable[[], list[Any]]:
    """Begin to sum the gradients of a stage over its ranks; returns what waits for the sums."""
    (own,), mesh = given, None if split is None else layouts.mesh(split.placement)
    own = [_settled(*each, mesh) for each in zip(own, weights, strict=True)]
    if len(ranks) == 1:
        return lambda: own
    kinds = {weight.dtype: [n for n, each in enumerate(weights) if each.dtype == weight.dtype] for weight in weights}
    flat: list[tuple[list[int], torch.Tensor]] = []
    for dtype, numbers in kinds.items():
        # a rank that had no rows has none. So a number for each says whether there is one
        there = torch.tensor([float(own[n] is not None) for n in numbers], dtype=core.to_torch_dtype(dtype))
        parts = [_zeros(weights[n], mesh) if own[n] is None else local(own[n]) for n in numbers]
        flat.append((numbers, torch.cat([part.reshape(-1) for part in (*parts, there.to(core.get_device()))])))
    works: list[Any] = [
        torch_distributed.all_reduce(each, group=process_group(ranks), async_op=True) for _, each in flat
    ]

    def wait() -> list[Any]:
        sums: list[Any] = [None] * len(weights)
        for work, (numbers, joined) in zip(works, flat, strict=True):
            work.wait()
            counts = joined[-len(numbers) :].tolist()
            shapes = [_shape(weights[n], mesh) for n in numbers]
            parts = joined[: -len(numbers)].split([math.prod(shape) for shape in shapes])
            for n, count, part, shape in zip(numbers, counts, parts, shapes, strict=True):
                sums[n] = _of_weight(part.reshape(shape), weights[n], mesh) if count else None
        return sums

    return wait


def _settled(gradient: Any, weight: keras.Variable, mesh: DeviceMesh | None) -> Any:
    """A gradient in the layout of its weight: summed and gathered once for a step."""
    if mesh is None or gradient is None:
        return gradient
    placements = _placements(weight)
    if not isinstance(gradient, DTensor):
        return from_logical(gradient, mesh, placements)
    return gradient if gradient.placements == placements else gradient.redistribute(mesh, placements)


def _placements(weight: keras.Variable) -> layouts.TorchPlacements:
    layout = keras_layout(weight)
    assert layout is not None  # a pipeline lays all weights of its stages
    return layouts.engine_layout(layout.layout)


def _shape(weight: keras.Variable, mesh: DeviceMesh | None) -> tuple[int, ...]:
    """The shape of what this rank has of a weight."""
    if mesh is None:
        return tuple(weight.shape)
    return tuple(part.stop - part.start for part in layouts.local_slices(weight.shape, mesh, _placements(weight)))


def _zeros(weight: keras.Variable, mesh: DeviceMesh | None) -> torch.Tensor:
    return torch.zeros(_shape(weight, mesh), dtype=core.to_torch_dtype(weight.dtype), device=core.get_device())


def _of_weight(local: torch.Tensor, weight: keras.Variable, mesh: DeviceMesh | None) -> torch.Tensor:
    return local if mesh is None else local_tensors.from_local(local, weight.shape, mesh, _placements(weight))
