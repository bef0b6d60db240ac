"""Products of layers: their letters, and that they fit together as the signatures of `einsum` do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keras_flow.sbp import Split, broadcast, partial_sum
from keras_flow.signatures.layers import Product, product_of
from keras_flow.signatures.products import contraction


def layer(name: str, *bases: str, **attributes: Any) -> Any:
    """A layer of a class of this name, as far as products look at one."""
    cls = object
    for base in reversed(bases):
        cls = type(base, (cls,), {})
    made = type(name, (cls,), {})()
    made.__dict__.update(attributes)
    return made


def einsum(equation: str, *bias: int) -> Any:
    return layer("EinsumDense", equation=equation, bias=SimpleNamespace(shape=bias) if bias else None)


def conv(name: str, *bases: str, groups: int = 1, data_format: str = "channels_last") -> Any:
    return layer(name, *bases, groups=groups, data_format=data_format)


PRODUCTS = {
    "dense": (layer("Dense"), 3, Product("abc", "cd", "abd", "d")),
    "a subclass": (layer("Mine", "Dense"), 2, Product("ac", "cd", "ad", "d")),
    "to heads": (einsum("abc,cde->abde", 2, 4), 3, Product("abc", "cde", "abde", "de")),
    "the same along heads": (einsum("abc,cde->abde", 1, 4), 3, Product("abc", "cde", "abde", "1e")),
    "dims left out": (einsum("...x,xy->...y", 8), 3, Product("ABx", "xy", "ABy", "y")),
    "convolution": (conv("Conv2D", "BaseConv"), 4, Product("nabc", "xycd", "nABd", "d")),
    "channels first": (conv("Conv1D", "BaseConv", data_format="channels_first"), 3, Product("nca", "xcd", "ndA", "d")),
    "transposed": (conv("Conv1DTranspose", "BaseConvTranspose"), 3, Product("nac", "xdc", "nAd", "d")),
    "groups": (conv("Conv1D", "BaseConv", groups=2), 3, None),
    "a table": (layer("Embedding"), 2, Product("ab", "vd", "abd")),
    "another": (layer("LSTM"), 3, None),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_letters(name: str) -> None:
    made, ndim, wanted = PRODUCTS[name]
    assert product_of(made, ndim) == wanted


@pytest.mark.parametrize("name", ["dense", "to heads", "dims left out"])
def test_einsums_fit_together_as_their_signatures_say(name: str) -> None:
    product = PRODUCTS[name][2]
    assert product is not None
    letters = [product.input, product.weight]
    table = {
        signature.inputs: signature.outputs[0]
        for signature in contraction(letters, product.output, [(4,) * len(each) for each in letters])
    }

    def part(dim: int | None) -> object:
        return broadcast if dim is None else Split(dim)

    for x in (None, *range(len(product.input))):
        for w in (None, *range(len(product.weight))):
            wanted = broadcast if x is None and w is None else table.get((part(x), part(w)))  # type: ignore[call-overload]
            assert product.output_of(x, w) == wanted, (x, w)


def test_what_is_no_einsum() -> None:
    of_conv, table = PRODUCTS["channels first"][2], PRODUCTS["a table"][2]
    assert of_conv is not None and table is not None
    assert of_conv.output_of(2, None) is None, "a position is no sum"
    assert of_conv.output_of(1, 1) == partial_sum
    assert of_conv.bias_dim(1) == 0 and of_conv.bias_dim(2) is None
    assert table.output_of(None, 0) == partial_sum, "each rank has its rows of the table, and zeros"
    assert table.output_of(1, None) == Split(1)
