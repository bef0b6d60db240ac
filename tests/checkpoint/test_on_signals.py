"""Signals while `fit` runs with a `Checkpoint`, and after it: in one process."""

from __future__ import annotations

import gc
import signal
import socket
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_flow as kf

pytestmark = pytest.mark.usefixtures("four_ranks")


def fitted(folder: Path, *more: keras.callbacks.Callback, signals: tuple[str, ...] = ("SIGTERM",)) -> None:
    with kf.DataParallel().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    checkpoint = kf.callbacks.Checkpoint(folder, save_on_signal=signals, resume=False)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=2, verbose=0, callbacks=[checkpoint, *more])


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def test_a_checkpoint_takes_the_signals_that_it_names_while_fit_runs(tmp_path: Path) -> None:
    before, seen = handlers(), []
    look = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(handlers()))
    for signals in (("SIGTERM",), ("SIGINT",), ()):
        fitted(tmp_path / str(len(seen)), look, signals=signals)
        assert handlers() == before
    changed = [[old is not new for old, new in zip(before, now, strict=True)] for now in seen[::2]]
    assert changed == [[True, False], [False, True], [False, False]]

    def stop(epoch: int, logs: object) -> None:
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        fitted(tmp_path / "broken off", keras.callbacks.LambdaCallback(on_epoch_begin=stop))
    gc.collect()
    assert handlers() == before


def test_a_signal_after_the_last_step_is_not_lost(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        late = keras.callbacks.LambdaCallback(on_train_end=lambda logs: signal.raise_signal(signal.SIGTERM))
        fitted(tmp_path, late)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_event_loop_goes_on_hearing_of_signals() -> None:
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)
    before = signal.set_wakeup_fd(pythons.fileno())
    try:
        point = kf.on_preemption(print)
        assert signal.set_wakeup_fd(pythons.fileno()) == pythons.fileno()
        point.close()
        assert signal.set_wakeup_fd(pythons.fileno()) == pythons.fileno()
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        pythons.close()


def test_a_signal_that_is_none_of_these() -> None:
    with pytest.raises(kf.FlowError, match="legal signals are SIGTERM and SIGINT, got SIGUSR1"):
        kf.on_preemption(print, signals=["SIGUSR1"])
