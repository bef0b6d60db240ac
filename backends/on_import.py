"""`keras.distribution` is made whole as soon as both Keras and keras_flow are imported, in either order.

A program may ask `keras.distribution.list_devices()` before it asks anything of keras_flow, and under
`keras-flow launch` keras_flow is imported before the program's first line.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from keras_flow.errors import FlowError


def arrange() -> None:
    """Make `keras.distribution` whole, now or when Keras has been imported; a second call does nothing more."""
    if "keras" not in sys.modules:
        if not any(isinstance(finder, _AfterKeras) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterKeras())
    elif hasattr(sys.modules["keras"], "distribution"):  # else its import is under way
        _install()


def _install() -> None:
    name = "keras_flow.backends.keras_distribution"
    places, distribution = "keras_flow.current.keras_places", "keras_flow.current.distribution"
    hooking = "keras_flow.backends.hooking"
    for file, last in ((name, "install"), (places, "private"), (distribution, "active"), (hooking, "install_each")):
        if file in sys.modules and not hasattr(sys.modules[file], last):
            return  # this file of ours imports Keras right now, for a public name that calls `arrange` in the end
    # a version of Keras that does not fit is told by the first distribution, and not by `import keras`
    with contextlib.suppress(FlowError):
        importlib.import_module(name).install()
        ranks = importlib.import_module("keras_flow.backends.active").ranks_of_job()  # it is loaded by now
        if ranks > 1:  # hooks cost what their checks import, which other programs need not pay
            importlib.import_module("keras_flow.backends.undistributed").install()


class _AfterKeras:
    """A finder of modules that finds nothing itself, and waits for `import keras` to end."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of Keras as the other finders have it, with a loader that calls `_install` afterwards."""
        if name != "keras":
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                # only now: who asks for the spec alone does not import Keras
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)  # type: ignore[arg-type]
                _install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
