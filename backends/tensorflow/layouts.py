"""Layouts on TensorFlow: a DTensor mesh for each placement, and a DTensor layout for each layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.experimental import dtensor
from tensorflow.python.eager import record

from keras_flow import sbp
from keras_flow.backends.tensorflow.devices import rank_devices, world
from keras_flow.current.distribution import Distribution, active, check_activation, expected
from keras_flow.current.variable_layout import KerasLayout
from keras_flow.errors import FlowError
from keras_flow.layout import Layout
from keras_flow.placements import Placement
from keras_flow.sbp import NdSbp, Split

#: how the name of a mesh of several processes begins, of which each knows its own devices only; its ranks follow
_RANKS = "ranks_"
#: whether this thread is inside `on_mesh`; DTensor's own default mesh is one for all threads, those that read data too
_inside: ContextVar[bool] = ContextVar("keras_flow_inside", default=False)


@dataclass(frozen=True)
class MeshView:
    """The DTensor mesh of a placement.

    DTensor puts one mesh axis on a dim. Axes that a distribution only uses together are therefore one mesh axis, whose
    name joins theirs: `("a", "b")` is `"a_b"`.

    Attributes:
        mesh: the DTensor mesh.
        ranks: rank of each component of a DTensor that this process holds, in the order of `dtensor.pack` and
            `dtensor.unpack`.
        axes: placement axis -> its mesh axis.
        parts: mesh axis -> its placement axes, outer first.
    """

    mesh: dtensor.Mesh
    ranks: tuple[int, ...]
    axes: Mapping[str, str] = field(hash=False)
    parts: Mapping[str, tuple[str, ...]] = field(hash=False)

    def layout(self, nd_sbp: NdSbp, axis_names: Sequence[str], ndim: int) -> dtensor.Layout:
        """The DTensor layout of a tensor with `ndim` dims; a mesh axis is used only where all of its axes agree."""
        # broadcast on every axis, until one says otherwise
        specs = [dtensor.UNSHARDED] * ndim
        by_axis = dict(zip(axis_names, nd_sbp, strict=True))
        for name, parts in self.parts.items():
            sbps = {by_axis[axis] for axis in parts}
            # joined axes that disagree cannot be expressed on their one mesh axis: the tensor stays whole on it
            if len(sbps) == 1 and isinstance(part := sbps.pop(), Split):
                specs[part.dim % ndim] = name
        return dtensor.Layout(specs, self.mesh)


def mesh_view(placement: Placement, joined: tuple[tuple[str, ...], ...] = ()) -> MeshView:
    """The mesh of `placement`, with the axes of each group in `joined` made one. The order of ranks is kept."""
    return _mesh_view(placement, placement.axis_names, joined)


@functools.lru_cache(maxsize=64)
def _mesh_view(placement: Placement, axis_names: tuple[str, ...], joined: tuple[tuple[str, ...], ...]) -> MeshView:
    """Names are a key of their own: equal placements may have others."""
    groups: list[tuple[str, ...]] = []
    for axis in axis_names:
        group = next((group for group in joined if axis in group), (axis,))
        if group not in groups:
            groups.append(group)
    # axes that are joined must be neighbours in the mesh, so that one index runs through both
    order = [axis_names.index(axis) for group in groups for axis in group]
    ranks = np.asarray(placement.ranks).reshape(placement.hierarchy).transpose(order).ravel()
    dims = [("_".join(group), int(np.prod([placement.axis_size(axis) for axis in group]))) for group in groups]
    # of several processes each names its own devices, by their places in the mesh
    own = [place for place, rank in enumerate(ranks) if rank in set(world().local_ranks)]
    names = rank_devices()
    mesh = dtensor.Mesh(
        [name for name, _ in dims],
        np.arange(len(ranks)).reshape([size for _, size in dims]),
        own,
        [tf.DeviceSpec.from_string(names[ranks[place]]) for place in own],
        mesh_name=_RANKS + "_".join(map(str, ranks)) if len(own) < len(ranks) else "",
    )
    return MeshView(
        mesh,
        tuple(int(ranks[place]) for place in own),
        {axis: name for (name, _), group in zip(dims, groups, strict=True) for axis in group},
        {name: group for (name, _), group in zip(dims, groups, strict=True)},
    )


def ranks_of(mesh: dtensor.Mesh) -> np.ndarray:
    """The ranks of a mesh's places.

    Raises:
        FlowError: the mesh has devices of other processes, whose ranks are known of keras_flow's own meshes only.
    """
    shape = [mesh.dim_size(name) for name in mesh.dim_names]
    if mesh.num_local_devices() < mesh.size:
        named = mesh.name.removeprefix(_RANKS)
        if named == mesh.name:
            raise FlowError(
                "this DTensor's mesh has devices of several processes and was not made by keras_flow. Make the tensor "
                "by kf.to_global or kf.tensor"
            )
        return np.asarray([int(rank) for rank in named.split("_")]).reshape(shape)
    # the mesh names devices ("CPU:3"), as ranks do
    mine = world().local_ranks
    ranks = [mine[device.device_index] for device in map(tf.DeviceSpec.from_string, mesh.local_devices())]
    return np.asarray(ranks).reshape(shape)


def view_of(distribution: Distribution) -> MeshView:
    """The mesh of a distribution's placement."""
    return mesh_view(distribution.placement, distribution.joined_axes)


def engine_layout(layout: Layout) -> dtensor.Layout:
    """The DTensor layout of `layout`, on the mesh of the active distribution where it has the same placement."""
    distribution = active()
    if distribution is not None and _same(distribution.placement, layout.placement):
        return layout_on(layout, view_of(distribution))
    # outside of the active distribution nothing says which axes to join: those that share a dim here are
    groups = (layout.axes_of_dim(dim) for dim in range(len(layout.shape)))
    return layout_on(layout, mesh_view(layout.placement, tuple(group for group in groups if len(group) > 1)))


def _same(a: Placement, b: Placement) -> bool:
    return a == b and a.axis_names == b.axis_names


def layout_on(layout: Layout, view: MeshView) -> dtensor.Layout:
    """The DTensor layout of `layout` on a mesh.

    Raises:
        FlowError: the layout is a partial sum, or splits one dim over axes that the mesh keeps apart.
    """
    if layout.has_partial:
        raise FlowError(f"{layout}: TensorFlow's DTensor has no layout for partial_sum; use split or broadcast")
    for dim in range(len(layout.shape)):
        # axes that the view has joined to one of the mesh count as one
        used = {view.axes[axis] for axis in layout.axes_of_dim(dim)}
        if len(used) > 1:
            raise FlowError(
                f"{layout}: TensorFlow's DTensor holds one axis on a dim, dim {dim} asks for "
                f"{list(layout.axes_of_dim(dim))}; jax and torch hold several"
            )
    return view.layout(layout.nd_sbp, layout.placement.axis_names, len(layout.shape))


def replicated(mesh: dtensor.Mesh, ndim: int) -> dtensor.Layout:
    """The layout of a replicated tensor."""
    return dtensor.Layout.replicated(mesh, ndim)


def relayout(tensor: tf.Tensor, layout: dtensor.Layout, pullback: Callable[[Any], Any] | None = None) -> tf.Tensor:
    """A tensor of a step in another layout, and its gradient too, unless `pullback` says what that is.

    TensorFlow's own gradient lays as the tensor was before (RelayoutLike). DTensor fails on that where what uses the
    tensor decides its layout ("output layout of Relayout op after layout propagation does not match").
    """
    # told to the tape by TensorFlow's private `record`: `tf.custom_gradient` would put an IdentityN around it, which
    # DTensor lays as what uses it is laid, so that the tensor is cut and gathered again, and which it orders wrongly
    # where loops are unrolled ("operand #0 does not dominate this use")
    with record.stop_recording():
        result = dtensor.relayout(tensor, layout)
    pull = pullback or (lambda upstream: dtensor.relayout(upstream, layout))
    record.record_operation("KerasFlowLay", [result], [tensor], lambda upstream: [pull(upstream)])
    return result


@contextmanager
def on_mesh(mesh: dtensor.Mesh) -> Iterator[None]:
    """Operations inside run on DTensor's device, with `mesh` for those whose inputs name none.

    `dtensor.default_mesh` stays set when its body raises (TensorFlow 2.21), so the error leaves it first here.
    """
    error: BaseException | None = None
    token = _inside.set(True)
    try:
        with dtensor.default_mesh(mesh):
            try:
                yield
            except BaseException as raised:
                error = raised
    finally:
        _inside.reset(token)
    if error is not None:
        raise error


def gathered(layout: dtensor.Layout, placed: KerasLayout) -> dtensor.Layout | None:
    """The layout in which a variable is used, where that is not its own: None where it is.

    DTensor meets one mesh axis on two tensors of an operation, the rows and a weight, and fails on some ("'tf.Tile' op
    requires", "EmitAllScatter"): a weight that is split over an axis of the batch is gathered where it is used. So is
    one whose layout says so (`used`), as those of layers that the capability record names.
    """
    view, used = view_of(placed.distribution), placed.given.used
    # mesh axes on which the variable may not be split where it is used
    names = {view.axes[axis] for axis in placed.distribution.batch_axes}
    if used is not None:
        parts = zip(used.placement.axis_names, used.nd_sbp, strict=True)
        names |= {view.axes[axis] for axis, part in parts if part == sbp.broadcast}
    if not names.intersection(layout.sharding_specs):
        return None
    specs = [dtensor.UNSHARDED if spec in names else spec for spec in layout.sharding_specs]
    return dtensor.Layout(specs, layout.mesh)


def in_step() -> bool:
    """Whether this thread traces a step for a mesh, or runs one eagerly on it.

    Graphs of input pipelines are no steps, and a thread that reads data beside a step is in none.
    """
    return _inside.get()


def constrain(outputs: object, nd_sbp: NdSbp, path: str) -> object:
    """Give a layer's output tensors the layout of an `activations` rule; outside of a step they stay as they are."""
    distribution = active()
    if distribution is None or distribution.strategy == "mirrored" or not in_step():
        return outputs
    view = view_of(distribution)

    def constrained(tensor: tf.Tensor) -> tf.Tensor:
        return relayout(tensor, _activation(view, nd_sbp, tensor, path)) if tf.is_tensor(tensor) else tensor

    return tree.map_structure(constrained, outputs)


def _activation(view: MeshView, nd_sbp: NdSbp, tensor: tf.Tensor, path: str) -> dtensor.Layout:
    placement = expected().placement
    shape = tuple(tensor.shape)
    check_activation(placement, nd_sbp, shape, path)
    layout = view.layout(nd_sbp, placement.axis_names, len(shape))
    specs = [
        dtensor.MATCH
        if spec != dtensor.UNSHARDED and length is None
        else spec
        if spec == dtensor.UNSHARDED or length % view.mesh.dim_size(spec) == 0
        else dtensor.UNSHARDED  # an uneven batch is broadcast, and so are its activations
        for spec, length in zip(layout.sharding_specs, shape, strict=True)
    ]
    return dtensor.Layout(specs, view.mesh)
