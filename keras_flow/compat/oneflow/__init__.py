"""OneFlow 0.x's names for Keras 3: `import keras_flow.compat.oneflow as flow`.

Job functions are traced into Keras models and run under kf.DataParallel, kf.ModelParallel or kf.PipelineParallel, with
the numbers of one device. What is not there raises an error that names the new way.

Example:
    >>> import numpy as np, keras_flow.compat.oneflow as flow, keras_flow.compat.oneflow.typing as tp
    >>> @flow.global_function()
    ... def job(x: tp.Numpy.Placeholder((2, 3))) -> tp.Numpy:
    ...     return flow.math.reduce_sum(flow.nn.relu(x), axis=1)
    >>> job(np.float32([[1, -2, 3], [-4, 5, 6]])).tolist()
    [4.0, 11.0]
"""

from typing import Any as _Any

from keras_flow.compat.oneflow import missing as _missing
from keras_flow.compat.oneflow import session as _session
from keras_flow.compat.oneflow import tracing as _tracing
from keras_flow.compat.oneflow import typing as typing
from keras_flow.compat.oneflow import variables as _variables
from keras_flow.compat.oneflow.initializers import INITIALIZERS as _INITIALIZERS
from keras_flow.compat.oneflow.initializers import regularizers as regularizers
from keras_flow.compat.oneflow.jobs import FunctionConfig as FunctionConfig
from keras_flow.compat.oneflow.jobs import global_function as global_function
from keras_flow.compat.oneflow.layers import layers as layers
from keras_flow.compat.oneflow.operations import cast as cast
from keras_flow.compat.oneflow.operations import concat as concat
from keras_flow.compat.oneflow.operations import flatten as flatten
from keras_flow.compat.oneflow.operations import identity as identity
from keras_flow.compat.oneflow.operations import math as math
from keras_flow.compat.oneflow.operations import matmul as matmul
from keras_flow.compat.oneflow.operations import nn as nn
from keras_flow.compat.oneflow.operations import pack as pack
from keras_flow.compat.oneflow.operations import reshape as reshape
from keras_flow.compat.oneflow.operations import transpose as transpose
from keras_flow.compat.oneflow.operations import unpack as unpack
from keras_flow.compat.oneflow.operations import watch as watch
from keras_flow.compat.oneflow.optimizer import losses as losses
from keras_flow.compat.oneflow.optimizer import optimizer as optimizer
from keras_flow.compat.oneflow.scope import scope as scope
from keras_flow.compat.oneflow.session import config as config
from keras_flow.compat.oneflow.session import env as env
from keras_flow.compat.oneflow.variables import checkpoint as checkpoint
from keras_flow.compat.oneflow.variables import distribute as distribute
from keras_flow.compat.oneflow.variables import get_all_variables as get_all_variables
from keras_flow.compat.oneflow.variables import get_variable as get_variable
from keras_flow.compat.oneflow.variables import load_variables as load_variables
from keras_flow.compat.oneflow.variables import train as train

function_config = FunctionConfig
float = float32 = "float32"
double = float64 = "float64"
float16, int8, uint8, int32, int64 = "float16", "int8", "uint8", "int32", "int64"


def clear_default_session() -> None:
    """Forget variables, distributions of jobs, and what was said of machines; ranks that have started stay."""
    _variables.forget()
    _tracing.forget()
    _session.forget()


def __getattr__(name: str) -> _Any:
    return _INITIALIZERS[name] if name in _INITIALIZERS else _missing.refuse("", name)
