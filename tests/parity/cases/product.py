"""The product that `make test-full` runs: models x optimizers x options, each under every layout."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
from keras import layers

from tests.parity.cases import data
from tests.parity.cases.layers import MLP_RULES, TRANSFORMER_RULES, crossentropy, mlp_model, transformer_model
from tests.parity.gradient64 import largest_gradients
from tests.parity.harness import Case, Run


def cnn_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 4)),
            layers.Conv2D(8, 3, padding="same", use_bias=False, name="conv"),
            layers.BatchNormalization(momentum=0.8),
            # smooth: with a ReLU, "cnn, RMSprop, global_clipnorm" met an input of 1.6e-7 at step 8 (in float64; the
            # next smallest of the 20 steps is 1.6e-5): in float32 its sign is rounding, and 36 weights step otherwise
            layers.Activation("silu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(8, name="logits"),
        ]
    )


def rnn_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((4,), dtype="int32"),
            layers.Embedding(32, 8, mask_zero=True, name="embedding"),
            layers.LSTM(8, name="lstm"),
            layers.Dense(8, name="logits"),
        ]
    )


MODELS: dict[str, tuple[Callable[[], keras.Model], np.ndarray, np.ndarray, dict[str, int]]] = {
    "mlp": (mlp_model, data.FEATURES, data.LABELS, MLP_RULES),
    "cnn": (cnn_model, data.IMAGES, data.LABELS, {"conv/kernel": 3, "logits/kernel": 0}),
    "rnn": (rnn_model, data.SHORT_TOKENS, data.LABELS, {"lstm/.*kernel": 1, "logits/kernel": 0}),
    "transformer": (transformer_model, data.FULL_TOKENS, data.NEXT_TOKENS, TRANSFORMER_RULES),
}
OPTIMIZERS: dict[str, Callable[..., keras.optimizers.Optimizer]] = {
    "plain SGD": lambda **options: keras.optimizers.SGD(0.05, **options),
    "SGD": lambda **options: keras.optimizers.SGD(0.05, momentum=0.9, **options),
    "Adam": lambda **options: keras.optimizers.Adam(3e-3, **options),
    "AdamW": lambda **options: keras.optimizers.AdamW(3e-3, weight_decay=0.01, **options),
    "RMSprop": lambda **options: keras.optimizers.RMSprop(1e-3, **options),
    "Adafactor": lambda **options: keras.optimizers.Adafactor(3e-3, **options),
    "Muon": lambda **options: keras.optimizers.Muon(3e-3, **options),
}
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.5},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "ema": {"use_ema": True, "ema_overwrite_frequency": 4},
    "accumulation": {"gradient_accumulation_steps": 2},
}
#: the key bias of attention: its gradient is zero in mathematics
_ZERO = ("attention/key/bias",)


def _program(model: str, optimizer: str, option: str) -> Callable[[Run], None]:
    build, x, y, _ = MODELS[model]

    def program(run: Run) -> None:
        with run.scope():
            network = build()
            network.compile(OPTIMIZERS[optimizer](**OPTIONS[option]), crossentropy(), metrics=["accuracy"])
            run.fit(network, x, y, batch_size=data.BATCH, epochs=data.EPOCHS)
        run.record_model(network)

    return program


def _case(model: str, optimizer: str, option: str) -> Case:
    build, x, y, rules = MODELS[model]
    zero = _ZERO if model == "transformer" else ()
    return Case(
        f"{model}, {optimizer}, {option}",
        _program(model, optimizer, option),
        (),
        rules,
        zero_gradient=zero,
        gradient64=(lambda: largest_gradients(build, x, y, crossentropy, zero)) if zero else None,
    )


CASES = {
    case.name: case
    for case in (_case(model, optimizer, option) for model in MODELS for optimizer in OPTIMIZERS for option in OPTIONS)
}
