"""Data of each rank, models, and Horovod's training in NumPy, for the jobs of these tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_flow.hvd as hvd

#: steps, rows of rank 0 in a batch, features
STEPS, ROWS, FEATURES = 6, 4, 3
RATE = 0.1


def rank_values(shape: tuple[int, ...] = (5,)) -> list[np.ndarray]:
    """Return the tensor of each rank."""
    return [np.random.default_rng(rank).normal(size=shape).astype("float32") for rank in range(hvd.size())]


def check(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(keras.ops.convert_to_numpy(found), wanted, rtol=tolerance, atol=tolerance)


def batches(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the data of a rank: every rank's batches have another number of rows."""
    rows = STEPS * (ROWS + rank)
    x = np.random.default_rng(50 + rank).normal(size=(rows, FEATURES)).astype("float32")
    return x, x @ np.array([[1.0], [-2.0], [0.5]], "float32") + 0.1 * rank


def linear(optimizer: Any, **options: Any) -> keras.Model:
    model = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    model.set_weights([np.full((FEATURES, 1), 0.3, "float32"), np.zeros(1, "float32")])
    return model


def trained(model: keras.Model, **options: Any) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    x, y = batches(hvd.rank())
    options = {"batch_size": ROWS + hvd.rank(), "shuffle": False, "verbose": 0, **options}
    history = model.fit(x, y, **options)
    return model.get_weights(), history.history


def formula(
    reduce: Callable[[list[np.ndarray]], Any], momentum: float = 0.0, passes: int = 1, epochs: int = 1
) -> tuple[list[np.ndarray], list[float]]:
    """Train by hand: the update of what `reduce` makes of the ranks' gradients.

    Returns:
        Weights; the mean over the ranks of each epoch's loss.
    """
    weights = np.array([0.3] * FEATURES + [0.0])
    velocity, sums = np.zeros_like(weights), [np.zeros_like(weights) for _ in range(hvd.size())]
    losses = []
    for step in range(STEPS * epochs):
        at, of_ranks = step % STEPS, []
        if at == 0:
            totals = [[0.0, 0] for _ in sums]
        for rank in range(hvd.size()):
            x, y = batches(rank)
            rows = slice(at * (ROWS + rank), (at + 1) * (ROWS + rank))
            wide = np.concatenate([x[rows], np.ones((ROWS + rank, 1))], 1)
            error = wide @ weights - y[rows, 0]
            sums[rank] = sums[rank] + 2 * wide.T @ error / len(error)
            totals[rank][0] += (error**2).sum()
            totals[rank][1] += len(error)
            of_ranks.append(sums[rank])
        if (step + 1) % passes == 0:
            gradient = np.asarray(reduce(of_ranks))
            velocity = momentum * velocity - RATE * gradient
            weights = weights + velocity
            sums = [np.zeros_like(weights) for _ in sums]
        if at == STEPS - 1:
            losses.append(float(np.mean([total / rows for total, rows in totals])))
    return [weights[:-1, None], weights[-1:]], losses
