"""Checks that faults seeded into the paths by own rows are seen: a net that would let them through is none."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from tests.backends.torch.registry import check, error_of
from tests.backends.torch.rows import CLASSES, ROWS, Numbers, model_with, numbers, off


@check
def faults_in_the_sums_are_seen() -> None:
    """One rank's rows are another's; sums are taken twice; a loss counts once for each rank."""
    import keras_flow as kf
    from keras_flow.backends.torch import losses, metrics, mirrored, split_rows
    from keras_flow.backends.torch.step import OwnRows

    def make() -> Any:
        return model_with("categorical_crossentropy", ["accuracy"], masked=True)

    def one_row_too_many(placement: Any, rows: int) -> OwnRows:
        right = rows_of(placement, rows)
        return OwnRows(rows, right.count, (right.index + (right.index == 1)) % right.count, right.groups)

    def twice(value: Any, groups: Any) -> Any:
        return summed(summed(value, groups), groups)

    rows_of, summed = mirrored.rows_of, split_rows.summed
    wanted = numbers(make, ROWS)
    for target, name, fault in (
        (mirrored, "rows_of", one_row_too_many),
        (metrics.split_rows, "summed", twice),
        (losses.partial_numbers, "partial_number", lambda own, rows: own * rows.count),
    ):
        with mock.patch.object(target, name, fault), kf.DataParallel().scope():
            assert off(wanted, numbers(make, ROWS)), name


@check
def a_mask_drawn_by_a_ranks_own_index_is_seen() -> None:
    """Each rank would draw the first rows' mask."""
    import keras

    import keras_flow as kf
    from keras_flow.backends import torch as backend
    from keras_flow.backends.interface import RandomPart

    def trained() -> Numbers:
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential([layers.Input((6,)), layers.Dropout(0.5, seed=2), layers.Dense(CLASSES)])
        model.compile(keras.optimizers.SGD(0.5), "mse")
        model.fit(np.ones((8, 6), "float32"), np.ones((8, CLASSES), "float32"), batch_size=8, verbose=0)
        return dict(enumerate(model.get_weights()))

    with kf.DataParallel(kf.Placement([0]), random="logical").scope():
        wanted = trained()
    distribution = kf.DataParallel(random="logical")
    with distribution.scope():
        assert not off(wanted, trained())
    own = mock.patch.object(backend, "random_part", lambda shape, *_: RandomPart.whole(shape))
    with distribution.scope(), own:
        assert off(wanted, trained())


@check
def other_rows_than_a_ranks_own_are_seen_as_they_are_read() -> None:
    """A dataset whose `rows` counts wrong on one rank: what the next rank reads of its rows is not that."""
    import keras

    import keras_flow as kf

    class Batches(keras.utils.PyDataset):
        num_batches = 4

        def __getitem__(self, index: int) -> Any:
            return self.rows(index, slice)

        def rows(self, index: int, part: Any) -> Any:
            own = part(8)
            shift = kf.env.get_rank() == 1  # it begins a row too early
            rows = np.arange(8 * index, 8 * index + 8, dtype="float32")[own.start - shift : own.stop - shift]
            return rows[:, None], rows[:, None]

    with kf.DataParallel().scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        error = error_of(lambda: model.fit(Batches(), shuffle=False, verbose=0))
    assert "the ranks are fed different batches: input 'x' of batch 0 differs on rank 1 from rank 0" in error, error


@check
def a_loss_of_another_shape_than_rows_is_refused() -> None:
    """One that is taken for a sum over rows, and returns something else."""
    import keras

    import keras_flow as kf
    from keras_flow.backends import row_interaction

    class Turned(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return keras.ops.transpose(y_pred - y_true)

    with kf.DataParallel().scope(), mock.patch.object(row_interaction, "of_loss", lambda *_: None):
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(CLASSES)])
        model.compile("sgd", Turned())
        x, y = np.ones((8, 6), "float32"), np.ones((8, CLASSES), "float32")
        error = error_of(lambda: model.train_on_batch(x, y))
    assert f"a loss was given 2 rows and returned values of shape [{CLASSES}, 2]" in error, error
