"""Layers with control flow: each primitive of `keras.ops`, and Python's `if`, around each kind of body."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
from keras import layers as L
from keras import ops

from tests.beside_fit.models import SCOPES, difference, values

ROWS, COLUMNS = 8, 6


class Flow(L.Layer):
    """A primitive around a body.

    Args:
        primitive: a name of PRIMITIVES.
        body: a name of BODIES.
    """

    def __init__(self, primitive: str, body: str):
        super().__init__(name="flow")
        self.primitive, self.body = primitive, body
        self.seeds = keras.random.SeedGenerator(3)
        self.scale = self.add_weight(shape=(COLUMNS,), initializer="ones", name="scale")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x):
        return PRIMITIVES[self.primitive](lambda value: BODIES[self.body](self, value), x)


#: what a body does with [rows, columns]
BODIES: dict[str, Callable[[Flow, Any], Any]] = {
    "row-wise": lambda layer, x: ops.tanh(x) * layer.scale,
    "reduces": lambda layer, x: x - ops.max(x, axis=0) * layer.scale,
    "indexes": lambda layer, x: x + ops.tanh(x[1]) * layer.scale + ops.take(x, [0], axis=0),
    "draws": lambda layer, x: x + layer.scale * keras.random.uniform((COLUMNS,), seed=layer.seeds),
    "assigns": lambda layer, x: _counted(layer, x),
}


def _counted(layer: Flow, x: Any) -> Any:
    layer.count.assign_add(1.0)
    return ops.sin(x) * layer.scale


def _scan(body: Callable, x: Any) -> Any:
    carried, seen = ops.scan(lambda carry, step: (body(carry) * step, ops.mean(carry)), x, ops.array([0.5, 0.7]))
    return carried + ops.sum(seen)


#: primitive -> body, x -> result
PRIMITIVES: dict[str, Callable[[Callable, Any], Any]] = {
    "cond": lambda body, x: ops.cond(ops.mean(x) > -9.0, lambda: body(x), lambda: 2.0 * x),
    "switch": lambda body, x: ops.switch(ops.cast(ops.mean(x) > -9.0, "int32"), [lambda v: 2.0 * v, body], x),
    "while_loop": lambda body, x: ops.while_loop(
        lambda i, v: i < 3, lambda i, v: (i + 1, body(v)), (0, x), maximum_iterations=3
    )[1],
    "fori_loop": lambda body, x: ops.fori_loop(0, 2, lambda i, v: body(v), x),
    "scan": _scan,
    "map": lambda body, x: ops.map(lambda factor: body(x * factor), ops.array([0.5, 0.7]))[1],
    "vectorized_map": lambda body, x: ops.vectorized_map(lambda factor: body(x * factor), ops.array([0.5, 0.7]))[1],
    "associative_scan": lambda body, x: ops.associative_scan(lambda a, b: a + b, body(x), axis=0),
}


def ran(primitive: str, body: str, way: str, scope: Callable[[], AbstractContextManager]) -> Any:
    """What a model with such a layer gives.

    Args:
        primitive: a name of PRIMITIVES.
        body: a name of BODIES.
        way: `fit` (two steps of plain SGD, then the weights), `predict`, or `call`.
        scope: makes the scope.
    """
    x = np.random.default_rng(3).normal(size=(ROWS, COLUMNS)).astype("float32")
    with scope():
        keras.utils.set_random_seed(1)
        inputs = L.Input((COLUMNS,))
        hidden = L.Dense(COLUMNS, name="h")(inputs)
        model = keras.Model(inputs, L.Dense(2, name="o")(Flow(primitive, body)(hidden)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        if way == "predict":
            return values(model.predict(x, batch_size=ROWS, verbose=0))
        if way == "call":
            return values(model(x))
        history = model.fit(x, np.ones((ROWS, 2), "float32"), batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
        return [np.asarray(history.history["loss"]), *map(np.asarray, model.get_weights())]


def outcomes(primitives: list[str], bodies: list[str], ways: list[str], layouts: list[str], ranks: int) -> list[str]:
    """What is neither as on one device, to 1e-5, nor refused there or here in an error with a first line of its own."""
    from keras_flow import FlowError

    wrong = []
    for primitive in primitives:
        for body in bodies:
            for way in ways:
                try:
                    expected = ran(primitive, body, way, contextlib.nullcontext)
                except Exception:
                    continue  # one device cannot: the engine's own error
                for layout in layouts:
                    where = f"{primitive} {body} {way} {layout}"
                    print(where, flush=True)
                    try:
                        found = ran(primitive, body, way, lambda layout=layout: SCOPES[layout](ranks))
                    except FlowError as error:
                        print(f"  refused: {str(error).splitlines()[0][:300]}", flush=True)
                        continue
                    except Exception as error:
                        wrong.append(f"{where}: {type(error).__name__} {str(error)[:300]}")
                        print("  " + wrong[-1], flush=True)
                        continue
                    off = difference(expected, found)
                    if not off < 1e-5:
                        wrong.append(f"{where}: off by {off}")
                        print("  " + wrong[-1], flush=True)
    return wrong
