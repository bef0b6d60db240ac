"""Statements that a random program has around its model: what is made before it, called beside it, and taken after it.

around = drawn_for(seed)       which of them, and in words
around.metrics()               before the scope: metric objects that `compile` gets
around.trained(...)            a `fit` with a callback that looks, saves and changes
around.after(...)              gradients by inputs, a copy, a sub-model
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_flow as kf
from tests.fuzz import further
from tests.fuzz.random_models import Centred, Noted

#: what changes the model, so that every process must do it
CHANGES = ("changes weights", "changes the learning rate")


@dataclass
class Around:
    """What a program has around its model.

    Attributes:
        metrics_before: metric objects are made before the scope.
        model_before: the model, too.
        callback: what a callback of a `fit` does at an epoch's end; empty for no `fit`.
        alone: process 0 alone does it, where no weights are split.
        after: what is done once all is trained.
    """

    metrics_before: bool
    model_before: bool
    callback: str
    alone: bool
    after: str

    @property
    def text(self) -> str:
        """Return it in words."""
        said = [
            "metrics made before the scope" if self.metrics_before else "",
            "model made before the scope" if self.model_before else "",
            f"a callback that {self.callback}{', on process 0 alone' * self.alone}" if self.callback else "",
            f"then {self.after}" if self.after else "",
        ]
        return "; ".join(filter(None, said)) or "nothing around it"


def drawn_for(seed: str) -> Around:
    """Return what the program of a seed has around its model."""
    drawn = random.Random(f"{seed} around")
    alone = seed.startswith("q")
    return Around(
        drawn.random() < 0.5,
        drawn.random() < 0.3,
        drawn.choice(["evaluates", "predicts", "saves"] if alone else ["", "evaluates", "predicts", "saves", *CHANGES]),
        alone,
        drawn.choice(["", "gradients by inputs", "a deep copy", "a clone", "a sub-model", "one row alone"]),
    )


class Does(keras.callbacks.Callback):
    """Does one thing at an epoch's end, and keeps what it saw."""

    def __init__(self, what: str, rows: tuple[Any, Any, Any], together: bool, alone: bool):
        super().__init__()
        self.what, self.rows, self.together, self.alone = what, rows, together and not alone, alone
        self.seen: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        x, y, weight = self.rows
        if self.alone and kf.env.process_index() != 0:
            return
        self.seen.append(logs["loss"])  # type: ignore[index]
        if self.what == "evaluates":
            self.seen.append(self.model.evaluate(x, y, sample_weight=weight, batch_size=64, verbose=0))
        elif self.what == "predicts":
            self.seen.append(self.model.predict(x, verbose=0))
        elif self.what == "saves":
            self._save()
        elif self.what == "changes weights":
            self.model.set_weights([value * value.dtype.type(0.9) for value in self.model.get_weights()])
        elif self.what == "changes the learning rate":
            self.model.optimizer.learning_rate = 0.01

    def _save(self) -> None:
        with tempfile.TemporaryDirectory() as own:
            folder = further.agreed(own, self.together)
            self.model.save_weights(Path(folder) / "w.weights.h5")
            self.model.load_weights(Path(folder) / "w.weights.h5")
            further.agreed(True, self.together)  # before the folder goes


def after(what: str, model: Any, x: Any) -> Any:
    """Return the numbers of what is done with a trained model.

    Args:
        what: one of `Around.after`.
        model: trained.
        x: rows of its inputs.
    """
    if what == "gradients by inputs":
        return gradients_by_inputs(model, x)
    if what == "a deep copy":
        with keras.saving.custom_object_scope({"Centred": Centred, "Noted": Noted}):  # which Keras makes from configs
            return copy.deepcopy(model).predict(x, verbose=0)
    if what == "a clone":
        other = keras.models.clone_model(model)
        other.set_weights(model.get_weights())
        return other.predict(x, verbose=0)
    if what == "a sub-model":
        inner = next(layer for layer in reversed(model.layers[:-1]) if not isinstance(layer, keras.layers.InputLayer))
        output = keras.tree.flatten(inner.get_output_at(0) if hasattr(inner, "get_output_at") else inner.output)[0]
        return keras.Model(model.inputs, output).predict(x, verbose=0)
    return model.predict([part[:1] for part in x] if isinstance(x, list) else x[:1], verbose=0)


def gradients_by_inputs(model: Any, x: Any) -> list[np.ndarray]:
    """Return the gradients of the sum of all outputs by the float inputs."""
    parts = x if isinstance(x, list) else [x]
    floats = [place for place, part in enumerate(parts) if part.dtype.kind == "f"]
    if not floats:
        return []
    by_engine: dict[str, Callable[..., list[Any]]] = {"jax": _by_jax, "tensorflow": _by_tape, "torch": _by_autograd}
    found = by_engine[keras.backend.backend()](model, parts, floats)
    return [np.asarray(keras.ops.convert_to_numpy(gradient)) for gradient in found]


def _total(model: Any, parts: list[Any]) -> Any:
    outputs = model(parts if len(parts) > 1 else parts[0], training=False)
    return sum(keras.ops.sum(output) for output in keras.tree.flatten(outputs))


def _by_jax(model: Any, parts: list[Any], floats: list[int]) -> list[Any]:
    import jax

    weights = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]

    def total(chosen: list[Any]) -> Any:
        mixed = [chosen[floats.index(place)] if place in floats else part for place, part in enumerate(parts)]
        given = mixed if len(mixed) > 1 else mixed[0]
        outputs, _ = model.stateless_call(weights, others, given, training=False)
        return sum(keras.ops.sum(output) for output in keras.tree.flatten(outputs))

    return jax.grad(total)([parts[place] for place in floats])


def _by_tape(model: Any, parts: list[Any], floats: list[int]) -> list[Any]:
    import tensorflow as tf

    tensors = [tf.constant(part) for part in parts]
    with tf.GradientTape() as tape:
        for place in floats:
            tape.watch(tensors[place])
        total = _total(model, tensors)
    return tape.gradient(total, [tensors[place] for place in floats], unconnected_gradients="zero")


def _by_autograd(model: Any, parts: list[Any], floats: list[int]) -> list[Any]:
    import torch

    tensors = [torch.tensor(part, requires_grad=place in floats) for place, part in enumerate(parts)]
    wanted = [tensors[place] for place in floats]
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(
            wanted, torch.autograd.grad(_total(model, tensors), wanted, allow_unused=True), strict=True
        )
    ]
