"""Do rows interact? Answered from a layer's structure, without an engine that trains."""

from __future__ import annotations

from collections.abc import Callable

import keras
import pytest

from keras_flow.backends import row_interaction

pytestmark = pytest.mark.usefixtures("four_ranks")
layers = keras.layers
ROW_BY_ROW: dict[str, Callable[[], keras.Layer]] = {
    "flip": lambda: layers.RandomFlip(),
    "crop": lambda: layers.RandomCrop(4, 4),
    "alpha dropout": lambda: layers.AlphaDropout(0.5),
    "classes": lambda: layers.CategoryEncoding(4, output_mode="one_hot"),
}
KIND: dict[str, tuple[Callable[[], keras.Layer], str]] = {
    "one mask that looks like a row": (lambda: layers.AlphaDropout(0.5, noise_shape=(1, 8)), "unknown"),
    "two draws that look like rows": (lambda: layers.RandomGaussianBlur(), "unknown"),
    "the user's": (lambda: layers.Lambda(lambda x: x), "own code"),
    "normalization over rows": (lambda: layers.LayerNormalization(axis=0), "along rows"),
}


def called(layer: keras.Layer, *shape: int) -> keras.Layer:
    """The layer, called on a batch of rows of this shape."""
    layer(keras.Input(shape))
    return layer


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_row_by_row(name: str) -> None:
    assert row_interaction.of_layer(called(ROW_BY_ROW[name](), 8, 8, 3)) is None


@pytest.mark.parametrize("name", KIND)
def test_rows_that_may_interact(name: str) -> None:
    make, kind = KIND[name]
    interaction = row_interaction.of_layer(make())
    assert interaction is not None and interaction.kind == kind


def test_a_vector_of_classes_is_one_sample() -> None:
    """Keras counts the classes of all rows where the rows have no dim of their own."""
    counts = called(layers.CategoryEncoding(4, output_mode="count"), 3)
    assert row_interaction.of_layer(counts) is None
    of_all = called(layers.CategoryEncoding(4, output_mode="count"))
    interaction = row_interaction.of_layer(of_all)
    assert interaction is not None and "vector for one sample" in interaction.text
