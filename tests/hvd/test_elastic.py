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


def test_what_is_loaded_is_what_was_committed() -> None:
    wanted = {"best": 3, "counts": {"of": [0.5]}, "shape": (1, 2), "by": [{3: "three"}]}
    elastic.CommittedState(**{**wanted, "best": np.int64(3)}).commit()
    other = elastic.CommittedState(**dict.fromkeys(wanted))
    other.load()
    assert {name: getattr(other, name) for name in wanted} == wanted
    with pytest.raises(kf.FlowError, match="a state that is saved has a set: it may have numbers"):
        elastic.CommittedState(by={1}).commit()


@pytest.mark.usefixtures("four_ranks")
def test_weights_go_back_to_those_that_the_state_was_made_with() -> None:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    wanted = model.get_weights()
    state = elastic.KerasState(model, epoch=2)
    model.set_weights([each + 1.0 for each in wanted])
    state.restore()
    for found, value in zip(model.get_weights(), wanted, strict=True):
        assert np.array_equal(found, value)


def test_epochs_are_counted_where_keras_begins_at_zero_and_where_it_goes_on() -> None:
    state = elastic.CommittedState(epoch=3)
    counts = elastic.UpdateEpochStateCallback(state)
    for epochs in (range(2), range(5, 7)):
        counts.on_train_begin()
        for epoch in epochs:
            counts.on_epoch_begin(epoch)
            counts.on_epoch_end(epoch)
        assert state.epoch == 3 + 2 * (1 + (epochs.start > 0))


def test_reset_callbacks_are_called_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    state = elastic.CommittedState(epoch=0)
    state.register_reset_callbacks([lambda: called.append(state.epoch)])
    monkeypatch.setattr(state, "sync", lambda: None)
    for restarts, wanted in (("0", []), ("1", [0])):
        monkeypatch.setenv("KERAS_FLOW_RESTARTS", restarts)
        elastic.run(lambda state: state.check_host_updates())(state)
        assert called == wanted


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
