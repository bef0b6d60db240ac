"""numpy, the reference: all ranks in this process, as arrays; gradients by central differences. It trains nothing.

This module is the engine: it has the names of `keras_flow.backends.tensor_engine.TensorEngine`.
"""

from typing import TYPE_CHECKING

from keras_flow.backends.numpy.boxing import redistribute as redistribute
from keras_flow.backends.numpy.collectives import direct as direct
from keras_flow.backends.numpy.collectives import exchange as exchange
from keras_flow.backends.numpy.collectives import fold as fold
from keras_flow.backends.numpy.collectives import gather_all as gather_all
from keras_flow.backends.numpy.collectives import is_recorded as is_recorded
from keras_flow.backends.numpy.collectives import join as join
from keras_flow.backends.numpy.collectives import key_of as key_of
from keras_flow.backends.numpy.collectives import native as native
from keras_flow.backends.numpy.collectives import reshape as reshape
from keras_flow.backends.numpy.collectives import shape as shape
from keras_flow.backends.numpy.collectives import with_gradient as with_gradient
from keras_flow.backends.numpy.collectives import without_gradient as without_gradient
from keras_flow.backends.numpy.devices import init as init
from keras_flow.backends.numpy.devices import simulate as simulate
from keras_flow.backends.numpy.devices import world as world
from keras_flow.backends.numpy.tensors import agree_on as agree_on
from keras_flow.backends.numpy.tensors import as_numpy as as_numpy
from keras_flow.backends.numpy.tensors import from_engine as from_engine
from keras_flow.backends.numpy.tensors import on_rank as on_rank
from keras_flow.backends.numpy.tensors import put as put
from keras_flow.backends.numpy.tensors import to_engine as to_engine
from keras_flow.backends.numpy.tensors import vjp as vjp

if TYPE_CHECKING:
    from keras_flow.backends import numpy
    from keras_flow.backends.tensor_engine import TensorEngine

    _: TensorEngine = numpy  # a type checker compares the module with the interface

name = "numpy"
