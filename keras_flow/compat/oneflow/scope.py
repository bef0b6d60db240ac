"""`flow.scope`: views, and the devices of what is made inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NoReturn

from keras_flow.compat.oneflow import session, tracing
from keras_flow.compat.oneflow.missing import Names
from keras_flow.errors import FlowError
from keras_flow.parallel.scope import placement as placed
from keras_flow.placements import Placement
from keras_flow.runtime.placement import placement as placement_of


class _View(str):
    """A view, for `default_logical_view`."""

    def __enter__(self) -> NoReturn:
        raise FlowError(
            f"with flow.scope.{self}_view(): is not in keras_flow.compat.oneflow. Instead: give a job its view, "
            f"config.default_logical_view(flow.scope.{self}_view()) of config = flow.function_config()"
        )

    def __exit__(self, *problem: object) -> None: ...


class PlacementScope:
    """Layers that are made inside are on these devices: `"0:0-3"` is machine 0, devices 0 to 3.

    Two placements in a job make it a pipeline of stages; a job in one placement runs on its devices.

    Args:
        device_tag: `"gpu"` or `"cpu"`.
        machine_device_ids: a device string, or several.
        hierarchy: the grid of the devices, for `parallel_distribution=`; rows are split along its first axis.
    """

    def __init__(
        self, device_tag: str, machine_device_ids: str | Sequence[str], hierarchy: Sequence[int] | None = None
    ) -> None:
        self._type, self._given, self._hierarchy = device_tag, machine_device_ids, tuple(hierarchy or ())
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        # around a job's definition, or a program's main function, nothing is made
        scope = self._inside() if tracing.is_inside() else nullcontext()
        scope.__enter__()
        self._open.append(scope)

    def __exit__(self, *problem: object) -> None:
        self._open.pop().__exit__(None, None, None)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        trace, world = tracing.current("flow.scope.placement"), session.start()
        type, ranks = "gpu" if self._type == "cuda" else self._type, self._ranks(world.size)
        if type != world.type or max(ranks) >= world.size:
            raise FlowError(
                f"flow.scope.placement({self._type!r}, {self._given!r}): the session has {world.type!r} devices 0 to "
                f"{world.size - 1}; flow.config.gpu_device_num or cpu_device_num says how many"
            )
        trace.placed.append(ranks)
        if trace.need.kind == "stages":
            with placed(Placement(ranks, type=type)):
                yield
            return
        if self._hierarchy:
            trace.require(kind="model", ranks=ranks, hierarchy=self._hierarchy)
        elif ranks != (trace.need.ranks or tuple(range(world.size))):
            if set(trace.placed) == {ranks} and not trace.names:
                trace.require(ranks=ranks)  # perhaps all of the job is there
            trace.require(kind="stages", ranks=(), hierarchy=())
        yield

    def _ranks(self, size: int) -> tuple[int, ...]:
        """The ranks of the device strings: of machines with 2 devices machine 1 begins at rank 2."""
        each = size // session.node_count()
        found: list[int] = []
        for text in [self._given] if isinstance(self._given, str) else self._given:
            machine, _, devices = text.partition(":")
            first = int(machine) * each if machine.isdigit() else 0
            ranks = placement_of("cpu", f"0:{devices}" if machine.isdigit() else text).ranks
            found += [first + rank for rank in ranks]
        return tuple(found)


@contextmanager
def _namespace(name: str) -> Iterator[None]:
    """Inside, names of layers and variables begin with this one: `first-dense/kernel`."""
    trace = tracing.current("flow.scope.namespace")
    trace.namespaces.append(name)
    try:
        yield
    finally:
        trace.namespaces.pop()


scope = Names(
    "scope",
    placement=PlacementScope,
    consistent_view=lambda: _View("consistent"),
    mirrored_view=lambda: _View("mirrored"),
    namespace=_namespace,
)
