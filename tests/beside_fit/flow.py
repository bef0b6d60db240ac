"""Layers with control flow: each primitive of `keras.ops`, the engine's own, and Python's `if`, around each body."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers as L
from keras import ops

from tests.beside_fit.models import SCOPES, difference, values
from tests.one_device import one_device

COLUMNS = 6
#: what is done with a model; training last, since it changes the weights
WAYS = ("call", "predict", "evaluate", "fit")
#: rows that divide by the ranks, and that do not
ROWS = (8, 6)
#: two factors, over which loops go that do not go over rows
FACTORS = (0.5, 0.7)


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

    def compute_output_shape(self, shape):
        return shape  # said, and not inferred: there `if` has no values, and a scan no length


#: what a body does with [rows, columns], or with one row; repeated it does not grow
BODIES: dict[str, Callable[[Flow, Any], Any]] = {
    "row-wise": lambda layer, x: ops.tanh(x) * layer.scale,
    "reduces": lambda layer, x: 0.5 * (x - ops.max(x, axis=0) * layer.scale),
    "indexes": lambda layer, x: 0.3 * (x + ops.tanh(x[1]) * layer.scale + ops.take(x, [0], axis=0)),
    "draws": lambda layer, x: 0.5 * x + layer.scale * keras.random.uniform((COLUMNS,), seed=layer.seeds),
    "assigns": lambda layer, x: _counted(layer, x),
}


def _counted(layer: Flow, x: Any) -> Any:
    layer.count.assign_add(1.0)
    return ops.sin(x) * layer.scale


def _scan(body: Callable, x: Any) -> Any:
    # TensorFlow's wants what is stacked to have the shape of what is carried
    carried, seen = ops.scan(lambda carry, step: (body(carry) * step, carry + step), x, ops.array(FACTORS))
    return carried + ops.mean(seen, axis=0)


def _scan_rows(body: Callable, x: Any) -> Any:
    carried, seen = ops.scan(lambda carry, row: (0.5 * carry + body(row), body(row) + carry), ops.zeros((COLUMNS,)), x)
    return carried + seen


def _python_if(body: Callable, x: Any) -> Any:
    if ops.mean(x) > -9.0:
        x = body(x)
    return x


def _early_return(body: Callable, x: Any) -> Any:
    if ops.mean(x) < -9.0:
        return 2.0 * x
    return body(x)


def _own_cond(body: Callable, x: Any) -> Any:
    """`tf.cond`, `jax.lax.cond` or `torch.cond`."""
    branch = importlib.import_module(f"tests.beside_fit.by_{keras.backend.backend()}").branch
    return branch(ops.mean(x) > -9.0, body, lambda v: 2.0 * v, x)


#: primitive -> body, x -> result. Loops go over numbers, or over rows where their name says so
PRIMITIVES: dict[str, Callable[[Callable, Any], Any]] = {
    "cond": lambda body, x: ops.cond(ops.mean(x) > -9.0, lambda: body(x), lambda: 2.0 * x),
    "switch": lambda body, x: ops.switch(ops.cast(ops.mean(x) > -9.0, "int32"), [lambda v: 2.0 * v, body], x),
    "while_loop": lambda body, x: ops.while_loop(
        lambda i, v: i < 3, lambda i, v: (i + 1, body(v)), (0, x), maximum_iterations=3
    )[1],
    "fori_loop": lambda body, x: ops.fori_loop(0, 2, lambda i, v: body(v), x),
    "scan": _scan,
    "scan_rows": _scan_rows,
    "map": lambda body, x: ops.map(lambda factor: body(x * factor), ops.array(FACTORS))[1],
    "map_rows": lambda body, x: ops.map(body, x),
    "vectorized_map": lambda body, x: ops.vectorized_map(lambda factor: body(x * factor), ops.array(FACTORS))[1],
    "vectorized_map_rows": lambda body, x: ops.vectorized_map(body, x),
    "associative_scan": lambda body, x: ops.associative_scan(lambda a, b: a + b, body(x), axis=0),
    "python_if": _python_if,
    "early_return": _early_return,
    "own_cond": _own_cond,
}
#: every combination of a primitive and a body
CASES = tuple(itertools.product(PRIMITIVES, BODIES))


def ran(primitive: str, body: str, rows: int, scope: Callable[[], AbstractContextManager]) -> dict[str, Any]:
    """What a model with such a layer gives, by way: arrays, or the error.

    Args:
        primitive: a name of PRIMITIVES.
        body: a name of BODIES.
        rows: of the batch.
        scope: makes the scope.
    """
    x = np.random.default_rng(3).normal(size=(rows, COLUMNS)).astype("float32")
    y = np.ones((rows, 2), "float32")
    found: dict[str, Any] = {}
    with scope():
        keras.utils.set_random_seed(1)
        inputs = L.Input((COLUMNS,))
        hidden = L.Dense(COLUMNS, name="h")(inputs)
        flow = Flow(primitive, body)
        flow.build(hidden.shape)
        model = keras.Model(inputs, L.Dense(2, name="o")(flow(hidden)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        # copies: an array of a torch tensor shares its memory
        begin = [(variable, np.array(variable)) for variable in (*model.variables, flow.seeds.state)]
        options = {"batch_size": rows, "verbose": 0}
        ways: dict[str, Callable[[], Any]] = {
            "call": lambda: values(model(x)),
            "predict": lambda: values(model.predict(x, **options)),
            "evaluate": lambda: np.asarray(model.evaluate(x, y, **options)),
            "fit": lambda: np.asarray(model.fit(x, y, epochs=2, shuffle=False, **options).history["loss"]),
        }
        for way in WAYS:
            for variable, value in begin:  # each way begins with the same weights and seed
                variable.assign(value)
            try:
                found[way] = [ways[way](), *map(np.asarray, model.get_weights())]
            except Exception as error:
                found[way] = error
    return found


@mock.patch.dict(os.environ, KERAS_FLOW_RANDOM="logical")  # as users have it
def outcomes(
    cases: Iterable[tuple[str, str]], layouts: list[str], rows: Iterable[int], ranks: int
) -> tuple[list[str], list[str]]:
    """What is neither as on one device, to 1e-5, nor refused by name; and what is refused that one device computes.

    Args:
        cases: primitives and bodies.
        layouts: names of SCOPES.
        rows: numbers of rows.
        ranks: how many.
    """
    from keras_flow import FlowError

    wrong, refused = [], []
    for (primitive, body), number in itertools.product(cases, rows):
        expected = ran(primitive, body, number, one_device)
        for layout in layouts:
            found = ran(primitive, body, number, lambda layout=layout: SCOPES[layout](ranks))
            for way in WAYS:
                where = f"{primitive} {body} {way} {layout} {number} rows"
                right, given = expected[way], found[way]
                if isinstance(right, Exception) or isinstance(given, FlowError):
                    both = f"{type(right).__name__} / {type(given).__name__} {str(given)[:200]!r}"
                    print(f"{where}: {both}", flush=True)
                    # one device's own error is an error here, too
                    # Keras's trainers may meet it as they build, and quote it
                    is_error = isinstance(given, Exception) and type(given).__name__ != "GivenUp"
                    # torch compiles both branches on one device, and fails on some; under a distribution one is run
                    more = primitive == "own_cond" and keras.backend.backend() == "torch"
                    if not isinstance(right, Exception) and is_error:
                        refused.append(f"{where}: {given}"[:400])
                    said = "" if is_error or more else f"{type(right).__name__} on one device, here {given!r}"[:400]
                elif isinstance(given, Exception):
                    said = f"{type(given).__name__} {str(given)[:300]}"
                else:
                    off = difference(right, given)
                    said = "" if off < 1e-5 else f"off by {off}"
                if said:
                    wrong.append(f"{where}: {said}")
                    print("  WRONG " + wrong[-1], flush=True)
    return wrong, refused
