"""`kf.ops`: the operators of `keras.ops` on global tensors, with Keras's names and arguments.

Every operator of `keras.ops` that takes tensors is here: this module makes them when they are first asked for. Those
for which `keras_flow.signatures` has rows run on shards; for others the inputs are brought to broadcast first.
Operators along a split dim that amount to a few sums (softmax, normalisations, cross-entropy, means) are decomposed
where that receives fewer bytes.

>>> import keras_flow as kf
>>> x = kf.tensor([[1.0, 2.0], [3.0, 4.0]], placement=kf.Placement([0, 1]), sbp="S(0)")
>>> kf.ops.sum(x, axis=0)
GlobalTensor(shape=(2,), dtype=float32, sbp=(P), Placement([0, 1], axis_names=('axis0',)))
  rank 0: [1. 2.]
  rank 1: [3. 4.]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_flow.tensors import dispatch
from keras_flow.tensors.global_tensor import GlobalTensor
from keras_flow.tensors.keras_operators import arguments_by_name, function_of

#: operators that compute nothing
_KNOWN: dict[str, Callable[[GlobalTensor], object]] = {
    "shape": lambda x: x.shape,
    "ndim": lambda x: x.ndim,
    "size": lambda x: x.size,
    "dtype": lambda x: x.dtype,
    "is_tensor": lambda _: True,
    "convert_to_numpy": GlobalTensor.numpy,
}


class Operator:
    """One operator. Call it with global tensors, or give it to `kf.explain`."""

    def __init__(self, name: str, function: Callable[..., object]):
        """An operator of `keras.ops`.

        Args:
            name: its name there.
            function: computes it on arrays of the engine, and describes the result of `KerasTensor`s.
        """
        self.name = self.__name__ = name
        self.__doc__ = function.__doc__
        self._function = function

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The result for these arguments, which are those of the operator of `keras.ops`."""
        arguments = arguments_by_name(self._function, args, kwargs)
        first = next(iter(arguments.values()), None)
        if self.name in _KNOWN and isinstance(first, GlobalTensor):
            return _KNOWN[self.name](first)
        if self.name == "einsum":  # keras.ops accepts spaces where it computes and refuses them where it describes
            arguments["subscripts"] = str(arguments["subscripts"]).replace(" ", "")
        if self.name == "squeeze" and arguments.get("axis") is None:
            # which dims to squeeze is a question to the logical shape: on a rank a split dim may have length 1 too
            dims = tuple(dim for dim, length in enumerate(arguments["x"].shape) if length == 1)
            arguments["axis"] = dims or None
        return dispatch.cheapest(self.name, self._function, arguments)

    def without_decomposition(self, *args: object, **kwargs: object) -> Any:
        """Call the operator itself, for decompositions that cover only some of its arguments."""
        return dispatch.run(self.name, self._function, arguments_by_name(self._function, args, kwargs))

    def __repr__(self) -> str:
        return f"kf.ops.{self.name}"


def __getattr__(name: str) -> Operator:
    if name.startswith("_"):
        raise AttributeError(name)
    function = function_of(name)
    if function is None:
        raise AttributeError(f"keras.ops has no operator {name!r}, and so has kf.ops")
    operator = Operator(name, function)
    globals()[name] = operator
    return operator


def __dir__() -> list[str]:
    return [name for name in dir(keras.ops) if not name.startswith("_")]
