"""`kf.DistributedDataParallel`: gradients of a loop of one's own, averaged over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_flow.backends import hooking
from keras_flow.backends.active import backend
from keras_flow.backends.files import shared_files
from keras_flow.comm.group import Group, dtype_name, parts_of, shape_of
from keras_flow.comm.movements import broadcast
from keras_flow.comm.reductions import all_reduce
from keras_flow.errors import FlowError
from keras_flow.placements import Placement
from keras_flow.tensors.dtypes import numpy_dtype

if TYPE_CHECKING:
    from keras_flow.backends.engine_records import Replica


class DistributedDataParallel:
    """A model whose gradients are averaged over the ranks, each of which has tensors of its own (local, not global).

    For loops of one's own, as torch's and OneFlow's class of this name; `kf.DataParallel` is for `model.fit`, where the
    results are those of the logical batch. Here each rank's loss counts alike, whatever its rows, and
    BatchNormalization takes each rank's own statistics. Weights are made equal to those of the first rank at the start.

    On torch it is torch's DistributedDataParallel: `ddp(x)` and `loss.backward()` work as there, and buckets travel
    while the backward pass runs. On JAX and TensorFlow a compiled step has all its gradients at once, so that buckets
    travel beside each other but after it.

    Args:
        model: a built Keras model; made outside of a distribution's scope.
        bucket_size_mb: MiB of gradients that travel together.
        broadcast_buffers: give all ranks the first rank's moving statistics (and other weights that are not trained)
            before each step: of `value_and_grad`, and on torch of each call whose gradients are averaged.
        find_unused_parameters: torch: look for weights that a loss does not depend on, whose gradient is zero. Without
            it torch raises in the step after one that left weights out. The others always do.
        group: the ranks that take part, one for each process that makes one; all by default.

    Raises:
        FlowError: the model is not built; this process drives several ranks; models differ between ranks.

    Example:
        >>> import keras, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> def main():  # in every process of `keras-flow launch --nproc_per_node 4`
        ...     model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
        ...     optimizer = keras.optimizers.SGD(0.1)
        ...     ddp = kf.DistributedDataParallel(model)
        ...     step = ddp.value_and_grad(lambda x, y: keras.ops.mean((ddp(x) - y) ** 2))
        ...     for x, y in batches_of(kf.env.process_index()):
        ...         loss, gradients = step(x, y)
        ...         optimizer.apply(gradients, model.trainable_weights)
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        bucket_size_mb: float = 25.0,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = True,
        group: Placement | None = None,
    ):
        """Make the weights of all ranks those of the first."""
        if not isinstance(model, keras.Layer):
            raise FlowError(
                f"kf.DistributedDataParallel takes a Keras model, and was given a {type(model).__qualname__}: write it "
                "of Keras layers, or on torch as keras.layers.TorchModuleWrapper(module)"
            )
        if not model.built or not model.weights:
            raise FlowError(
                "kf.DistributedDataParallel takes a built model: call it once, or model.build(shape), before"
            )
        if not bucket_size_mb > 0:
            raise FlowError(f"bucket_size_mb is {bucket_size_mb!r}; legal is a number of MiB above 0")
        members = Group.of(group, "DistributedDataParallel")
        local = backend().world().local_ranks
        if len(local) != 1:
            raise FlowError(
                f"kf.DistributedDataParallel is for processes of one rank; this one drives {list(local)}. Start one "
                "process for each (keras-flow launch --nproc_per_node), or train by model.fit under kf.DataParallel"
            )
        if not members.mine:
            raise FlowError(f"kf.DistributedDataParallel: rank {local[0]} is not in its group {list(members.ranks)}")
        self.module = model
        self._group, self._ranks = group, members.ranks
        self._bucket_bytes = int(bucket_size_mb * 2**20)
        self._broadcast_buffers = broadcast_buffers
        self._is_synced = True
        self._kept: list[Any] | None = None
        self._share(model.weights)
        hooking.install_each(hooking.declared(shared_files))  # all processes may save the model under one name
        self._replica: Replica = backend().make_replica(
            model, members.ranks, self._bucket_bytes, find_unused_parameters
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for this rank's tensors."""
        if self._broadcast_buffers and self._replica.is_recorded is not None and self._replica.is_recorded():
            # an earlier call of this step may have saved a weight for its gradient: torch then lets none write into it
            self._share(self.module.non_trainable_weights, only_changed=True)
        return self._replica.call(*args, **kwargs)

    def value_and_grad(
        self, loss_function: Callable[..., Any], has_aux: bool = False
    ) -> Callable[..., tuple[Any, list[Any]]]:
        """A function that gives the loss and the gradients averaged over the ranks, as `jax.value_and_grad`.

        On JAX and TensorFlow it is compiled: `loss_function` is traced, and gets tensors. Every rank must call it
        equally often.

        Args:
            loss_function: takes this rank's tensors; calls this object and returns the loss, a scalar.
            has_aux: it returns `(loss, others)`, tensors which are handed back beside the loss.

        Returns:
            `function(*tensors) -> (what loss_function returned, gradients by module.trainable_weights)`. The loss is
            that of this rank. Within `no_sync` gradients are the sum so far of this rank's own.
        """
        local = self._replica.gradients_of(loss_function, has_aux)

        def step(*args: Any) -> tuple[Any, list[Any]]:
            if self._broadcast_buffers and not self._replica.averages:
                self._share(self.module.non_trainable_weights)
            result, gradients = local(*args)
            return result, gradients if self._replica.averages else self.average(gradients)

        return step

    def average(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients that were computed in another way, averaged over the ranks; not on torch, whose hooks do it.

        Args:
            gradients: the gradients of this rank, by `module.trainable_weights`; None, of an unused weight, is 0.

        Raises:
            FlowError: the engine has averaged them already.
        """
        if self._replica.averages:
            raise FlowError("loss.backward() has averaged the gradients already; leave out ddp.average")
        found = [
            keras.ops.zeros(weight.shape, weight.dtype) if each is None else each
            for each, weight in zip(gradients, self.module.trainable_weights, strict=True)
        ]
        if self._kept is not None:
            found = [kept + new for kept, new in zip(self._kept, found, strict=True)]
        self._kept = None if self._is_synced else found
        return self._averaged(found) if self._is_synced and len(self._ranks) > 1 else found

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are added up and not averaged; the first step outside averages their sum."""
        with self._replica.no_sync() if self._replica.no_sync else nullcontext():
            was_synced, self._is_synced = self._is_synced, False  # it may be inside another one
            try:
                yield
            finally:
                self._is_synced = was_synced

    def _averaged(self, gradients: list[Any]) -> list[Any]:
        """All buckets are begun before the first is waited for; the last layers' first, as they are computed."""
        engine = backend()
        found = list(gradients)
        begun = []
        for places in buckets(gradients, self._bucket_bytes):
            flat = engine.join([engine.reshape(gradients[place], (-1,)) for place in places])
            begun.append((places, all_reduce(flat, "mean", self._group, async_op=True)))
        for places, work in begun:
            parts = parts_of(work.wait(), [shape_of(gradients[place]) for place in places])
            for place, part in zip(places, parts, strict=True):
                found[place] = part
        return found

    def _share(self, variables: Sequence[keras.Variable], only_changed: bool = False) -> None:
        """Give variables the first rank's values."""
        if len(self._ranks) > 1:
            share(variables, self._ranks[0], self._group, self._bucket_bytes, only_changed)


def share(
    variables: Sequence[keras.Variable],
    source: int,
    group: Placement | None,
    bucket_bytes: int,
    only_changed: bool = False,
) -> None:
    """Give variables the values that they have on rank `source`; all ranks of the group call it.

    `only_changed`: write to those alone whose values differ.
    """
    engine = backend()
    values = [keras.ops.convert_to_tensor(keras.ops.stop_gradient(each)) for each in variables]
    for places in buckets(values, bucket_bytes):
        flat = engine.join([engine.reshape(values[place], (-1,)) for place in places])
        parts = parts_of(broadcast(flat, source, group), [shape_of(values[place]) for place in places])
        for place, part in zip(places, parts, strict=True):
            if not only_changed or not np.array_equal(engine.as_numpy(part), engine.as_numpy(values[place])):
                variables[place].assign(part)


def buckets(values: Sequence[Any], limit: int) -> list[list[int]]:
    """Places of values that travel together: of one dtype, up to `limit` bytes, from the last to the first."""
    found: list[list[int]] = []
    opened: dict[str, tuple[list[int], int]] = {}
    for place in reversed(range(len(values))):
        name = dtype_name(values[place])
        size = math.prod(shape_of(values[place])) * numpy_dtype(name).itemsize
        bucket, filled = opened.get(name, ([], limit + 1))
        if filled + size > limit:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(place)
        opened[name] = (bucket, filled + size)
    return found
