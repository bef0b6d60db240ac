"""Models whose layer "h" is looked into, and the layouts that they are tested in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
from keras import layers as L
from keras import ops

import keras_flow as kf


def dense() -> keras.Model:
    """Two layers, of which 2x2 splits both."""
    inputs = L.Input((6,))
    hidden = L.Dense(8, "tanh", name="h", kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
    return keras.Model(inputs, L.Dense(3, name="o")(hidden))


def convolutional() -> keras.Model:
    """Convolutions, statistics over rows, pools."""
    inputs = L.Input((8, 8, 2))
    x = L.BatchNormalization()(L.Conv2D(4, 3, strides=2, padding="same", name="c")(inputs))
    x = L.Conv2D(8, 3, padding="same", activation="tanh", name="h")(L.Activation("swish")(x))
    x = L.GlobalAveragePooling2D()(L.MaxPooling2D(2)(x))
    return keras.Model(inputs, L.Dense(3, name="o")(x))


def attentive() -> keras.Model:
    """Attention, concatenation, positions picked."""
    inputs = L.Input((6, 8))
    x = L.LayerNormalization()(inputs)
    x = L.MultiHeadAttention(2, 4, name="h")(x, x) + inputs
    x = L.Concatenate()([x, L.Dense(4, "gelu", name="d")(x)])
    return keras.Model(inputs, L.Dense(3, name="o")(x[:, 0] + x[:, -1]))


def recurrent() -> keras.Model:
    """Steps over positions."""
    inputs = L.Input((5, 6))
    return keras.Model(inputs, L.Dense(3, name="o")(L.LSTM(8, name="h")(inputs)))


def looked_up() -> keras.Model:
    """Rows of a table, which one device's gradient has as slices, and a draw."""
    inputs = L.Input((5,))
    rows = L.Embedding(7, 8, name="e")(ops.cast(ops.abs(inputs), "int32") % 7)
    x = L.Dropout(0.3, seed=4)(L.Dense(8, "tanh", name="h")(inputs))
    return keras.Model(inputs, L.Dense(3, name="o")(x + ops.mean(rows, 1)))


class Looking(keras.Model):
    """A subclassed model that hands out what it goes on with, which is no layer's output.

    Args:
        model: one of MODELS, which is cut behind "h".
    """

    def __init__(self, model: keras.Model):
        super().__init__()
        self.before, self.after = cut(model)

    def call(self, x):
        hidden = 1.5 * self.before(x)
        return hidden, self.after([hidden, x]) + ops.mean(hidden)


def cut(model: keras.Model) -> tuple[keras.Model, keras.Model]:
    """The two parts of a model: to the output of "h", and from there and the inputs on."""
    hidden = model.get_layer("h").output
    return keras.Model(model.inputs, hidden), keras.Model([hidden, *model.inputs], model.outputs[0])


def handing_out(model: keras.Model) -> list[keras.Model]:
    """Models that hand out what they go on with: a graph, a graph with an operation there, and a subclassed model."""
    before, after = cut(model)
    inputs = L.Input(model.inputs[0].shape[1:])
    hidden = ops.multiply(before(inputs), 1.5)
    graph = keras.Model(inputs, [hidden, after([hidden, inputs]) + ops.mean(hidden)])
    seen = keras.Model(model.inputs, [model.get_layer("h").output, model.outputs[0]])
    return [seen, graph, Looking(model)]


def from_parts(model: keras.Model, x: Any) -> list[Any]:
    """What a function of one's own computes from the inner parts of a model: `layer.call`, and weights in a product."""
    hidden, last = model.get_layer("h"), model.get_layer("o")
    of_hidden = keras.tree.flatten(keras.Model(model.inputs, hidden.input)(x))
    of_last = keras.Model(model.inputs, last.input)(x)
    return [hidden.call(*of_hidden), last.call(of_last), ops.tanh(of_last @ last.kernel + last.bias)]


#: name -> the shape of a row, and the model
MODELS: dict[str, tuple[tuple[int, ...], Callable[[], keras.Model]]] = {
    "dense": ((6,), dense),
    "convolutional": ((8, 8, 2), convolutional),
    "attentive": ((6, 8), attentive),
    "recurrent": ((5, 6), recurrent),
    "looked_up": ((5,), looked_up),
}

#: model and case that torch has not on one device: a second derivative of its attention
WITHOUT = {("attentive", case) for case in ("penalty", "twice_by_input", "hessian_vector")}


def hybrid(ranks: list[list[int]]) -> AbstractContextManager[object]:
    """A scope of rows over the first axis, and split kernels over the second."""
    split = kf.sbp.split
    rules = {r"h/(lstm_cell/)?kernel|(query|key|value)/kernel$": {"model": split(1)}}
    rules |= {r"\bo/kernel$": {"model": split(0)}}
    return kf.ModelParallel(kf.Placement(ranks, ("data", "model")), rules=rules, batch_axes="data").scope()


#: layout -> its scope over the given number of ranks
SCOPES: dict[str, Callable[[int], AbstractContextManager[object]]] = {
    "data": lambda ranks: kf.DataParallel(kf.Placement(list(range(ranks)), ("data",))).scope(),
    "1x2": lambda ranks: hybrid([[0, 1]]),
    "2x2": lambda ranks: hybrid([[0, 1], [2, 3]]),
}


def scope(layout: str, ranks: int = 4) -> Callable[[], AbstractContextManager[object]]:
    """Makes the scope of a layout."""
    return lambda: SCOPES[layout](ranks)


def values(found: object) -> Any:
    """Arrays of tensors, lists of them too; None stays, because an engine may give it for what is not connected."""
    if isinstance(found, list | tuple):
        return [values(each) for each in found]
    return None if found is None else np.asarray(ops.convert_to_numpy(found))


def computed(
    name: str, case: Callable[..., object], scope: Callable[[], AbstractContextManager], inside: bool, rows: int
) -> Any:
    """What a case gives for a model made in a scope.

    Args:
        name: of the model.
        case: called with the model and the engine's tensor of its inputs.
        scope: makes the scope.
        inside: whether the case runs in it, or after it.
        rows: of the inputs; three divide by no axis.
    """
    shape, make = MODELS[name]
    x = np.random.default_rng(3).normal(size=(rows, *shape)).astype("float32")
    with scope():
        keras.utils.set_random_seed(1)
        model = make()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        begin = model.get_weights()
        # a `fit` ran before; it ends where it began, so that numbers keep their size
        model.fit(x, np.ones((rows, 3), "float32"), batch_size=rows, shuffle=False, verbose=0)
        # biases that are not zero
        model.set_weights([w + 0.1 * np.random.default_rng(5).random(w.shape) for w in begin])
        if inside:
            return values(case(model, ops.convert_to_tensor(x)))
    return values(case(model, ops.convert_to_tensor(x)))


def difference(a: Any, b: Any) -> float:
    """The largest difference of two structures; infinite where one has something else."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((difference(one, other) for one, other in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape:
        return float(np.max(np.abs(a - b), initial=0.0))
    return 0.0 if a is None and b is None else float("inf")


def failures(
    names: tuple[str, ...],
    cases: dict[str, Callable[..., object]],
    contexts: list[tuple[str, bool, int]],
    ranks: int,
) -> list[str]:
    """What is not as on one device, to 1e-5.

    Args:
        names: of models.
        cases: name -> case.
        contexts: layout, whether inside of the scope, rows.
        ranks: how many.
    """
    wrong = []
    for name in names:
        for label, case in cases.items():
            try:
                expected = {rows: computed(name, case, contextlib.nullcontext, True, rows) for _, _, rows in contexts}
            except RuntimeError as error:
                if (name, label) not in WITHOUT or "is not implemented" not in str(error):
                    raise
                continue
            for layout, inside, rows in contexts:
                where = f"{name} {label} {layout} {'in' if inside else 'after'} the scope, {rows} rows"
                try:
                    found = computed(name, case, lambda layout=layout: SCOPES[layout](ranks), inside, rows)
                except Exception as error:
                    wrong.append(f"{where}: {type(error).__name__} {str(error)[:400]}")
                    continue
                off = difference(expected[rows], found)
                if not off < 1e-5:
                    wrong.append(f"{where}: off by {off}")
    return wrong
