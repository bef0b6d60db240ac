"""Values of one rank for all: `broadcast_variables`, and models that are loaded or run on several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_flow.backends.active import drives_all_ranks
from keras_flow.comm.distributed_data_parallel import share
from keras_flow.hvd import ranks
from keras_flow.hvd.agreed import agree
from keras_flow.hvd.collectives import allgather_object, check_root
from keras_flow.hvd.compression import Compression
from keras_flow.hvd.optimizer import BUCKET_BYTES, DistributedOptimizer
from keras_flow.hvd.ranks import ProcessSet, global_process_set
from keras_flow.launch.run import run as run_ranks


def broadcast_variables(
    variables: Sequence[keras.Variable], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give variables the values that they have on one rank.

    Raises:
        FlowError: ranks have other variables.

    Example:
        >>> import keras, keras_flow.hvd as hvd
        >>> hvd.init()
        >>> hvd.broadcast_variables([keras.Variable([1.0])], root_rank=0)
    """
    check_root(root_rank, process_set)
    if process_set.size() == 1 or not variables:
        return
    agree("broadcast", process_set, tensors=[each.value for each in variables], detail=f"from {root_rank}")
    share(variables, root_rank, ranks.group_of(process_set), BUCKET_BYTES)


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
) -> keras.Model:
    """Load a model whose optimizer goes on as a distributed one.

    Args:
        filepath: the path of a file that `model.save` wrote, on one rank or many.
        custom_optimizers: classes of optimizers that are not Keras's.
        custom_objects: other classes that the file needs, by name.
        compression: the compression of gradients.
    """
    known = {each.__name__: each for each in custom_optimizers or ()} | dict(custom_objects or {})
    model: Any = keras.saving.load_model(filepath, custom_objects=known)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


def run(
    func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, np: int = 1
) -> list[Any]:
    """Call a function in processes of their own, one for each rank, on this host.

    Args:
        func: to call; it calls `hvd.init()`.
        args: its arguments.
        kwargs: its keyword arguments.
        np: how many processes.

    Returns:
        What each returned, by rank.

    Raises:
        LaunchError: a rank failed; it names the rank.
    """
    processes = np if drives_all_ranks() else None
    given = (func, tuple(args), dict(kwargs or {}))
    return run_ranks(_gathered, np, processes=processes, args=given, rehearse=False)


def _gathered(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Call a function, and return the results of all ranks."""
    result = func(*args, **kwargs)
    ranks.init()
    return allgather_object(result)
