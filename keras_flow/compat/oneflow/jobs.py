"""`flow.global_function`: a Python function that is traced into a Keras model, and called with NumPy."""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np
from keras import tree

from keras_flow.backends import random_states
from keras_flow.compat.oneflow import session, tracing, variables
from keras_flow.compat.oneflow import typing as tp
from keras_flow.compat.oneflow.blobs import Blob, Reduced
from keras_flow.compat.oneflow.job_model import JobModel
from keras_flow.compat.oneflow.missing import Names
from keras_flow.compat.oneflow.optimizer import TrainConfig
from keras_flow.compat.oneflow.scope import PlacementScope
from keras_flow.compat.oneflow.tracing import Need, TraceAgain, TracedJob
from keras_flow.errors import FlowError

#: the argument of a job without arguments
_ROW = "hidden_row"
#: distributions that a job may ask for, one after the other
_MOST_TRACES = 4


class FunctionConfig(Names):
    """How a job is compiled; `flow.function_config()` makes it.

    Example:
        >>> import keras_flow.compat.oneflow as flow
        >>> config = flow.function_config()
        >>> config.default_logical_view(flow.scope.mirrored_view())
        >>> config.view
        'mirrored'
    """

    def __init__(self) -> None:
        super().__init__("function_config")
        self.view = "consistent"
        self.dtype = "float32"
        self.placement: PlacementScope | None = None
        self.train = TrainConfig()

    def default_logical_view(self, value: str) -> None:
        """Set the view: `flow.scope.consistent_view()`, which is the default, or `flow.scope.mirrored_view()`."""
        if value not in ("consistent", "mirrored"):
            raise FlowError(
                f"default_logical_view takes flow.scope.consistent_view() or mirrored_view(), got {value!r}"
            )
        self.view = value

    def default_data_type(self, value: str) -> None:
        """Set the dtype of variables."""
        self.dtype = value

    def default_placement_scope(self, value: PlacementScope) -> None:
        """Set the devices of the job: `flow.scope.placement("gpu", "0:0-1")`."""
        self.placement = value


def global_function(
    type: Literal["train", "predict"] | FunctionConfig = "predict", function_config: FunctionConfig | None = None
) -> Callable[[Callable[..., Any]], GlobalFunction]:
    """Make a job of a function: its arguments are placeholders by their annotations, its result says what it returns.

    Args:
        type: `"train"` for a job that minimizes a loss, or `"predict"`.
        function_config: view, dtype and placement.

    Raises:
        FlowError: another type, or a function without annotations.

    Example:
        >>> import keras_flow.compat.oneflow as flow, keras_flow.compat.oneflow.typing as tp, numpy as np
        >>> @flow.global_function()
        ... def double(x: tp.Numpy.Placeholder((3, 2))) -> tp.Numpy:
        ...     return x * 2.0
        >>> double(np.ones((3, 2), "float32")).tolist()
        [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    """
    if isinstance(type, FunctionConfig):  # `@flow.global_function(config)`, before 0.2
        type, function_config = "predict", type
    if type not in ("train", "predict"):
        raise FlowError(f'flow.global_function: type is "train" or "predict", got {type!r}')
    config = function_config or FunctionConfig()
    kind = "train" if config.train.rate is not None else type
    return lambda function: GlobalFunction(function, kind, config)


class GlobalFunction:
    """A job function, which is called with NumPy."""

    def __init__(self, function: Callable[..., Any], type: str, config: FunctionConfig) -> None:
        functools.update_wrapper(self, function)
        self._function, self._type, self._config = function, type, config
        self.name = function.__name__
        try:
            self._signature = inspect.signature(function, eval_str=True)
        except NameError as error:  # texts, by `from __future__ import annotations`, of names in a function
            raise FlowError(
                f"job {self.name!r}: its annotations cannot be read ({error}); write them as values"
            ) from error
        # a job without arguments has one row on each device of the mirrored view, or one, of which nothing is computed
        hidden = tp.Placeholder((1, 1), "float32", config.view == "mirrored")
        self.placeholders = {name: self._placeholder(name) for name in self._signature.parameters} or {_ROW: hidden}
        self._returns = self._return_annotation()
        #: rows of a batch -> the model, its results' structure, and what is called with which values
        self._models: dict[int, tuple[JobModel, list[Blob], Any, list[Callable[[Any], object]]]] = {}
        self._need = Need()
        self._session = session.number()

    def _placeholder(self, name: str) -> tp.Placeholder:
        found = self._signature.parameters[name].annotation
        example = f"{name}: tp.Numpy.Placeholder((100, 10), dtype=flow.float)"
        if not isinstance(found, tp.Placeholder):
            raise FlowError(f"job {self.name!r}: argument {name!r} has no placeholder as its annotation; {example}")
        if found.mirrored != (self._config.view == "mirrored"):
            kind = "tp.ListNumpy" if self._config.view == "mirrored" else "tp.Numpy"
            raise FlowError(f"job {self.name!r}: in the {self._config.view} view argument {name!r} is a {kind}")
        return found

    def _return_annotation(self) -> Any:
        found = self._signature.return_annotation
        if found is inspect.Signature.empty:
            raise FlowError(f"job {self.name!r} does not say what it returns: write -> tp.Numpy, or -> None")
        inner = typing.get_args(found)[0] if typing.get_origin(found) is tp.Callback else found
        kind = tp.ListNumpy if self._config.view == "mirrored" else tp.Numpy
        leaves = [inner] if typing.get_origin(inner) is None else typing.get_args(inner)
        if wrong := [each for each in leaves if each in (tp.Numpy, tp.ListNumpy) and each is not kind]:
            raise FlowError(
                f"job {self.name!r}: in the {self._config.view} view it returns tp.{kind.__name__}, not "
                f"tp.{wrong[0].__name__}"
            )
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the job.

        Returns:
            What the function returns, as arrays; in the mirrored view lists of them; for `tp.Callback` what is to be
            called with a handler.

        Raises:
            FlowError: an array does not fit its placeholder.
        """
        devices = session.start().size
        given = self._signature.bind(*args, **kwargs).arguments or {_ROW: np.zeros((1, 1))}
        if _ROW in given and self._config.view == "mirrored":
            given = {_ROW: [given[_ROW]] * devices}
        lists = {name: each.arrays(name, given[name], devices) for name, each in self.placeholders.items()}
        counts = {name: [len(part) for part in parts] for name, parts in lists.items()}
        first, rows = next(iter(counts.items()))
        for name, other in counts.items():
            if other != rows:
                raise FlowError(f"job {self.name!r}: argument {first!r} has {rows} rows, {name!r} has {other}")
        arrays = {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in lists.items()}
        if self._session != session.number():  # its models have the variables of a session that is forgotten
            self._models.clear()
            self._need, self._session = Need(), session.number()
        if sum(rows) not in self._models:
            self._models[sum(rows)] = self._traced(sum(rows))
        model, outputs, structure, handlers = self._models[sum(rows)]
        values = [self._shown(*pair, rows) for pair in zip(outputs, model(arrays), strict=True)]
        returned = len(values) - len(handlers)
        for handler, value in zip(handlers, values[returned:], strict=True):
            handler(value)
        result = None if structure is None else tree.pack_sequence_as(structure, values[:returned])
        if typing.get_origin(self._returns) is tp.Callback:
            return lambda handler: handler(result)
        return result

    def _shown(self, blob: Blob, value: np.ndarray, rows: Sequence[int]) -> Any:
        """A value as the job returns it."""
        parts = np.split(value, np.cumsum(rows)[:-1]) if self._config.view == "mirrored" else [value]
        if isinstance(blob, Reduced):
            parts = [blob.of(part) for part in parts]
        elif blob.rows is None:  # it stands in each row
            parts = [part[0] for part in parts]
        return parts if self._config.view == "mirrored" else parts[0]

    def _traced(self, rows: int) -> tuple[JobModel, list[Blob], Any, list[Callable[[Any], object]]]:
        """Call the function, under the distribution that it turns out to need."""
        before, states = variables.held(), random_states.states()
        for _ in range(_MOST_TRACES):
            try:
                made = self._trace(rows)
                variables.made()
                return made
            except BaseException as error:
                variables.keep(before)
                if not isinstance(error, TraceAgain):
                    raise
                # initial values are those of a job that is traced once
                random_states.set_states(states)
                self._need = error.need
        raise FlowError(f"job {self.name!r} asks for other placements each time that it is traced")

    def _trace(self, rows: int) -> tuple[JobModel, list[Blob], Any, list[Callable[[Any], object]]]:
        config, need = self._config, self._need
        trace = TracedJob(
            self.name,
            self._type == "train",
            config.view == "mirrored",
            need,
            config.dtype,
            config.train.optimizer,
        )
        distribution = need.distribution()
        with distribution.scope(), tracing.tracing(trace):
            inputs = {
                name: keras.Input(each.shape[1:], dtype=each.dtype, name=name)
                for name, each in self.placeholders.items()
            }
            trace.input = next(iter(inputs.values()))
            given = {name: Blob(inputs[name], self.placeholders[name].shape[0]) for name in self._signature.parameters}
            with config.placement or contextlib.nullcontext():
                result = self._function(**given)
            if need.kind == "stages" and len(set(trace.placed)) == 1:
                raise TraceAgain(Need(ranks=trace.placed[0]))
            if trace.is_training and trace.minimized is None:
                raise FlowError(
                    f"job {self.name!r} is a train job and minimizes no loss: call "
                    "flow.optimizer.SGD(schedule).minimize(loss) in it"
                )
            returned = [] if result is None else tree.flatten(result)
            if wrong := [each for each in returned if not isinstance(each, Blob)]:
                raise FlowError(f"job {self.name!r} returns {wrong[0]!r}, which is no value of the job")
            if (result is None) != (self._returns is None):
                raise FlowError(f"job {self.name!r} returns {result!r}, its annotation says {self._returns}")
            outputs = [*returned, *(blob for blob, _ in trace.watched)]
            known = next(iter(self._models.values()), None)
            model = JobModel(trace, inputs, outputs, distribution, rows, known[0].optimizer if known else None)
        return model, outputs, result, [handler for _, handler in trace.watched]
