"""The values that an explanation consists of: variables, collectives, memory, repeated work, advice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

#: passes of a step, in order
PASSES = ("forward", "outputs", "backward", "gradients", "update")


@dataclass(frozen=True)
class VariableRow:
    """One variable.

    Attributes:
        path: `variable.path`.
        shape: logical shape.
        dtype: its dtype.
        layout: nd_sbp in short form.
        source: the rule that gave it, `kf.shard` or `default`.
        note: why it is not what was asked for, or that it is gathered where it is used.
        bytes: on each rank; a variable is split evenly or not at all.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    source: str
    note: str
    bytes: int


@dataclass(frozen=True)
class Collective:
    """One collective of a training step.

    Attributes:
        kind: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        axes: the axes over which it goes.
        ranks: number of ranks in each of its groups.
        bytes: of the tensor on one rank (of the gathered one, for `all_gather`).
        received: bytes that each rank receives, by a ring.
        phase: one of `PASSES`.
        path: the layer that causes it.
        tensor: which tensor.
        why: the reason.
        stage: of a pipeline, whose ranks take part.
    """

    kind: str
    axes: tuple[str, ...]
    ranks: int
    bytes: int
    received: int
    phase: str
    path: str
    tensor: str
    why: str
    stage: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds.

    Attributes:
        weights: variables of the model.
        slots: variables of the optimizer.
        gradients: of trainable variables.
        activations: estimate: what the forward pass keeps for the backward pass.
        peak: estimate: the most that the rank holds at one time in a step, all of the above that are there together.
    """

    weights: int
    slots: int
    gradients: int
    activations: int
    peak: int


@dataclass(frozen=True)
class Repeated:
    """Work that every rank of an axis does alike.

    Attributes:
        path: the layer.
        axis: the axis.
        ranks: its number of ranks.
        parameters: of the layer.
    """

    path: str
    axis: str
    ranks: int
    parameters: int


@dataclass(frozen=True)
class Advice:
    """A layout that is legal and slow.

    Attributes:
        kind: `idle`, `unpaired`, `heads`, `embedding`, `left out` or `batch`.
        paths: the layers it is about.
        text: what, what it costs, what to do.
    """

    kind: str
    paths: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class CallRow:
    """One call of a layer.

    Attributes:
        path: the layer.
        kind: its class.
        inputs: keys of tensors.
        outputs: keys of tensors.
    """

    path: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class TensorRow:
    """A tensor between two calls: its logical shape, and its layout in short form, one sbp for each axis."""

    shape: tuple[int, ...]
    layout: str


@dataclass(frozen=True)
class StageRow:
    """One stage of a pipeline.

    Attributes:
        number: its place.
        ranks: those that compute it.
        layers: how many.
        first: the path of the first of them.
        weights: bytes of its variables.
        work: its share of the model's multiplications.
        kept: estimate: bytes that one micro-batch keeps on a rank until its backward pass.
        sends: bytes that it sends to the next stage in a step.
        gets_back: bytes of gradients that come back for them.
        lanes: parts of the rows, each of which a rank has; the ranks that share a part by its tensors have it whole.
    """

    number: int
    ranks: tuple[int, ...]
    layers: int
    first: str
    weights: int
    work: float
    kept: int
    sends: int
    gets_back: int
    lanes: int


@dataclass(frozen=True)
class Explanation:
    """All of it.

    Attributes:
        model: the model's name.
        engine: the Keras backend whose habits were used.
        placement: axis name -> ranks.
        batch_size: rows of a global batch.
        variables: the model's.
        memory: rank -> bytes.
        collectives: of one training step, in order.
        repeated: work that is done on every rank of an axis.
        warnings: legal and slow.
        notes: where this is an estimate, and why.
        rules: those of the distribution in their order, pattern -> axis -> dim.
        calls: of the layers, in order.
        tensors: key -> a tensor between calls.
        inputs: keys of the model's inputs.
        suggested_rules: variable path -> axis -> dim, which would remove the warnings about pairs; empty without any.
        stages: of a pipeline.
        schedule: of a pipeline, in words.
        picture: of a pipeline: its ranks' work in time, as text.
        idle: of a pipeline: the share of a step in which the rank with the least work has nothing to do.
    """

    model: str
    engine: str
    placement: Mapping[str, int]
    batch_size: int
    variables: Sequence[VariableRow]
    memory: Mapping[int, Memory]
    collectives: Sequence[Collective]
    repeated: Sequence[Repeated]
    warnings: Sequence[Advice]
    notes: Sequence[str]
    suggested_rules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    calls: Sequence[CallRow] = ()
    tensors: Mapping[int, TensorRow] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    stages: Sequence[StageRow] = ()
    schedule: str = ""
    picture: str = ""
    idle: float | None = None

    @property
    def received(self) -> int:
        """Bytes that a rank receives in a step; of a pipeline the rank that receives most."""
        if self.stages:
            return max(self._received_of_stages().values())
        return sum(collective.received for collective in self.collectives)

    def _received_of_stages(self) -> dict[tuple[int, ...], int]:
        """The ranks of each stage -> what one of them receives: messages, and the sum of gradients."""
        found = dict.fromkeys([stage.ranks for stage in self.stages], 0)
        for stage, following in itertools.pairwise(self.stages):
            found[following.ranks] += stage.sends // stage.lanes
            found[stage.ranks] += stage.gets_back // stage.lanes
        for each in self.collectives:
            found[self.stages[each.stage].ranks] += each.received
        return found

    def as_json(self) -> dict[str, object]:
        """The explanation as JSON values, sizes in bytes."""
        return {**asdict(self), "received": self.received}

    def text(self, *, all_rows: bool = False) -> str:
        """The tables as text, as `print` shows them.

        Args:
            all_rows: list every collective; else those that are equal but for the layer or the weight are one row.
        """
        from keras_flow.explainer.text import plain

        return plain(self, fold=not all_rows)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """The explanation as HTML, for a notebook."""
        from keras_flow.explainer.page import html

        return html(self)
