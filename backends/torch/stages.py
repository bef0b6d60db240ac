"""Stages of a pipeline on torch: autograd on this rank, activations by messages of `torch.distributed`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
import torch.distributed as torch_distributed
from keras import tree

from keras_flow.backends.structures import described, leaves, made
from keras_flow.backends.torch import layouts
from keras_flow.backends.torch.collectives import process_group
from keras_flow.current.distribution import Distribution
from keras_flow.current.keras_places import engine_core as core


class _EagerStage:
    """A stage as it is: torch computes and differentiates what runs.

    Args:
        function: of weights, tensors and others; returns what has gradients, and all else.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def run(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any]:
        """Compute the stage without gradients."""
        with torch.no_grad():
            return self._function(list(weights), list(tensors), on(0, others))

    def forward(self, weights: Sequence[Any], tensors: Sequence[Any], others: Any) -> tuple[list[Any], Any, Any]:
        """Compute the stage; also what its backward pass needs."""
        sources = [value.detach().requires_grad_() for value in (*weights, *tensors)]
        with torch.enable_grad():
            outputs, rest = self._function(sources[: len(weights)], sources[len(weights) :], on(0, others))
        rest = _mapped(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, rest)
        return [output.detach() for output in outputs], rest, (outputs, sources, len(weights))

    def backward(self, held: Any, from_next: Any, scale: float) -> tuple[list[Any], list[Any]]:
        """Gradients by the weights, and by the tensors that were received.

        Args:
            held: what `forward` returned.
            from_next: gradients by the tensors sent, from the stage that got them; None for no such.
            scale: the gradient by the sum of the stage's losses.
        """
        outputs, sources, weights = held
        given = [None] * (len(outputs) - 1) if from_next is None else from_next
        pairs = [*zip(outputs[:-1], given, strict=True), (outputs[-1], torch.full_like(outputs[-1], scale))]
        used = [(output, gradient) for output, gradient in pairs if gradient is not None and output.requires_grad]
        if not used:
            return [None] * weights, [None] * (len(sources) - weights)
        found = torch.autograd.grad(
            [output for output, _ in used], sources, [gradient for _, gradient in used], allow_unused=True
        )
        return list(found[:weights]), list(found[weights:])


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
    return _EagerStage(function)


def compiled(function: Callable[..., Any], rank: int, is_compiled: bool) -> Callable[..., Any]:
    """A function of values that is computed without gradients."""

    def call(*values: Any) -> Any:
        with torch.no_grad():
            return function(*on(rank, values))

    return call


def on(rank: int, structure: Any, split: Distribution | None = None) -> Any:
    """A structure with its arrays as tensors; a process drives one rank."""
    return _mapped(
        lambda leaf: core.convert_to_tensor(leaf) if hasattr(leaf, "shape") and not torch.is_tensor(leaf) else leaf,
        structure,
    )


def add(total: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """The sums of gradients, one by one; None for those that there are not."""
    return [
        other if one is None else one if other is None else one.add_(other)
        for one, other in zip(total, more, strict=True)
    ]


def read(variable: keras.Variable) -> torch.Tensor:
    """The value of a variable."""
    return variable._value.detach()


def write(variable: keras.Variable, value: torch.Tensor) -> None:
    """Give a variable a value."""
    with torch.no_grad():
        variable.assign(value)


def apply_gradients(
    optimizer: Any, parts: Sequence[tuple[int, list[keras.Variable], list[Any]]], is_compiled: bool
) -> None:
    """Update the weights of this rank.

    Args:
        optimizer: of which this rank has the slots of its weights.
        parts: of this rank the weights, and a gradient for each.
        is_compiled: nothing is.
    """
    pairs = [pair for _, *lists in parts for pair in zip(*lists, strict=True) if pair[1] is not None]
    if pairs:
        with torch.no_grad():
            optimizer.apply([gradient for _, gradient in pairs], [variable for variable, _ in pairs])
        return
    # a rank without weights that are trained: its counters move on as those of the others do
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            each._iterations.assign_add(1)


def step_function(model: keras.Model, name: str, step: Callable[[Any], Any]) -> Callable[..., Any]:
    """What Keras's loop calls: a step on a batch, which stands in a list.

    Args:
        model: whose loop.
        name: `"train"`, `"test"` or `"predict"`.
        step: of a batch.
    """
    return lambda data: step(data[0])


# ---- messages


def send_tensors(
    tensors: Any, pair: tuple[int, int], tag: int, told: dict[object, Any], key: object
) -> Callable[[], None]:
    """Begin to send a structure of tensors to a rank; returns what waits until it has left.

    Args:
        tensors: None, or lists of tensors, some of which may be None.
        pair: who sends them, and who gets them.
        tag: tells messages apart that are on their way between two ranks.
        told: the keys whose shapes were told.
        key: messages of one key have the same shapes, which are told with the first.
    """
    flat = [leaf.contiguous() for leaf in leaves(tensors)]
    works, sent = [], []
    if key not in told:
        told[key] = True
        text = json.dumps(described(tensors)).encode()
        header = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        sent += [torch.tensor([len(text)]), header]
    sent += flat
    for leaf in sent:
        works.append(torch_distributed.isend(leaf, pair[1], tag=tag))

    def wait() -> None:
        for work in works:
            work.wait()
        sent.clear()

    return wait


def receive_tensors(pair: tuple[int, int], tag: int, told: dict[object, Any], key: object) -> Callable[[], Any]:
    """Begin to receive what a rank sends; returns what waits for it and gives it."""
    rank = pair[0]
    if key in told:
        return _coming(told[key], rank, tag)

    def first() -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        torch_distributed.recv(length, rank, tag=tag)
        header = torch.zeros(int(length), dtype=torch.uint8)
        torch_distributed.recv(header, rank, tag=tag)
        told[key] = json.loads(bytes(header.tolist()).decode())
        return _coming(told[key], rank, tag)()

    return first


def _coming(told: Any, rank: int, tag: int) -> Callable[[], Any]:
    """Begin to receive tensors of known shapes; what waits for them."""
    tensors = made(told, _empty)
    works: list[Any] = [torch_distributed.irecv(leaf, rank, tag=tag) for leaf in leaves(tensors)]

    def wait() -> Any:
        for work in works:
            work.wait()
        return tensors

    return wait


def sum_over_processes(value: Any) -> Any:
    """The sum of a scalar over all processes, in each."""
    total = core.convert_to_tensor(value, dtype="float32").detach().clone()
    if torch_distributed.is_initialized():
        torch_distributed.all_reduce(total)
    return total


def sum_over_ranks(
    ranks: tuple[int, ...], given: Sequence[list[Any]], weights: Sequence[keras.Variable]
) -> Callable[[], list[Any]]:
    """Begin to sum the gradients of a stage over its ranks; returns what waits for the sums.

    Args:
        ranks: those of the stage.
        given: those of this process's rank; None for those that there are not.
        weights: whose they are.
    """
    (own,) = given
    if len(ranks) == 1:
        return lambda: own
    kinds = {weight.dtype: [n for n, each in enumerate(weights) if each.dtype == weight.dtype] for weight in weights}
    flat: list[tuple[list[int], torch.Tensor]] = []
    for dtype, numbers in kinds.items():
        # a rank that had no rows has none. So a number for each says whether there is one
        there = torch.tensor([float(own[n] is not None) for n in numbers], dtype=core.to_torch_dtype(dtype))
        parts = [_zeros(weights[n]) if own[n] is None else own[n] for n in numbers]
        flat.append((numbers, torch.cat([part.reshape(-1) for part in (*parts, there.to(core.get_device()))])))
    works: list[Any] = [
        torch_distributed.all_reduce(each, group=process_group(ranks), async_op=True) for _, each in flat
    ]

    def wait() -> list[Any]:
        sums: list[Any] = [None] * len(weights)
        for work, (numbers, joined) in zip(works, flat, strict=True):
            work.wait()
            counts = joined[-len(numbers) :].tolist()
            shapes = [tuple(weights[n].shape) for n in numbers]
            parts = joined[: -len(numbers)].split([math.prod(shape) for shape in shapes])
            for n, count, part, shape in zip(numbers, counts, parts, shapes, strict=True):
                sums[n] = part.reshape(shape) if count else None
        return sums

    return wait


def _zeros(weight: keras.Variable) -> torch.Tensor:
    return torch.zeros(tuple(weight.shape), dtype=core.to_torch_dtype(weight.dtype), device=core.get_device())


def from_process_of(rank: int, value: Any, is_like: bool, ranks: tuple[int, ...] | None = None) -> Any:
    """A structure of tensors of the process that drives a rank, in all processes.

    Args:
        rank: who has it.
        value: it; elsewhere tensors of the same shapes where `is_like`, otherwise whatever.
        is_like: whether all processes know the shapes.
        ranks: those whose processes get it; None for all.
    """
    mine, group = layouts.this_rank() == rank, None if ranks is None else process_group(ranks)
    if not is_like:
        text = json.dumps(described(value)).encode() if mine else b""
        length = torch.tensor([len(text)])
        torch_distributed.broadcast(length, rank, group)
        header = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if mine
            else torch.zeros(int(length), dtype=torch.uint8)
        )
        torch_distributed.broadcast(header, rank, group)
        value = value if mine else made(json.loads(bytes(header.tolist()).decode()), _empty)
    flat = [leaf.contiguous() if mine else torch.empty_like(leaf) for leaf in tree.flatten(value)]
    for leaf in flat:
        torch_distributed.broadcast(leaf, rank, group)
    return tree.pack_sequence_as(value, flat)


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=core.to_torch_dtype(dtype), device=core.get_device())
