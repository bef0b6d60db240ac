"""Parameter servers: variables on servers, rows of batches on workers, the program on the chief."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import keras

from keras_flow import sbp, schedules
from keras_flow.backends.active import backend
from keras_flow.current.creator import creator
from keras_flow.current.joining import joining_seconds, waiting_seconds
from keras_flow.current.keras_places import in_stateless_scope
from keras_flow.current.variable_layout import KerasLayout, VariableLayout
from keras_flow.distributions.distribution import FlowDistribution
from keras_flow.errors import FlowError
from keras_flow.launch import roles
from keras_flow.layout import Layout
from keras_flow.parallel.pipeline_parallel import PipelineParallel
from keras_flow.pipelines.staged_model import StagedModel
from keras_flow.placements import Placement
from keras_flow.servers.counting import Ledger, Statistics
from keras_flow.servers.served_model import ServedModel

if TYPE_CHECKING:
    from keras_flow.explainer.explanation import Explanation


class ParameterServer(PipelineParallel):
    """Variables and slots on parameter servers, batches computed by workers, under stock `fit` in the chief.

    `TF_CONFIG` names the chief, the workers (`"worker"`) and the servers (`"ps"`); `keras-flow launch --servers 1
    --workers 2 train.py` sets it. Workers and servers run the same program: there this call serves until the chief has
    ended, and then ends the process. On TensorFlow, through its own ClusterCoordinator, and on torch, which sends them
    layers and the optimizer.

    - `mode="sync"`: each worker computes a part of the rows of each batch, and one update is made: the numbers of one
      device, whatever the number of workers.
    - `mode="async"`: each worker computes a batch, whose gradient is applied when it arrives. Every batch is applied
      once, also where a worker is lost.

    Workers that are lost lose nothing: their batches are computed by others, or by themselves when they are back. With
    a server its variables are lost, and `fit` ends with an error that says so.

    Args:
        mode: `"sync"` or `"async"`.
        servers: how many the job has; None takes those that it has.
        staleness: with `"async"`, how many updates may come between the sending of a batch and the update with its
            gradient; 0 is one batch after the other, None any number.
        partition: into how many parts the rows of a variable are divided, each part on a server of its own: a number
            for all variables, `"min_size:256KiB"` for as many as leave that many bytes for each, `"auto"` for that. Of
            a divided `Embedding` a worker gets the rows that it uses, as of a whole one.
        random: `"logical"` (the default) or `"stock"`, as for `kf.DataParallel`.

    Raises:
        FlowError: on JAX; no `TF_CONFIG` with servers; one of its processes does not listen within the timeout
            (KERAS_FLOW_TIMEOUT); on torch without KERAS_FLOW_TOKEN, where nothing has set it.

    Example:
        >>> import keras_flow as kf
        >>> kf.ParameterServer(staleness=-1)
        Traceback (most recent call last):
        ...
        keras_flow.errors.FlowError: staleness=-1: legal is a whole number of at least 0 (updates), or None for any
    """

    def __init__(
        self,
        mode: str = "sync",
        servers: int | None = None,
        staleness: int | None = None,
        partition: str | int = "auto",
        *,
        random: str | None = None,
    ):
        if mode not in ("sync", "async"):
            raise FlowError(f'mode is "sync" or "async", got {mode!r}')
        if staleness is not None and (isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise FlowError(
                f"staleness={staleness!r}: legal is a whole number of at least 0 (updates), or None for any"
            )
        if staleness is not None and mode == "sync":
            raise FlowError(f'staleness={staleness} goes with mode="async"; with "sync" no gradient is stale')
        roles.refuse_engine()
        role = roles.find()
        if role is None:
            raise FlowError(
                "kf.ParameterServer found no parameter servers: start the job with `keras-flow launch --servers 1 "
                '--workers 2 train.py`, or set TF_CONFIG with "chief", "worker" and "ps" on each of its processes'
            )
        count = len(role.cluster["ps"])
        if servers not in (None, count):
            raise FlowError(f"kf.ParameterServer was asked for {servers} servers, the job has {count}")
        if role.job != "chief":
            roles.serve(role, joining_seconds())
        self._servers = _connected()
        self.mode, self.staleness = mode, staleness
        self.workers = len(role.cluster["worker"])
        self._counted = Statistics() if mode == "async" else None
        self._partition = _Partition(partition, count)
        self._elements_on = dict.fromkeys(range(1, count + 1), 0)
        self._servers_of: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        self._watched: WeakSet[keras.Model] = WeakSet()
        parts = self.workers if mode == "sync" else 1
        super().__init__(
            Placement([0], axis_names=("pipe",)), stages=1, schedule=schedules.gpipe(1, parts), random=random
        )

    #: the servers are ranks of this process besides that of the placement
    has_one_rank = False  # pyright: ignore[reportAssignmentType]

    @property
    def statistics(self) -> Statistics:
        """Counts of an asynchronous training: updates, batches of each worker, dropped ones, staleness.

        Raises:
            FlowError: training is synchronous.
        """
        if self._counted is None:
            raise FlowError('with mode="sync" every batch is one update, and nothing else is counted')
        return self._counted

    def layout_for(
        self, path: str, shape: tuple[int, ...], layer: keras.Layer | None = None, dtype: str = "float32"
    ) -> KerasLayout:
        """The layout of a variable: a layer's is whole on the server that has least; all else is on the chief."""
        made_by = creator()
        part: FlowDistribution = self._home
        if layer is not None or (made_by is not None and made_by.layer is not None):
            if (path, shape) not in self._servers_of:
                self._servers_of[path, shape] = self._least_used(shape)
            part = self._part(self._servers_of[path, shape])
        if part is self._home:
            return KerasLayout(VariableLayout(Layout(part.placement, {}, shape), "default"), part)
        ranks = part.placement.ranks
        several = len(ranks) > 1
        source = f"parameter server{'s' * several} {', '.join(str(rank - 1) for rank in ranks)}"
        rows = {part.placement.axis_names[0]: sbp.split(0)} if several else {}
        return KerasLayout(VariableLayout(Layout(part.placement, rows, shape), source), part)

    def _least_used(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The servers that have the fewest elements, as many as a variable has parts."""
        parts = self._partition.parts(shape)
        servers = sorted(sorted(self._elements_on, key=lambda each: (self._elements_on[each], each))[:parts])
        for server in servers:
            self._elements_on[server] += math.prod(shape) // parts
        return tuple(servers)

    def _part(self, ranks: tuple[int, ...]) -> FlowDistribution:
        if len(ranks) > 1 and ranks not in self._parts:
            self._parts[ranks] = self._split_part(Placement(list(ranks), axis_names=("server",)), ranks)
        return super()._part(ranks)

    def adopt(self, model: keras.Model, *others: object) -> bool:
        """Give every variable that a model reaches its server; whether any moved."""
        return FlowDistribution.adopt(self, model, *others)

    def _staged(self, *args: Any) -> StagedModel:
        # each model has an epoch 0 of its own
        ledger = None if self._counted is None else Ledger(self.staleness, self.workers, self._counted)
        return ServedModel(*args, servers=self._servers, ledger=ledger, timeout=waiting_seconds())

    @contextmanager
    def _running(self, model: keras.Model) -> Iterator[None]:
        pipeline: Any = self._cut(model)
        optimizer: Any = getattr(model, "optimizer", None)
        with super()._running(model):
            if model in self._watched:  # `evaluate` in `fit`, whose logs are its own
                with_counts = model.__dict__.pop("get_metrics_result", None)
                try:
                    yield
                finally:
                    if with_counts is not None:
                        model.__dict__["get_metrics_result"] = with_counts
                return
            pipeline.begin()
            if optimizer is None:
                yield
                return
            self._watched.add(model)
            results = model.get_metrics_result

            def finished_results() -> Any:
                # Keras asks for the logs of an epoch, when its last batch was sent; and a step for its own, inside
                if in_stateless_scope():
                    return results()
                pipeline.finish()
                return results() | pipeline.counts()

            model.__dict__["get_metrics_result"] = finished_results
            try:
                with self._servers.update_on_servers(optimizer):
                    yield
                    pipeline.finish()
            finally:
                del model.__dict__["get_metrics_result"]
                self._watched.discard(model)

    def finish_steps(self, model: keras.Model) -> None:
        """Wait for the gradients of the batches that are on their way."""
        pipeline: Any = self._cut_before(model)
        if pipeline is not None:
            pipeline.finish()

    def explain(self, model: keras.Model, batch_size: int) -> Explanation:
        """Refuse: what servers and workers hold is not explained yet.

        Raises:
            FlowError: always.
        """
        raise FlowError("explain does not know parameter servers yet; kf.layout_of(variable) says which server has it")


@functools.cache
def _connected() -> Any:
    """The engine's coordinator of this job's workers, which distributions of one program share."""
    role, engine = roles.find(), backend()
    assert role is not None
    roles.listen(role)
    roles.await_others(role, joining_seconds())
    return engine.connect_servers(role.cluster)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Partition:
    """The rule for how many parts a variable's rows are divided into.

    >>> by_size = _Partition("min_size:1KiB", servers=4)
    >>> by_size.parts((100, 8)), by_size.parts((1000, 8)), by_size.parts((3,))
    (3, 4, 1)

    Attributes:
        given: `"auto"`, `"min_size:256KiB"` or a number of parts.
        servers: how many there are.

    Raises:
        FlowError: it is none of these.
    """

    given: str | int
    servers: int

    def __post_init__(self) -> None:
        if self._parts_at_most() is None and self._bytes_at_least() is None:
            raise FlowError(
                f'partition={self.given!r}: legal is "auto", "min_size:256KiB" (bytes of a part; also B, MiB, '
                f"GiB), or a number of parts from 1 to {self.servers}, the servers of this job"
            )

    def _parts_at_most(self) -> int | None:
        is_number = isinstance(self.given, int) and not isinstance(self.given, bool)
        return int(self.given) if is_number and 1 <= int(self.given) <= self.servers else None

    def _bytes_at_least(self) -> int | None:
        text = "min_size:256KiB" if self.given == "auto" else str(self.given)
        found = re.fullmatch(r"min_size:([1-9]\d*)(B|KiB|MiB|GiB)", text)
        return int(found[1]) * 1024 ** ("B", "KiB", "MiB", "GiB").index(found[2]) if found else None

    def parts(self, shape: tuple[int, ...]) -> int:
        """How many parts a variable of this shape has; its elements are counted as four bytes."""
        rows, least = (shape[0] if shape else 1), self._bytes_at_least()
        most = self._parts_at_most() or min(self.servers, 4 * math.prod(shape) // (least or 1))
        return max(1, min(most, rows))
