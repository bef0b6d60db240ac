"""Seconds for each token that KerasHub's `generate` makes: keras_flow on one rank and on several, against plain Keras.

    KERAS_BACKEND=jax python -m benchmarks.generate
    keras-flow launch --devices 4 benchmarks/generate.py                     # torch, whose ranks are processes

The ranks share the rows (data parallel), the kernels (tensor parallel, by the layout map of KerasHub's Gemma), or both,
where there are four (2x2). Ways take turns, and a ratio is the median of the ratios of turns that follow one another.
On JAX the same model under `keras.distribution.DataParallel` over as many virtual devices stands beside.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import keras
import keras_hub
import numpy as np

import keras_flow as kf

#: sizes of the model, and of the batch of prompts
SIZES = {"vocabulary_size": 1024, "num_layers": 4, "hidden_dim": 128, "intermediate_dim": 512, "head_dim": 32}
ROWS, PROMPT, LENGTH = 8, 8, 40


def model_under(distribution: keras.distribution.Distribution | None) -> keras.Model:
    """A small Gemma of random weights, made under a distribution."""
    keras.utils.set_random_seed(0)
    keras.distribution.set_distribution(distribution)
    backbone = keras_hub.models.GemmaBackbone(num_query_heads=4, num_key_value_heads=2, **SIZES)
    model = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
    model.compile(sampler="greedy")
    return model


def tensor_parallel(ranks: np.ndarray) -> kf.ModelParallel:
    """Kernels split over the columns of a grid of ranks, by KerasHub's own layout map, and rows over its rows."""
    placement = kf.Placement(ranks, axis_names=("batch", "model"))
    return kf.ModelParallel(placement, rules=keras_hub.models.GemmaBackbone.get_layout_map, batch_axes="batch")


def seconds_of(model: keras.Model, distribution: object) -> float:
    """Seconds for one token of all rows."""
    keras.distribution.set_distribution(distribution)
    mask = np.zeros((ROWS, LENGTH), "int32")
    mask[:, :PROMPT] = 1
    tokens = np.random.default_rng(0).integers(1, 1000, (ROWS, LENGTH)).astype("int32") * mask
    start = time.perf_counter()
    model.generate({"token_ids": tokens, "padding_mask": mask}, stop_token_ids=None)
    return (time.perf_counter() - start) / (LENGTH - PROMPT)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    turns = parser.parse_args().turns
    kf.init(devices=None if keras.backend.backend() == "torch" else 4)
    makers: dict[str, Callable[[], object]] = {
        "plain Keras": lambda: None,
        "kf.DataParallel, 1 rank": lambda: kf.DataParallel(kf.Placement([0])),
    }
    ranks = np.arange(kf.env.get_world_size())
    if len(ranks) > 1:
        makers[f"kf.DataParallel, {len(ranks)} ranks"] = kf.DataParallel
        makers[f"kf.ModelParallel, 1x{len(ranks)}"] = lambda: tensor_parallel(ranks[None])
    if len(ranks) == 4:
        makers["kf.ModelParallel, 2x2"] = lambda: tensor_parallel(ranks.reshape(2, 2))
    if keras.backend.backend() == "jax":
        makers["keras.distribution.DataParallel, 4 devices"] = keras.distribution.DataParallel
    ways = {}
    for name, make in makers.items():
        distribution = make()
        ways[name] = model_under(distribution), distribution  # type: ignore[arg-type]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 2):
        for name, way in ways.items():
            seconds = seconds_of(*way)
            if turn > 1:  # the first ones compile
                times[name].append(seconds)
    keras.distribution.set_distribution(None)
    if kf.env.is_main_process():
        print(
            f"| {keras.backend.backend()}, way | ms for a token | lowest | of plain Keras | lowest |\n"
            "|---|---|---|---|---|"
        )
        for name, own in times.items():
            ratios = [a / b for a, b in zip(own, times["plain Keras"], strict=True)]
            lowest = min(own), min(own) / min(times["plain Keras"])  # of a machine that does other things too
            shown = 1000 * statistics.median(own), 1000 * lowest[0], statistics.median(ratios), lowest[1]
            print(f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in shown) + " |")


if __name__ == "__main__":
    main()
