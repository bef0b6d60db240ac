"""A first step of `fit` that takes long is said, once: while an engine compiles, nothing else shows that it works."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import keras

from keras_flow.backends.active import backend
from keras_flow.backends.object_hooks import replaces

#: a first step that is over before this is not spoken of
AFTER_SECONDS = 30.0

#: speaks of the first step of the `fit` that runs, unless it is cancelled before
_timer: ContextVar[threading.Timer | None] = ContextVar("keras_flow_first_step", default=None)


@contextmanager
def watched(model: keras.Model) -> Iterator[None]:
    """Inside, `fit` runs: process 0 says it if the first step is not over after half a minute."""
    if backend().world().process_index != 0:
        yield
        return
    timer = threading.Timer(AFTER_SECONDS, _say, [model])
    timer.daemon = True
    timer.start()
    token = _timer.set(timer)
    try:
        yield
    finally:
        _timer.reset(token)
        timer.cancel()
        timer.join()


def _say(model: keras.Model) -> None:
    text = f"keras-flow: the first step of fit is not over after {AFTER_SECONDS:.0f} s. {_reason(model)}"
    print(text.rstrip(), file=sys.stderr, flush=True)


def _reason(model: keras.Model) -> str:
    """Why the first step takes longer than the next ones; empty where the engine has no reason."""
    engine = backend().capabilities
    refusing = [layer.name for layer in model._flatten_layers() if not layer.supports_jit]
    if not engine.long_without_jit or model.jit_compile or model.run_eagerly or not refusing:
        return engine.long_first_step
    return (
        f"{engine.long_without_jit}: Keras does not jit-compile a model with {', '.join(refusing[:3])}. Steps are "
        "faster if such layers are applied to the data (`dataset.map`) instead of in the model"
    )


def _awaited(*args: object, **kwargs: object) -> threading.Timer | None:
    """Condition of the hook: what waits for the end of the first step."""
    return _timer.get()


@replaces("keras.callbacks.CallbackList", "on_train_batch_end", when=_awaited)
def _step_is_over(
    timer: threading.Timer, original: Callable[..., object], callbacks: object, *args: object, **kwargs: object
) -> object:
    """Hook on `CallbackList.on_train_batch_end`: the first step is over."""
    timer.cancel()
    _timer.set(None)
    return original(callbacks, *args, **kwargs)
