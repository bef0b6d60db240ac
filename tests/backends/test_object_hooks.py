"""Callbacks, and models that are built late: what is put on objects, and not on Keras's classes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.backends import object_hooks
from keras_flow.current.variable_layout import keras_layout
from tests.distributions import programs
from tests.launch import programs as started

pytestmark = pytest.mark.usefixtures("four_ranks")


class Plain(keras.callbacks.BackupAndRestore):
    """A callback of the user's."""

    def on_train_end(self, logs: Any = None) -> None:
        self.ended = True
        super().on_train_end(logs)


def _model() -> keras.Model:
    with kf.DataParallel(programs.DATA).scope():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def test_a_subclass_stays_before_what_keras_flow_puts_before_the_class_of_keras(tmp_path: Path) -> None:
    callbacks = [Plain(tmp_path / "a"), keras.callbacks.BackupAndRestore(tmp_path / "b"), keras.callbacks.Callback()]
    model = _model()
    for _ in range(2):  # a callback may be given to several loops
        keras.callbacks.CallbackList(callbacks, model=model)
    kind = keras.callbacks.BackupAndRestore
    part = object_hooks._parts[kind]
    assert type(callbacks[0]).__mro__[1:4] == (Plain, part, kind)
    assert [type(each) for each in callbacks[1:]] == [part, keras.callbacks.Callback]
    assert [type(each).__name__ for each in callbacks] == ["Plain", "BackupAndRestore", "Callback"]


def test_copies_and_pickles_are_of_the_class_that_it_was(tmp_path: Path) -> None:
    for kind in (Plain, keras.callbacks.BackupAndRestore):
        callback = kind(tmp_path / "a")
        keras.callbacks.CallbackList([callback], model=_model())
        callback.set_model(None)
        assert type(callback) is not kind
        for other in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
            assert type(other) is kind
            assert other.backup_dir == tmp_path / "a"
        assert type(callback) is not kind


def test_a_list_is_freed_as_soon_as_nobody_has_it() -> None:
    """What `fit` leaves to do after an error (`weakref.finalize`) does not wait for a collection."""
    gc.disable()
    try:
        callbacks = keras.callbacks.CallbackList([], model=_model())
        known = weakref.ref(callbacks)
        del callbacks
        assert known() is None
    finally:
        gc.enable()


def test_a_build_of_ones_own_enters_the_scope_of_its_making() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def build(self, shape: Any) -> None:
            self.inner.build(shape)

        def call(self, x: Any) -> Any:
            return self.inner(x)

    with kf.DataParallel(programs.DATA).scope():
        models = [Own(), keras.Sequential([keras.layers.Dense(1)])]
    for model in models:
        model.build((None, 2))
        assert all(keras_layout(variable) is not None for variable in model.variables)
        assert model(np.ones((4, 2), "float32")).shape == (4, 1)


_LOADED = """
import sys, numpy as np, keras, keras_flow as kf
kf.init(2)
if sys.argv[2] == "first":
    kf.callbacks.Checkpoint
def fit():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    saves = kf.callbacks.Checkpoint(sys.argv[1], save_on_signal=())
    return model.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=2, callbacks=[saves], verbose=0)
if sys.argv[2] == "without a distribution":
    print(fit().epoch)
else:
    with kf.DataParallel().scope():
        print(fit().epoch)
"""


@pytest.mark.parametrize("order", ["last", "first", "without a distribution"])
def test_a_module_may_be_loaded_before_a_distribution_is_made_or_after_it(order: str, tmp_path: Path) -> None:
    """That of Checkpoint is loaded where it is asked for; its methods are none that versions are compared by."""
    process = started.start(["-c", _LOADED, str(tmp_path), order], "jax")
    code, out, err = started.finish(process, 120)
    assert code == 0, err
    assert out.split("\n")[0] == "[0, 1]"
