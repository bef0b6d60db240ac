"""`optimizer.stateless_apply` gives what `apply` gives on one device, and leaves the variables as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda optimizers: optimizers.SGD(0.1),
    "momentum": lambda optimizers: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda optimizers: optimizers.Adam(0.1, amsgrad=True, clipnorm=1.0),
    "averages": lambda optimizers: optimizers.AdamW(0.1, use_ema=True, ema_overwrite_frequency=2),
    "ftrl": lambda optimizers: optimizers.Ftrl(0.1),
}
#: given gradients as arrays of NumPy, which those of Keras's updates take that use `keras.ops` alone
BY_ARRAYS = ("ftrl",)
#: the optimizer is made in the scope, before it, or was used under another layout
MADE = ("in", "before", "elsewhere")


def scope_of(layout: str, zero: int = 0, rules: dict[str, int] | None = None) -> Any:
    """The scope of "dp" or of a mesh of two columns, whose `rules` are variable -> dim."""
    import keras_flow as kf

    ranks = np.arange(kf.env.get_world_size())
    more: dict[str, Any] = {"zero": zero, "zero_min_size": 1} if zero else {}
    if layout == "dp":
        return kf.DataParallel(kf.Placement(ranks, axis_names=("data",)), **more).scope()
    mesh = kf.Placement(ranks.reshape(-1, 2), axis_names=("data", "model"))
    dims = rules or {"h/kernel": 1, "h/bias": 0}
    split = {name: {"model": kf.sbp.split(dim)} for name, dim in dims.items()}
    return kf.ModelParallel(mesh, rules=split, batch_axes="data", **more).scope()


def _made(name: str) -> tuple[Any, Any]:
    import keras

    model = keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(8, name="h"), keras.layers.Dense(3, name="o")]
    )
    rng = np.random.default_rng(5)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape).astype("float32") / 3)
    optimizer = OPTIMIZERS[name](keras.optimizers)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def _values(tensors: Any) -> list[np.ndarray]:
    import keras

    # a copy: torch's array is the tensor itself
    return [np.array(keras.ops.convert_to_numpy(each)) for each in tensors]


def _after_three_steps(name: str, layout: str | None, made: str, zero: int = 0, whole: bool = False) -> list[Any]:
    """Return weights and slots; in a scope by `stateless_apply`, on one device by `apply`.

    Args:
        name: of the optimizer.
        layout: None for one device.
        made: where model and optimizer are made.
        zero: stage of ZeRO.
        whole: whether the first values are given as whole tensors.
    """
    import keras

    def scope(is_held: bool = True) -> Any:
        return scope_of(layout, zero) if layout and is_held else contextlib.nullcontext()

    x, y = np.ones((4, 6), "float32"), np.ones((4, 3), "float32")
    with scope(made == "in"):
        model, optimizer = _made(name)
    if made == "elsewhere":
        with scope_of("2x2" if layout == "dp" else "dp") if layout else contextlib.nullcontext():
            model.compile(optimizer, "mse")
            model.fit(x, y, verbose=0)
    with scope():
        trained = model.trainable_variables
        weights, slots = [each.value for each in trained], [each.value for each in optimizer.variables]
        if whole:
            weights, slots = (
                [keras.ops.convert_to_tensor(each) for each in _values(those)] for those in (weights, slots)
            )
        before = _values([*weights, *slots])
        rng = np.random.default_rng(1)
        for _ in range(3):
            gradients: list[Any] = [rng.normal(size=each.shape).astype("float32") for each in trained]
            if name not in BY_ARRAYS:
                gradients = [keras.ops.convert_to_tensor(each) for each in gradients]
            if layout:
                weights, slots = optimizer.stateless_apply(slots, gradients, weights)
            else:
                optimizer.apply(gradients, trained)
        kept = _values([*trained, *optimizer.variables])
        if layout is None:
            return kept
        for value, same in zip(before, kept, strict=True):
            np.testing.assert_array_equal(value, same)
        return _values([*weights, *slots])


def _compared(cases: list[tuple[str, str, str, int, bool]]) -> list[str]:
    """Return what differs from one device."""
    found = []
    for name, layout, made, zero, whole in cases:
        expected = _after_three_steps(name, None, made)
        values = _after_three_steps(name, layout, made, zero, whole)
        off = max(float(np.abs(a - b).max()) for a, b in zip(expected, values, strict=True))
        if off > 2e-6:
            found.append(f"{name}, {layout}, made {made}, zero={zero}, {'whole' if whole else 'own'} values: {off:.2g}")
    return found


def _cases(zeros: tuple[int, ...]) -> list[tuple[str, str, str, int, bool]]:
    return [
        (name, layout, made, zero, whole)
        for name in OPTIMIZERS
        for layout in ("dp", "2x2")
        for made in MADE
        for zero in zeros
        for whole in (False, True)
    ]


@pytest.mark.parametrize("engine", ["jax", "torch"])  # Keras has none on TensorFlow
def test_it_gives_the_values_of_apply(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_compared, _cases((0,))[::5]) == []


@pytest.mark.full
@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_also_where_slots_are_split_further(engine: str, on_ranks: Any) -> None:
    assert on_ranks(engine)(_compared, _cases((0, 1, 3))) == []
