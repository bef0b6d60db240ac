"""Layers that are computed again in the backward pass have the numbers of those that are not, on every engine."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_flow as kf
from keras_flow.errors import FlowError, LayoutError
from tests.parity import remat_program
from tests.sampling import chosen

BACKENDS = ("jax", "tensorflow", "torch")


def _is_quick(backend: str, layout: str, way: str) -> bool:
    """One layout of each way; of patterns on torch that in which a layer with a split kernel is computed again."""
    if (backend, way) == ("torch", "patterns"):
        return layout == "2x2"
    return chosen(f"remat {way} {backend}", remat_program.LAYOUTS) == layout


#: each way under one layout on each backend; all in `make test-full`
CASES = [
    pytest.param(
        backend,
        layout,
        way,
        marks=[] if _is_quick(backend, layout, way) else pytest.mark.full,
    )
    for backend in BACKENDS
    for layout in remat_program.LAYOUTS
    for way in remat_program.WAYS
]


@pytest.mark.parametrize(("backend", "layout", "way"), CASES)
def test_numbers_are_those_of_one_run(on_ranks, backend: str, layout: str, way: str) -> None:
    for rows in (4, 5):  # on four ranks 5 do not divide; the last batch has 1 or 3
        expected, losses, _ = on_ranks(backend)(remat_program.trained, layout, None, rows)
        found, again, count = on_ranks(backend)(remat_program.trained, layout, way, rows)
        np.testing.assert_allclose(again, losses, rtol=1e-5)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)
        assert count == {"scope": 0, "block": 3, "patterns": 3}[way]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_recurrent_layer_forgets_its_dropout_mask(on_ranks, backend: str) -> None:
    """torch breaks the second run off before its end: the mask of that run was taken by the next step."""
    expected = on_ranks(backend)(remat_program.recurrent, None)
    found = on_ranks(backend)(remat_program.recurrent, ["hidden"])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_python_draws_the_same_in_the_second_run(on_ranks, backend: str) -> None:
    """`AugMix` chooses its operations by Python's generator."""
    expected = on_ranks(backend)(remat_program.choosing, None)
    found = on_ranks(backend)(remat_program.choosing, ["choosing"])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_layer_that_writes_into_its_inputs_is_refused(on_ranks) -> None:
    said = on_ranks("torch")(remat_program.refusal_of_writing)
    assert "layer 'writing' (RandomBrightness) writes into its inputs" in said
    assert "leave it out of remat=" in said


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])  # jax.checkpoint has no second draw that could differ
def test_a_second_run_that_draws_anew_is_caught(on_ranks, backend: str) -> None:
    _, losses, _ = on_ranks(backend)(remat_program.trained, "dp4", None, 4)
    _, again, _ = on_ranks(backend)(remat_program.trained, "dp4", "block", 4, True)
    assert abs(again[1] - losses[1]) > 1e-3 * abs(losses[1])


def test_bad_input() -> None:
    kf.init(4)
    with pytest.raises(FlowError, match=r"remat is None, \"block\" .*for example remat=\['decoder_"):
        kf.DataParallel(remat="blocks")
    with pytest.raises(FlowError, match=r"remat: 'a\(' is not a regular expression"):
        kf.DataParallel(remat=["a("])
    with pytest.raises(FlowError, match="names no layer"):
        kf.DataParallel(remat=[])

    def fitted(remat: object) -> None:
        with kf.DataParallel(remat=remat).scope():  # type: ignore[arg-type]
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="first")])
            model.compile("sgd", "mse")
        model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)

    with pytest.raises(LayoutError, match=r"remat: 'fisrt' matched no layer; the nearest path is .*first"):
        fitted(["fisrt"])
    with pytest.raises(LayoutError, match="has no two layers of one class and shape that have layers themselves"):
        fitted("block")


def test_a_sub_model_need_not_have_all_layers() -> None:
    kf.init(4)
    ones = np.ones((4, 4))
    with kf.DataParallel(remat=["one", "two"]).scope():
        inputs = keras.Input((4,))
        outputs = [keras.layers.Dense(4, name=name)(inputs) for name in ("one", "two")]
        model, part = keras.Model(inputs, outputs), keras.Model(inputs, outputs[0])
        for each, y in ((model, [ones, ones]), (part, ones)):
            each.compile("sgd", "mse")
            each.fit(ones, y, verbose=0)
        other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="one")])
        other.compile("sgd", "mse")
        with kf.DataParallel(remat=["one", "two"]).scope(), pytest.raises(LayoutError, match="'two' matched no layer"):
            other.fit(ones, ones, verbose=0)  # of this distribution no model had it
