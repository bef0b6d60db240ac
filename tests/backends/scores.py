"""KerasHub's `CausalLM.score`: logits, losses, and gradients by what `layer_intercept_fn` is handed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from tests.backends.test_generation import MODELS, distribution, prompts
from tests.one_device import one_device


def _by_jax(score: Callable[..., Any], at: int) -> Any:
    import jax

    shape: list[Any] = []
    score(lambda x, i: shape.append(x) or x if i == at else x)

    def total(added: Any) -> Any:
        return keras.ops.sum(score(lambda x, i: x + added if i == at else x))

    return jax.grad(total)(keras.ops.zeros_like(shape[0]))


def _by_tensorflow(score: Callable[..., Any], at: int) -> Any:
    import tensorflow as tf

    handed: list[Any] = []
    with tf.GradientTape(watch_accessed_variables=True) as tape:  # as KerasHub's docstring writes it

        def intercept(x: Any, i: int) -> Any:
            if i == at:
                handed.append(x)
                tape.watch(x)
            return x

        losses = score(intercept)
    return tape.gradient(losses, handed[0])


def _by_torch(score: Callable[..., Any], at: int) -> Any:
    import torch

    handed: list[Any] = []
    losses = score(lambda x, i: handed.append(x) or x if i == at else x)
    return torch.autograd.grad(losses.sum(), handed[0])[0]


def scored(name: str, scope: AbstractContextManager[Any], inside: bool, rows: int, layers: int) -> dict:
    """What a model of random weights scores: logits, losses, and their gradients by embeddings and a layer's output.

    Args:
        name: of MODELS.
        scope: in which the model is made.
        inside: whether it scores in there, or afterwards.
        rows: of tokens.
        layers: of the backbone.
    """
    import keras_hub

    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    settings = {"vocabulary_size": 64, "num_layers": layers, "hidden_dim": 16, "intermediate_dim": 32, **MODELS[name]}
    with scope:
        backbone = getattr(keras_hub.models, f"{name}Backbone")(**settings)
        for variable in backbone.trainable_variables:  # initial weights are too small to tell layouts apart
            variable.assign(keras.ops.convert_to_numpy(variable) * 4)
        model = getattr(keras_hub.models, f"{name}CausalLM")(backbone=backbone, preprocessor=None)
        if inside:
            return _parts(model, rows)
    return _parts(model, rows)


def _parts(model: Any, rows: int) -> dict[str, np.ndarray]:
    given = {key: keras.ops.convert_to_tensor(value) for key, value in prompts(rows).items()}
    targets = keras.ops.roll(given["token_ids"], shift=-1, axis=1)

    def losses(intercept: Any = None) -> Any:
        return model.score(**given, scoring_mode="loss", layer_intercept_fn=intercept, target_ids=targets)

    gradient = {"jax": _by_jax, "tensorflow": _by_tensorflow, "torch": _by_torch}[keras.backend.backend()]
    found = {"logits": model.score(**given), "losses": losses()}
    # KerasHub's Gemma goes on with the embeddings, not with what the function returns: zeros by JAX
    found |= {f"gradient at {at}": gradient(losses, at) for at in (-1, 0)}
    return {key: np.array(keras.ops.convert_to_numpy(value)) for key, value in found.items()}


def deviations(
    name: str,
    layouts: tuple[str, ...] = ("1x4", "2x2"),
    contexts: tuple[bool, ...] = (True, False),
    rows: tuple[int, ...] = (8, 5),
    layers: int = 2,
) -> dict[str, str]:
    """How scores differ from one device's, by layout, context, rows and part; nothing where they are equal to 1e-5."""
    bad = {}
    for count in rows:
        expected = scored(name, one_device(), True, count, layers)
        for layout, inside in itertools.product(layouts, contexts):
            where = f"{name} {layout} {'in' if inside else 'after'} the scope, {count} rows"
            try:
                got = scored(name, distribution(layout, name).scope(), inside, count, layers)
            except Exception as error:
                bad[where] = f"{type(error).__name__}: {error}"[:600]
                continue
            for part, value in expected.items():
                off = np.abs(got[part] - value).max() if got[part].shape == value.shape else np.inf
                if not off <= 1e-5 * max(1.0, np.abs(value).max()):
                    bad[f"{where}: {part}"] = f"off by {off:.2g} of {np.abs(value).max():.2g}"
    return bad
