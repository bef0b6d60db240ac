"""Updates in a loop of one's own, by an optimizer that was built outside of the scope or has a `tf.Variable`, too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests import sampling
from tests.beside_fit.test_stateless_apply import scope_of

#: variable -> the dim that a mesh with the axis `model` splits
RULES = {"kernel": 1, "rows": 0}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "averages": lambda optimizers: optimizers.AdamW(
        0.1, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=2
    ),
    # on JAX a loop of one's own cannot call it
    "scaled": lambda optimizers: optimizers.LossScaleOptimizer(optimizers.SGD(0.1, momentum=0.9)),
}


def _updated(make: Any, scope: Callable[[], Any], built: str, applied: str, others: Callable[..., Any]) -> list[Any]:
    """Return weights and slots after three updates.

    Args:
        make: makes the optimizer.
        scope: that of the variables.
        built: whether the optimizer is built "in" the scope or "outside" of it.
        applied: the same of its updates.
        others: makes a variable of the last value.
    """
    import keras

    rng = np.random.default_rng(3)
    values = [rng.normal(size=shape).astype("float32") for shape in ((4, 8), (4, 2), (2, 4))]
    with scope():
        variables = [keras.Variable(values[0], name="kernel"), keras.Variable(values[1], name="rows")]
        variables.append(others(values[2]))
        optimizer = make(keras.optimizers)
    with scope() if built == "in" else contextlib.nullcontext():
        optimizer.build(variables)
    with scope() if applied == "in" else contextlib.nullcontext():
        for step in range(3):
            grads: list[Any] = [
                keras.ops.convert_to_tensor(rng.normal(size=each.shape).astype("float32")) for each in variables
            ]
            if step == 1:
                grads[-1] = None
            optimizer.apply(grads, variables)
    return [np.array(keras.ops.convert_to_numpy(each)) for each in [*variables, *optimizer.variables]]


#: layout, zero, where the optimizer is built, and where it is applied
BUILT = (
    ("dp", 0, "outside", "in"),
    ("dp", 1, "outside", "in"),
    ("2x2", 0, "outside", "outside"),
    ("2x2", 1, "outside", "in"),
)
WITH_OTHERS = (("dp", 0, "in", "in"), ("2x2", 0, "in", "outside"), ("2x2", 0, "outside", "in"))


def _compared(names: Sequence[str], cases: Sequence[tuple[Any, ...]], others: Callable[..., Any]) -> list[str]:
    """Return what differs from one device."""
    import warnings

    warnings.simplefilter("ignore")  # one variable gets no gradient in the second step
    found = []
    for name in names:
        make = OPTIMIZERS[name]
        expected = _updated(make, contextlib.nullcontext, "in", "in", others)
        for layout, zero, built, applied in cases:
            values = _updated(make, functools.partial(scope_of, layout, zero, RULES), built, applied, others)
            off = max(float(np.abs(a - b).max()) for a, b in zip(expected, values, strict=True))
            if off > 2e-6:
                found.append(f"{name}, {layout}, zero={zero}, built {built}, applied {applied}: {off:.2g}")
    return found


def built_outside() -> list[str]:
    import keras

    names = ["averages"] if keras.backend.backend() == "jax" else list(OPTIMIZERS)
    return _compared(names, BUILT, lambda value: keras.Variable(value, name="other"))


def with_a_variable_of_tensorflow() -> list[str]:
    import tensorflow as tf

    return _compared(list(OPTIMIZERS), WITH_OTHERS, tf.Variable)


@pytest.mark.parametrize("engine", sampling.on_one(["jax", "tensorflow", "torch"]))
def test_an_optimizer_is_built_outside_of_the_scope(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(built_outside) == []


def test_a_tf_variable_beside_variables_of_the_scope(on_ranks: Any) -> None:
    assert on_ranks("tensorflow")(with_a_variable_of_tensorflow) == []


def slots_are_split() -> list[tuple[int, ...]]:
    """Return the shapes of a rank's part of the slots that an optimizer makes outside of the scope."""
    import keras

    import keras_flow as kf

    with scope_of("2x2", rules=RULES):
        variable = keras.Variable(np.ones((4, 8), "float32"), name="kernel")
    optimizer = keras.optimizers.Adam()
    optimizer.build([variable])
    return [kf.layout_of(each).layout.local_shape(0) for each in optimizer.variables if each.shape == (4, 8)]


@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_slots_that_are_made_outside_of_the_scope_are_split(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(slots_are_split) == [(4, 4), (4, 4)]
