"""`Stage`: the calls that its ranks compute, what they read from the stage before and give to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras

from keras_flow.current.keras_places import get_keras_mask, set_keras_mask
from keras_flow.pipelines.graph import Call, CallGraph

if TYPE_CHECKING:
    from keras_flow.current.distribution import Distribution


@dataclass
class Stage:
    """Consecutive calls of a model.

    Attributes:
        number: its place.
        ranks: those that compute it, one of each lane: a part of the rows of every micro-batch. Where ranks compute a
            lane together it is the first, and in a process that is one of them the one of its own place.
        calls: in their order.
        inputs: keys of the model's inputs that it reads.
        received: keys of the tensors that it gets from the stage before, some of them only to hand them on.
        sent: keys of those that the next stage gets; of the last stage the model's outputs.
        trainable: weights with gradients that its layers use.
        state: all other variables of its layers.
        frozen: ids of those in `state` that are weights whose layers do not train now: no call changes them.
        statistics: ids of those in `state` that each micro-batch moves on.
        is_repeated: whether layers are computed again in the backward pass: `remat=` names them, or `keras.RematScope`.
        layer: what computes the calls.
        holders: those of its ranks that hold its variables; the others get copies for each pass.
        split: of each lane what lays its tensors over the ranks that compute it together, of which `ranks` has the
            one; empty where a rank computes a lane alone.
    """

    number: int
    ranks: tuple[int, ...]
    calls: list[Call]
    inputs: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    trainable: list[keras.Variable] = field(default_factory=list)
    state: list[keras.Variable] = field(default_factory=list)
    frozen: set[int] = field(default_factory=set)
    statistics: set[int] = field(default_factory=set)
    is_repeated: bool = False
    layer: StageLayer | None = None
    holders: tuple[int, ...] = ()
    split: tuple[Distribution, ...] = ()

    @property
    def rank(self) -> int:
        """The first of its ranks."""
        return self.ranks[0]

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """Its ranks, those that compute a lane together too."""
        return tuple(rank for lane in self.split for rank in lane.placement.ranks) or self.ranks

    @property
    def root(self) -> int:
        """The first of all its ranks: what all processes are told comes from it."""
        return self.all_ranks[0]

    def splits(self, lane: int) -> Distribution | None:
        """What lays the tensors of a lane over the ranks that compute it together; None where one does."""
        return self.split[lane] if self.split else None

    @property
    def layers(self) -> list[keras.Layer]:
        """The layers that it calls, each once."""
        found = {id(call.operation): call.operation for call in self.calls if isinstance(call.operation, keras.Layer)}
        return list(found.values())

    @property
    def inner_layers(self) -> list[keras.Layer]:
        """Its layers, and those inside them."""
        return [inner for layer in self.layers for inner in layer._flatten_layers()]

    def look_at_variables(self) -> None:
        """Take the variables that its layers have now; a layer may be frozen between two fits."""
        every = {id(variable): variable for layer in self.layers for variable in layer.variables}
        trained = {id(variable) for layer in self.layers for variable in layer.trainable_variables}
        self.trainable = [variable for key, variable in every.items() if key in trained]
        self.state = [variable for key, variable in every.items() if key not in trained]
        weights = {id(variable) for layer in self.inner_layers for variable in layer._trainable_variables}
        self.frozen = weights - trained
        norms = [layer for layer in self.inner_layers if isinstance(layer, keras.layers.BatchNormalization)]
        self.statistics = {id(variable) for layer in norms for variable in layer.variables}


class StageLayer(keras.Layer):
    """The calls of a stage as a layer, so that those inside learn from its call whether they train."""

    def __init__(self, stage: Stage, model: keras.Model):
        super().__init__(name=f"stage_{stage.number}", dtype=model.dtype_policy)
        self._stage = stage
        self._inner = stage.layers
        # tensors arrive as they left the stage before
        self._convert_input_args = False
        self.supports_masking = True
        self.built = True

    def call(self, tensors: list[Any], training: bool | None = None) -> list[Any]:
        """Compute the calls from the model's inputs and what was received, in this order."""
        known = dict(zip((*self._stage.inputs, *self._stage.received), tensors, strict=True))
        for call in self._stage.calls:
            known.update(zip(call.outputs, call.run(known, training), strict=True))
        return [known[key] for key in self._stage.sent]

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """None: the masks are those of the layers inside."""

    def run(self, tensors: Sequence[Any], masks: Sequence[Any], training: bool) -> tuple[list[Any], list[Any]]:
        """Compute the stage.

        Args:
            tensors: the model's inputs that it reads, then what it received.
            masks: Keras's mask of each, or None.
            training: whether layers train.

        Returns:
            The tensors of `sent`, and the mask of each, or None.
        """
        for tensor, mask in zip(tensors, masks, strict=True):
            if mask is not None:
                set_keras_mask(tensor, mask)
        outputs = self(list(tensors), training=training)
        return outputs, [get_keras_mask(tensor) for tensor in outputs]


def cut(graph: CallGraph, stage_of_call: Sequence[int], ranks: Sequence[tuple[int, ...]]) -> list[Stage]:
    """Return the stages of a model.

    Args:
        graph: its calls.
        stage_of_call: the stage of each.
        ranks: the ranks of each stage.
    """
    count = len(ranks)
    made_in = {key: stage for call, stage in zip(graph.calls, stage_of_call, strict=True) for key in call.outputs}
    last_use = dict.fromkeys(graph.output_keys, count)  # what the model returns leaves the last stage
    for call, stage in zip(graph.calls, stage_of_call, strict=True):
        for key in call.inputs:
            last_use[key] = max(last_use.get(key, 0), stage)
    crossing = [
        tuple(sorted(key for key, made in made_in.items() if made <= place < last_use.get(key, -1)))
        for place in range(count)
    ]
    stages = []
    for number, of_stage in enumerate(ranks):
        calls = [call for call, stage in zip(graph.calls, stage_of_call, strict=True) if stage == number]
        read = {key for call in calls for key in call.inputs}
        is_last = number == count - 1
        inputs = tuple(key for key in graph.inputs if key in read or (is_last and key in graph.output_keys))
        received = () if number == 0 else crossing[number - 1]
        sent = tuple(dict.fromkeys(graph.output_keys)) if is_last else crossing[number]
        stages.append(Stage(number, of_stage, calls, inputs, received, sent))
    return stages
