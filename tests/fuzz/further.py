"""How a random program trains on: other optimizers, frozen layers, a new head, files, several batches, after the scope.

further = drawn_for(seed)
further.outside               whether what is around the model is done after the scope, which the model remembers
further.run(model, rows, ..)  the numbers
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends.active import backend
from tests.fuzz.random_models import Centred, Drawn, Noted

#: what a program does once its model was trained; a pipeline has none of them, and one whose seed begins with q has its
#: model quantized instead
KINDS = (
    "another optimizer",
    "frozen layers",
    "a new head",
    "a file",
    "a checkpoint",
    "batches in order",
    "a generator",
    "several steps in one call",
)

#: epsilons are large, so that what is zero but for rounding stays small
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "Adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-2, amsgrad=True, clipnorm=0.5),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-2, weight_decay=0.02, global_clipnorm=0.5),
    "EMA": lambda: keras.optimizers.SGD(0.02, 0.9, True, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "accumulates": lambda: keras.optimizers.SGD(0.02, momentum=0.9, gradient_accumulation_steps=2),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.005, epsilon=1e-2, momentum=0.5, clipvalue=0.3),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.02, epsilon=1e-2),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.5, epsilon=1e-2),
    "Nadam": lambda: keras.optimizers.Nadam(0.01, epsilon=1e-2),
    "scales its loss": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.02), initial_scale=64.0, dynamic_growth_steps=2
    ),
    "a schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)),
}


@dataclass
class Further:
    """How a program trains on.

    Attributes:
        outside: what is around the model is done after the scope.
        kind: one of `KINDS`, or empty.
        optimizer: a name of `OPTIMIZERS`.
        chosen: numbers that decide on the rest.
    """

    outside: bool
    kind: str
    optimizer: str
    chosen: int

    @property
    def text(self) -> str:
        """Return it in words."""
        said = ["after the scope"] if self.outside else []
        return ", ".join([*said, *([f"trained on: {self.kind} ({self.optimizer})"] if self.kind else [])])


def drawn_for(seed: str) -> Further:
    """Return how the program of a seed trains on."""
    drawn = random.Random(f"{seed} further")
    kind = "" if seed.startswith("p") else drawn.choice(["", *KINDS, "another optimizer"])
    kind = "quantized" if seed.startswith("q") else kind
    return Further(
        drawn.random() < 0.3 and not seed.startswith("p"),
        kind,
        drawn.choice(list(OPTIMIZERS)),
        drawn.randrange(1 << 16),
    )


def run(further: Further, model: keras.Model, drawn: Drawn, batch: int, together: bool) -> list[Any]:
    """Train on, and return what was seen: losses, slots, predictions.

    Args:
        further: how.
        model: compiled, and trained before.
        drawn: its data and its options of `compile`.
        batch: rows of a batch.
        together: whether all ranks take part; one process alone trains on one device.
    """
    return _RUN[further.kind](further, model, drawn, batch, together)


def _rows(drawn: Drawn) -> dict[str, Any]:
    return {"x": drawn.x, "y": drawn.y, "sample_weight": drawn.sample_weight}


def _compile(further: Further, model: keras.Model, drawn: Drawn, **options: Any) -> None:
    model.compile(OPTIMIZERS[further.optimizer](), **{**drawn.compile, **options})


def _fit(model: keras.Model, *given: Any, **options: Any) -> list[Any]:
    history = model.fit(*given, verbose=0, **options).history
    # stock Keras on TensorFlow weighs a smaller last batch as a whole one in the losses of outputs: `loss` says it all
    several = len(model.outputs) > 1
    return [history[name] for name in sorted(history) if not several or name == "loss"]


def _whole(model: keras.Model, drawn: Drawn, epochs: int = 3) -> list[Any]:
    """Epochs of one batch: its rows may come in any order."""
    return _fit(model, **_rows(drawn), batch_size=64, epochs=epochs)


def _another_optimizer(further: Further, model: keras.Model, drawn: Drawn, batch: int, together: bool) -> list[Any]:
    _compile(further, model, drawn)
    seen = _whole(model, drawn)
    slots = [np.asarray(variable) for variable in model.optimizer.variables if "seed" not in variable.path]
    return [seen, *slots]


def _frozen(further: Further, model: keras.Model, drawn: Drawn, batch: int, together: bool) -> list[Any]:
    chosen = random.Random(further.chosen)
    for layer in model.layers[:-1]:
        layer.trainable = chosen.random() < 0.5
    _compile(further, model, drawn)
    return [len(model.trainable_variables), _whole(model, drawn)]


def _quantized(further: Further, model: keras.Model, drawn: Drawn, batch: int, together: bool) -> list[Any]:
    """Quantize a copy between two trainings: the weights of the model are loaded elsewhere afterwards."""
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    _compile(further, other, drawn)
    seen = _whole(other, drawn)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Layer .* does not have a `quantize` method", UserWarning)
        other.quantize(random.Random(further.chosen).choice(["int8", "float8"]))
    _compile(further, other, drawn)
    seen += _whole(other, drawn)
    return [seen, other.predict(drawn.x, verbose=0)]


def _new_head(further: Further, model: keras.Model, drawn: Drawn, batch: int, together: bool) -> list[Any]:
    chosen = random.Random(further.chosen)
    inner = chosen.choice([layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)])
    features = keras.tree.flatten(inner._inbound_nodes[-1].output_tensors)[0]
    features = keras.layers.Flatten()(features) if len(features.shape) > 2 else features
    start = keras.initializers.GlorotUniform(seed=3)
    other = keras.Model(model.inputs, keras.layers.Dense(2, kernel_initializer=start, name="head")(features))
    other.compile(OPTIMIZERS[further.optimizer](), "mse", metrics=["mae"])
    count = len(drawn.x[0] if isinstance(drawn.x, list) else drawn.x)
    targets = np.random.default_rng(further.chosen).normal(size=(count, 2)).astype(keras.config.floatx())
    seen = _fit(other, drawn.x, targets, batch_size=64, epochs=3)
    return [seen, other.predict(drawn.x, verbose=0)]


def agreed(value: Any, together: bool) -> Any:
    """Return the value of rank 0, in which all ranks take part; on one device, which one process trains, the own."""
    return backend().agree_on(dict.fromkeys(kf.env.local_ranks(), value))[0] if together else value


def _file(further: Further, model: keras.Model, drawn: Drawn, batch: int, together: bool) -> list[Any]:
    _compile(further, model, drawn)
    seen = _whole(model, drawn, epochs=1)
    with tempfile.TemporaryDirectory() as own:
        path = Path(agreed(own, together)) / "m.keras"
        model.save(path)
        other = keras.models.load_model(path, custom_objects={"Centred": Centred, "Noted": Noted})
        agreed(True, together)  # before the folder goes
    return [seen, _whole(other, drawn)]


def _checkpoint(further: Further, model: keras.Model, drawn: Drawn, batch: int, together: bool) -> list[Any]:
    _compile(further, model, drawn)
    seen = _whole(model, drawn, epochs=1)
    if together:  # which on one device changes nothing
        with tempfile.TemporaryDirectory() as own:
            path = Path(agreed(own, together)) / "c"
            kf.checkpoint.save(path, model)
            _whole(model, drawn, epochs=1)
            kf.checkpoint.load(path, model)
            agreed(True, together)
    return [seen, _whole(model, drawn)]


def _in_order(further: Further, model: keras.Model, drawn: Drawn, batch: int, together: bool) -> list[Any]:
    _compile(further, model, drawn)
    return _fit(model, **_rows(drawn), batch_size=batch, epochs=2, shuffle=False)


def _several_steps(further: Further, model: keras.Model, drawn: Drawn, batch: int, together: bool) -> list[Any]:
    # Keras's trainer of torch takes one at a time
    _compile(further, model, drawn, steps_per_execution=1 if keras.backend.backend() == "torch" else 2)
    return _fit(model, **_rows(drawn), batch_size=batch, epochs=2, shuffle=False)


def _generator(further: Further, model: keras.Model, drawn: Drawn, batch: int, together: bool) -> list[Any]:
    _compile(further, model, drawn)
    count = len(drawn.x[0] if isinstance(drawn.x, list) else drawn.x)

    def part(whole: Any, rows: slice) -> Any:
        return tuple(each[rows] for each in whole) if isinstance(whole, list) else whole[rows]

    def batches() -> Iterator[tuple[Any, ...]]:
        while True:
            for start in range(0, count, batch):
                given = (drawn.x, drawn.y, drawn.sample_weight)
                yield tuple(part(one, slice(start, start + batch)) for one in given if one is not None)

    return _fit(model, batches(), steps_per_epoch=2, epochs=3)


_RUN: dict[str, Callable[[Further, keras.Model, Drawn, int, bool], list[Any]]] = {
    "": lambda further, model, drawn, batch, together: [],
    "another optimizer": _another_optimizer,
    "frozen layers": _frozen,
    "a new head": _new_head,
    "quantized": _quantized,
    "a file": _file,
    "a checkpoint": _checkpoint,
    "batches in order": _in_order,
    "a generator": _generator,
    "several steps in one call": _several_steps,
}
