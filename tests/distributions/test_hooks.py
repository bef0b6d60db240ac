"""Hooks are data; and the program that JAX compiles for an uneven batch stays parallel."""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.backends import fingerprints, hooking, keras_hooks
from keras_flow.backends.active import backend
from keras_flow.backends.jax import data
from keras_flow.current import keras_places
from keras_flow.current.distribution import Distribution, active
from tests import sampling
from tests.distributions import programs
from tests.hooks import wrapped

HOOKS = [*keras_hooks.hooks(), *backend().hooks()]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_each_names_a_target_and_says_why(hook: hooking.Hook) -> None:
    owner, attribute = hooking.owner_of(hook)
    assert callable(getattr(owner, attribute))
    assert hook.replacement.__module__.startswith("keras_flow.backends")
    for other in hook.also:
        module, _, name = other.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_rows_of_a_batch_are_those_that_keras_makes() -> None:
    x = np.zeros((30, 2))
    for method, given, rows in (
        (keras.Model.fit, {"x": x, "batch_size": 7, "steps_per_epoch": 4}, 7),
        (keras.Model.fit, {"x": x, "steps_per_epoch": 4}, 8),
        (keras.Model.evaluate, {"x": {"a": x, "b": x}, "steps": 4}, 8),
        (keras.Model.predict, {"x": [x, x]}, 32),
        (keras.Model.fit, {"x": iter([x]), "steps_per_epoch": 4}, None),
        (keras.Model.train_on_batch, {"x": x}, None),
    ):
        assert keras_hooks._batch_size(method, given) == rows, given


def test_installed_once() -> None:
    kf.DataParallel(programs.DATA)
    kf.DataParallel(programs.DATA)
    for hook in HOOKS:
        # by name: a function that is made anew for each distribution would be another one
        keys = [(one.module, one.name, one.replacement.__qualname__) for one in wrapped(hook)]
        assert (hook.module, hook.name) in [key[:2] for key in keys]
        assert len(set(keys)) == len(keys)


def test_a_remembered_distribution_is_entered_before_an_engine_is_asked() -> None:
    kf.DataParallel(programs.DATA)  # which installs hooks
    hook = next(hook for hook in backend().hooks() if hook.name == "predict_on_batch")
    assert [one.replacement.__name__ for one in wrapped(hook)] == ["_entry", "on_batch"]


def test_a_missing_target_is_an_error_that_names_it() -> None:
    hook = hooking.Hook("keras.Model", "no_such", lambda original: None, "for this test")
    with pytest.raises(kf.FlowError, match=r"keras_flow needs keras\.Model\.no_such, which keras 3"):
        hooking.install_one(hook)


@pytest.mark.parametrize("cls", [keras.Model, keras.Layer, keras.Optimizer], ids=lambda cls: cls.__name__)
def test_what_a_program_put_over_methods_of_keras_moves_no_place(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that counts calls of `keras.Model.fit` does so before the first distribution is made."""
    here = [hook for hook in HOOKS if hook.module.startswith("keras")]
    places = {name: keras_places.find(name) for name in keras_places._PLACES if ":torch_" not in name}
    originals = [fingerprints.original_of(hook) for hook in here]
    for name in dir(cls):
        method = getattr(cls, name)
        if not name.startswith("_") and inspect.isfunction(method) and name not in vars(cls):
            monkeypatch.setattr(cls, name, _counted(method))
    assert {name: keras_places.find(name) for name in places} == places
    assert [fingerprints.original_of(hook) for hook in here] == originals


def _counted(method: Callable[..., object]) -> Callable[..., object]:
    def counted(*args: object, **kwargs: object) -> object:
        return method(*args, **kwargs)

    return counted


def _own_frames(error: BaseException) -> list[str]:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return [Path(file).name for file in files if "keras_flow/" in file or "/backends/" in file]


@pytest.mark.parametrize("pattern", ["kernel", "kernle"], ids=["wrong shape", "wrong rule"])
def test_no_frame_of_ours_stands_in_a_traceback(pattern: str) -> None:
    """As Keras leaves its own frames out: the user's line, then what Keras or the engine says."""
    columns, expected = (12, ValueError) if pattern == "kernel" else (16, kf.LayoutError)
    with kf.ModelParallel(programs.HYBRID, rules={pattern: {"model": kf.sbp.split(0)}}).scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x, y = np.zeros((64, columns), "float32"), np.zeros((64, 2), "float32")
    with pytest.raises(expected) as found:
        model.fit(x, y, verbose=0)
    assert _own_frames(found.value) == []
    assert found.value.__cause__ is None
    keras.config.disable_traceback_filtering()
    try:
        with pytest.raises(expected) as found:
            model.fit(x, y, verbose=0)
    finally:
        keras.config.enable_traceback_filtering()
    assert len(_own_frames(found.value)) > 3


def compiled_step(count: int, distribution: kf.DataParallel | kf.ModelParallel, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text of the compiled training step for a batch of `count` rows, as stock fit makes it."""
    texts: list[str] = []
    original = jax.jit

    def spy(function: object, **options: object) -> object:
        jitted = original(function, **options)  # type: ignore[call-overload]

        def call(*args: object) -> object:
            texts.append(jitted.lower(*args).compile().as_text())
            return jitted(*args)

        return call

    with distribution.scope():
        model = programs.build(96, extra=[keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)])
        trainer = keras_places.find("keras:trainer")
        hooked = trainer.jit
        monkeypatch.setattr(trainer, "jit", lambda function, **options: hooked_with(spy, hooked, function, options))
        model.fit(*programs.rows(count), batch_size=count, verbose=0)
    return texts[0]


def hooked_with(spy: object, hooked: object, function: object, options: dict) -> object:
    """keras_flow's hook under a distribution around `spy`, in the place of Keras's own jit."""
    around: Any = hooked
    while not isinstance(around.keras_flow_hook.when(function, **options), Distribution):
        around = around.__wrapped__
    return around.keras_flow_hook.replacement(active(), spy, function, **options)


@pytest.mark.parametrize("count", [13, 16])
def test_an_uneven_batch_stays_parallel(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows per device are ceil(n / r), and no row of the batch is gathered."""
    text = compiled_step(count, kf.DataParallel(programs.DATA), monkeypatch)
    per_device = -(-count // 4)
    assert f"f32[{per_device},96]" in text
    assert f"f32[{per_device},8]" in text
    assert not re.findall(rf"f32\[(?:{count}|{4 * per_device}),(?:96|8|4)\]", text), "whole batches"
    found = {kind: len(re.findall(rf" {kind}\(", text)) for kind in ("all-reduce", "all-gather", "all-to-all")}
    assert found["all-reduce"] > 0
    assert found["all-gather"] == found["all-to-all"] == 0


@sampling.one_in(2)
def test_uneven_batches_give_the_numbers_of_one_device() -> None:
    """Statistics of BatchNormalization and dropout masks included; 45 rows in batches of 13 over 4 ranks."""

    def run() -> tuple[list[float], np.ndarray, keras.Model]:
        keras.utils.set_random_seed(7)
        model = programs.build(extra=[keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)])
        losses = programs.fit(model, 45, batch_size=13, validation_split=0.1)
        return losses, model.predict(programs.rows(45)[0], batch_size=13, verbose=0), model

    single, predicted, reference = run()
    for distribution in (kf.DataParallel(programs.DATA), programs.hybrid()):
        keras.utils.clear_session()
        with distribution.scope():
            losses, found, model = run()
        assert losses == pytest.approx(single, rel=1e-5)
        np.testing.assert_allclose(found, predicted, rtol=1e-4, atol=1e-5)
        programs.same(model, reference)


def test_the_next_batch_is_transferred_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On accelerators, as Keras does without a distribution; the same numbers."""
    x, y = np.random.default_rng(0).standard_normal((2, 24, 4)).astype("float32")
    sent, at_steps = [], []
    put = data._put

    def counted(host: np.ndarray, sharding: object, padded_rows: int) -> object:
        sent.append(host.shape)
        return put(host, sharding, padded_rows)

    monkeypatch.setattr(data, "_put", counted)

    def losses() -> list[float]:
        sent.clear()
        at_steps.clear()
        with kf.DataParallel().scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
            model.compile("sgd", "mse")
            # the model is built from a first batch, and the loop begins anew; a step takes its batch as it begins
            seen = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: at_steps.append(len(sent)))
            return model.fit(x, y, 8, shuffle=False, verbose=0, callbacks=[seen]).history["loss"]

    wanted = losses()
    # x and y of one batch each
    assert at_steps == [2, 4, 6]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_allclose(losses(), wanted, rtol=1e-6)
    assert at_steps == [4, 8, 10]


@pytest.mark.parametrize("module", ["utils", "backend"])
def test_a_scope_holds_when_the_session_is_cleared(module: str) -> None:
    inner, outer = kf.DataParallel(programs.DATA), programs.hybrid()
    with outer.scope():
        with inner.scope():
            getattr(keras, module).clear_session()
            assert keras.distribution.distribution() is inner
        assert keras.distribution.distribution() is outer
    assert keras.distribution.distribution() is None


def test_a_scope_whose_distribution_was_taken_away_says_so() -> None:
    clear_session = keras.utils.clear_session.__wrapped__  # type: ignore[attr-defined]  # imported before the hooks
    for take_away in (clear_session, lambda: keras.distribution.set_distribution(None)):
        with (
            pytest.warns(kf.FlowWarning, match="taken away inside its scope.*set_distribution.*clear_session"),
            kf.DataParallel(programs.DATA).scope(),
        ):
            take_away()


def test_a_distribution_that_was_set_is_cleared_with_the_session_and_a_line() -> None:
    keras.distribution.set_distribution(kf.DataParallel(programs.DATA))
    with pytest.warns(kf.FlowWarning, match=r"has cleared the distribution that keras.distribution.set_distribution"):
        keras.utils.clear_session()
    assert keras.distribution.distribution() is None


class _StopSearch(Exception):
    """A program's own."""


@pytest.mark.parametrize("kind", [_StopSearch, RuntimeError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("is_cause", [False, True])
def test_what_a_callback_raises_of_our_error_stays_what_it_is(kind: type[BaseException], is_cause: bool) -> None:
    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            try:
                raise kf.FlowError("ours")
            except kf.FlowError as error:
                if is_cause:
                    raise kind("stop") from error
                raise kind("stop")  # noqa: B904

    with kf.DataParallel(programs.DATA).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        with pytest.raises(kind, match="stop"):
            model.fit(np.ones((8, 3)), np.ones((8, 2)), callbacks=[Stops()], verbose=0)


def test_targets_that_the_loss_does_not_take_are_named() -> None:
    with kf.DataParallel(programs.DATA).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    with pytest.raises(kf.FlowError, match=r"fit was given targets .* y has the shape \(8, 2\), the model's"):
        model.fit(np.ones((8, 4), "float32"), np.ones((8, 2), "float32"), verbose=0)


def test_what_keras_makes_of_our_error_is_ours() -> None:
    class Picky(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            raise kf.FlowError("ours")

    with kf.DataParallel(programs.DATA).scope():
        model = keras.Sequential([Picky()])
        model.compile("sgd", "mse")
        with pytest.raises(kf.FlowError, match="ours"):
            model.fit(np.ones((8, 3)), np.ones((8, 3)), verbose=0)
