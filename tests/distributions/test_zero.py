"""Which part of a variable's slots a rank keeps, and what `zero=` refuses."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow import sbp
from keras_flow.backends.active import backend
from keras_flow.boxing import plan
from keras_flow.distributions.zero import layouts_of_slots
from keras_flow.errors import LayoutFallback
from keras_flow.layout import Layout

LINE = kf.Placement(range(4), axis_names=("data",))
SQUARE = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
TURNED = kf.Placement([[0, 1], [2, 3]], axis_names=("model", "data"))
BOTH = kf.Placement([[0, 1], [2, 3]], axis_names=("outer", "inner"))
COLUMN = kf.Placement([[0], [1], [2], [3]], axis_names=("data", "model"))


@pytest.mark.parametrize(
    ("placement", "given", "shape", "axes", "expected"),
    [
        (LINE, "B", (8, 6), ("data",), "S(0)"),
        (LINE, "B", (6, 8), ("data",), "S(1)"),  # OneFlow leaves it whole
        (LINE, "B", (6, 7), ("data",), None),
        (LINE, "B", (), ("data",), None),
        (SQUARE, "B,B", (6, 7), ("data",), "S(0),B"),
        (SQUARE, "B,S(1)", (6, 8), ("data",), "S(0),S(1)"),
        (SQUARE, "B,S(0)", (8, 6), ("data",), "S(1),S(0)"),  # OneFlow: S(0),S(0), not within what a rank has
        (SQUARE, "B,S(0)", (8, 7), ("data",), None),
        (TURNED, "S(0),B", (8, 7), ("data",), "S(0),S(0)"),  # within it
        (BOTH, "B,B", (8, 7), ("outer", "inner"), "S(0),S(0)"),
        (BOTH, "B,B", (6, 7), ("outer", "inner"), "B,S(0)"),  # 6 divides by 2 and not by 4
        (BOTH, "B,B", (8, 7), ("outer",), "S(0),B"),
        (COLUMN, "B,S(0)", (8, 6), ("data",), "S(0),S(0)"),  # an axis of one rank splits nothing
        (COLUMN, "B,S(0)", (6, 8), ("data",), "S(1),S(0)"),
    ],
)
def test_first_dim_that_divides_within_what_a_rank_has(
    placement: kf.Placement, given: str, shape: tuple[int, ...], axes: tuple[str, ...], expected: str | None
) -> None:
    layout = Layout(placement, sbp.parse(given), shape)
    found = layouts_of_slots(layout, axes, 1)
    assert (sbp.text(found[0].nd_sbp) if found else None) == expected


@pytest.mark.parametrize(
    ("given", "shape"), [("B,B", (8, 12)), ("B,S(0)", (8, 12)), ("B,S(1)", (8, 12)), ("S(1),B", (8, 12))]
)
def test_new_weights_need_an_all_gather_alone(given: str, shape: tuple[int, ...]) -> None:
    """What a rank receives is what others have updated of its piece, and nothing else."""
    layout = Layout(TURNED if given.startswith("S") else SQUARE, sbp.parse(given), shape)
    for part in layouts_of_slots(layout, ("data",), 1):
        gather = plan(part, layout, "float32")
        for rank in range(4):
            whole, mine = (each.local_bytes(rank, "float32") for each in (layout, part))
            assert gather.bytes_received(rank) == whole - mine


def test_small_variables_stay_whole() -> None:
    layout = Layout(LINE, {}, (8, 8))
    assert layouts_of_slots(layout, ("data",), 16) and not layouts_of_slots(layout, ("data",), 17)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"zero": 4}, r"zero=4: legal are 0 .*1 \(slots\), 2 \(slots and gradients\), 3 \(weights as well\)"),
        ({"zero": True}, r"zero=True: legal are 0"),
        ({"zero": 1, "zero_min_size": 0}, r"zero_min_size=0: legal is a whole number of at least 1"),
        ({"zero": 1, "zero_axes": "model"}, r"zero_axes names \['model'\]; .*which are \['data'\]"),
    ],
)
def test_refused(options: dict, text: str) -> None:
    with pytest.raises(kf.FlowError, match=text):
        kf.ModelParallel(SQUARE, **options)


def test_nothing_splits_the_batch() -> None:
    with pytest.raises(kf.FlowError, match="zero=1 splits over the axes of the batch, and no axis of the placement"):
        kf.ModelParallel(kf.Placement(range(4), axis_names=("model",)), zero=1)


def compiled(width: int = 8) -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(width, name="up"), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def test_slots_are_split_and_weights_are_not() -> None:
    with kf.DataParallel(zero=1, zero_min_size=1).scope():
        model = compiled()
        model.fit(np.ones((8, 8)), np.ones((8, 3)), verbose=0)
    kernel, momentum = model.layers[0].kernel, model.optimizer.momentums[0]
    assert sbp.text(kf.layout_of(kernel).layout.nd_sbp) == "B"
    assert str(kf.layout_of(momentum)) == "S(0) (from zero=1; its variable: default)"
    assert {shard.shape for shard in backend().shards(momentum).values()} == {(2, 8)}


def test_weights_are_split_and_used_whole() -> None:
    placement = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))
    rules = {"up/kernel": {"model": sbp.split(1)}}
    with kf.ModelParallel(placement, rules=rules, zero=3, zero_min_size=4).scope():
        model = compiled()
        model.fit(np.ones((8, 8)), np.ones((8, 3)), verbose=0)
    kernel, momentum = model.layers[0].kernel, model.optimizer.momentums[0]
    given = kf.layout_of(kernel)
    assert given.used is not None and sbp.text(given.used.nd_sbp) == "B,S(1)"
    assert str(given) == "S(0),S(1) (from zero=3; before it: rule 'up/kernel')"
    assert str(kf.layout_of(momentum)) == str(given)
    assert {shard.shape for shard in backend().shards(kernel).values()} == {(4, 4)}
    assert kernel.numpy().shape == (8, 8)
    kf.DataParallel().apply(model)
    assert {shard.shape for shard in backend().shards(kernel).values()} == {(8, 8)}
    assert kf.layout_of(kernel).used is None


def test_slots_made_before_are_laid() -> None:
    """A model that was trained on one device keeps its momentum."""
    model = compiled()
    x, y = np.ones((8, 8)), np.ones((8, 3))
    model.fit(x, y, verbose=0)
    before = model.optimizer.momentums[0].numpy()
    kf.DataParallel(zero=2, zero_min_size=1).apply(model)
    momentum = model.optimizer.momentums[0]
    assert {shard.shape for shard in backend().shards(momentum).values()} == {(2, 8)}
    np.testing.assert_array_equal(momentum.numpy(), before)
    kf.DataParallel().apply(model)
    assert {shard.shape for shard in backend().shards(momentum).values()} == {(8, 8)}
    np.testing.assert_array_equal(momentum.numpy(), before)


def test_a_variable_that_does_not_divide_is_said_once() -> None:
    with pytest.warns(LayoutFallback) as caught, kf.DataParallel(zero=1, zero_min_size=1).scope():
        model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(7), keras.layers.Dense(7)])
        model.compile(keras.optimizers.Adam(), "mse")
        model.fit(np.ones((8, 7)), np.ones((8, 7)), verbose=0)
    texts = [str(each.message) for each in caught]
    said = (
        "zero=1: slots of variables of shape [7, 7] stay whole: none of their dims divides by the 4 ranks of ['data']"
    )
    assert texts.count(said) == 1
    assert sbp.text(kf.layout_of(model.optimizer._momentums[0]).layout.nd_sbp) == "B"


def test_strict_makes_it_an_error() -> None:
    data = kf.Placement(range(4), axis_names=("data",))
    with (
        pytest.raises(kf.LayoutError, match=r"zero=1: slots of .* \[7, 7\] stay whole.*\(strict=True\)"),
        kf.ModelParallel(data, zero=1, zero_min_size=1, strict=True).scope(),
    ):
        model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(7)])
        model.compile(keras.optimizers.Adam(), "mse")
        model.fit(np.ones((8, 7)), np.ones((8, 7)), verbose=0)
