"""The running totals of one explained training step: layouts of tensors, collectives, bytes kept.

Layouts are stated as splits, axis name -> dim. On a placement with the axes `batch` (2 ranks) and `model` (2 ranks),
a tensor [64, 128] with the splits `{"batch": 0, "model": 1}` has a shard [32, 64] on each rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keras_flow.explainer.explanation import Collective
from keras_flow.explainer.graph import Graph, LayerCall
from keras_flow.layout import Layout, itemsize
from keras_flow.sbp import Split

if TYPE_CHECKING:
    import keras

    from keras_flow.backends.engine_records import StepMemory, StepTraffic

#: layout of a tensor: axis name -> the dim that it splits; the tensor is broadcast over axes that are left out
Splits = Mapping[str, int]


def ring(kind: str, size: int, ranks: int) -> int:
    """Bytes that a rank receives in a collective by a ring (Thakur, Rabenseifner, Gropp 2005).

    Args:
        kind: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        size: bytes of the tensor on one rank; for an all-gather of the gathered tensor, for a reduce-scatter of the
            tensor that is summed.
        ranks: how many take part.

    >>> ring("all_gather", 1000, 4), ring("all_reduce", 1000, 4)
    (750, 1500)
    """
    # all that is not on this rank yet; an all-reduce is a reduce-scatter and an all-gather, so twice that
    share = size * (ranks - 1) / ranks
    return round(2 * share if kind == "all_reduce" else share)


@dataclass
class StepCost:
    """One training step: what the calls so far have sent and kept.

    Attributes:
        graph: the model's calls.
        axes: axis name -> ranks.
        traffic, memory: what the engine sends and keeps beyond what the layouts need, from its capability record.
        layout_of: a variable's layout.
        slots_of: the layout of a variable's slots, in which it is updated.
        cuts_gradients: whether a rank keeps of each gradient what it updates, from the moment when it is known.
        gathers_weights: whether a rank holds what it updates of each weight, and gathers it for its use.
        uses_of_gradient: how often the optimizer's update uses a gradient.
        rows: axes that split the rows of the batch.
        splits: tensor key -> its layout.
        trained: keys of tensors that depend on a trainable variable; the others need no gradient.
        collectives: so far.
        activations: bytes that are kept for the backward pass on one rank, so far.
        summed: variable and axes -> the call whose sum of its gradient was counted first.
        workspace: bytes that the backward pass of the call that is being explained needs besides.
    """

    graph: Graph
    axes: Mapping[str, int]
    traffic: StepTraffic
    memory: StepMemory
    layout_of: Callable[[keras.Variable], Layout]
    slots_of: Callable[[keras.Variable], Layout]
    cuts_gradients: bool = False
    gathers_weights: bool = False
    uses_of_gradient: int = 1
    batch_statistics: str = "global"
    rows: tuple[str, ...] = ()
    splits: dict[int, Splits] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    collectives: list[Collective] = field(default_factory=list)
    activations: int = 0
    summed: dict[tuple[int, tuple[str, ...]], LayerCall] = field(default_factory=dict)
    workspace: int = 0
    _input_sums: dict[tuple[int, tuple[str, ...]], list[tuple[str, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    # ---- tensors

    def shape(self, key: int) -> tuple[int, ...]:
        """Logical shape of a tensor."""
        return self.graph.tensors[key].shape

    def local(self, key: int, splits: Splits | None = None, without: str | None = None) -> int:
        """Bytes of a tensor on one rank, in its own layout or in `splits`; the axis `without` counts as unsplit."""
        spec = self.graph.tensors[key]
        # an empty layout is also a layout: the whole tensor
        splits = self.splits[key] if splits is None else splits
        return self.piece(spec.shape, splits, without) * itemsize(spec.dtype)

    def piece(self, shape: tuple[int, ...], splits: Splits, without: str | None = None) -> int:
        """Elements of the largest shard."""
        lengths = list(shape)
        for axis, dim in splits.items():
            if axis != without:
                # rounded up: the largest shard says how long a step takes
                lengths[dim] = -(-lengths[dim] // self.axes[axis])
        return math.prod(lengths)

    def variable(self, variable: keras.Variable) -> dict[str, int]:
        """The layout of a variable. Axes of one rank split nothing, so they are left out."""
        return self._splits_of(self.layout_of(variable))

    def slots(self, variable: keras.Variable) -> dict[str, int]:
        """The layout of a variable's slots."""
        return self._splits_of(self.slots_of(variable))

    def part_axes(self, variable: keras.Variable) -> tuple[str, ...]:
        """Axes over which slots are split and the variable is not: a rank updates a part of it (`zero=`)."""
        own = self.variable(variable)
        return tuple(axis for axis in self.slots(variable) if axis not in own)

    def _splits_of(self, layout: Layout) -> dict[str, int]:
        parts = zip(layout.placement.axis_names, layout.nd_sbp, strict=True)
        return {axis: part.dim for axis, part in parts if isinstance(part, Split) and self.axes[axis] > 1}

    def weight(self, variable: keras.Variable) -> int:
        """Bytes of a variable on one rank."""
        return self.piece(tuple(variable.shape), self.variable(variable)) * itemsize(variable.dtype)

    def part(self, variable: keras.Variable) -> int:
        """Bytes of what a rank updates of a variable."""
        return self.piece(tuple(variable.shape), self.slots(variable)) * itemsize(variable.dtype)

    def gradient(self, variable: keras.Variable) -> int:
        """Bytes that a rank keeps of a variable's gradient until the update."""
        return self.part(variable) if self.cuts_gradients else self.weight(variable)

    def set_outputs(self, call: LayerCall, splits: Splits) -> None:
        """Set the layout of a call's outputs; splits of dims that an output does not have are dropped."""
        variables = getattr(call.layer, "trainable_variables", ())
        # a tensor that no trained variable reaches has no gradient to send
        trained = bool(variables) or any(key in self.trained for key in call.inputs)
        for key in call.outputs:
            shape = self.shape(key)
            self.splits[key] = {axis: dim for axis, dim in splits.items() if dim < len(shape)}
            if trained:
                self.trained.add(key)
            self.keep(1, key)

    def keep(self, times: int, key: int) -> None:
        """Count `times` tensors of this size as kept for the backward pass."""
        self.activations += times * self.local(key)

    # ---- what is sent

    def send(self, kind: str, axes: tuple[str, ...], size: int, phase: str, path: str, tensor: str, why: str) -> None:
        """Record a collective over `axes` of a tensor of `size` bytes; of one rank or no bytes it is none."""
        # several axes are one collective over their product
        ranks = math.prod(self.axes[axis] for axis in axes)
        if ranks == 1 or size == 0:
            return
        if kind == "all_gather" and self.traffic.gather_is_sum:
            kind, why = "all_reduce", f"{why} (this engine gathers by summing padded pieces)"
        if kind == "reduce_scatter" and not self.traffic.scatters_sums:
            kind, why = "all_reduce", f"{why} (this engine sums whole tensors, then cuts)"
        received = ring(kind, size, ranks)
        self.collectives.append(Collective(kind, axes, ranks, size, received, phase, path, tensor, why))

    def sum_input(self, key: int, axis: str, path: str, why: str) -> None:
        """Remember that an input's gradient is a partial sum over an axis, for `settle_input_sums`."""
        if key in self.trained:
            self._input_sums[key, (axis,)].append((path, why))

    def gather_input(self, call: LayerCall, key: int, axis: str, why: str) -> None:
        """Gather an input over an axis, and keep it for the backward pass.

        Its gradient is whole on every rank, so that slicing it costs nothing.
        """
        size = self.local(key, without=axis)
        self.send("all_gather", (axis,), size, "forward", call.path, "input", why)
        self.splits[key] = {name: dim for name, dim in self.splits[key].items() if name != axis}
        self.keep(1, key)

    def settle_input_sums(self) -> None:
        """Record the sums of input gradients: one a consumer, or one for all where the engine adds them first."""
        # last first, as the backward pass meets them
        for (key, axes), causes in reversed(self._input_sums.items()):
            size = self.local(key)
            path = ", ".join(dict.fromkeys(path for path, _ in causes))
            if self.traffic.adds_before_summing:
                self.send("all_reduce", axes, size, "backward", path, "input gradient", causes[0][1])
            else:
                for path, why in causes:
                    self.send("all_reduce", axes, size, "backward", path, "input gradient", why)
