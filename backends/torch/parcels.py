"""Pickled layers, losses and optimizers, which a chief of parameter servers sends to run elsewhere.

Keras pickles an object as a file with its config: a layer would be made anew, a function of the user's program would
not be found, and a whole table would be sent. Here the object's attributes are sent. What can be imported is sent by
name, what the program defines by value, and a variable on servers as the place where it is (`tables.ServedTensor`).
The calls of a model's graph, which lead back to the whole model, and its distribution are not sent.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from typing import Any

import cloudpickle
import keras
import numpy as np
import torch

from keras_flow.errors import FlowError

#: what Keras makes on each object as it is made, or what leads to all of a graph
_LEFT = {"build", "quantize", "_inbound_nodes", "_outbound_nodes"}
#: Keras's containers that tell their owner of changes -> plain ones
_TRACKED = {"TrackedList": list, "TrackedSet": set, "TrackedDict": dict}
_SETTINGS = ("floatx", "epsilon", "image_data_format")


def packed(value: object) -> np.ndarray:
    """Pickle a value, with the settings of Keras under which it was made.

    Raises:
        FlowError: something in it cannot be pickled.
    """
    stream = io.BytesIO()
    pickle.dump(sys.path, stream)  # before what is imported by it
    try:
        _ParcelPickler(stream).dump(({name: getattr(keras.config, name)() for name in _SETTINGS}, value))
    except Exception as error:  # whatever a __reduce__ raises
        raise FlowError(
            "kf.ParameterServer cannot send the layers, the loss or the optimizer to workers and servers: "
            f"{type(error).__name__}: {error}. Keep open files, locks, generators and connections out of them"
        ) from error
    return np.frombuffer(stream.getvalue(), np.uint8)


def unpacked(data: np.ndarray) -> Any:
    """Return the pickled object. A process of this job has sent it (`mail.calls.require_secret`)."""
    reads = io.BytesIO(data.tobytes())
    sys.path += [each for each in pickle.load(reads) if each not in sys.path]
    settings, value = pickle.load(reads)
    for name, each in settings.items():
        getattr(keras.config, f"set_{name}")(each)
    return value


class _ParcelPickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        kind = _TRACKED.get(type(obj).__name__)
        if kind is not None:
            return kind, (kind(obj),)
        if isinstance(obj, torch.nn.ParameterDict):  # in which Keras shows the weights of a layer to torch
            return torch.nn.ParameterDict, ()
        if isinstance(obj, keras.Variable):
            return copyreg.__newobj__, (type(obj),), {**vars(obj), "_layout": None, "_initializer": None}  # type: ignore[attr-defined]
        if isinstance(obj, keras.KerasTensor):
            return super().reducer_override(obj)
        if isinstance(obj, keras.Operation | keras.Loss | keras.Metric | keras.Optimizer):
            left = {name: [] for name in ("_inbound_nodes", "_outbound_nodes") if name in vars(obj)}
            state = {name: each for name, each in vars(obj).items() if name not in _LEFT}
            return copyreg.__newobj__, (type(obj),), {**state, **left}  # type: ignore[attr-defined]
        return super().reducer_override(obj)
