"""Checkpoints that any layout, engine and number of ranks can read; `kf.checkpoint`.

`save` and `load` are for models; `kf.callbacks.Checkpoint` calls them in `fit`. `load_weights` reads pretrained
weights, `export` and `import_` have to do with other programs. `inspect`, `verify` and `read_tensor` need no engine.
The format is described in docs/checkpoint-format.md.

    >>> import tempfile
    >>> inspect(tempfile.mkdtemp())  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    keras_flow.errors.FlowError: ... holds no checkpoint
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from keras_flow.checkpoint.looking import inspect as inspect
from keras_flow.checkpoint.looking import read_tensor as read_tensor
from keras_flow.checkpoint.looking import verify as verify
from keras_flow.checkpoint.manifest import Manifest as Manifest

if TYPE_CHECKING:
    from keras_flow.checkpoint.exporting import export as export
    from keras_flow.checkpoint.exporting import import_ as import_
    from keras_flow.checkpoint.loading import Loaded as Loaded
    from keras_flow.checkpoint.loading import load as load
    from keras_flow.checkpoint.saving import Saved as Saved
    from keras_flow.checkpoint.saving import save as save
    from keras_flow.checkpoint.weights import load_weights as load_weights

#: names that load Keras and its engine -> their modules
_LOADED = {
    **dict.fromkeys(("load", "Loaded"), "loading"),
    **dict.fromkeys(("save", "Saved"), "saving"),
    **dict.fromkeys(("export", "import_"), "exporting"),
    "load_weights": "weights",
}

__all__ = ["Manifest", "inspect", "read_tensor", "verify", *_LOADED]


def __getattr__(name: str) -> object:
    if name not in _LOADED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(_import_module(f"{__name__}.{_LOADED[name]}"), name)
    return value
