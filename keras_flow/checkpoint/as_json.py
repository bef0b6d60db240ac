"""Values as JSON that it has no form for: bytes, tuples, arrays, tensors of torch, dicts with keys that are no text.

>>> encoded((3, b"ab"))
{'@kind': 'tuple', 'items': [3, {'@kind': 'bytes', 'hex': '6162'}]}
>>> decoded(encoded({"rng": (3, np.arange(2))}))
{'rng': (3, array([0, 1]))}
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_flow.errors import FlowError

#: the key under which the kind of a value stands
_KIND = "@kind"
#: what JSON has a form for
PLAIN = (bool, int, float, str, type(None))


def encoded(value: Any) -> Any:
    """Return a value in the form that `json.dumps` takes.

    Raises:
        FlowError: a value of another type is in it. Nothing is pickled.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, bytes):
        return {_KIND: "bytes", "hex": value.hex()}
    if isinstance(value, list):
        return [encoded(each) for each in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", "items": [encoded(each) for each in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != _KIND for key in value):
            return {key: encoded(each) for key, each in value.items()}
        return {_KIND: "dict", "items": [[encoded(key), encoded(each)] for key, each in value.items()]}
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    array = value.detach().cpu().numpy() if is_tensor else value
    if isinstance(array, np.ndarray) and array.dtype.kind in "biuf":
        said = {"dtype": array.dtype.str, "shape": list(array.shape), "hex": array.tobytes().hex()}
        return {_KIND: "tensor" if is_tensor else "array", **said}
    raise FlowError(
        f"a state that is saved has a {type(value).__name__}: it may have numbers, texts, bytes, arrays, and lists, "
        "tuples and dicts of these"
    )


def decoded(value: Any) -> Any:
    """Return the value from which `encoded` made this."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decoded(each) for key, each in value.items()}
    if kind == "bytes":
        return bytes.fromhex(value["hex"])
    if kind == "tuple":
        return tuple(decoded(each) for each in value["items"])
    if kind == "dict":
        return {decoded(key): decoded(each) for key, each in value["items"]}
    array = np.frombuffer(bytearray.fromhex(value["hex"]), value["dtype"]).reshape(value["shape"])
    return sys.modules["torch"].from_numpy(array) if kind == "tensor" else array
