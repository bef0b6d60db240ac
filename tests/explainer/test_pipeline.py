"""What `explain` says of pipelines: stages, messages, memory by the schedule."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.distributions.dry_run import dry_run
from keras_flow.errors import FlowError
from keras_flow.explainer.plot import draw

pytestmark = pytest.mark.usefixtures("described")
_PIPE = ("pipe",)


def _model(width: int = 16) -> keras.Model:
    names = ("first", "second", "third")
    inner = [keras.layers.Dense(width, name=name) for name in names]
    model = keras.Sequential([keras.Input((8,)), *inner, keras.layers.Dense(8, name="last")])
    model.compile("adam", "mse")
    return model


def _explained(ranks: Any, axes: tuple[str, ...] = _PIPE, rows: int = 32, **settings: Any) -> Any:
    with dry_run(int(np.size(ranks))):
        distribution = kf.PipelineParallel(kf.Placement(ranks, axis_names=axes), **settings)
        with distribution.scope():
            model = _model()
        return distribution.explain(model, rows)


def test_stages_and_messages() -> None:
    found = _explained([0, 1], microbatches=4, stages=[["first", "second"], ["third", "last"]])
    first, last = found.stages
    assert [first.ranks, last.ranks] == [(0,), (1,)]
    assert (first.weights, last.weights) == (4 * (8 * 16 + 16 + 16 * 16 + 16), 4 * (16 * 16 + 16 + 16 * 8 + 8))
    # 32 rows of 16 floats go forward, and their gradients back
    assert (first.sends, first.gets_back, last.sends, last.gets_back) == (2048, 2048, 0, 0)
    assert found.received == 2048
    assert first.work + last.work == pytest.approx(1.0)
    assert (found.memory[0].weights, found.memory[0].slots) == (first.weights, 2 * first.weights)
    assert json.loads(json.dumps(found.as_json()))["stages"][0]["sends"] == 2048
    assert {row.path.split("/")[-2]: row.layout for row in found.variables} == {
        "first": "B on 0",
        "second": "B on 0",
        "third": "B on 1",
        "last": "B on 1",
    }
    assert "sends in a step" in str(found) and "0 F0 F1" in str(found) and "<pre>" in found._repr_html_()
    assert "a rank receives at most" in draw(found).svg


def test_a_rank_holds_what_its_schedule_says() -> None:
    held = {name: _explained([0, 1], microbatches=4, schedule=name).memory[0].activations for name in ("gpipe", "1f1b")}
    assert held["gpipe"] == 2 * held["1f1b"]
    assert _explained([0, 1], microbatches=4, remat="stage").memory[0].activations < held["1f1b"]


def test_several_ranks_of_a_stage() -> None:
    found = _explained([[0, 1], [2, 3]], ("pipe", "data"), microbatches=4)
    sums = [(each.path, each.axes, each.ranks, each.bytes) for each in found.collectives]
    assert sums == [(f"stage {row.number}", ("data",), 2, row.weights) for row in found.stages]
    # a rank's rows are half of a micro-batch's
    one = _explained([0, 1], microbatches=4)
    assert found.stages[0].kept * 2 == one.stages[0].kept
    assert found.received == found.collectives[0].received + 1024


def test_stages_that_are_split() -> None:
    rules = {"(first|third)/kernel": {"model": kf.sbp.split(1)}, "(second|last)/kernel": {"model": kf.sbp.split(0)}}
    stages = [["first", "second"], ["third", "last"]]
    found = _explained([[0, 1], [2, 3]], ("pipe", "model"), microbatches=4, rules=rules, stages=stages)
    assert [row.ranks for row in found.stages] == [(0, 1), (2, 3)]
    # the kernels' halves, and biases whole
    weights = 4 * (8 * 16 // 2 + 16 + 16 * 16 // 2 + 16)
    assert {found.memory[rank].weights for rank in (0, 1)} == {weights}
    assert {found.memory[rank].slots for rank in (0, 1)} == {2 * weights}
    assert [row.layout for row in found.variables if row.path.endswith("kernel")] == [
        "S(1) on 0, 1",
        "S(0) on 0, 1",
        "S(1) on 2, 3",
        "S(0) on 2, 3",
    ]
    # a pair of layers sums its outputs once forward and its input's gradient once backward: 8 rows in 4 micro-batches
    sums = {(each.stage, each.phase): each.bytes for each in found.collectives if each.kind == "all_reduce"}
    assert sums == {(0, "forward"): 4 * 8 * 16 * 4, (1, "forward"): 4 * 8 * 8 * 4, (1, "backward"): 4 * 8 * 16 * 4}


def test_within_a_rank_nothing_is_sent() -> None:
    found = _explained([0, 1], schedule="zbv")
    assert [row.ranks for row in found.stages] == [(0,), (1,), (1,), (0,)]
    assert found.stages[1].sends == 0 < found.stages[0].sends


def test_fewer_rows_than_micro_batches() -> None:
    with pytest.raises(FlowError, match="a batch of 3 rows cannot be cut into 4 micro-batches"):
        _explained([0, 1], rows=3, microbatches=4)


def test_attention_in_stages_that_are_split() -> None:
    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("pipe", "model"))
    rules = {"(query|key|value)/kernel": {"model": kf.sbp.split(1)}}
    with dry_run(4):
        distribution = kf.PipelineParallel(placement, microbatches=4, rules=rules, stages=[["tokens"], ["att", "head"]])
        with distribution.scope():
            ids = keras.Input((16,), dtype="int32")
            x = keras.layers.Embedding(32, 64, name="tokens")(ids)
            y = keras.layers.MultiHeadAttention(8, 8, name="att")(x, x)
            model = keras.Model(ids, keras.layers.Dense(4, name="head")(y))
            model.compile("sgd", "mse")
        found = distribution.explain(model, 32)
    assert {each.stage for each in found.collectives if "att" in each.path} == {1}
    # each rank of a stage receives all of what is between two stages
    within = sum(each.received for each in found.collectives if each.stage == 1)
    assert found.received == within + 32 * 16 * 64 * 4
