"""The functions that `keras.distribution` needs of an engine, for every engine.

Keras has one module for it, `distribution_lib`: whole on JAX, a fragment on TensorFlow,
none on torch, where `list_devices`, `DeviceMesh` and `distribute_tensor` end in an AttributeError. `Functions` takes
its place. It leaves to Keras what Keras has for the engine, and answers by the ranks of `kf.init` what it has not.
"""

from __future__ import annotations

import math
from types import ModuleType

import keras
import numpy as np

from keras_flow import sbp
from keras_flow.backends import active as engines
from keras_flow.current import dry_run
from keras_flow.current.distribution import ActivationLayout, Distribution, active
from keras_flow.current.variable_layout import KerasLayout
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement

_NAME = "distribution_lib"


class Functions:
    """The functions of one engine that `keras.distribution` calls.

    Args:
        keras_own: Keras's module for the engine; None where it has none.
    """

    def __init__(self, keras_own: ModuleType | None):
        self._keras_own = keras_own
        #: whether Keras can distribute on this engine: then devices have its names, and layouts are its own
        self._is_whole = hasattr(keras_own, "distribute_tensor")

    def __getattr__(self, name: str) -> object:
        # since Keras 3.16 on torch: plain tensors beside DTensors of ours become what the step says
        if name == "activate_dtensor_promotion" and active() is not None:
            name = "deactivate_dtensor_promotion"
        return getattr(self._keras_own, name)

    def list_devices(self, device_type: str | None = None) -> list[str]:
        """The names of all ranks, `"cpu:0"` and so on; none where they are of another type than `device_type`."""
        rehearsed = dry_run.world()
        if self._is_whole and rehearsed is None:
            _begin()
            return self._keras_own.list_devices(device_type)  # type: ignore[union-attr]
        world = rehearsed or engines.backend().world()
        wanted = {"cuda": "gpu"}.get((device_type or world.type).lower(), (device_type or world.type).lower())
        return [f"{world.type}:{rank}" for rank in range(world.size)] if wanted == world.type else []

    def get_device_count(self, device_type: str | None = None) -> int:
        """How many devices `list_devices` has."""
        return len(self.list_devices(device_type))

    def initialize(
        self, job_addresses: str | None = None, num_processes: int | None = None, process_id: int | None = None
    ) -> None:
        """Join the processes of a job.

        Raises:
            FlowError: an engine whose processes do not find each other by these arguments.
        """
        if engines.announced_devices() is not None or (job_addresses, num_processes, process_id) == (None,) * 3:
            engines.backend().world()  # the launcher has said already which process this is
        elif self._is_whole:
            self._keras_own.initialize(job_addresses, num_processes, process_id)  # type: ignore[union-attr]
        else:
            raise FlowError(
                f"keras.distribution.initialize({job_addresses!r}, {num_processes!r}, {process_id!r}): on "
                f"{engines.checked_name()} processes of a job are started by `keras-flow launch`, kf.run or a launcher "
                "that kf.init() knows (torchrun, TF_CONFIG, mpirun, srun); leave the arguments out, or call kf.init()"
            )

    def distribute_tensor(self, tensor: object, layout: object) -> object:
        """The tensor, or the layer's outputs, with this layout; a value outside of a step stays as it is.

        Raises:
            FlowError: the layout is not one of the active distribution's ranks, or has more dims than the tensor.
        """
        if isinstance(layout, ActivationLayout):
            return _lay_outputs(tensor, layout)
        distribution = active()
        lays = distribution is None or engines.backend().capabilities.lays_by_keras
        if self._is_whole and lays:
            return self._keras_own.distribute_tensor(tensor, layout)  # type: ignore[union-attr]
        nd_sbp = _nd_sbp(layout, distribution)
        return tensor if distribution is None else engines.backend().constrain(tensor, nd_sbp, "distribute_tensor")

    def _to_backend_mesh(self, device_mesh: keras.distribution.DeviceMesh) -> object:
        """The engine's mesh of a DeviceMesh; where Keras has none for it, the placement."""
        return self._keras_own._to_backend_mesh(device_mesh) if self._is_whole else placement_of(device_mesh)  # type: ignore[union-attr]

    def _to_backend_layout(self, layout: keras.distribution.TensorLayout) -> object:
        """The engine's layout of a TensorLayout."""
        if self._is_whole:
            return self._keras_own._to_backend_layout(layout)  # type: ignore[union-attr]
        if layout.device_mesh is None:
            raise FlowError(f"TensorLayout({layout.axes}) has no device_mesh, so it is a layout of no ranks yet")
        placement = placement_of(layout.device_mesh)
        # lengths that divide: a layout of Keras has none, and the engine's does not depend on them
        shape = [math.prod(placement.hierarchy)] * len(layout.axes)
        return engines.backend().engine_layout(Layout(placement, sbp.of_axes(layout.axes, "TensorLayout"), shape))


def install() -> None:
    """Put `Functions` where `keras.distribution` looks for its engine's; a second call does nothing.

    Raises:
        FlowError: this version of Keras looks elsewhere.
    """
    names = keras.distribution.list_devices.__globals__
    if _NAME not in names:
        raise FlowError(
            f"keras {keras.__version__}: keras.distribution.list_devices has no global {_NAME!r}, by which keras_flow "
            "gives layers' outputs their layouts; use a version named in docs/versions.md"
        )
    if not isinstance(names[_NAME], Functions):
        names[_NAME] = Functions(names[_NAME])


def placement_of(mesh: keras.distribution.DeviceMesh) -> Placement:
    """The placement of a mesh, whose devices name ranks: `"cpu:3"` is rank 3.

    Raises:
        FlowError: names that are not those of devices.
    """
    devices = [str(device) for device in np.asarray(mesh.devices).flat]
    kind = devices[0].partition(":")[0]
    known = keras.distribution.list_devices(kind)  # of several processes JAX's numbers have gaps
    try:
        ranks = [known.index(device) if device in known else int(device.rpartition(":")[2]) for device in devices]
    except ValueError as error:
        raise FlowError(
            f"the mesh names the devices {devices}; devices of keras.distribution are named as in {known[:2]}"
        ) from error
    return Placement(np.asarray(ranks).reshape(mesh.shape), tuple(mesh.axis_names), kind)


def _begin() -> None:
    """Start the ranks that the launcher announced, before Keras asks the engine for its devices."""
    if engines.announced_devices() is not None:
        engines.backend().world()


def _lay_outputs(outputs: object, asked: ActivationLayout) -> object:
    try:
        return engines.backend().constrain(outputs, asked.nd_sbp, asked.path)
    except FlowError as error:
        distribution = active()
        if distribution is not None:
            distribution.record(asked.path, str(error))
        raise


def _nd_sbp(layout: object, distribution: Distribution | None) -> sbp.NdSbp:
    """The nd_sbp of a layout of Keras on the ranks of the active distribution."""
    if isinstance(layout, KerasLayout):
        return layout.layout.nd_sbp
    if not isinstance(layout, keras.distribution.TensorLayout):
        raise FlowError(
            f"keras.distribution.distribute_tensor takes a keras.distribution.TensorLayout, got {type(layout).__name__}"
        )
    own = None if layout.device_mesh is None else placement_of(layout.device_mesh)
    placement = distribution.placement if distribution is not None else own
    if placement is None:
        raise FlowError(
            f"TensorLayout({layout.axes}) has no device_mesh and no distribution is active: give it "
            "device_mesh=, or call it inside `with dist.scope():`"
        )
    if own is not None and (own.ranks, own.axis_names) != (placement.ranks, placement.axis_names):
        raise FlowError(
            f"keras.distribution.distribute_tensor was given a layout on the mesh {own}; the active distribution's "
            f"ranks are {placement}"
        )
    return sbp.nd_sbp(sbp.of_axes(layout.axes, "TensorLayout"), placement.axis_names)
