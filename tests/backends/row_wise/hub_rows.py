"""KerasHub's backbones, each as small as it can be; `row_wise/row_interaction.py` is tested with their layers."""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS, LENGTH = 7, 6
_LAYERS = {"num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
_QUERIES = {"vocabulary_size": 32, **_LAYERS, "num_query_heads": 4, "num_key_value_heads": 2}
_HEADS = {"vocabulary_size": 32, **_LAYERS, "num_heads": 4, "max_sequence_length": LENGTH}
#: name of a backbone -> what it is made with
BACKBONES: dict[str, dict[str, Any]] = {
    "Gemma": {**_QUERIES, "head_dim": 4, "dropout": 0.1},
    "GPT2": _HEADS,
    "Llama": _QUERIES,
    "Llama3": _QUERIES,
    "Mistral": _QUERIES,
    "Qwen": _QUERIES,
    "Qwen3": {**_QUERIES, "head_dim": 4},
    "Phi3": _QUERIES,
    "Falcon": {"vocabulary_size": 32, **_LAYERS, "num_attention_heads": 4},
    "GPTNeoX": {**_HEADS, "hidden_dim": 32},  # a quarter of a head is rotated
    "OPT": _HEADS,
    "Bloom": _HEADS,
    "Bert": _HEADS,
    "Roberta": _HEADS,
    "Albert": {**_HEADS, "embedding_dim": 8},
    "Bart": _HEADS,
    "ViT": {
        "image_shape": (8, 8, 3),
        "patch_size": 4,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 16,
        "mlp_dim": 32,
    },
}


def _inputs(backbone: Any) -> dict[str, np.ndarray] | np.ndarray:
    random = np.random.default_rng(0)
    if not isinstance(backbone.input, dict):
        return random.normal(size=(ROWS, *backbone.input.shape[1:])).astype("float32")
    length = 1 + np.arange(ROWS)[:, None] % LENGTH
    found = {}
    for name in backbone.input:
        if name.endswith("padding_mask"):
            found[name] = (np.arange(LENGTH) < length).astype("int32")
        else:
            found[name] = random.integers(0, 2 if name == "segment_ids" else 32, (ROWS, LENGTH)).astype("int32")
    return found


def trained(name: str, distribution: Any) -> tuple[list[np.ndarray], Any]:
    """The losses and weights of a backbone with heads, after two steps of plain SGD; and the model."""
    import keras
    import keras_hub

    keras.utils.set_random_seed(0)
    with distribution.scope():
        backbone = getattr(keras_hub.models, f"{name}Backbone")(**BACKBONES[name])
        outputs = keras.tree.flatten(backbone.output)
        sums = [keras.layers.Dense(1)(output) for output in outputs]
        model = keras.Model(backbone.input, sums)
        model.compile(keras.optimizers.SGD(0.1), ["mse"] * len(sums))
    y = [_targets(output.shape[1:-1]) for output in outputs]
    losses = model.fit(_inputs(backbone), y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [np.asarray(losses), *model.get_weights()], model


def _targets(steps: tuple[int | None, ...]) -> np.ndarray:
    shape = (ROWS, *(LENGTH if length is None else length for length in steps), 1)
    return np.cos(np.arange(np.prod(shape))).reshape(shape).astype("float32")
