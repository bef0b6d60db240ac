"""`ServedModel`: the steps of a model whose variables are on parameter servers and whose rows workers compute.

Synchronous: a batch is cut into a part for each worker, their gradients are added, and one update is made; the numbers
are those of one device. Asynchronous: a worker computes a whole batch, and its gradient is applied when it arrives.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from keras_flow.backends.active import backend
from keras_flow.distributions.distribution import is_seed
from keras_flow.pipelines.graph import CallGraph
from keras_flow.pipelines.passes import CutBatch, host
from keras_flow.pipelines.staged_model import StagedModel, loss_scale
from keras_flow.pipelines.update import update
from keras_flow.servers.counting import Ledger, Statistics
from keras_flow.servers.errands import Errands


@dataclass(frozen=True)
class _Compiled:
    """The part of a compiled model that a worker has besides the layers.

    Attributes:
        _compile_loss: Keras's object with the losses.
    """

    _compile_loss: Any


@dataclass
class _Rows:
    """The results for the rows of a batch, as a pass of a pipeline has them."""

    lane: Any
    training: bool
    losses: list[Any] = field(default_factory=list)
    blocks: list[Any] = field(default_factory=list)


class ServedModel(StagedModel):
    """A model of one stage that workers compute.

    Args:
        args: the arguments of `StagedModel`; its schedule has as many micro-batches as a batch has parts.
        servers: the engine's coordinator of workers.
        ledger: what counts batches, where training is asynchronous; None where it is not.
        timeout: seconds without a result after which a step fails.
    """

    def __init__(self, *args: Any, servers: Any, ledger: Ledger | None, timeout: float):
        super().__init__(*args)
        self._servers, self._ledger = servers, ledger
        self._errands = Errands(servers, timeout, Statistics() if ledger is None else ledger.statistics)
        #: keys of parts count down from -1, those of epochs up from 0: a late part is never mistaken for a batch
        self._steps = itertools.count(-1, -1)
        #: key -> a batch that is on its way, and the loss scale with which it was sent
        self._batches: dict[Any, tuple[CutBatch, float]] = {}
        self._latest: dict[str, Any] | None = None
        self._epoch = self._number = 0
        self._newest = (-1, -1)
        #: how far a batch moves each seed, once it is known: batches on their way together have seeds of their own
        self._moves: list[np.ndarray] | None = None

    # ---- steps

    def train(self, data: Any) -> dict[str, Any]:
        """Send a batch to the workers; the logs of what has come back."""
        batch = self._batch(data)
        self._look_at_variables()
        if self._ledger is None:
            results = self._of_parts(batch, training=True, with_loss=True)
            self._keep_state(results)
            return self._learned(batch, results, self._scale())
        while not self._ledger.may_send():
            self._take()
        key = (self._epoch, self._number)
        self._number += 1
        self._ledger.sent(key)
        self._batches[key] = (batch, self._scale())
        self._send(batch, 0, True, True, key)
        if self._moves is not None:
            self._move_seeds(self._moves)
        while self._latest is None or self._moves is None or self._errands.has_results:
            self._take()
        return self._latest | self.counts()

    def counts(self) -> dict[str, Any]:
        """The counts of an asynchronous training, for its logs."""
        return {} if self._ledger is None else self._ledger.statistics.logs()

    def _evaluated(self, batch: CutBatch, with_loss: bool) -> list[Any]:
        """Let the workers compute a batch without learning from it, and return the results."""
        self.finish()
        self._look_at_variables()
        results = self._of_parts(batch, training=False, with_loss=with_loss)
        self._keep_state(results)
        return [self._rows(results, training=False)]

    def finish(self) -> None:
        """Wait for all that is on its way: an epoch ends with the updates of all its batches."""
        while self._ledger is not None and self._ledger.on_their_way:
            self._take()
        if self._number:
            self._epoch, self._number = self._epoch + 1, 0

    def begin(self) -> None:
        """Forget what a training that was broken off has left."""
        self._latest = None
        self._errands.forget()
        self._batches.clear()
        if self._ledger is not None:
            self._ledger.forget()

    def forget_programs(self) -> None:
        """Forget the programs, and how far they move seeds."""
        super().forget_programs()
        self._moves = None

    # ---- what workers compute

    def __getstate__(self) -> dict[str, Any]:
        """Return what `_compute` needs elsewhere, since torch sends it to workers."""
        told = {"graph": CallGraph(outputs=self.graph.outputs), "stages": self.stages, "_said_added": False}
        return {**told, "model": _Compiled(self.model._compile_loss)}  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._first_stage = {id(weight): stage.number for stage in self.stages for weight in stage.trainable}

    def _of_parts(self, batch: CutBatch, training: bool, with_loss: bool) -> list[Any]:
        """Return what the workers computed of each part of a batch, in the order of its rows."""
        step, found = next(self._steps), dict[int, Any]()
        self._errands.forget()  # a step that failed may have left parts on their way
        for number in range(len(batch.parts)):
            self._send(batch, number, training, with_loss, (step, number))
        while len(found) < len(batch.parts):
            (of_step, number), result, _ = self._errands.take()
            if of_step == step:
                found[number] = result
        return [found[number] for number in sorted(found)]

    def _scale(self) -> float:
        return loss_scale(self.model.optimizer)  # type: ignore[attr-defined]

    def _send(self, batch: CutBatch, number: int, training: bool, with_loss: bool, key: tuple[int, int]) -> None:
        part, stage = batch.microbatch(number, 0), self.stages[0]
        with_loss = with_loss and self.model._compile_loss is not None  # type: ignore[attr-defined]
        others: dict[str, Any] = {
            "inputs": batch.cut([batch.inputs[self.graph.inputs.index(each)] for each in stage.inputs], part),
            "fixed": [],
            "masks": [None] * len(stage.inputs),
            # copies: seeds move on while a batch waits for its worker
            "state": [np.array(host(backend().read(variable))) for variable in stage.state],
            "start": np.int32(part.start),
            "first": np.float32(number == 0),
            "scale": np.float32(self._scale() if training else 1.0),
        }
        if with_loss:
            others["y"], others["weights"] = batch.cut(batch.y, part), batch.cut(batch.weights, part)
            others["shares"] = batch.shares[number, 0]
        known = (part.count, part.rows, training, with_loss, tuple(map(id, stage.trainable)))
        if known not in self._programs:
            function = functools.partial(self._compute, stage, part.count, part.rows, training, with_loss)
            self._programs[known] = self._servers.program(function, stage, learns=training)
        self._errands.send(key, self._programs[known], others)

    def _take(self) -> None:
        """Take one gradient: apply it, unless its batch was applied before."""
        assert self._ledger is not None
        key, found, worker = self._errands.take()
        if key[0] >= 0 and self._ledger.came_back(key, worker):
            self._keep_later_state(key, found[1]["state"])
            batch, scale = self._batches.pop(key)
            self._latest = self._learned(batch, [found], scale)

    def _keep_later_state(self, key: Any, values: Sequence[Any]) -> None:
        """Give variables what a batch left, unless a later batch came before it; seeds move as batches are sent."""
        pairs = list(zip(self.stages[0].state, values, strict=True))
        if self._moves is None:  # of the first batch, which goes alone
            seeds = [pair for pair in pairs if is_seed(pair[0].path)]
            self._moves = [host(value) - host(backend().read(seed)) for seed, value in seeds]
            self._move_seeds(self._moves)
        if key > self._newest:
            self._newest = key
            for variable, value in pairs:
                if not is_seed(variable.path):
                    backend().write(variable, value)

    def _move_seeds(self, moves: Sequence[np.ndarray]) -> None:
        seeds = [variable for variable in self.stages[0].state if is_seed(variable.path)]
        for seed, move in zip(seeds, moves, strict=True):
            backend().write(seed, keras.ops.add(backend().read(seed), move))

    def _rows(self, results: Sequence[Any], training: bool) -> _Rows:
        rows = _Rows(self.lanes.all[0], training)
        for _, rest in results:
            rows.losses.append(rest["loss"])
            rows.blocks.append((rest["fixed"], rest["masks"]))
        return rows

    def _keep_state(self, results: Sequence[Any]) -> None:
        """Give variables what the last part of a batch left, which every part began with what the batch did."""
        for variable, value in zip(self.stages[0].state, results[-1][1]["state"], strict=True):
            backend().write(variable, value)

    def _learned(self, batch: CutBatch, results: Sequence[Any], scale: float) -> dict[str, Any]:
        """Update the variables by the gradients, times a scale, of all parts of a batch; the logs."""
        rows: Any = self._rows(results, True)
        gradients = [self._servers.total(each) for each in zip(*(found for found, _ in results), strict=True)]
        optimizer: Any = self.model.optimizer  # type: ignore[attr-defined]
        update(self, optimizer, {0: gradients}, scale)
        return self._logs(batch, [rows])
