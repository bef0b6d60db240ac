"""Programs that quantize, freeze or extend a trained model and train it on, against one device."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import keras_flow as kf

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((22, 6)).astype("float32"), RANDOM.standard_normal((22, 4)).astype("float32")


@dataclass(frozen=True)
class Case:
    """How a model is changed: its quantization, when adapters are added, and the layout."""

    mode: str | None
    lora: str
    layout: str

    def __str__(self) -> str:
        return f"{self.mode}, adapters: {self.lora}, {self.layout}"


MODES = (None, "int8", "int4", "float8")
ADAPTERS = ("none", "before compile", "after compile")
LAYOUTS = ("data", "2x2", "1x2", "zero=3")


def cases() -> list[Case]:
    """All cases: Keras has no adapters for float8."""
    return [
        Case(mode, lora, layout)
        for mode, lora, layout in itertools.product(MODES, ADAPTERS, LAYOUTS)
        if (mode, lora) not in ((None, "none"), *(("float8", each) for each in ADAPTERS[1:]))
    ]


def _scope(layout: str) -> AbstractContextManager[Any]:
    ranks = kf.env.get_world_size()
    if layout == "data":
        return kf.DataParallel().scope()
    if layout == "zero=3":
        mesh = kf.Placement(range(ranks), axis_names=("data",))
        return kf.ModelParallel(mesh, batch_axes="data", zero=3, zero_min_size=1).scope()
    shape = np.arange(ranks).reshape(ranks // 2, 2) if layout == "2x2" else np.arange(ranks).reshape(1, ranks)
    # as people write them: each also finds the scales and adapters of its layer
    rules = {
        "hidden/kernel": {"model": kf.sbp.split(1)},
        "out/kernel": {"model": kf.sbp.split(0)},
        "heads/kernel": {"model": kf.sbp.split(1)},
    }
    return kf.ModelParallel(kf.Placement(shape, axis_names=("data", "model")), batch_axes="data", rules=rules).scope()


def _compile(model: keras.Model) -> None:
    model.compile(keras.optimizers.SGD(0.1), "mse")


def _fit(model: keras.Model) -> list[float]:
    return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]


def _run(case: Case, scope: AbstractContextManager[Any]) -> dict[str, np.ndarray]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    found: dict[str, Any] = {}
    with scope, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that cannot be quantized
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh", name="hidden"),
                keras.layers.EinsumDense("ab,bcd->acd", (2, 4), name="heads"),
                keras.layers.Flatten(),
                keras.layers.Dense(4, name="out"),
            ]
        )
        layers = [model.get_layer(name) for name in ("hidden", "heads", "out")]
        _compile(model)
        found["first loss"] = _fit(model)
        if case.mode is not None:
            model.quantize(case.mode)
        if case.lora == "before compile":
            _adapt(layers)
        _compile(model)
        found["prediction"] = model.predict(X, batch_size=8, verbose=0)
        if case.lora == "after compile":
            _adapt(layers)
            _compile(model)
        if case.lora != "none" or case.mode == "float8":
            found["loss"] = _fit(model)
            found["prediction after it"] = model.predict(X, batch_size=8, verbose=0)
        weights = model.get_weights()  # adapters are trained, the rest is as it was
        found |= {f"weight {index}": weight for index, weight in enumerate(weights)}
    return {name: np.asarray(value, "float64") for name, value in found.items()}


def _adapt(layers: Sequence[keras.Layer]) -> None:
    for layer in layers:
        layer.enable_lora(2, a_initializer=keras.initializers.HeUniform(seed=5))


def deviations(cases: Sequence[Case]) -> dict[str, str]:
    """Case -> how it differs from one device; those that are equal are left out. Runs on every rank."""
    bad = {}
    for case in cases:
        expected = _run(case, contextlib.nullcontext())
        try:
            got = _run(case, _scope(case.layout))
        except Exception as error:
            bad[str(case)] = f"{type(error).__name__}: {error}"
            continue
        assert expected.keys() == got.keys(), case
        for name, value in expected.items():
            if not np.allclose(got[name], value, rtol=1e-5, atol=1e-5):
                bad[str(case)] = f"{name}: {got[name].tolist()} where one device has {value.tolist()}"
                break
    keras.utils.clear_session()
    return bad


def _thawed(scope: AbstractContextManager[Any]) -> list[np.ndarray]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    base = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh")])
    base.trainable = False
    model = keras.Sequential([keras.Input((6,)), base, keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.3)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[-1].kernel])
    with scope:
        model.compile(optimizer, "mse")
        _fit(model)
        base.trainable = True
        _compile(model)
        _fit(model)
    return model.get_weights()


def thawed() -> dict[str, float]:
    """Layout -> how far weights are off. Some are frozen while they are laid, and trained then.

    One is excluded from weight decay before it is laid.
    """
    pipe = kf.Placement(range(2), axis_names=("pipe",))
    ways: dict[str, Any] = {
        "data": kf.DataParallel(),
        "mirrored": kf.DataParallel(strategy="mirrored" if keras.backend.backend() == "tensorflow" else None),
        "one rank": kf.DataParallel(kf.Placement([0])),
        "pipeline": kf.PipelineParallel(pipe, microbatches=2),
    }
    expected = _thawed(contextlib.nullcontext())
    found = {name: _thawed(way.scope()) for name, way in ways.items()}
    keras.utils.clear_session()
    pairs = {name: zip(weights, expected, strict=True) for name, weights in found.items()}
    return {name: max(float(np.abs(one - other).max()) for one, other in each) for name, each in pairs.items()}
