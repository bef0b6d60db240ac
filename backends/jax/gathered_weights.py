"""Weights that are held split further than they are used (`zero=3`): gathered where a layer reads them.

Left to itself, XLA may compute with the split weight, and gather activations instead. So a step states the layout in
which a weight is used. The gathered weight is no residual that `jax.checkpoint` keeps, so that the backward pass
gathers it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from keras_flow.backends.hooking import hook
from keras_flow.backends.jax.layouts import engine_layout
from keras_flow.current.distribution import Distribution, active
from keras_flow.current.keras_places import get_global_attribute
from keras_flow.current.variable_layout import KerasLayout, keras_layout

if TYPE_CHECKING:
    import keras

#: by which a step knows what it gathered
_NAME = "keras_flow_gathered"


def read_in_step(variable: keras.Variable, value: object) -> KerasLayout | None:
    """Condition of the hook on what a variable gives when it is read: its layout, where a layer gathers it.

    Outside of layers an optimizer reads it, and computes with what ranks hold.
    """
    if not isinstance(value, Tracer) or get_global_attribute("current_call_ctx") is None:
        return None
    layout = keras_layout(variable)
    return layout if layout is not None and layout.given.used is not None else None


@hook(
    "keras.Variable",
    "_maybe_autocast",
    "zero=3: XLA would be free to split the products of a weight as it is held, and to gather activations",
    when=read_in_step,
)
def read(layout: KerasLayout, original: Callable[..., object], variable: keras.Variable, value: Any) -> object:
    """Hook on `Variable._maybe_autocast`, which a value passes when it is read: in the layout in which it is used."""
    assert layout.given.used is not None
    whole = jax.lax.with_sharding_constraint(value, engine_layout(layout.given.used))
    return original(variable, checkpoint_name(whole, _NAME))


def gathering_step(model: keras.Model, *args: object, **kwargs: object) -> Distribution | None:
    """Condition of the hook on `compute_loss_and_updates`: the distribution, where it gathers weights."""
    distribution = active()
    return distribution if distribution is not None and distribution.gathers_weights else None


@hook(
    "keras.Model",
    "compute_loss_and_updates",
    "zero=3: all gathered weights would be kept until the backward pass has used them",
    when=gathering_step,
)
def not_kept(
    _: Distribution, original: Callable[..., Any], model: keras.Model, *args: Any, training: bool = False, **kwargs: Any
) -> Any:
    """Hook on `compute_loss_and_updates`: what the forward pass gathered is not kept for the backward pass."""
    if not training:
        return original(model, *args, training=training, **kwargs)

    def computed(values: Any, others: Any) -> Any:
        return original(model, *values, training=True, **others)

    return jax.checkpoint(computed, policy=_keeps)(args, kwargs)


_keeps_others = jax.checkpoint_policies.save_anything_except_these_names(_NAME)


def _keeps(primitive: Any, *inputs: Any, **params: Any) -> Any:
    """Policy of `jax.checkpoint`: whether a result is kept; no complex one, since what is kept is rounded."""
    is_complex = primitive.name in ("complex", "fft") or any(
        jax.numpy.issubdtype(dtype, np.complexfloating)  # numpy's does not know the dtypes of keys
        for dtype in (params.get("new_dtype"), *(getattr(each, "dtype", None) for each in inputs))
        if dtype is not None
    )
    return not is_complex and _keeps_others(primitive, *inputs, **params)
