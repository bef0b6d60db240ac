"""Models under `zero=` and on one device: of all kinds of layers (tied, frozen, uneven), and a transformer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends.active import backend
from keras_flow.current.distribution import as_under
from keras_flow.current.variable_layout import keras_layout

ROWS, STEPS, LENGTH = 12, 4, 8
OPTIMIZERS: Mapping[str, Callable[[], keras.optimizers.Optimizer]] = {
    "plain": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov and weight decay": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW, amsgrad": lambda: keras.optimizers.AdamW(0.01, amsgrad=True),
    "averages": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=2),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipvalue=0.005),
    "accumulated": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "accumulated, Adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 64.0),
    # these need whole tensors
    "Lamb": lambda: keras.optimizers.Lamb(0.01),
    "Muon": lambda: keras.optimizers.Muon(0.01, exclude_layers=["table"]),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.05),
}
LAYOUTS = tuple(f"{mesh}z{stage}" for mesh in ("dp2", "dp3", "dp2x2", "2x2", "4x1") for stage in (1, 2, 3))
MIXED, TRANSFORMER = "mixed", "transformer"
#: model -> pattern -> the dim that a rule splits
RULES: Mapping[str, Mapping[str, int]] = {
    MIXED: {"up/kernel": 1, "odd/kernel": 0, "table/": 1},
    TRANSFORMER: {
        "attention./(query|key|value)/kernel": 1,
        "attention./attention_output/kernel": 0,
        "up./kernel": 1,
        "down./kernel": 0,
        "logits/": -1,
    },
}


def distribution(layout: str, kind: str = MIXED) -> kf.DataParallel | kf.ModelParallel:
    """dpN, dpAxB (both axes split the batch) or AxB (the second splits weights), and the stage of `zero=`.

    dpAxBzNi splits over the inner axis of the two alone.
    """
    mesh, _, stage = layout.removeprefix("dp").partition("z")
    inner = {"zero_axes": "model"} if stage.endswith("i") else {}
    stage = stage.removesuffix("i")
    sizes = [int(size) for size in mesh.split("x")]
    placement = kf.Placement(np.arange(np.prod(sizes)).reshape(sizes), ("data", "model")[: len(sizes)])
    if layout.startswith("dp"):
        return kf.DataParallel(placement, zero=int(stage), zero_min_size=1, **inner)
    rules = {pattern: {"model": kf.sbp.split(dim)} for pattern, dim in RULES[kind].items()}
    return kf.ModelParallel(placement, rules=rules, zero=int(stage), zero_min_size=1)


def mixed(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    layers = keras.layers
    keras.utils.set_random_seed(3)
    numbers, words = keras.Input((12,)), keras.Input((3,), dtype="int32")
    x = layers.Dense(16, activation="tanh", name="up")(numbers)
    x = layers.Dense(7, activation="tanh", kernel_constraint="max_norm", name="odd")(x)
    tied = layers.Dense(7, activation="tanh", name="tied")
    x = layers.Concatenate()([tied(tied(x)), layers.Flatten()(layers.Embedding(30, 16, name="table")(words))])
    x = layers.LayerNormalization(name="norm")(layers.Dense(8, trainable=False, name="frozen")(x))
    result = keras.Model([numbers, words], layers.Dense(4, name="out")(x))
    result.compile(optimizer, "mse")
    return result


def transformer(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    layers = keras.layers
    keras.utils.set_random_seed(3)
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(30, 16, name="words")(words)
    x = x + layers.Embedding(LENGTH, 16, name="places")(words * 0 + keras.ops.arange(LENGTH, dtype="int32"))
    for block in range(2):
        seen = layers.LayerNormalization(name=f"before{block}")(x)
        x = x + layers.MultiHeadAttention(4, 4, name=f"attention{block}")(seen, seen, use_causal_mask=True)
        seen = layers.LayerNormalization(name=f"between{block}")(x)
        x = x + layers.Dense(16, name=f"down{block}")(layers.Dense(32, activation="gelu", name=f"up{block}")(seen))
    x = layers.LayerNormalization(name="last")(x)
    result = keras.Model(words, layers.Dense(30, name="logits")(x))
    result.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return result


def _data(kind: str, rows: int) -> tuple[object, np.ndarray]:
    random = np.random.default_rng(0)
    if kind == TRANSFORMER:
        tokens = random.integers(0, 30, (rows, LENGTH + 1)).astype("int32")
        return tokens[:, :-1], tokens[:, 1:]
    x = [random.normal(size=(rows, 12)).astype("float32"), random.integers(0, 30, (rows, 3)).astype("int32")]
    return x, random.normal(size=(rows, 4)).astype("float32")


def trained(
    optimizer: str, scale: float = 1.0, kind: str = MIXED, rows: int = ROWS
) -> tuple[keras.Model, list[np.ndarray]]:
    """The model, and how its weights have changed."""
    x, y = _data(kind, 2 * rows)
    found = {MIXED: mixed, TRANSFORMER: transformer}[kind](OPTIMIZERS[optimizer]())
    if scale != 1.0:
        found.optimizer.learning_rate = 0.1 * scale
    before = [value.copy() for value in found.get_weights()]
    found.fit(x, y, batch_size=rows, epochs=STEPS // 2, shuffle=False, verbose=0)
    return found, [after - was for after, was in zip(found.get_weights(), before, strict=True)]


def deviations(optimizer: str, layout: str, scale: float = 1.0, kind: str = MIXED, rows: int = ROWS) -> dict:
    """On every rank: how far updates and slots are from those of one device, relative to the largest element.

    Args:
        scale: what updates are multiplied by under the distribution, as a seeded fault.
        kind: which model.
        rows: of a batch.
    """
    keras.utils.clear_session()  # before the scope: it clears the current distribution too
    with as_under(kf.DataParallel(kf.Placement([0]))):
        alone, expected = trained(optimizer, 1.0, kind, rows)
        slots = [np.asarray(slot) for slot in alone.optimizer.variables]
    keras.utils.clear_session()
    with distribution(layout, kind).scope():
        found, updates = trained(optimizer, scale, kind, rows)
        largest = max(np.abs(update).max() for update in expected)
        relative = {
            variable.path: float(np.abs(a - b).max() / max(np.abs(b).max(), largest / 100))
            for variable, a, b in zip(found.weights, updates, expected, strict=True)
        }
        of_slots = [
            float(np.abs(np.asarray(slot).astype("float64") - b).max() / max(np.abs(b).max(), 1e-3))
            for slot, b in zip(found.optimizer.variables, slots, strict=True)
        ]
    split = [slot.path for slot in found.optimizer.variables if not kf.layout_of(slot).layout.is_broadcast]
    weights = [each.path for each in found.weights if not kf.layout_of(each).layout.is_broadcast]
    return {
        "updates": relative,
        "slots": max(of_slots),
        "split": split,
        "weights": weights,
        "not as laid": _not_as_laid(found),
    }


def deviations_and_said(*arguments: object) -> dict:
    """Do as `deviations`; with the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = deviations(*arguments)
    return {**found, "said": [str(each.message) for each in said]}


def _not_as_laid(found: keras.Model) -> list[str]:
    """Weights and slots of which a rank of this process holds other elements than their layout says."""
    return [
        slot.path
        for slot in (*found.weights, *found.optimizer.variables)
        if len(slot.shape) and (placed := keras_layout(slot)) is not None
        for rank, shard in backend().shards(slot).items()
        if rank in placed.layout.placement.ranks and shard.shape != placed.layout.local_shape(rank)
    ]
