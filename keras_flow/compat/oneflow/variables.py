"""The session's variables by name, which its jobs share: `flow.get_variable`, values and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_flow import checkpoint as checkpoints
from keras_flow import sbp
from keras_flow.compat.oneflow import session, tracing
from keras_flow.compat.oneflow.blobs import VariableBlob
from keras_flow.compat.oneflow.initializers import of_variable
from keras_flow.compat.oneflow.missing import Names
from keras_flow.distributions.shard import shard
from keras_flow.errors import FlowError

#: name -> the layer, and what it was asked to be
_layers: dict[str, tuple[keras.Layer, tuple[object, ...]]] = {}
#: values of variables that no job has made yet
_loaded: dict[str, np.ndarray] = {}


@dataclass(frozen=True)
class Distribute:
    """The layout of a variable over the devices: split along `axis`, or whole on each (None)."""

    axis: int | None = None


distribute = Names("distribute", split=Distribute, broadcast=Distribute, auto=Distribute)


class Holder(keras.Layer):
    """The layer of one variable."""

    def __init__(self, name: str, dtype: str, **options: Any) -> None:
        super().__init__(name=name, dtype=dtype)
        self._options = options

    def build(self, input_shape: object) -> None:  # noqa: D102
        self.value = self.add_weight(name="value", **self._options)
        self.built = True


def layer_named(
    name: str,
    make: Callable[[str], keras.Layer],
    asked: tuple[object, ...],
    shape: tuple[int | None, ...] | None = None,
    layouts: Mapping[str, sbp.SbpSpec] | None = None,
    regularizers: Mapping[str, Any] | None = None,
    trainable: bool | None = True,
    again: bool = False,
) -> keras.Layer:
    """The session's layer of a name, built; the first job that asks for it makes it.

    Args:
        name: the name of the layer, in the namespaces of the job.
        make: makes it.
        asked: what it is asked to be.
        shape: the shape of its input.
        layouts: the layouts of its variables; none: broadcast.
        regularizers: name of a variable -> its regularizer in this job.
        trainable: whether this job trains it; None: it does.
        again: whether the job may ask for it twice.

    Raises:
        FlowError: the job has one of that name, or another job has asked for something else.
    """
    trace = tracing.current("flow.layers")
    name = "-".join([*trace.namespaces, name]).replace("/", "_")
    asked = (*asked, *sorted((key, str(each)) for key, each in (layouts or {}).items()))
    if layouts:
        trace.require(kind="model")
    is_again = name in trace.names
    if is_again and not again:
        raise FlowError(f"job {trace.job!r} has two layers named {name!r}; give each a name= of its own")
    trace.names.add(name)
    if name not in _layers:
        layer = make(name)
        if layouts:
            shard(layer, **layouts)
        layer.build(shape)
        _layers[name] = (layer, asked)
        _fill(layer.variables)
    layer, before = _layers[name]
    if before != asked:
        raise FlowError(f"layer {name!r} is {before} in another job, and {asked} in {trace.job!r}; name it otherwise")
    if not is_again:
        trace.modes.append((layer, regularizers or {}, trainable is not False))
    return layer


def get_variable(
    name: str,
    shape: Sequence[int],
    dtype: str | None = None,
    initializer: keras.initializers.Initializer | None = None,
    regularizer: keras.regularizers.Regularizer | None = None,
    trainable: bool | None = None,
    model_name: str | None = None,
    random_seed: int | None = None,
    parallel_distribution: str | Sequence[str] | None = None,
    distribute: Distribute | None = None,
    reuse: bool = True,
) -> VariableBlob:
    """A variable by its name, made by the first job that asks for it.

    Args:
        name: the name of the variable.
        shape: logical.
        dtype: None: that of `config.default_data_type`.
        initializer: None: zeros.
        regularizer: None: none.
        trainable: whether this job updates it; None: it does.
        model_name: not needed.
        random_seed: of its initial values.
        parallel_distribution: its layout on a grid of devices: `["S(0)", "B"]`.
        distribute: its layout over the devices.
        reuse: whether the job may ask for it twice.
    """
    grid = [parallel_distribution] if isinstance(parallel_distribution, str) else parallel_distribution
    parts = list(sbp.parse(",".join(grid))) if grid else []
    if distribute is not None and distribute.axis is not None:
        parts = [sbp.split(distribute.axis)]
    kind = dtype or tracing.current("flow.get_variable").dtype
    layouts: dict[str, sbp.SbpSpec] = {"value": parts} if any(part != sbp.broadcast for part in parts) else {}

    def make(name: str) -> Holder:
        return Holder(name, kind, shape=tuple(shape), initializer=of_variable(initializer, shape, random_seed))

    regularizers = {"value": regularizer}
    asked = ("variable", tuple(shape))
    return VariableBlob(layer_named(name, make, asked, None, layouts, regularizers, trainable, again=reuse))


# ---- values


class Variables(keras.Model):
    """All variables of a session, as a model that has values and checkpoints."""

    def __init__(self) -> None:
        super().__init__(name="variables")
        self.held = [layer for layer, _ in _layers.values()]
        self.built = True


def get_all_variables() -> dict[str, np.ndarray]:
    """The values of all variables by name, `dense1/kernel`; all processes call it."""
    held = Variables()
    return {variable.path: value for variable, value in zip(held.weights, held.get_weights(), strict=True)}


def load_variables(value_dict: Mapping[str, Any], ignore_mismatch: bool = True) -> None:
    """Give variables values by name; those that no job has made yet get them when they are made.

    Args:
        value_dict: name -> value.
        ignore_mismatch: whether names without a variable wait for one.

    Raises:
        FlowError: a value has another shape than its variable, or its name is of none.
    """
    held = Variables().variables
    if not ignore_mismatch and (unknown := sorted(set(value_dict) - {each.path for each in held})):
        raise FlowError(f"flow.load_variables: no variables {unknown}; there are {[each.path for each in held]}")
    given = {name: np.asarray(value) for name, value in value_dict.items()}
    for variable in held:  # before any is kept: one that is refused is not there for the next call
        if variable.path in given:
            _check_shape(variable, given[variable.path])
    _loaded.update(given)
    _fill(held)


def _fill(variables: Sequence[keras.Variable]) -> None:
    for variable in variables:
        value = _loaded.get(variable.path)
        if value is None:
            continue
        _check_shape(variable, value)
        variable.assign(value)
        if not tracing.is_inside():  # a trace may begin again
            del _loaded[variable.path]


def _check_shape(variable: keras.Variable, value: np.ndarray) -> None:
    if value.shape != tuple(variable.shape):
        raise FlowError(
            f"variable {variable.path!r} has the shape {tuple(variable.shape)}, its loaded value {value.shape}; "
            "kernels have the order of dims of Keras: [features, units]"
        )


def _save(path: str | os.PathLike[str]) -> None:
    if not _layers:
        raise FlowError("flow.checkpoint.save: there are no variables yet; call a job first")
    checkpoints.save(path, Variables(), step=0).wait()


def _get(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    return {name: checkpoints.read_tensor(path, name) for name in sorted(checkpoints.inspect(path).tensors)}


class CheckPoint:
    """`flow.train.CheckPoint`, as programs of OneFlow before 0.3 began and saved."""

    def init(self) -> None:
        """Start the ranks; variables get initial values as they are made."""
        session.start()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Variables get the saved values as they are made, others initial ones."""
        session.start()
        load_variables(_get(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save all variables."""
        _save(path)


checkpoint = Names("checkpoint", save=_save, get=_get)
train = Names("train", CheckPoint=CheckPoint)


def held() -> dict[str, tuple[keras.Layer, tuple[object, ...]]]:
    """The layers that there are."""
    return dict(_layers)


def keep(layers: Mapping[str, tuple[keras.Layer, tuple[object, ...]]]) -> None:
    """Have these layers alone: those of a trace that begins again are made anew."""
    _layers.clear()
    _layers.update(layers)


def made() -> None:
    """Forget the loaded values of variables that a whole trace has made."""
    for variable in Variables().variables:
        _loaded.pop(variable.path, None)


def forget() -> None:
    """Forget all variables."""
    _layers.clear()
    _loaded.clear()
