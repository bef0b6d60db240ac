"""Models whose rows may interact, which a replica that sees its own rows only cannot compute."""

from __future__ import annotations

import keras
from keras.src import tree

from keras_flow.errors import FlowError

_INSTEAD = "use the default strategy (kf.DataParallel() without strategy), which computes the logical batch as one"
#: operations of a functional model that work row by row, whatever their arguments
_ROW_WISE = (
    "Add",
    "Subtract",
    "Multiply",
    "Divide",
    "Negative",
    "Relu",
    "Sigmoid",
    "Tanh",
    "Silu",
    "Gelu",
    "Exp",
    "Log",
)


def refuse_what_mixes_rows(model: keras.Model) -> None:
    """Raise for a model whose rows may interact: a replica sees its own rows only.

    Raises:
        FlowError: a layer, operation, loss, metric or step that is not Keras's own or works along the rows.
    """
    if type(model).train_step is not keras.Model.train_step or type(model).test_step is not keras.Model.test_step:
        raise FlowError(f'strategy="mirrored": model {model.name!r} has its own train_step or test_step; {_INSTEAD}')
    for layer in model._flatten_layers():
        own = not type(layer).__module__.startswith("keras.")
        along_rows = getattr(layer, "axis", None) == 0 or getattr(layer, "axes", None) == 0
        own |= isinstance(layer, keras.layers.Lambda)
        if own or along_rows or getattr(layer, "stateful", False):
            raise FlowError(
                f'strategy="mirrored": rows may interact in layer {layer.name!r} ({type(layer).__name__}), and a '
                f"replica sees its own rows only; {_INSTEAD}"
            )
        for operation in getattr(layer, "operations", ()):
            if not isinstance(operation, keras.Layer) and type(operation).__name__ not in _ROW_WISE:
                raise FlowError(
                    f'strategy="mirrored": rows may interact in operation {type(operation).__name__} of model '
                    f"{model.name!r}, and a replica sees its own rows only; {_INSTEAD}"
                )
    parts = (getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None))
    asked = [
        getattr(part, name, None) for part in parts for name in ("_user_loss", "_user_metrics") if part is not None
    ]
    for function in tree.flatten(asked):
        function = getattr(function, "fn", None) or getattr(function, "_fn", None) or function
        module = getattr(function, "__module__", None) or type(function).__module__
        if function is not None and not isinstance(function, str) and not module.startswith("keras."):
            name = getattr(function, "__name__", type(function).__name__)
            raise FlowError(f'strategy="mirrored": rows may interact in the loss or metric {name!r}; {_INSTEAD}')
