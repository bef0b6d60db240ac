"""Parameter servers on TensorFlow: its own servers and ClusterCoordinator; the chief's process is the program's.

Variables are plain `tf.Variable`s on the servers, which are ranks of the chief. A worker runs graphs that read them.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.python.distribute.coordinator.cluster_coordinator import Cluster, RemoteValueImpl

from keras_flow.backends.hooking import hook
from keras_flow.backends.optimizer_slots import updates_by_element
from keras_flow.backends.tensorflow import devices, tables
from keras_flow.current import joining
from keras_flow.errors import FlowError
from keras_flow.scoped import setting

#: threads of a worker's executor: with fewer, the servers of one host may wait for each other without end
_THREADS = 4
#: seconds between two attempts to get what a worker has computed
_AGAIN_SECONDS = 0.1
#: seconds that its threads have to stop at the end
_STOP_SECONDS = 5.0


def serve(cluster: Mapping[str, Sequence[str]], job: str, index: int) -> None:
    """Begin to serve in this process: a worker computes what the chief schedules, a server holds variables."""
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=max(_THREADS, os.cpu_count() or 1))
    try:
        server = tf.distribute.Server(_spec(cluster), job_name=job, task_index=index, protocol="grpc", config=config)
    except tf.errors.UnknownError as error:
        raise FlowError(
            f"TF_CONFIG gives this process {cluster[job][index]}, where it cannot listen: {error.message}"
        ) from None
    _served.append(server)


#: what this process serves, which ends with it
_served: list[Any] = []


def connect_servers(cluster: Mapping[str, Sequence[str]]) -> Coordinator:
    """Make this process the chief of workers and servers that listen; the servers become its ranks from 1 on."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(_spec(cluster), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    chief = "/job:chief/replica:0/task:0/device:CPU:0"
    servers = [f"/job:ps/replica:0/task:{number}/device:CPU:0" for number in range(len(cluster["ps"]))]
    devices.serve_with(chief, servers)
    return Coordinator(tf.distribute.coordinator.ClusterCoordinator(strategy))


def _spec(cluster: Mapping[str, Sequence[str]]) -> tf.train.ClusterSpec:
    return tf.train.ClusterSpec({job: list(cluster[job]) for job in ("worker", "ps")})


class WorkerProgram:
    """A function of a batch's part that a worker runs, reading the variables from their servers.

    Args:
        function: of weights, tensors and others, as `stage_program` takes it.
        variables: the weights.
        learns: whether it also gives gradients.
    """

    def __init__(self, function: Callable[..., Any], variables: Sequence[keras.Variable], learns: bool):
        self._function, self._variables, self._learns = function, list(variables), learns
        self._structure: Any = None
        self.graph = tf.function(self._compute, autograph=False)

    def _compute(self, others: Any) -> list[Any]:
        parts = [_read(variable) for variable in self._variables]
        found = {id(variable): read for variable, read in zip(self._variables, parts, strict=True) if len(read) > 1}
        with (
            tables.reading(found),
            tf.compat.v1.get_default_graph().device(_where_it_reads),
            tf.GradientTape() as tape,
        ):
            tape.watch(parts)
            # of a table the whole is computed where something other than a lookup asks for it
            weights = [read[0] if len(read) == 1 else tf.concat(read, 0) for read in parts]
            outputs, rest = self._function(weights, [], others)
            loss = outputs[-1] * tf.cast(others["scale"], outputs[-1].dtype)
        gradients: Any = tape.gradient(loss, parts) if self._learns else []
        self._structure = [[[_parts(each) for each in read] for read in gradients], rest]
        # what a coordinator hands on has no None
        return [leaf for leaf in tree.flatten(self._structure) if leaf is not None]

    def packed(self, found: Sequence[Any]) -> tuple[list[Any], Any]:
        """Gradients, and the rest, of what a worker returned."""
        known = iter(found)
        flat = [None if leaf is None else next(known) for leaf in tree.flatten(self._structure)]
        gradients, rest = tree.pack_sequence_as(self._structure, flat)
        return [_joined(*pair) for pair in zip(gradients, self._variables, strict=False)], rest


def _read(variable: keras.Variable) -> list[tf.Tensor]:
    """The value of a variable, read on its server; the parts of a table."""
    read = []
    for part in variable._value.variables if isinstance(variable._value, tables.ServedTable) else [variable._value]:
        with tf.device(part.device):
            read.append(part.read_value())
    return read


#: operations that give less than they read, or as much: rows of a table, a value in another dtype
_READS = ("GatherV2", "GatherNd", "Cast", "Identity", "Shape")


def _where_it_reads(operation: tf.Operation) -> str:
    """Device of an operation of a worker: rows of a table are taken on its server, so that they alone are sent."""
    device = operation.inputs[0].device if operation.type in _READS else ""
    return device if tf.DeviceSpec.from_string(device).job == "ps" else ""


def _parts(gradient: Any) -> Any:
    """A gradient as tensors: that of a table as the rows that were used, and their numbers."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    numbers, at = tf.unique(gradient.indices)
    return {"rows": tf.math.unsorted_segment_sum(gradient.values, at, tf.size(numbers)), "numbers": numbers}


def _joined(parts: Sequence[Any], variable: keras.Variable) -> Any:
    """The gradient of a variable, of those of its parts; None where there is none."""
    if any(part is None for part in parts):
        return None
    begins = [0] if len(parts) == 1 else [index[0].start for index in variable._value.indices]
    if not isinstance(parts[0], dict):
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    # what is fetched is of NumPy
    rows = tf.concat([part["rows"] for part in parts], 0)
    numbers = tf.concat([part["numbers"] + begin for part, begin in zip(parts, begins, strict=True)], 0)
    return tf.IndexedSlices(rows, numbers, tf.constant(variable.shape, numbers.dtype))


class Coordinator:
    """Schedules programs on workers.

    A worker that is lost loses no call: another one runs it, or the worker itself when it is back.
    """

    #: whether a call may be given to a second worker. TensorFlow tells all workers each function that is made or freed,
    #: and holds Python's lock until they have answered: beside one that hangs the chief would soon hang too
    can_repeat = False

    def __init__(self, coordinator: Any):
        self._coordinator = coordinator
        atexit.register(_leave, coordinator)

    def program(self, function: Callable[..., Any], stage: Any, learns: bool) -> WorkerProgram:
        """A function of a stage's weights, tensors and others as what workers run."""
        return WorkerProgram(function, stage.trainable, learns)

    def schedule(self, program: WorkerProgram, others: Any) -> Callable[[], tuple[Any, int]]:
        """Begin to compute a program on a worker; what waits for what it gives, and says which worker it was."""
        with tf.device(devices.host_device()):
            args = tree.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), others)
            remote: RemoteValueImpl = self._coordinator.schedule(program.graph, args=(args,))

        def wait() -> tuple[Any, int]:
            found: Any = _fetched(remote)
            where = tf.DeviceSpec.from_string(tree.flatten(remote._values)[0].device)
            return program.packed(found), int(where.task or 0)

        return wait

    def settle(self) -> None:
        """Forget a failure that a step has raised: TensorFlow's coordinator would raise it in the next one again."""
        with suppress(Exception):
            self._coordinator.done()

    @staticmethod
    def total(gradients: Sequence[Any]) -> Any:
        """The sum of gradients of one variable; None where there are none."""
        found = [each for each in gradients if each is not None]
        if len(found) < 2:
            return found[0] if found else None
        if all(isinstance(each, tf.IndexedSlices) for each in found):
            parts = ([each.values for each in found], [each.indices for each in found])
            # a row once: optimizers square what is in them
            whole = _parts(tf.IndexedSlices(*(tf.concat(part, 0) for part in parts)))
            return tf.IndexedSlices(whole["rows"], whole["numbers"], found[0].dense_shape)
        return tf.add_n([tf.convert_to_tensor(each) for each in found])

    @staticmethod
    def update_on_servers(optimizer: Any) -> AbstractContextManager[None]:
        """Inside, an optimizer updates each variable on its server."""
        return setting(_updated_on_servers, getattr(optimizer, "inner_optimizer", optimizer))

    @staticmethod
    def is_lost(error: BaseException) -> bool:
        """Whether an error says that a server is gone."""
        return isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.InternalError)


def _fetched(remote: RemoteValueImpl) -> Any:
    """What a worker has computed; of a worker that is lost before it has sent it, what is computed again."""
    while True:
        try:
            return remote.fetch()
        except tf.errors.OpError:
            if remote._error is not None:  # the program's, or that of a server
                raise
            time.sleep(_AGAIN_SECONDS)  # the coordinator sees the loss too, and gives the program to a worker


def _leave(coordinator: Any) -> None:
    """Leave at exit: a coordinator's threads wait for workers that are lost, and the end of the process for them.

    Seen with TensorFlow 2.21. Where none is lost they stop, and the process ends as it would.
    """
    cluster: Cluster = coordinator._cluster
    with suppress(Exception):
        if not coordinator.done():  # to free a program asks its worker, without end where that hangs
            joining.leave_at_once()
    stopping = threading.Thread(target=cluster.stop, daemon=True)
    stopping.start()
    stopping.join(_STOP_SECONDS)
    if stopping.is_alive():
        joining.leave_at_once()


#: the optimizer that updates each variable on its server
_updated_on_servers: ContextVar[Any] = ContextVar("keras_flow_updated_on_servers", default=None)


def _is_on_servers(optimizer: keras.optimizers.Optimizer, *args: object) -> bool | None:
    """Condition of `update_on_servers`: the optimizer is that of a model on servers, which is trained."""
    return True if _updated_on_servers.get() is optimizer else None


@hook(
    "keras.Optimizer",
    "_backend_update_step",
    "parameter servers: each variable is updated where it is, by one update of Keras's",
    when=_is_on_servers,
)
def update_on_servers(
    _: object,
    original: Callable[..., object],
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    rate: Any,
) -> None:
    """Hook on `TFOptimizer._backend_update_step`, which Nadam calls after a step of its own."""
    for gradient, variable in zip(gradients, variables, strict=True):
        value = getattr(variable, "_value", variable)
        if isinstance(value, tables.ServedTable) and updates_by_element(optimizer):
            tables.update(optimizer, gradient, variable, rate)
            continue
        with tf.device(value.device):
            optimizer.update_step(gradient, variable, rate)
