"""The self-tests, run on ranks: a collective, two steps of training compared with one device, and links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from keras_flow.errors import FlowError

#: bytes of the tensors whose all-reduces a link is fitted to
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)

_TOLERANCE = 1e-4


def each(tests: Sequence[tuple[Callable[..., object], tuple]]) -> list[object]:
    """The results of functions with their arguments, one after the other."""
    return [function(*arguments) for function, arguments in tests]


def collective(ranks: int) -> float:
    """Sum 1000 numbers over the first ranks; returns the best seconds (0 on a rank that takes no part)."""
    from keras_flow.backends.active import backend

    return min(backend().all_reduce(1000, ranks, 3), default=0.0)


def train() -> tuple[float, float]:
    """Two steps of a small model on all ranks, and on one device.

    Returns:
        The loss of the second step, on all ranks and on one device.

    Raises:
        FlowError: they differ.
    """
    import keras_flow as kf

    # one device draws its weights as Keras does
    with kf.DataParallel(random="stock").scope():
        ours = _two_steps()
    alone = _two_steps()
    if not np.isclose(ours, alone, rtol=_TOLERANCE):
        raise FlowError(f"two steps of training gave a loss of {ours}, one device {alone}")
    return ours, alone


def _two_steps() -> float:
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    random = np.random.default_rng(0)
    x, y = random.standard_normal((8, 8)).astype("float32"), random.standard_normal((8, 1)).astype("float32")
    model.train_on_batch(x, y)
    return float(model.train_on_batch(x, y))  # type: ignore[arg-type]


def bandwidth(counts: list[int]) -> dict[int, dict[int, float]]:
    """Median seconds of all-reduces: number of ranks -> bytes -> seconds."""
    from keras_flow.backends.active import backend

    medians = {}
    for ranks in counts:
        times = {size: backend().all_reduce(size // 4, ranks, 5) for size in SIZES}
        medians[ranks] = {size: float(np.median(seconds)) for size, seconds in times.items() if seconds}
    return medians
