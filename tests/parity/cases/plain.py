"""Plain SGD: two steps without momentum or clipping, and the update of every variable.

Adam, clipping and normalisation hide a gradient of the wrong size: the weights after them may agree where a gradient is
doubled. A plain step is the gradient times the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.parity.cases import data
from tests.parity.cases.layers import (
    MLP_RULES,
    TRANSFORMER_RULES,
    cnn_model,
    crossentropy,
    mlp_model,
    rnn_model,
    transformer_model,
)
from tests.parity.harness import Case, Run
from tests.parity.support import LAYOUTS

#: the fault that every model must show: the gradient of the variable in the middle counts twice
DOUBLED = "one variable's gradient doubled"


@dataclass(frozen=True)
class Model:
    """A model and what it is trained on.

    Attributes:
        build: makes the model.
        x, y: one batch.
        loss: as `compile` takes it, or a function that makes it.
        rules: pattern -> dim to split.
        shows: the features of the support table for which it stands.
    """

    build: Callable[[], keras.Model]
    x: Any
    y: Any
    loss: Callable[[], Any] = crossentropy
    rules: Mapping[str, int] = field(default_factory=dict)
    shows: tuple[str, ...] = ()


def _split_convolution() -> keras.Model:
    """Its kernels are split on output and on input channels."""
    return keras.Sequential(
        [
            layers.Input((8, 8, 4)),
            layers.Conv2D(8, 3, activation="relu", name="first"),
            layers.Conv2D(8, 3, name="second"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(8),
        ]
    )


def _several() -> keras.Model:
    left, right = layers.Input((16,), name="left"), layers.Input((16,), name="right")
    shared = layers.Dense(16, activation="tanh", name="shared")
    joined = layers.Concatenate()([shared(left), shared(right)])
    summed = layers.Add()([shared(left), shared(right)])
    score = layers.Dense(4, name="score")(layers.Flatten()(layers.Reshape((4, 8))(joined)))
    return keras.Model([left, right], [score, layers.Dense(8, name="kind")(summed)])


_ROWS = slice(0, data.BATCH)
MODELS = {
    "mlp": Model(mlp_model, data.FEATURES[_ROWS], data.LABELS[_ROWS], rules=MLP_RULES, shows=("plain SGD",)),
    "cnn": Model(cnn_model, data.IMAGES[_ROWS], data.LABELS[_ROWS], rules={"logits/kernel": 0}),
    "split convolution": Model(
        _split_convolution,
        data.IMAGES[_ROWS],
        data.LABELS[_ROWS],
        rules={"first/kernel": 3, "first/bias": 0, "second/kernel": 2},
        shows=("Conv2D kernels split on channels",),
    ),
    "rnn": Model(
        rnn_model, data.SHORT_TOKENS[_ROWS], data.LABELS[_ROWS], rules={"gru/.*kernel": 1, "logits/kernel": 0}
    ),
    "transformer": Model(transformer_model, data.FULL_TOKENS[_ROWS], data.NEXT_TOKENS[_ROWS], rules=TRANSFORMER_RULES),
    "several inputs": Model(
        _several,
        [data.FEATURES[_ROWS], data.FEATURES[_ROWS][:, ::-1].copy()],
        [data.TARGETS[_ROWS], data.LABELS[_ROWS]],
        loss=lambda: ["mse", crossentropy()],
        rules={"shared/kernel": 1, "score/kernel": 0},
    ),
}


class DoubledOne(keras.optimizers.SGD):
    """The seeded fault."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        grads[len(grads) // 2] = 2 * grads[len(grads) // 2]
        super().apply(grads, trainable_variables)


def _program(model: Model) -> Callable[[Run], None]:
    def program(run: Run) -> None:
        with run.scope():
            network = model.build()
            sgd = DoubledOne if run.fault == DOUBLED and run.distributed else keras.optimizers.SGD
            # large steps: an update is the difference of two weights, and with steps of 0.05 their last bit alone
            # could be the whole tolerance (Keras 3.14 on torch: 1.01 of it; a tenth with steps ten times as large)
            network.compile(sgd(0.5), model.loss())
            for step in range(2):
                before = _weights(network)
                logs = network.train_on_batch(model.x, model.y)
                run.record("loss", "loss", np.ravel(logs)[0])
                for name, value in _weights(network).items():
                    run.record("update", f"step {step}: {name}", value - before[name])
        run.check_split(network)

    return program


def _weights(model: keras.Model) -> dict[str, np.ndarray]:
    return {
        f"{place} {variable.name}": np.asarray(ops.convert_to_numpy(variable), "float64")
        for place, variable in enumerate(model.trainable_variables)
    }


#: the hybrid layout has both kinds of gradients; the others are in the product of `make test-full`
CASES = tuple(
    Case(
        f"plain SGD: {name}",
        _program(model),
        model.shows,
        model.rules,
        layouts=LAYOUTS if model.shows else ("2x2",),
    )
    for name, model in MODELS.items()
)
