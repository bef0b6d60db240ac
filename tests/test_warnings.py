"""Warnings point at the line of the user's program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from keras_flow.errors import ComputedWhole, FlowWarning, warn
from keras_flow.progress import working


def test_the_line_of_the_program_is_named() -> None:
    with pytest.warns(FlowWarning, match="said here") as found:
        warn("said here")
    assert found[0].filename == __file__


def test_frames_of_libraries_are_passed_over() -> None:
    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        exec(compile("warn('from inside')", f"{working.__code__.co_filename}", "exec"))
        yield

    with pytest.warns(FlowWarning, match="from inside") as found, scope():
        pass
    assert found[0].filename == __file__


def test_a_kind_of_its_own() -> None:
    with pytest.warns(ComputedWhole, match="whole"):
        warn("whole", ComputedWhole)


@pytest.mark.usefixtures("four_ranks")
def test_what_keras_says_of_the_data_is_said_of_the_programs_line() -> None:
    import keras
    import torch

    import keras_flow as kf

    with kf.DataParallel().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), 4)
    with pytest.warns(UserWarning, match="`shuffle=True` was passed") as found:
        model.fit(data, verbose=0)
    assert [each.filename for each in found if "shuffle" in str(each.message)] == [__file__]
