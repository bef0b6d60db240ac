"""Batches on TensorFlow: every tensor of a batch becomes a DTensor, its rows split over the data ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.experimental import dtensor

from keras_flow.backends.reading.batch_watch import PartOfRows
from keras_flow.backends.tensorflow.devices import host_device
from keras_flow.backends.tensorflow.layouts import MeshView, view_of
from keras_flow.backends.tensorflow.mesh_values import is_dtensor, to_logical
from keras_flow.current.batch import rows_of
from keras_flow.current.distribution import Distribution
from keras_flow.errors import FlowError


@dataclass(frozen=True)
class MeshBatch:
    """A batch on the mesh.

    Attributes:
        data: the structure of DTensors.
        rows: rows of the logical batch; None where no tensor has any.
        divides: whether the rows are split. If not, every rank computes the whole batch.
    """

    data: object
    rows: int | None
    divides: bool


def batch_axis(distribution: Distribution, view: MeshView) -> tuple[str | None, int]:
    """The mesh axis that splits rows, and its size.

    Batch axes that are one mesh axis split together. If other tensors use them separately, DTensor can put only one on
    the rows: the largest.
    """
    names = {view.axes[axis] for axis in distribution.batch_axes}
    sizes = sorted(((view.mesh.dim_size(name), name) for name in names), reverse=True)
    return (sizes[0][1], sizes[0][0]) if sizes else (None, 1)


def put_batch(data: object, distribution: Distribution, model: keras.Model | None = None) -> MeshBatch:
    """Put a batch on the mesh: rows split where those of every tensor divide, otherwise the whole batch on every rank.

    Raises:
        FlowError: a tensor that DTensor cannot hold (text, sparse, ragged).
    """
    view = view_of(distribution)
    axis, _ = batch_axis(distribution, view)
    data = to_tensors(data, model)
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    rows = rows_of(leaves)
    divides = axis is not None and bool(rows) and all(distribution.batch_plan(count).divides for count in rows)
    mesh_tensors = tree.map_structure(lambda leaf: _put(leaf, view, axis if divides else None), data)
    return MeshBatch(mesh_tensors, rows[0] if rows else None, divides)


def to_tensors(data: object, model: keras.Model | None = None) -> object:
    """The batch as plain tensors; None stays None.

    Raises:
        FlowError: a tensor that cannot be split over the ranks.
    """
    data = tree.map_structure(_tensor, data)
    for leaf in tree.flatten(data):
        if leaf is not None:
            _refuse(leaf, model)
    return data


def _tensor(
    value: tf.Tensor | np.ndarray | PartOfRows | None,
) -> tf.Tensor | tf.SparseTensor | tf.RaggedTensor | PartOfRows | None:
    if value is None or isinstance(value, tf.experimental.Optional):  # how Keras's adapters pass None
        return None
    if isinstance(value, tf.Tensor | tf.SparseTensor | tf.RaggedTensor | PartOfRows):
        return value
    if hasattr(value, "detach"):  # a torch tensor
        value = cast("np.ndarray", value.detach().cpu().numpy())
    with tf.device(host_device()):
        return tf.convert_to_tensor(value)


def _put(tensor: tf.Tensor | PartOfRows | None, view: MeshView, axis: str | None) -> tf.Tensor | None:
    if isinstance(tensor, PartOfRows):
        return _put_part(tensor, view, axis)
    if tensor is None or is_dtensor(tensor):
        return tensor
    ndim = tensor.shape.rank
    if axis is None or ndim == 0 or view.mesh.dim_size(axis) == 1:
        return dtensor.pack([tensor] * view.mesh.num_local_devices(), dtensor.Layout.replicated(view.mesh, ndim))
    parts = tf.split(tensor, view.mesh.dim_size(axis))
    pieces = [parts[where[axis]] for where in view.mesh.local_device_locations()]
    return dtensor.pack(pieces, dtensor.Layout([axis] + [dtensor.UNSHARDED] * (ndim - 1), view.mesh))


def _put_part(part: PartOfRows, view: MeshView, axis: str | None) -> tf.Tensor:
    if axis is None:
        raise FlowError(
            f"a batch has a value of shape {list(part.shape)}, whose rows divide by the ranks, beside one whose rows "
            "do not: give all values of a batch as many rows"
        )
    block = part.rows // view.mesh.dim_size(axis)
    starts = [where[axis] * block - part.start for where in view.mesh.local_device_locations()]
    pieces = [_tensor(part.own[start : start + block]) for start in starts]
    return dtensor.pack(pieces, dtensor.Layout([axis] + [dtensor.UNSHARDED] * (part.ndim - 1), view.mesh))


def gathered(data: object, distribution: Distribution) -> object:
    """The batch with all rows in this process too, for a step of one device. A collective of all processes."""
    view = view_of(distribution)
    axis, _ = batch_axis(distribution, view)
    return tree.map_structure(
        lambda leaf: to_logical(_put_part(leaf, view, axis)) if isinstance(leaf, PartOfRows) else leaf, data
    )


def _refuse(tensor: tf.Tensor | tf.SparseTensor | tf.RaggedTensor | PartOfRows, model: keras.Model | None) -> None:
    kind = "sparse" if isinstance(tensor, tf.SparseTensor) else "ragged" if isinstance(tensor, tf.RaggedTensor) else ""
    is_text = tensor.own.dtype.kind in "OSU" if isinstance(tensor, PartOfRows) else tensor.dtype == tf.string
    if not kind and not is_text:
        return
    what = f"a {kind} tensor" if kind else "text"
    # with the layer's name, because a batch may have several inputs
    layers = [layer.name for layer in model._flatten_layers() if _reads(layer, kind)] if model is not None else []
    reader = f" (read by layer {', '.join(map(repr, layers))})" if layers else ""
    cure = (
        "give it dense (`tf.sparse.to_dense`)"
        if kind == "sparse"
        else "give it padded (`.to_tensor()`)"
        if kind == "ragged"
        else "apply the layer in the input pipeline (`dataset.map(lambda x, y: (layer(x), y))`)"
    )
    raise FlowError(
        f"the batch has {what} of shape {list(tensor.shape)}{reader}, which the tensorflow backend cannot lay over the "
        f"ranks: {cure}"
    )


def _reads(layer: keras.Layer, kind: str) -> bool:
    if kind:
        return isinstance(layer, keras.layers.InputLayer) and getattr(layer, kind, False)
    return type(layer).__name__ in ("TextVectorization", "StringLookup", "Hashing", "HashedCrossing") or (
        isinstance(layer, keras.layers.InputLayer) and layer.dtype == "string"
    )
