"""Checks that the state which a call assigns (moving statistics, seeds) is equal on all ranks.

Where each rank computes its own rows, the state is compared after the first steps of a model (`STEPS`). That finds a
layer which is wrongly believed to act row by row: what it assigns depends on the rows of its rank. Later steps need no
check, since a difference stays. Where one program computes for all ranks, as on JAX, processes may still have traced
different numbers into it: there the state is compared after a model's first `fit`.

State is never averaged over the ranks, but for BatchNormalization's under `batch_statistics="replica"`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from keras_flow import sbp
from keras_flow.backends.rendezvous import agreement
from keras_flow.current.variable_layout import keras_layout
from keras_flow.errors import FlowError
from keras_flow.units import numbered

if TYPE_CHECKING:
    import keras

#: steps of a model after which its state is compared
STEPS = 2


def assigned_by_calls(model: keras.Model) -> list[tuple[keras.Variable, keras.Layer]]:
    """The variables of a model that a step may assign beside its trained weights, each with its layer.

    Those of metrics are left out, which are summed over the ranks.
    """
    metrics = {id(variable) for variable in model.metrics_variables}
    found: list[tuple[keras.Variable, keras.Layer]] = []
    for layer in model._flatten_layers():
        of_layer = [*layer._non_trainable_variables, *filter(is_overwritten, layer._trainable_variables)]
        of_layer += [seeds.state for seeds in layer._seed_generators]
        # quantized kernels are large, and no call assigns them
        found += [(v, layer) for v in of_layer if id(v) not in metrics and v.dtype not in ("int8", "uint8")]
    return found


def _is_split(variable: keras.Variable) -> bool:
    placed = keras_layout(variable)
    return placed is None or any(isinstance(part, sbp.Split) for part in placed.layout.nd_sbp)


def _sum_of(value: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(value))  # type: ignore[arg-type]  # numpy's stubs tell buffers from 3.12 on


def is_overwritten(variable: object) -> bool:
    """Whether what a backward pass gives a variable is its next value and no gradient: float8's scales."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def compare(model: keras.Model, shards: Callable[[keras.Variable], Mapping[int, np.ndarray]]) -> None:
    """Check that the state which a step has assigned is equal on all ranks of all processes, which all call this.

    Args:
        model: its state is broadcast to all ranks.
        shards: gives the values of a variable by rank, for the ranks of this process; split ones are left out.

    Raises:
        FlowError: in all processes, naming the first variable, its layer and the ranks.
    """
    state = [(v, layer) for v, layer in assigned_by_calls(model) if not _is_split(v)]
    sums = [{rank: _sum_of(own) for rank, own in shards(v).items()} for v, _ in state]
    said = [sorted(set(each.values())) for each in sums]
    # equal facts mean equal numbers of values here: all processes go on, or none does
    if not agreement.differ({"state": zlib.crc32(repr(said).encode())}) and all(len(each) < 2 for each in said):
        return
    by_rank = [agreement.agree_on(each) for each in sums]
    off = [index for index, each in enumerate(by_rank) if len(set(each.values())) > 1]
    if off:
        raise FlowError(explained(*state[off[0]], by_rank[off[0]], len(off) - 1))


def explained(variable: keras.Variable, layer: keras.Layer, sums: Mapping[int, int], others: int) -> str:
    """The text of an error.

    Args:
        variable: the first that differs.
        layer: its layer.
        sums: rank -> a checksum of its value.
        others: how many other variables differ.
    """
    ranks: dict[int, list[int]] = {}
    for rank, total in sorted(sums.items()):
        ranks.setdefault(total, []).append(rank)
    groups = [numbered(each, most=8) for each in ranks.values()]
    parts = f"{len(groups)} values" if len(groups) > 4 else ", another on ".join(groups)
    more = f", and {others} more variables differ" if others else ""
    kind = type(layer).__name__
    begin = (
        f"layer {layer.name!r} ({kind}) assigned {variable.path!r} in a step, and the ranks hold different values of "
    )
    begin += f"it: one on {parts}{more}. "
    begin += (
        "If some ranks alone called the model or drew (`model(x)` under `if kf.env.is_main_process():`), let all ranks "
        "do so. "
    )
    if type(layer).__module__.startswith("keras."):
        return begin + (
            "Otherwise the layer was believed to act row by row, so each rank gave it its own rows, and the value "
            f"depends on all rows. Make it a layer of your own (`class Own(keras.layers.{kind}): pass`): keras_flow "
            "assumes nothing about your own classes, so every rank computes the layer from all rows (the consistent "
            "view)"
        )
    return begin + (
        "Otherwise every rank computed it from all rows, and the difference comes from elsewhere: numbers of numpy or "
        "of Python's random, the time, or the rank. Draw by keras.random, and give all ranks the same"
    )
