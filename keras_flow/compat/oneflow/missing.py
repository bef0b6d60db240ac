"""Names of OneFlow 0.x: those that are there, and what does the work of the others today."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from keras_flow.errors import FlowError, MissingName

#: a name, or `module.` for all names of one -> what to do instead
_INSTEAD = {
    "data.": "read data with NumPy, Keras's loaders or tf.data, and give the job arrays",
    "parallel_cast": "give layouts to variables (distribute=), or kf.ModelParallel(activations=...)",
    "hierarchical_parallel_cast": "give layouts by parallel_distribution=, or kf.ModelParallel(activations=...)",
    "advanced.": "use kf.to_global and x.to_local() on global tensors",
    "repeat": "variables need none: flow.unpack and flow.pack cut and join a batch",
    "acc": "variables need none: flow.unpack and flow.pack cut and join a batch",
    "watch_diff": "compute gradients with kf.value_and_grad",
    "enable_eager_execution": "outside of jobs Keras's layers and kf.ops compute at once",
    "distributed.": "use kf.env.get_world_size() and kf.env.process_index()",
    "placement": "use kf.placement",
    "sbp": "use kf.sbp",
    "tensor": "use kf.tensor(..., placement=, sbp=)",
    "Graph": "use a Keras model, and kf.PipelineParallel for stages",
    "Module": "use keras.Model or keras.Layer",
    "saved_model.": "use model.export of Keras, or kf.checkpoint.export",
    "optimizer.": "use one of keras.optimizers in model.fit, in a program of Keras",
    "layers.": "use one of keras.layers, in a program of Keras",
    "config.": "leave it out: it tuned OneFlow's own runtime",
    "env.": "kf.env has what programs ask for, get_rank() say; leave out what tuned OneFlow's own runtime",
    "typing.": "the annotations are tp.Numpy, tp.ListNumpy, tp.Callback and tp.Bundle",
    "env.data_port": "leave it out: ctrl_port is the coordinator's port, and the engines choose theirs",
    "function_config.": "leave it out where it only tuned OneFlow's runtime",
    "function_config.enable_auto_mixed_precision": 'use keras.config.set_dtype_policy("mixed_bfloat16") and fit',
    "function_config.optimizer_placement_optimization_mode": "use kf.DataParallel(zero=1), in a program of Keras",
    "function_config.train.num_gradient_accumulation_steps": "use gradient_accumulation_steps= of Keras's optimizers",
}


def refuse(module: str, name: str) -> NoReturn:
    """Raise for a name that is not there.

    Raises:
        AttributeError: a private name, for which Python itself asks.
        MissingName: any other; it says what to use.
    """
    full = f"{module}.{name}" if module else name
    if name.startswith("_"):
        raise AttributeError(full)
    keys = [key for key in (full, f"{full}.", f"{module}.") if key in _INSTEAD]
    instead = _INSTEAD[keys[0]] if keys else "use keras.ops, in a program of Keras"
    raise MissingName(f"flow.{full} of OneFlow 0.x is not in keras_flow.compat.oneflow. Instead: {instead}")


R = TypeVar("R")


def listed(who: str, names: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Make a function of keywords one that is called with the arguments of OneFlow's, in OneFlow's order.

    Args:
        who: its name.
        names: the arguments; those after `!` change the results in OneFlow and are not there: legal is None or False.

    Example:
        >>> half = listed("nn.half", "x !seed")(lambda x: x / 2)
        >>> half(3.0, None, name="of_an_operation")
        1.5
        >>> half(3.0, 5)
        Traceback (most recent call last):
        ...
        keras_flow.errors.FlowError: flow.nn.half: seed=5 is not in keras_flow.compat.oneflow; leave it out
    """
    known = names.replace("!", "").split()
    refused = [each[1:] for each in names.split() if each.startswith("!")]

    def of(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def called(*args: Any, **options: Any) -> R:
            if len(args) > len(known) or set(known[: len(args)]) & set(options):
                raise FlowError(f"flow.{who} takes each once, in this order: {', '.join(known)}")
            given = {**dict(zip(known, args, strict=False)), **options}
            if "name" not in known:
                given.pop("name", None)
            for each in refused:
                value = given.pop(each, None)
                if value is not None and value is not False:
                    raise FlowError(f"flow.{who}: {each}={value!r} is not in keras_flow.compat.oneflow; leave it out")
            return function(**given)

        return called

    return of


class Names:
    """The names of a module of OneFlow's."""

    def __init__(self, module: str, /, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> NoReturn:
        refuse(self._module, name)
