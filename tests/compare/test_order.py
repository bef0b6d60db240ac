"""The order of samples: a function of seed and epoch only."""

from __future__ import annotations

import numpy as np
import pytest

from keras_flow import FlowError
from keras_flow.compare.order import Ordered
from keras_flow.user_file import length_of


def epoch(batches: Ordered, number: int = 0) -> list[int]:
    first = number * batches.per_epoch
    return [int(row) for index in range(batches.per_epoch) for row in batches[first + index][0]]  # type: ignore[union-attr]


def test_order() -> None:
    x = np.arange(23)
    one, two, other = Ordered(x, x * 2, 5, seed=1), Ordered(x, x * 2, 5, seed=1), Ordered(x, x * 2, 5, seed=2)
    first, second = epoch(one), epoch(one, 1)
    assert first == epoch(two) == epoch(one)
    assert first != epoch(other)
    assert sorted(first) == list(x), "each row once"
    assert second != first
    assert sorted(second) == list(x)
    assert epoch(two, 1) == second
    assert first != list(x), "shuffled"
    assert epoch(Ordered(x, x, 7, seed=1)) == first, "whatever the batch size"


@pytest.mark.parametrize(("rows", "batch", "sizes"), [(23, 5, [5, 5, 5, 5, 3]), (10, 5, [5, 5]), (3, 8, [3])])
def test_sizes(rows: int, batch: int, sizes: list[int]) -> None:
    batches = Ordered(np.arange(rows), np.arange(rows), batch, 0)
    assert len(batches) == len(sizes)
    assert sizes == [len(batches[index][1]) for index in range(len(batches))]  # type: ignore[arg-type]
    assert len(Ordered(np.arange(rows), np.arange(rows), batch, 0, steps=12)) == 12


def test_structures_stay_together() -> None:
    batches = Ordered({"a": np.arange(9), "b": np.arange(9) * 10}, [np.arange(9) * 100], 4, 0)
    x, y = batches[1]
    np.testing.assert_array_equal(x["b"], x["a"] * 10)  # type: ignore[index]
    np.testing.assert_array_equal(y[0], x["a"] * 100)  # type: ignore[index]


def test_different_lengths() -> None:
    assert length_of((np.ones(3), {"a": np.ones((3, 2))})) == 3
    with pytest.raises(FlowError, match=r"arrays of different lengths: \[2, 3\]"):
        Ordered(np.ones(3), np.ones(2), 2, 0)


def test_fit_sees_each_batch_once(four_ranks: None) -> None:
    """In epochs of one step, as a comparison trains; without learning, each loss is that of its own batch."""
    import keras

    x = np.arange(23, dtype="float32")[:, None]
    batches = Ordered(x, x * 0, 5, seed=1, steps=7)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, "linear", False, "ones")])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    losses = model.fit(iter(batches), epochs=7, steps_per_epoch=1, verbose=0, shuffle=False).history["loss"]
    np.testing.assert_allclose(losses, [np.mean(batches[index][0] ** 2) for index in range(7)], rtol=1e-6)  # type: ignore[operator]
