"""Tables over parameter servers: a variable whose rows lie in parts, each of them a variable on its server.

What holds the parts is TensorFlow's `ShardedVariable`, as under ParameterServerStrategy. A worker looks rows up part by
part, on the servers (`tf.nn.embedding_lookup`), so that the rows alone are sent. An optimizer updates part by part.

Example: a table of 5 rows on 2 servers has the rows 0 to 2 on the first, 3 and 4 on the second. A batch with the tokens
4, 0 and 4 gets row 0 from the first server and row 4 from the second, and sends a gradient for each of these two rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_flow.backends.hooking import hook
from keras_flow.backends.optimizer_slots import slots_of
from keras_flow.backends.tensorflow.devices import host_device, rank_devices
from keras_flow.backends.tensorflow.mesh_variables import is_watched
from keras_flow.current.variable_layout import KerasLayout
from keras_flow.layout import Layout
from keras_flow.scoped import setting

#: a table's variable -> what a worker's program has read of each part
_read: ContextVar[dict[int, list[tf.Tensor]] | None] = ContextVar("keras_flow_table_parts", default=None)


class ServedTable(tf.__internal__.distribute.ShardedVariable):
    """The parts of a variable on servers.

    Args:
        parts: rank -> its rows, in their order.
        layout: the layout of the variable, over the servers.
        name: the name of the variable.
        key: the key by which optimizers find its slots; None for a new one.
    """

    def __init__(self, parts: dict[int, tf.Variable], layout: Layout, name: str, key: str | None):
        super().__init__(list(parts.values()), name)
        #: the elements of each part
        self.indices = [layout.local_slices(rank) for rank in parts]
        self._of_rank = parts
        self._key = key or self.variables[0]._unique_id
        for part in self.variables:
            part._unique_id = self._key

    @property
    def _unique_id(self) -> str:
        return self._key

    @property
    def device(self) -> str:
        """The chief's device, where its rows are joined."""
        return host_device()

    def read_value(self) -> tf.Tensor:
        """All rows."""
        return tf.concat(list(self.variables), 0)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def fill(self, part_of: Callable[[tuple[slice, ...]], np.ndarray]) -> None:
        """Give each part its elements."""
        for part, index in zip(self.variables, self.indices, strict=True):
            part.assign(part_of(index))

    def shards(self) -> dict[int, np.ndarray]:
        """rank -> its part."""
        return {rank: np.asarray(part.read_value()) for rank, part in self._of_rank.items()}

    def divided(self, gradient: Any) -> list[Any]:
        """The parts of a gradient of the whole."""
        if not isinstance(gradient, tf.IndexedSlices):
            return [gradient[index[0]] for index in self.indices]
        shapes = [tf.constant(part.shape.as_list(), gradient.indices.dtype) for part in self.variables]
        parts = zip(self._decompose_indexed_slices(gradient), shapes, strict=True)
        return [tf.IndexedSlices(part.values, part.indices, shape) for part, shape in parts]


def is_table(placed: KerasLayout) -> bool:
    """Whether a layout is that of rows over several servers."""
    ranks = placed.layout.placement.ranks
    return len(ranks) > 1 and "/job:ps/" in rank_devices()[ranks[0]]


def make(variable: keras.Variable, block: Callable[[tuple[slice, ...]], np.ndarray], placed: KerasLayout) -> None:
    """Give a variable its parts, each on its server; `block` gives the elements of one."""
    old, parts = getattr(variable, "_value", None), {}
    for number, rank in enumerate(placed.layout.placement.ranks):
        value = block(placed.layout.local_slices(rank))
        with tf.init_scope(), tf.device(rank_devices()[rank]):
            name = f"{variable.name}_part_{number}"
            parts[rank] = tf.Variable(value, dtype=variable._dtype, trainable=is_watched(variable), name=name)  # type: ignore[arg-type]
    with tf.init_scope():
        variable._value = ServedTable(parts, placed.layout, variable.name, None if old is None else old._unique_id)
    variable._layout = placed


def reading(parts: dict[int, list[tf.Tensor]]) -> AbstractContextManager[None]:
    """Inside, a worker's program is traced that has read these parts; variable's `id` -> its parts."""
    return setting(_read, parts)


def read_parts(x: object, indices: object, axis: int | None = None) -> list[tf.Tensor] | None:
    """Condition of the hook on `take`: the parts of the table whose rows are taken."""
    known = _read.get()
    if not known or axis != 0 or isinstance(indices, tf.SparseTensor | tf.RaggedTensor):
        return None
    return known.get(id(x))


@hook(
    "keras:numpy",
    "take",
    "a table on several servers would be sent whole to each worker, for the few rows of a batch",
    when=read_parts,
)
def take(
    parts: list[tf.Tensor], original: Callable[..., tf.Tensor], x: keras.Variable, indices: Any, axis: int | None = None
) -> tf.Tensor:
    """Hook on `take`: rows by their numbers, each from the server that has it."""
    numbers = tf.convert_to_tensor(indices)
    numbers = tf.where(numbers < 0, numbers + tf.cast(x.shape[0], numbers.dtype), numbers)
    return tf.nn.embedding_lookup([tf.cast(part, x.value.dtype) for part in parts], numbers)


def update(optimizer: keras.optimizers.Optimizer, gradient: Any, variable: keras.Variable, rate: Any) -> None:
    """Update a table part by part, each on its server.

    Args:
        optimizer: one that updates by element.
        gradient: the gradient of the whole table.
        variable: the Keras variable.
        rate: the learning rate.
    """
    table: Any = variable._value
    held = [(each, each._value) for each in (variable, *slots_of(optimizer, variable))]
    try:
        for number, part in enumerate(table.divided(gradient)):
            for each, whole in held:
                each._value = whole.variables[number]
            with tf.device(table.variables[number].device):
                optimizer.update_step(part, variable, rate)
    finally:
        for each, whole in held:
            each._value = whole
