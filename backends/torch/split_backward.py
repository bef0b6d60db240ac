"""The backward pass of a stage in two parts: gradients by what it received first, those by its weights later.

Zero-bubble schedules (Qi et al., 2024, arXiv:2401.10241) send the first part (`I`) to the stage before as soon as it
is there, and fill the time in which a rank would wait with the second part (`W`). Torch computes both in one walk over
the graph of autograd, in which `linear(x, w)` is one node with an edge towards `x` and one towards `w`. So the graph is
cut: a node is *on the way* if it leads to a tensor that the stage received. `I` walks over nodes on the way only, and
keeps the gradient that arrives at each node from which an edge leads towards weights. `W` starts at these nodes with
the kept gradients, and follows the edges towards the weights.

Example: the stage `h = x @ v; y = h @ w`

    I: grad by y -> node of `h @ w` (kept) -> node of `x @ v` (kept) -> grad by x
    W: kept gradient of `h @ w` -> grad by w; kept gradient of `x @ v` -> grad by v

A weight to which several nodes on the way lead (one that is used twice) has its gradient in `I`: from the later of its
nodes a walk would also pass the earlier one, and count it twice. So have weights that share a branch with such a one:
the walk to them would be computed twice. `torch.distributed.pipelining` cuts in a similar way.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

#: edges of the graph, and the gradient that arrived at each
Arrived = list[tuple[GradientEdge, torch.Tensor]]


@dataclass
class Later:
    """The gradients by weights, of which some are still to be computed.

    Attributes:
        weights: leaves of the graph.
        gradients: one for each weight; None for those that are not there.
        walks: where a walk starts, and the numbers of the weights that it finds.
    """

    weights: Sequence[torch.Tensor]
    gradients: list[Any]
    walks: list[tuple[Arrived, list[int]]]

    def finish(self) -> list[Any]:
        """All gradients; None for weights that were not used. Frees the graph, so it can be called once."""
        for arrived, numbers in self.walks:
            edges, gradients = zip(*arrived, strict=True)
            found = torch.autograd.grad(edges, [self.weights[n] for n in numbers], gradients, allow_unused=True)
            for number, gradient in zip(numbers, found, strict=True):
                self.gradients[number] = gradient
        self.walks = []
        return self.gradients


def by_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> tuple[list[Any], Later]:
    """Compute the gradients by tensors, and leave those by weights for later.

    Args:
        outputs: what was computed, and depends on a weight or a tensor.
        gradients: one for each output, of its shape.
        weights: leaves of the graph.
        tensors: leaves of the graph.

    Returns:
        The gradients by the tensors, None for those that were not used; and what computes those by the weights.
    """
    graph = _BackwardGraph(outputs, weights, tensors)
    starts = graph.starts()
    left = {number for _, numbers in starts for number in numbers}
    now = [number for number in range(len(weights)) if number not in left]
    kept = [edge for node, _ in starts if node is not None for edge in graph.edges_of(node)]

    wanted = [*tensors, *(weights[number] for number in now), *kept]
    found = iter(
        torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True) if wanted else ()
    )
    by_tensors = [next(found) for _ in tensors]
    later = Later(weights, [None] * len(weights), [])
    for number in now:
        later.gradients[number] = next(found)
    for node, numbers in starts:
        pairs = graph.apart(gradients) if node is None else [(edge, next(found)) for edge in graph.edges_of(node)]
        arrived = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if arrived:
            later.walks.append((arrived, numbers))
    return by_tensors, later


class _BackwardGraph:
    """The graph of autograd below some outputs.

    Sets of weights are bits of a number: a node has as many edges below it as a model has weights.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ):
        self._ends = [get_gradient_edge(output) for output in outputs]
        self._outputs: dict[Node, set[int]] = {}
        for node, number, *_ in self._ends:
            self._outputs.setdefault(node, set()).add(number)
        self._on_the_way = {get_gradient_edge(tensor).node for tensor in tensors}
        #: node that is not on the way -> the weights below it
        weights_of = {get_gradient_edge(weight).node: 1 << number for number, weight in enumerate(weights)}
        #: where edges leave the way (None: at an output that is not on it), and the weights below each
        branches: list[tuple[Node | None, int]] = []
        for node in self._from_below():
            below = [child for child, _ in node.next_functions if child is not None]
            apart = [weights_of.get(child, 0) for child in below if child not in self._on_the_way]
            if len(apart) < len(below):
                self._on_the_way.add(node)
            if node in self._on_the_way:
                branches += [(node, bits) for bits in apart]
            else:
                weights_of[node] = functools.reduce(operator.or_, apart, weights_of.get(node, 0))
        ends = {node for node, *_ in self._ends if node not in self._on_the_way}
        branches += [(None, weights_of.get(node, 0)) for node in ends]
        #: where branches begin -> the weights below
        self._starts: dict[Node | None, int] = {}
        for start, bits in branches:
            self._starts[start] = self._starts.get(start, 0) | bits
        self._now = self._not_for_later([bits for _, bits in branches])

    def _not_for_later(self, branches: Sequence[int]) -> int:
        """Weights to which edges of several nodes lead, and those in a branch with such a one."""
        once = now = 0
        for bits in self._starts.values():
            now |= once & bits
            once |= bits
        beside = -1
        while beside != now:
            beside = now
            for bits in branches:
                now |= bits if bits & now else 0
        return now

    def _from_below(self) -> Iterator[Node]:
        """All nodes, each after those that its edges lead to."""
        seen: set[Node] = set()
        todo = [(node, False) for node, *_ in self._ends]
        while todo:
            node, is_done = todo.pop()
            if is_done:
                yield node
            elif node not in seen:
                seen.add(node)
                todo.append((node, True))
                for child, number in node.next_functions:
                    if child is not None:
                        self._outputs.setdefault(child, set()).add(number)
                        todo.append((child, False))

    def apart(self, gradients: Sequence[torch.Tensor]) -> Arrived:
        """The outputs that are not on the way, of a gradient for each output."""
        given = zip(self._ends, gradients, strict=True)
        return [(edge, gradient) for edge, gradient in given if edge.node not in self._on_the_way]

    def edges_of(self, node: Node) -> list[GradientEdge]:
        """The outputs of a node that something depends on."""
        return [GradientEdge(node, number) for number in sorted(self._outputs[node])]

    def starts(self) -> list[tuple[Node | None, list[int]]]:
        """The starts of walks, each with its weights; None stands for outputs that are not on the way."""
        left = [(node, bits & ~self._now) for node, bits in self._starts.items()]
        return [(node, [n for n in range(bits.bit_length()) if bits >> n & 1]) for node, bits in left if bits]
