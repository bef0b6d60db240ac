"""Paths of layers in compiled programs, where XLA's profiler and `kf.trace` find them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import jax

from keras_flow.current.recorded_calls import Recorder, recorded_by, recorder_of

if TYPE_CHECKING:
    import keras

_SCOPE = re.compile(r"layer\[([^\]]+)\]")


@contextmanager
def named() -> Iterator[None]:
    """Inside, what layers trace is named after them.

    Names are metadata of a program: what it computes is the same, and so is its key in JAX's cache of compilations.
    """
    with recorded_by(_Scopes(recorder_of(object()))):
        yield


class _Scopes:
    """Names what a layer traces; calls go on to the recorder that was there before."""

    root: object = None

    def __init__(self, outer: Recorder | None) -> None:
        self._outer = outer

    def note(self, original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object) -> object:
        """Hook on `Layer.__call__` while a step is traced: a scope of the layer's path around its operations."""
        with jax.named_scope(f"layer[{layer.path or layer.name}]"):
            if self._outer is None or self._outer.root is layer:
                return original(layer, *args, **kwargs)
            return self._outer.note(original, layer, *args, **kwargs)


def layers_of(name: str) -> tuple[str, ...]:
    """The layers in an instruction's name: the innermost, or those of all parts where XLA has joined instructions.

    Example:
        >>> layers_of("jit(step)/transpose(jvp(layer[model]))/layer[model/up]/dot_general")
        ('model/up',)
        >>> layers_of("jit(step)/(jvp(layer[model/a])/add:jvp(layer[model/b])/add:reduce_sum)")
        ('model/a', 'model/b')
    """
    innermost = [found[-1] for part in name.split(":") if (found := _SCOPE.findall(part))]
    return tuple(dict.fromkeys(innermost))
