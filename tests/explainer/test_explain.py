"""What explain says of layouts, memory and collectives, how fast it is, and which questions it refuses."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
from keras import layers

import keras_flow as kf
from tests.explainer.small import COLUMN, MODEL, ROW, dense, explained, sent

pytestmark = pytest.mark.usefixtures("described")


def test_a_column_and_row_pair() -> None:
    explanation = explained(lambda: dense(64, 128, 64), {"d1/kernel": COLUMN, "d1/bias": ROW, "d2/kernel": ROW})
    size = 32 * 64 * 4
    assert sent(explanation) == [
        ("forward", "all_reduce", "m/d2", "output", 2 * size * 3 // 4),
        ("backward", "all_reduce", "m/d1", "input gradient", 2 * size * 3 // 4),
    ]
    assert [(layer.path, layer.axis, layer.ranks) for layer in explanation.repeated] == [("m/d0", "model", 4)]
    assert not explanation.warnings


def test_layouts_rules_and_bytes_of_variables() -> None:
    explanation = explained(lambda: dense(64, 128), {"d1/kernel": COLUMN})
    kernel = next(row for row in explanation.variables if row.path == "m/d1/kernel")
    assert (kernel.shape, kernel.layout, kernel.source) == ((64, 128), "S(1)", "rule 'd1/kernel'")
    assert kernel.bytes == 64 * 32 * 4
    assert next(row for row in explanation.variables if row.path == "m/d0/bias").source == "default"


def test_memory_of_a_rank() -> None:
    explanation = explained(lambda: dense(64, 128), {"d1/kernel": COLUMN})
    weights = 4 * (64 * 64 + 64 + 64 * 32 + 128)
    memory = explanation.memory[3]
    assert (memory.weights, memory.gradients, memory.slots) == (weights, weights, 2 * weights)
    assert memory.activations == 4 * 32 * (64 + 32)
    assert not explanation.notes, "that the peak is an estimate stands at its column"


def test_gradients_of_adapters_are_sent() -> None:
    def build() -> keras.Model:
        model = dense(64, 128)
        model.get_layer("d1").enable_lora(4)
        return model

    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    found = sent(explained(build, {"d1/kernel": COLUMN}, placement=placement))
    kinds = {row[3] for row in found if row[2] == "m/d1" and row[0] == "gradients"}
    assert kinds == {"lora_kernel_a gradient", "lora_kernel_b gradient", "bias gradient"}


@pytest.mark.parametrize("dim", [0, -2])
def test_a_layout_of_activations(dim: int) -> None:
    distribution = kf.ModelParallel(MODEL, activations={"d0": {"model": kf.sbp.split(dim)}})
    with distribution.scope():
        model = dense(64, 8)
    (gather, *_) = [sent for sent in distribution.explain(model, 32).collectives if sent.path == "m/d0"]
    assert (gather.kind, gather.phase, gather.tensor) == ("all_gather", "backward", "output gradient")


def test_weights_of_100_gigabytes_are_not_made() -> None:
    def build() -> keras.Model:
        return dense(*[40_000] * 17, inputs=40_000)

    explanation = explained(build, {"kernel": COLUMN}, placement=kf.Placement(range(64), axis_names=("model",)))
    assert sum(row.bytes for row in explanation.variables) * 64 > 100e9
    assert explanation.memory[0].weights == sum(row.bytes for row in explanation.variables)


def test_a_thousand_variables_in_a_second() -> None:
    rules = {"d.*[02468]/kernel": COLUMN, "d.*[02468]/bias": ROW, "d.*[13579]/kernel": ROW}
    distribution = kf.ModelParallel(MODEL, rules=rules)
    with distribution.scope():
        model = dense(*[64] * 500)
    began = time.process_time()
    explanation = distribution.explain(model, 32)
    assert time.process_time() - began < 1
    assert (len(explanation.variables), len(explanation.collectives)) == (1000, 499)


def test_a_model_that_is_not_built() -> None:
    distribution = kf.DataParallel(kf.Placement(range(4)))
    with pytest.raises(kf.FlowError, match=r"model 'm' is not built.*call model.build\(\(None, \.\.\.\)\)"):
        distribution.explain(keras.Sequential([layers.Dense(4)], name="m"), 32)


def test_a_batch_size_of_numpy() -> None:
    distribution = kf.DataParallel(kf.Placement(range(4)))
    found = distribution.explain(dense(4), np.int64(32))  # type: ignore[arg-type]
    assert type(found.batch_size) is int
    assert found == distribution.explain(dense(4), 32)


@pytest.mark.parametrize("batch_size", [0, 2.5, True, None])
def test_a_batch_size_that_is_none(batch_size: object) -> None:
    distribution = kf.DataParallel(kf.Placement(range(4)))
    with pytest.raises(kf.FlowError, match=r"legal is a whole number of at least 1"):
        distribution.explain(dense(4), batch_size)  # type: ignore[arg-type]
