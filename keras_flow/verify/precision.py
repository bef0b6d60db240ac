"""A copy of a model in another precision, for `verify(..., dtype="float64")`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_flow.backends.active import backend
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    from keras_flow.distributions.distribution import FlowDistribution

DTYPES = ("float32", "float64")


@contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    """Inside, Keras computes in `dtype` by default, and the engine does not reduce its precision.

    Raises:
        FlowError: models cannot be verified in this dtype.
    """
    if dtype not in DTYPES:
        raise FlowError(f"verify: dtype={dtype!r} is none of {list(DTYPES)}; None verifies the model as it is")
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        with backend().double_precision():
            yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def copy_in(model: keras.Model, distribution: FlowDistribution, dtype: str) -> keras.Model:
    """Copy a compiled model, with its weights and seeds; all layers of the copy compute in `dtype`.

    Raises:
        FlowError: the model cannot be built again from its configuration.
    """
    values = [np.array(keras.ops.convert_to_numpy(variable)) for variable in model.variables]
    # layers of the user's own need no registration to be copied
    layers = {type(layer).__name__: type(layer) for layer in model._flatten_layers()}
    try:
        config = _with_dtype(keras.saving.serialize_keras_object(model), dtype)
        with distribution.scope():
            copy: Any = keras.saving.deserialize_keras_object(config, custom_objects=layers, safe_mode=False)
            if not copy.built:
                copy.build_from_config(model.get_build_config())
        variables = copy.variables
        assert [tuple(v.shape) for v in variables] == [v.shape for v in values], "other variables"
    except Exception as error:
        raise FlowError(
            f"verify: model {model.name!r} cannot be made anew in {dtype} from its configuration "
            f"({type(error).__name__}: {error}). Give its layers a get_config(), or verify it as it is, without dtype"
        ) from error
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    if not copy.compiled:
        copy.compile_from_config(model.get_compile_config())
    return copy


def _with_dtype(config: Any, dtype: str) -> Any:
    """The configuration of an object with every floating-point dtype replaced."""
    if isinstance(config, dict):
        return {
            key: dtype if key in ("dtype", "name") and _is_float(value, key, config) else _with_dtype(value, dtype)
            for key, value in config.items()
        }
    return [_with_dtype(part, dtype) for part in config] if isinstance(config, list) else config


def _is_float(value: object, key: str, owner: dict[str, Any]) -> bool:
    """Whether a value is the dtype of a layer or input, or the name of a dtype policy."""
    names = ("float16", "bfloat16", "float32", "float64", "mixed_float16", "mixed_bfloat16")
    return value in names and (key == "dtype" or len(owner) == 1)
