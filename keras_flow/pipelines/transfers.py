"""What goes from stage to stage: within a rank as it is, within a process by a copy, between processes by messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_flow.backends.active import backend
from keras_flow.backends.rendezvous import whereabouts
from keras_flow.pipelines.stages import Stage
from keras_flow.schedules.action import RECV_B, RECV_F, SEND_F

#: what is on its way: the stage that gets it, `RECV_F` or `RECV_B`, and the micro-batch
Key = tuple[int, str, int]
#: tags of messages with weights of several stages, and with their gradients, begin here
_FIRST_TIED = 1 << 24


class Transfers:
    """The tensors between the stages of a lane.

    Args:
        stages: of the model.
        lane: which of each stage's ranks computes.

    Attributes:
        number: the lane.
        own: the ranks of this process.
        has_ranks: whether any of them is in the lane.
        is_alone: whether this process drives all.
    """

    def __init__(self, stages: Sequence[Stage], lane: int):
        self.number = lane
        self._ranks = [stage.ranks[lane] for stage in stages]
        #: rank -> what lays tensors over it and others, where these compute a stage together
        self._split = {stage.ranks[lane]: stage.splits(lane) for stage in stages}
        self.own = set(backend().world().local_ranks)
        self.has_ranks = bool(self.own & set(self._ranks))
        self.is_alone = set(self._ranks) <= self.own and backend().world().process_count == 1
        self._ready: dict[Key, Any] = {}
        self._leaving: dict[Key, Any] = {}
        self._coming: dict[Key, Any] = {}
        self._sent: dict[object, Callable[[], None]] = {}
        # what messages look like is told with the first of each kind
        self._told: dict[object, Any] = {}
        self._heard: dict[object, Any] = {}
        self._begun_anew = whereabouts.times_begun_anew()

    def is_own(self, stage: int) -> bool:
        """Whether this process computes a stage."""
        return self._ranks[stage] in self.own

    def rank(self, stage: int) -> int:
        """The rank that computes a stage."""
        return self._ranks[stage]

    def on(self, rank: int, structure: Any) -> Any:
        """Tensors on a rank, or on those that compute its stage with it."""
        return backend().on(rank, structure, self._split.get(rank))

    def begin(self) -> None:
        """Forget what a step that was broken off has left."""
        for left in (self._ready, self._leaving, self._coming, self._sent):
            left.clear()
        if self._begun_anew != whereabouts.times_begun_anew():  # another step may have told what nobody heard
            self._begun_anew = whereabouts.times_begun_anew()
            self.forget_shapes()

    def forget_shapes(self) -> None:
        """Forget what messages look like, on all processes alike: the next of each kind tell it anew."""
        self._told.clear()
        self._heard.clear()

    # ---- activations and their gradients

    def give(self, stage: int, kind: str, number: int, value: Any) -> None:
        """Take what a stage will receive; it leaves with the schedule's send, where it leaves the rank."""
        if stage < 0:
            return  # of the first stage: the model's inputs
        source = stage - 1 if kind == RECV_F else stage + 1
        stays = self._ranks[source] == self._ranks[stage]
        (self._ready if stays else self._leaving)[stage, kind, number] = value

    def send(self, stage: int, kind: str, number: int, signature: object) -> None:
        """Send what a stage has given; `signature` tells the shapes of one batch from those of another."""
        to, received = (stage + 1, RECV_F) if kind == SEND_F else (stage - 1, RECV_B)
        key = (to, received, number)
        value = self._leaving.pop(key)
        if self.is_own(to):
            self._ready[key] = self.on(self._ranks[to], value)
        else:
            pair = (self._ranks[stage], self._ranks[to])
            self._sent[key] = backend().send_tensors(value, pair, _tag(key), self._told, (key, signature))

    def receive(self, stage: int, kind: str, number: int, signature: object) -> None:
        """Begin to receive what a stage will need."""
        source = stage - 1 if kind == RECV_F else stage + 1
        if not self.is_own(source):
            key = (stage, kind, number)
            pair = (self._ranks[source], self._ranks[stage])
            split = self._split[pair[1]]
            self._coming[key] = backend().receive_tensors(pair, _tag(key), self._heard, (key, signature), split)

    def take(self, stage: int, kind: str, number: int) -> Any:
        """What a stage has received, waiting until it is there."""
        key = (stage, kind, number)
        value = self._coming.pop(key)() if key in self._coming else self._ready.pop(key)
        if kind == RECV_B and (sent := self._sent.pop((stage + 1, RECV_F, number), None)):
            sent()  # who sends a gradient has the activation: it is held no longer
        return value

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for wait in self._sent.values():
            wait()
        self._sent.clear()

    # ---- weights of several stages

    def weights_of(self, stages: Sequence[Stage]) -> dict[int, list[Any]]:
        """The values of the trainable weights of this process's stages; of those that another rank has, copies."""
        return self._values(stages, [stage.trainable for stage in stages], "trained")

    def state_of(self, stages: Sequence[Stage]) -> dict[int, list[Any]]:
        """The values of the state of this process's stages; of frozen weights that another rank has, copies."""
        return self._values(stages, [stage.state for stage in stages], "state")

    def _values(
        self, stages: Sequence[Stage], wanted: Sequence[Sequence[keras.Variable]], kind: str
    ) -> dict[int, list[Any]]:
        copies: dict[tuple[int, int], Any] = {}
        for number, (variable, home, users) in enumerate(self._tied(wanted)):
            for user in users:
                own = [backend().read(variable)] if home in self.own else None
                value = self.carried(own, home, user, number, (kind, *_told_by(variable)))
                if value is not None:
                    copies[id(variable), user] = value[0]
        found = {}
        for stage, variables in zip(stages, wanted, strict=True):
            if self.is_own(stage.number):
                keys = [(id(variable), self.rank(stage.number)) for variable in variables]
                here = [variable for variable, key in zip(variables, keys, strict=True) if key not in copies]
                own = iter(self.values_of(stage, here))
                found[stage.number] = [copies[key] if key in copies else next(own) for key in keys]
        return found

    def values_of(self, stage: Stage, variables: Sequence[keras.Variable]) -> list[Any]:
        """The values of variables for a stage of this lane; copies where another rank holds them."""
        if self.is_alone:
            values = [backend().read(variable) for variable in variables]
            return [self.on(self.rank(stage.number), value) for value in values] if self.number else values
        is_here = bool(self.own & set(stage.holders))
        values = [
            backend().read(each) if is_here else keras.ops.empty(tuple(each.shape), each.dtype) for each in variables
        ]
        if len(stage.holders) == len(backend().world().first_of_each_process(stage.all_ranks)) or not values:
            return self.on(self.rank(stage.number), values)
        return backend().from_process_of(stage.rank, values, True, stage.ranks)

    def gradients_at_home(
        self, stages: Sequence[Stage], gradients: Mapping[int, Sequence[Any]]
    ) -> list[tuple[int, keras.Variable, Any]]:
        """Each weight of this process's ranks with its rank and gradient: of several stages their sum.

        Args:
            stages: all.
            gradients: stage -> one for each of its trainable weights; of this process's stages.
        """
        found: dict[tuple[int, int], tuple[keras.Variable, Any]] = {}
        for stage in stages:
            if self.is_own(stage.number):
                own = gradients.get(stage.number) or [None] * len(stage.trainable)
                for variable, gradient in zip(stage.trainable, own, strict=True):
                    key = (id(variable), self.rank(stage.number))
                    before = found.get(key, (variable, None))[1]
                    found[key] = (variable, backend().add([before], [gradient])[0])
        tied = self._tied([stage.trainable for stage in stages])
        for number, (variable, home, users) in enumerate(tied):
            for user in users:
                mine = found.pop((id(variable), user), None)
                given = None if mine is None else [mine[1]]
                value = self.carried(given, user, home, len(tied) + number, ("gradient", *_told_by(variable)))
                if value is not None:
                    before = self.on(home, [found[id(variable), home][1]])
                    found[id(variable), home] = (variable, backend().add(before, value)[0])
        self.finish()
        return [(rank, variable, gradient) for (_, rank), (variable, gradient) in found.items()]

    def carried(self, value: list[Any] | None, source: int, to: int, number: int, kind: object) -> Any:
        """Bring tensors of one rank to another.

        Args:
            value: on the rank that has them.
            source: that rank.
            to: the rank that gets them.
            number: of the message, among those of this kind.
            kind: messages of one number and kind have the same shapes.

        Returns:
            What arrived, or None where `to` is of another process.
        """
        key = ("carried", number, source, to, kind)
        if source in self.own and to in self.own:
            return self.on(to, value)
        if source in self.own:
            self._sent[key] = backend().send_tensors(value, (source, to), _FIRST_TIED + number, self._told, key)
        elif to in self.own:
            split = self._split.get(to)
            return backend().receive_tensors((source, to), _FIRST_TIED + number, self._heard, key, split)()
        return None

    def _tied(self, wanted: Sequence[Sequence[keras.Variable]]) -> list[tuple[keras.Variable, int, list[int]]]:
        """Variables of layers that several ranks call: the variable, the rank of the first, and the others.

        Args:
            wanted: of each stage its variables.
        """
        ranks: dict[int, tuple[keras.Variable, dict[int, None]]] = {}
        for stage, variables in enumerate(wanted):
            for variable in variables:
                ranks.setdefault(id(variable), (variable, {}))[1][self.rank(stage)] = None
        return [(variable, *(next(iter(of)), list(of)[1:])) for variable, of in ranks.values() if len(of) > 1]


def _told_by(variable: keras.Variable) -> tuple[object, ...]:
    """What tells a weight from another that takes its number, when layers are frozen or get adapters."""
    return variable.path, tuple(variable.shape), variable.dtype


def _tag(key: Key) -> int:
    """A number of the message, different for all that are on their way between two ranks."""
    stage, kind, number = key
    return 2 * (stage * 4096 + number) + (kind == RECV_B)
