"""The products of Keras's layers: Dense, EinsumDense, convolutions and Embedding, each an einsum of input and weight.

The one statement of what belongs together in a layer: torch computes layers with split weights by it, and `explain`
says by it what they send. The layers are known by the names of their classes, so that Keras is not imported.

>>> Product("bc", "cd", "bd", "d").output_of(None, 1)  # columns of the weight
S(1)
>>> Product("bc", "cd", "bd", "d").output_of(1, 0)     # rows of the weight meet columns of the input
P
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_flow.sbp import Sbp, Split, broadcast, partial_sum


@dataclass(frozen=True)
class Product:
    """An einsum, and a bias that is added to it: a letter for each dim.

    A letter of the weight that neither input nor output has, the rows of an embedding table, is indexed by the input.
    A letter of the input alone, or of the output alone, is a position that stays whole.

    Attributes:
        input: letters of the input.
        weight: letters of the weight.
        output: letters of the output.
        bias: letters of the bias, some of the output's; empty without a bias.
    """

    input: str
    weight: str
    output: str
    bias: str = ""

    def output_of(self, input_dim: int | None, weight_dim: int | None) -> Sbp | None:
        """The layout of the output on one axis that splits these dims (None: it splits none).

        None where input and weight do not fit together: one of them is gathered first, or cut.
        """
        x = None if input_dim is None else self.input[input_dim]
        w = None if weight_dim is None else self.weight[weight_dim]
        if x is None and w is None:
            return broadcast
        letter = str(w if x is None else x)
        others = [labels for labels, split in ((self.input, x), (self.weight, w)) if split is None]
        # a letter is split in all that have it
        if (x and w and x != w) or any(letter in labels for labels in others):
            return None
        if letter in self.output:
            return Split(self.output.index(letter))
        # a position of the input alone is no letter that is summed over
        return partial_sum if w is not None else None

    def bias_dim(self, output_dim: int) -> int | None:
        """The dim of the bias that is added along a dim of the output; None where the bias is the same along it."""
        place = self.bias.find(self.output[output_dim])
        return None if place < 0 else place


def product_of(layer: Any, ndim: int, reverse: bool = False) -> Product | None:
    """The product of a layer of Keras, or of a class that derives from one.

    Args:
        layer: the layer, built.
        ndim: dims of its input.
        reverse: as of the call of a `ReversibleEmbedding`, which takes vectors then and gives a number for each id.

    Returns:
        None for other layers, and where the letters say too little: convolutions of groups.
    """
    if reverse:
        rows = _ROWS[: ndim - 1]
        return Product(f"{rows}d", "vd" if getattr(layer, "tie_weights", True) else "dv", f"{rows}v")
    for cls in type(layer).__mro__:
        if cls.__name__ in _PRODUCTS:
            return _PRODUCTS[cls.__name__](layer, ndim)
    return None


#: names of dims that are not features; upper case is left for dims that an equation of the user's leaves out
_ROWS = "abefghij"
_LEFT_OUT = "ABCDEFGH"


def _dense(layer: Any, ndim: int) -> Product:
    rows = _ROWS[: ndim - 1]
    return Product(f"{rows}c", "cd", f"{rows}d", "d")


def _einsum_dense(layer: Any, ndim: int) -> Product | None:
    left, output = layer.equation.split("->")
    x, weight = left.split(",")
    dots = _LEFT_OUT[: ndim - len(x.replace("...", ""))]
    x, output = x.replace("...", dots), output.replace("...", dots)
    # the bias has the last dims, and length 1 where it is the same along one ("1" is no letter)
    lengths = () if getattr(layer, "bias", None) is None else tuple(layer.bias.shape)
    last = output[len(output) - len(lengths) :]
    bias = "".join("1" if length == 1 else letter for letter, length in zip(last, lengths, strict=True))
    return Product(x, weight, output, bias) if len(x) == ndim else None


def _convolution(layer: Any, ndim: int) -> Product | None:
    if getattr(layer, "groups", 1) != 1:
        return None
    # a position of the output depends on several of the input: another letter
    before, after, of_kernel = "abefg"[: ndim - 2], "ABEFG"[: ndim - 2], "xyz"[: ndim - 2]
    weight = of_kernel + ("dc" if "Transpose" in type(layer).__name__ else "cd")
    if layer.data_format == "channels_first":
        return Product(f"nc{before}", weight, f"nd{after}", "d")
    return Product(f"n{before}c", weight, f"n{after}d", "d")


def _embedding(layer: Any, ndim: int) -> Product:
    rows = _ROWS[:ndim]
    return Product(rows, "vd", f"{rows}d")


_PRODUCTS: dict[str, Callable[[Any, int], Product | None]] = {
    "Dense": _dense,
    "EinsumDense": _einsum_dense,
    "BaseConv": _convolution,
    "BaseConvTranspose": _convolution,
    "Embedding": _embedding,
}
