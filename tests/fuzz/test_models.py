"""Random models under random layouts have the numbers of one device, a few of them on each engine."""

from __future__ import annotations

from unittest import mock

import pytest

from tests.fuzz.models import RANKS
from tests.sampling import each_on_one

#: quick on all engines, and right in float32 there; more of them are a run of `tests/fuzz/models.py`
SEEDS = ("1/9", "p1/1", "2001/9")


def result(seed: str) -> dict:
    from tests.fuzz import models  # its Keras is that of the ranks

    return models.result(seed, ranks=4)


@pytest.mark.parametrize(("backend", "seed"), each_on_one(list(RANKS), SEEDS))
def test_a_random_model_is_right(backend: str, seed: str, on_ranks) -> None:
    line = on_ranks(backend)(result, seed)
    assert line["state"] == "right", line


def twice_as_fast(seed: str) -> dict:
    """Give what trains on under the distribution another learning rate."""
    import keras

    from tests.fuzz import further, model_programs, models

    original = further.run

    def run(*given, together: bool):  # type: ignore[no-untyped-def]
        if together:
            with mock.patch.dict(further.OPTIMIZERS, {"RMSprop": lambda: keras.optimizers.RMSprop(0.01)}):
                return original(*given, together=together)
        return original(*given, together=together)

    with mock.patch.object(model_programs.further, "run", run):
        return models.result(seed, ranks=4)


def test_another_number_after_the_first_training_is_found(on_ranks) -> None:
    line = on_ranks("torch")(twice_as_fast, "2001/9")
    assert line["state"] == "wrong", line
    assert all(name.startswith("trained on") for name in line["over"]), line


def test_all_ways_to_train_on_are_drawn() -> None:
    from tests.fuzz import further

    drawn = [further.drawn_for(f"1/{number}") for number in range(400)]
    assert {one.kind for one in drawn} == {"", *further.KINDS}
    assert {one.optimizer for one in drawn} == set(further.OPTIMIZERS)
    assert {one.outside for one in drawn} == {True, False}
    assert further.drawn_for("p1/1").text == ""
    assert further.drawn_for("q1/1").kind == "quantized"
