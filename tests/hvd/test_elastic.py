"""What a state of `hvd.elastic` commits is what it takes back, in this process and in one that is started again."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.hvd import elastic


@pytest.fixture(autouse=True)
def _first_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic.ranks, "rank", lambda: 0)
    monkeypatch.setattr(elastic, "_file", lambda: tmp_path / "commit.npz")


def test_a_list_that_the_program_goes_on_changing_is_restored() -> None:
    losses = [1.0]
    state = elastic.CommittedState(losses=losses)
    losses.append(9.0)
    state.restore()
    assert state.losses == [1.0]
    state.losses.append(0.5)
    state.commit()
    for _ in range(2):
        state.losses.append(9.0)
        state.restore()
        assert state.losses == [1.0, 0.5]


def test_what_would_come_back_as_something_else_is_refused() -> None:
    state = elastic.CommittedState(best=np.int64(3), counts={"of": [np.float32(0.5)]})
    state.commit()
    other = elastic.CommittedState(best=0, counts={})
    other.load()
    assert (other.best, other.counts) == (3, {"of": [0.5]})
    for values, text in (
        ({"by": [{3: "three"}]}, "3 is a key of a dict, and keys are texts"),
        ({"by": {1}}, "found {1}"),
    ):
        with pytest.raises(kf.FlowError, match=f"a state keeps numbers, texts, and lists and dicts of them: {text}"):
            elastic.CommittedState(**values).commit()


@pytest.mark.usefixtures("four_ranks")
def test_weights_of_bfloat16_are_loaded() -> None:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")])
    model.compile("sgd", "mse")
    wanted = model.get_weights()
    elastic.KerasState(model, epoch=2).commit()
    model.set_weights([np.zeros_like(each) for each in wanted])
    state = elastic.KerasState(model, epoch=0)
    state.load()
    assert state.epoch == 2
    for found, value in zip(model.get_weights(), wanted, strict=True):
        assert np.array_equal(found, value)
