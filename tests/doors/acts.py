"""What is done with a pipeline's model between two fits: acts, of which a life is made (tests/doors/lives.py)."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Life:
    """A model, and what it is trained under.

    Attributes:
        seed: of the life.
        distribution: a pipeline; None on one device.
        other: what the model is used under for a while; None on one device.
        model: the model now.
        files: the folder of all ranks.
        seen: act -> its numbers.
    """

    seed: str
    distribution: Any
    other: Any
    files: Path
    model: Any = None
    seen: dict[str, list[Any]] = field(default_factory=dict)

    def scope(self, which: str = "distribution") -> AbstractContextManager[Any]:
        """Return the scope of the pipeline, or of the other distribution; on one device none."""
        found = getattr(self, which)
        return contextlib.nullcontext() if found is None else found.scope()

    def path(self, name: str) -> Path:
        """Return the path of a file that this act alone writes."""
        return self.files / f"{len(self.seen)}-{name}"

    def rows(self, count: int = 13) -> tuple[Any, Any]:
        """Return inputs and targets of so many rows."""
        from tests.pipelines import models

        x, y = models.X[:count], models.Y[:count]
        return x, ({"p": y, "q": y[:, ::-1].copy()} if len(self.model.outputs) > 1 else y)

    def logs(self, logs: Any) -> list[Any]:
        """Return logs in the order of their names."""
        # stock Keras on TensorFlow weighs a smaller last batch as a whole one in the losses of outputs: `loss` says all
        several = len(self.model.outputs) > 1
        return [logs[name] for name in sorted(logs) if not (several and name.endswith("_loss") and name != "val_loss")]

    def fit(self, model: Any = None, **options: Any) -> list[Any]:
        """Train for an epoch of two batches, and return the logs."""
        x, y = self.rows()
        given = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
        return self.logs((model or self.model).fit(x, y, **given).history)


Act = Callable[[Life, random.Random], Any]


def _optimizers() -> dict[str, Callable[[], Any]]:
    from keras import optimizers

    sgd = optimizers.SGD
    return {
        "SGD": lambda: sgd(0.02),
        "momentum": lambda: sgd(0.03, momentum=0.9),
        "Adam": lambda: optimizers.Adam(0.01, epsilon=1e-2),
        "norm": lambda: sgd(0.02, global_clipnorm=0.3),
        "EMA": lambda: sgd(0.02, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
        "accumulates": lambda: sgd(0.02, gradient_accumulation_steps=2),
        "schedule": lambda: sgd(optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)),
        "scale": lambda: optimizers.LossScaleOptimizer(sgd(0.02), initial_scale=64.0, dynamic_growth_steps=2),
    }


def _largest(y_true: Any, y_pred: Any) -> Any:
    """A metric that is a function."""
    from keras import ops

    return ops.max(ops.abs(ops.subtract(y_true, y_pred)), axis=-1)


def _metrics(drawn: random.Random) -> list[Any]:
    from keras import metrics

    choices = ["mae", _largest, metrics.MeanSquaredError(name="own"), metrics.CosineSimilarity(name="cos")]
    return drawn.sample(choices, drawn.randrange(3))


def compile_again(life: Life, drawn: random.Random) -> Any:
    """Another loss, optimizer and metrics, another way to run."""
    import keras

    several = len(life.model.outputs) > 1
    losses = ["mse", "mae", keras.losses.Huber(0.7), keras.losses.MeanSquaredError(reduction="sum")]
    name = drawn.choice(list(_optimizers()))
    steps = drawn.choice([1, 1, 2])
    life.model.compile(
        _optimizers()[name](),
        {"p": drawn.choice(losses[:3]), "q": "mae"} if several else drawn.choice(losses),
        metrics={"q": _metrics(drawn)} if several else _metrics(drawn),
        weighted_metrics={"p": _metrics(drawn)} if several else _metrics(drawn),
        loss_weights={"p": 0.3, "q": 2.0} if several and drawn.random() < 0.5 else None,
        run_eagerly=drawn.random() < 0.2,
        jit_compile=drawn.choice(["auto", False]),
        # Keras's trainer of torch takes one at a time
        steps_per_execution=1 if keras.backend.backend() == "torch" else steps,
    )
    return name


def freeze(life: Life, drawn: random.Random) -> Any:
    """Other layers are trained, with the same optimizer's kind."""
    import keras

    layers = [layer for layer in life.model._flatten_layers(include_self=False) if layer.weights and not layer._layers]
    for layer in layers:
        layer.trainable = drawn.random() < 0.6
    layers[-1].trainable = True
    life.model.compile(keras.optimizers.SGD(0.02, momentum=drawn.choice([0.0, 0.9])), "mse")
    return len(life.model.trainable_variables)


def fit(life: Life, drawn: random.Random) -> Any:
    """Some epochs, with other sizes of batches and weights of rows."""
    x, y = life.rows()
    options: dict[str, Any] = {"batch_size": drawn.choice([5, 6, 8, 13, 32]), "epochs": drawn.choice([1, 2])}
    if drawn.random() < 0.4:
        options |= {"validation_data": (x[:7], {k: v[:7] for k, v in y.items()} if isinstance(y, dict) else y[:7])}
    if drawn.random() < 0.3 and not isinstance(y, dict):
        options["sample_weight"] = np.linspace(0.1, 2.0, len(x), dtype="float32")
    return life.fit(**options)


def evaluate(life: Life, drawn: random.Random) -> Any:
    """Evaluate and predict."""
    x, y = life.rows()
    logs = life.model.evaluate(x, y, batch_size=drawn.choice([4, 8, 13]), verbose=0, return_dict=True)
    return [life.logs(logs), life.model.predict(x, batch_size=drawn.choice([4, 8, 13]), verbose=0)]


def on_batches(life: Life, drawn: random.Random) -> Any:
    """Steps by hand."""
    seen: list[Any] = []
    for _ in range(3):
        x, y = life.rows(drawn.choice([5, 8, 13]))
        name = drawn.choice(["train_on_batch", "train_on_batch", "test_on_batch", "predict_on_batch"])
        if name == "predict_on_batch":
            seen.append(life.model.predict_on_batch(x))
        else:
            seen.append(life.logs(getattr(life.model, name)(x, y, return_dict=True)))
    if drawn.random() < 0.5:
        life.model.reset_metrics()
    return seen


def weights_of_a_file(life: Life, drawn: random.Random) -> Any:
    """Save, train on, load."""
    path = life.path("w.weights.h5")
    life.model.save_weights(path)
    seen = life.fit()
    life.model.load_weights(path)
    return [seen, life.fit() if drawn.random() < 0.5 else []]


def set_weights(life: Life, drawn: random.Random) -> Any:
    """Other weights, all at once or one by one."""
    factor = np.float32(drawn.choice([0.5, 0.9]))
    if drawn.random() < 0.5:
        _shrink(life.model, factor)
    else:
        chosen = drawn.choice(life.model.trainable_variables)
        chosen.assign(np.asarray(chosen) * factor)
    return []


def _shrink(model: Any, factor: float = 0.9) -> None:
    model.set_weights([value * value.dtype.type(factor) for value in model.get_weights()])


def learning_rate(life: Life, drawn: random.Random) -> Any:
    """Another learning rate, assigned in one of two ways."""
    import keras

    optimizer = getattr(life.model.optimizer, "inner_optimizer", life.model.optimizer)
    if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        return []
    rate = drawn.choice([0.0, 0.01, 0.08])
    if drawn.random() < 0.5:
        optimizer.learning_rate = rate
    else:
        optimizer.learning_rate.assign(rate)
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def state_of_optimizer(life: Life, drawn: random.Random) -> Any:
    """Look at slots, and change them."""
    optimizer = life.model.optimizer
    values = [np.asarray(variable) for variable in optimizer.variables]
    if drawn.random() < 0.5:
        for variable, value in zip(optimizer.variables, values, strict=True):
            if value.ndim:
                variable.assign(value * np.float32(0.5))
    return values


def clone(life: Life, drawn: random.Random) -> Any:
    """Go on with a clone, a copy, or what comes out of a file."""
    import keras

    way = drawn.choice(["clone", "deepcopy", "pickle", "file", "file without compile"])
    with life.scope() if drawn.random() < 0.7 else contextlib.nullcontext():
        if way == "clone":
            other = keras.models.clone_model(life.model)
            other.set_weights(life.model.get_weights())
        elif way == "deepcopy":
            other = copy.deepcopy(life.model)
        elif way == "pickle":
            other = pickle.loads(pickle.dumps(life.model))
        else:
            life.model.save(life.path("m.keras"))
            objects = {"_largest": _largest}
            other = keras.models.load_model(life.path("m.keras"), objects, compile=way == "file")
        if not other.compiled:
            other.compile(keras.optimizers.SGD(0.02), "mse")
        life.model = other
    return way


def callbacks(life: Life, drawn: random.Random) -> Any:
    """A callback that changes or looks at something."""
    import keras

    class Acts(keras.callbacks.Callback):
        def __init__(self, act: Callable[[Any], Any]):
            super().__init__()
            self.act, self.seen = act, []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen.append(self.act(self.model))

    x, y = life.rows()

    def halve(model: Any) -> None:
        model.trainable_variables[0].assign(model.trainable_variables[0] * 0.5)

    several = len(life.model.outputs) > 1
    choices: dict[str, Callable[[], Any]] = {
        "assigns": lambda: Acts(halve),
        "sets weights": lambda: Acts(_shrink),
        "evaluates": lambda: Acts(lambda model: model.evaluate(x, y, verbose=0)[0] if several else 0.0),
        "predicts": lambda: Acts(lambda model: model.predict(x, verbose=0)),
        "stops": lambda: Acts(lambda model: setattr(model, "stop_training", True)),
        "best": lambda: keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0, restore_best_weights=True),
        "plateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", 0.5, 0, min_delta=9.0),
        "backup": lambda: keras.callbacks.BackupAndRestore(life.path("backup")),
        "saves": lambda: keras.callbacks.ModelCheckpoint(life.path("c.weights.h5"), save_weights_only=True),
        "swaps": lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    }
    if life.model.optimizer.__class__.__name__ == "LossScaleOptimizer" or callable(life.model.optimizer._learning_rate):
        del choices["plateau"]
    if not getattr(life.model.optimizer, "use_ema", False):
        del choices["swaps"]
    name = drawn.choice(list(choices))
    callback = choices[name]()
    return [name, life.fit(epochs=3, callbacks=[callback]), getattr(callback, "seen", [])]


def broken_off(life: Life, drawn: random.Random) -> Any:
    """A callback raises in the middle of an epoch; then train on."""
    import keras

    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt if drawn.random() < 0.5 else RuntimeError("broken off")

    with contextlib.suppress(KeyboardInterrupt, RuntimeError):
        life.fit(callbacks=[Raises()])
    return life.fit()


def another_model(life: Life, drawn: random.Random) -> Any:
    """Train another model with the layers of this one, then this one again."""
    import keras

    start = keras.initializers.GlorotUniform(seed=3)
    with life.scope() if drawn.random() < 0.7 else contextlib.nullcontext():
        inner = drawn.choice([layer for layer in life.model.layers if layer.weights])
        head = keras.layers.Dense(2, kernel_initializer=start, name="head")
        other = keras.Model(life.model.inputs, head(keras.tree.flatten(inner._inbound_nodes[-1].output_tensors)[0]))
        other.compile(keras.optimizers.SGD(0.02), "mse")
    x, _ = life.rows()
    trains = drawn.random() < 0.6
    if not trains:
        return [other.predict(x, verbose=0), life.fit()]
    history = other.fit(x, np.ones((len(x), 2), "float32"), batch_size=8, shuffle=False, verbose=0).history
    return [history["loss"], life.fit(), other.predict(x, verbose=0)]


def elsewhere(life: Life, drawn: random.Random) -> Any:
    """Use the model under another distribution, then go on."""
    x, _ = life.rows()
    with life.scope("other"):
        seen = life.fit() if drawn.random() < 0.7 else [life.model.predict(x, verbose=0)]
    return [seen, life.fit()]


def generator(life: Life, drawn: random.Random) -> Any:
    """Batches of several sizes from a generator."""
    sizes = [drawn.choice([6, 8, 13, 13]) for _ in range(3)]

    def batches() -> Iterator[Any]:
        while True:
            yield from (life.rows(size) for size in sizes)

    history = life.model.fit(batches(), steps_per_epoch=3, epochs=2, verbose=0).history
    return history["loss"]


def adapters(life: Life, drawn: random.Random) -> Any:
    """LoRA on some layers."""
    import keras

    for layer in life.model._flatten_layers():
        if isinstance(layer, keras.layers.Dense) and not layer.lora_enabled and drawn.random() < 0.5:
            layer.enable_lora(2, a_initializer=keras.initializers.GlorotUniform(seed=9), b_initializer="ones")
    life.model.compile(keras.optimizers.SGD(0.02), "mse")
    return life.fit()


def checkpoint(life: Life, drawn: random.Random) -> Any:
    """A checkpoint of keras_flow, training on, and back."""
    import keras_flow as kf

    if life.distribution is None:
        return [life.fit()]
    path = life.path("checkpoint")
    kf.checkpoint.save(path, life.model)
    life.fit()
    kf.checkpoint.load(path, life.model)
    return [life.fit()]


ACTS: dict[str, Act] = {
    act.__name__: act
    for act in (
        compile_again,
        freeze,
        fit,
        evaluate,
        on_batches,
        weights_of_a_file,
        set_weights,
        learning_rate,
        state_of_optimizer,
        clone,
        callbacks,
        broken_off,
        another_model,
        elsewhere,
        generator,
        adapters,
        checkpoint,
    )
}
