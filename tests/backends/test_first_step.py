"""A first step of `fit` that takes long is said once, by the first process; other steps are not spoken of."""

from __future__ import annotations

import threading
from typing import Any

import pytest

REASONS = {
    "jax": "JAX compiles it; the next steps are faster.",
    "tensorflow": "TensorFlow traces and compiles it; the next steps are faster.",
    "torch": "",
}
SAID = "keras-flow: the first step of fit is not over after 0 s."


def _said(slow: int, augments: bool = False) -> tuple[str, bool]:
    """What `fit` writes where one of its batches comes late, and whether it left a thread."""
    import contextlib
    import io
    import time

    import keras
    import numpy as np

    import keras_flow as kf
    from keras_flow.backends import first_step

    class Late(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            time.sleep(1.0 if index == slow else 0.0)
            return np.zeros((8, 4, 4, 1), "float32"), np.zeros((8, 2), "float32")

    layers = [keras.layers.RandomZoom(0.1, name="zoom")] if augments else []
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.Input((4, 4, 1)), *layers, keras.layers.Flatten(), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    model.fit(Late(), epochs=1, shuffle=False, verbose=0)
    before, limit = set(threading.enumerate()), first_step.AFTER_SECONDS
    first_step.AFTER_SECONDS = 0.4
    try:
        with contextlib.redirect_stderr(io.StringIO()) as written:
            model.fit(Late(), epochs=2, shuffle=False, verbose=0)
    finally:
        first_step.AFTER_SECONDS = limit
    return written.getvalue(), any(isinstance(each, threading.Timer) for each in set(threading.enumerate()) - before)


@pytest.mark.parametrize("backend", REASONS)
def test_a_slow_first_step_is_said_by_the_first_process(backend: str, on_ranks: Any) -> None:
    first, *others = on_ranks(backend).on_each(_said, 0)
    assert first == (f"{SAID} {REASONS[backend]}".rstrip() + "\n", False)
    assert set(others) <= {("", False)}


@pytest.mark.parametrize("backend", REASONS)
def test_a_slow_step_later_is_not_spoken_of(backend: str, on_ranks: Any) -> None:
    assert on_ranks(backend)(_said, 2) == ("", False)


def test_layers_that_keep_keras_from_compiling_are_named(on_ranks: Any) -> None:
    said, _ = on_ranks("jax")(_said, 0, True)
    reason = "JAX compiles each operation by itself: Keras does not jit-compile a model with zoom."
    assert said.startswith(f"{SAID} {reason} ")
