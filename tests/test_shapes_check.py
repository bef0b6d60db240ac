"""Whether a model and its loss take the rows of `load_data` is known by shapes, and right rows are not refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(280)


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


def cases() -> Iterator[tuple[Any, tuple[Any, ...], str | None]]:
    """Model, data, and a part of the error; None: the rows are right."""
    import keras

    layers, entropy = keras.layers, "sparse_categorical_crossentropy"

    def chain(*each: Any, rows: tuple[int | None, ...] = (16,), loss: str = "mse", **given: Any) -> Any:
        model = keras.Sequential([layers.Input(rows, **given), *each])
        model.compile("sgd", loss, metrics=["mae"])
        return model

    def two() -> Any:
        a, b = layers.Input((4,), name="a"), layers.Input((3,), name="b")
        both = layers.Concatenate()([a, b])
        model = keras.Model({"a": a, "b": b}, {"p": layers.Dense(2, name="p")(both), "q": layers.Dense(1, name="q")(a)})
        model.compile("sgd", {"p": "mse", "q": "mse"})
        return model

    image = (layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Dropout(0.5), layers.Flatten(), layers.Dense(1))
    right = {"p": zeros(8, 2), "q": zeros(8, 1)}
    yield chain(layers.Dense(2)), (zeros(8, 16), zeros(8, 2)), None
    yield chain(layers.Dense(1)), (zeros(1, 16), zeros(1)), None
    yield chain(layers.Dense(1, "sigmoid"), loss="binary_crossentropy"), (zeros(8, 16), zeros(8)), None
    yield chain(layers.Dense(5), loss=entropy), (zeros(8, 16), zeros(8, dtype="int64")), None
    yield chain(layers.Dense(1), batch_size=4), (zeros(8, 16), zeros(8, 1)), None
    yield chain(*image, rows=(8, 8, 3)), (zeros(6, 8, 8, 3, dtype="uint8"), zeros(6, dtype="float64")), None
    yield chain(layers.Embedding(9, 8), layers.LSTM(4), rows=(None,)), (zeros(8, 12, dtype="int32"), zeros(8, 4)), None
    yield two(), ({"a": zeros(8, 4), "b": zeros(8, 3)}, right), None
    yield chain(layers.Dense(2)), (zeros(8, 17), zeros(8, 2)), "x has the shape (8, 17). Input 0 of layer"
    yield chain(layers.Dense(2)), (zeros(8, 16), zeros(8, 2), zeros(4, 15), zeros(4, 2)), "x has the shape (4, 15)"
    yield chain(layers.Dense(2)), (zeros(8, 16), zeros(8, 3)), "y has the shape (8, 3), the model's output (8, 2). "
    yield chain(layers.Dense(5), loss=entropy), (zeros(8, 16), zeros(8, 5, dtype="int32")), "y has the shape (8, 5)"
    yield chain(*image, rows=(8, 8, 3)), (zeros(8, 192), zeros(8)), "Expected shape (None, 8, 8, 3)"
    yield two(), ({"a": zeros(8, 4)}, right), 'Missing data for input "b"'
    yield two(), (zeros(8, 4), right), "expects 2 named input(s)"
    yield two(), ({"a": zeros(8, 4), "b": zeros(8, 3)}, right | {"p": zeros(8, 3)}), "and (8, 1), the model's output (8"


def answers() -> list[tuple[str | None, str | None]]:
    """What is said, and what is expected."""
    import keras

    import keras_flow as kf
    from keras_flow import user_file
    from keras_flow.distributions.dry_run import dry_run

    said: list[tuple[str | None, str | None]] = []
    keras.utils.clear_session()
    with dry_run(1), kf.DataParallel(kf.Placement([0])).scope():
        for model, data, expected in cases():
            try:
                user_file.check_shapes(model, user_file.Data(*data))
                said.append((None, expected))
            except kf.FlowError as error:
                said.append((str(error), expected))
    return said


def test_rows_that_fit_and_rows_that_do_not(on_ranks: Callable[[str], Any]) -> None:
    said = on_ranks("jax")(answers)
    assert [text for text, expected in said if expected is None] == [None] * 8
    for text, expected in said[8:]:
        assert text is not None and expected in text and "\n" not in text, (text, expected)
