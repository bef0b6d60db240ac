"""Doors of `keras.callbacks`: each in a `fit` of three epochs with validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tests.doors.cases.registry import door, weights
from tests.doors.stage import Stage

c = keras.callbacks


def _fit(s: Stage, *callbacks: Any, model: Any = None) -> Any:
    model = model or s.model
    history = model.fit(
        s.x, s.y, batch_size=len(s.x), epochs=3, validation_data=(s.x, s.y), verbose=0, callbacks=list(callbacks)
    )
    return sorted(history.history.items()), weights(model)


def _plain(name: str, make: Callable[[Stage], Any]) -> None:
    """A callback that is made where the model is made, and whose `fit` says all."""

    @door(f"callbacks.{name}", make=lambda s: {"callback": make(s)})
    def case(s: Stage) -> Any:
        return _fit(s, s.extra["callback"])


_plain("EarlyStopping", lambda s: c.EarlyStopping("loss", min_delta=10.0, patience=0, restore_best_weights=True))
_plain("ReduceLROnPlateau", lambda s: c.ReduceLROnPlateau("loss", patience=0, min_delta=10.0))
_plain("LearningRateScheduler", lambda s: c.LearningRateScheduler(lambda epoch, rate: rate * 0.5))
_plain("TerminateOnNaN", lambda s: c.TerminateOnNaN())
_plain("History", lambda s: c.History())
_plain("ProgbarLogger", lambda s: c.ProgbarLogger())


class _Looks(c.Callback):
    """What callbacks of users do: look at weights, predict, evaluate, change weights and the learning rate."""

    def __init__(self, x: Any, y: Any):
        super().__init__()
        self.x, self.y = x, y
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.seen.append(float(logs["loss"]))  # type: ignore[index]

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        model = self.model
        self.seen += [np.abs(value).sum() for value in model.get_weights()]
        self.seen.append(model.predict(self.x, verbose=0))
        self.seen += model.evaluate(self.x, self.y, verbose=0)
        model.get_layer("h").set_weights([value * 0.9 for value in model.get_layer("h").get_weights()])
        model.optimizer.learning_rate = 0.5 * float(model.optimizer.learning_rate)


@door("callbacks.Callback", make=lambda s: {"callback": _Looks(s.x, s.y)})
def looks(s: Stage) -> Any:
    return _fit(s, s.extra["callback"]), s.extra["callback"].seen


@door("callbacks.LambdaCallback", "callbacks.CallbackList")
def own_list(s: Stage) -> Any:
    seen: list[float] = []
    callback = c.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(float(logs["val_loss"])))
    s.model.fit(
        s.x,
        s.y,
        batch_size=len(s.x),
        epochs=2,
        verbose=0,
        validation_data=(s.x, s.y),
        callbacks=c.CallbackList([callback], model=s.model, add_history=True),
    )
    return seen, weights(s.model)


@door("callbacks.ModelCheckpoint")
def model_checkpoint(s: Stage) -> Any:
    best = c.ModelCheckpoint(s.folder / "best.keras", monitor="val_loss", save_best_only=True)
    every = c.ModelCheckpoint(s.folder / "{epoch}.weights.h5", save_weights_only=True)
    trained = _fit(s, best, every)
    again = s.again()
    again.load_weights(s.folder / "2.weights.h5")
    best_model = keras.models.load_model(s.folder / "best.keras")
    return trained, again.get_weights(), best_model.predict(s.x, verbose=0)


@door("callbacks.OrbaxCheckpoint")
def orbax(s: Stage) -> Any:
    callback = c.OrbaxCheckpoint(str(s.folder / "orbax"), max_to_keep=2)
    trained = _fit(s, callback)
    callback.wait_until_finished()
    again = s.again()
    again.load_weights(str(s.folder / "orbax"))  # Keras's `load_model` of it draws new weights on one device, too
    return trained, sorted(path.name for path in (s.folder / "orbax").iterdir()), again.predict(s.x, verbose=0)


@door("callbacks.BackupAndRestore")
def backup(s: Stage) -> Any:
    class Stop(c.Callback):
        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            if epoch == 1:
                raise RuntimeError("as if the job were killed")

    try:
        _fit(s, c.BackupAndRestore(s.folder / "backup"), Stop())
    except RuntimeError as error:
        assert "as if" in str(error)
    again = s.again()
    return _fit(s, c.BackupAndRestore(s.folder / "backup"), model=again)


@door("callbacks.CSVLogger")
def csv(s: Stage) -> Any:
    _fit(s, c.CSVLogger(s.folder / "log.csv"))
    header, *rows = (s.folder / "log.csv").read_text().splitlines()
    return header, [[float(value) for value in row.split(",")] for row in rows]


@door("callbacks.TensorBoard")
def tensorboard(s: Stage) -> Any:
    trained = _fit(s, c.TensorBoard(s.folder / "tb", histogram_freq=1, write_graph=False))
    return trained, any((s.folder / "tb").rglob("events*"))


@door("callbacks.SwapEMAWeights")
def swap_ema(s: Stage) -> Any:
    s.model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), "mse")
    return _fit(s, c.SwapEMAWeights(swap_on_epoch=True))
