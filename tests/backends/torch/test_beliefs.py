"""What is believed of layers is what they compute, and the net that says so has teeth."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

ENGINE = "torch"
#: the pieces are many, and so are the changes: each part takes every so manieth piece
PARTS = 12
#: fixed: what is run each day
FIXED = ("layers.Dense", "layers.MultiHeadAttention", "layers.LSTM")


def _report(names: tuple[str, ...] | None, part: int = 0) -> tuple[dict[str, int], list[str]]:
    """On one rank: layers are computed as on one device, and no rank asks another."""
    from tests.backends.torch import beliefs, registry

    if registry.rank():
        return {}, []
    pieces = [*beliefs.PIECES, *beliefs.WRAPPED]
    chosen = pieces[part::PARTS] if names is None else [piece for piece in pieces if piece.name in names]
    return beliefs.report(chosen, beliefs.ALL)


def _with_a_wrong_entry(table: str, value: Any, name: str, change: str) -> list[str]:
    from keras_flow.backends.row_wise import looks, own_code, row_interaction
    from tests.backends.torch import beliefs, registry

    if registry.rank():
        return []
    owner = next(each for each in (row_interaction, own_code, looks.Look) if hasattr(each, table))
    entries = value if callable(value) else getattr(owner, table) | value
    pieces = [piece for piece in (*beliefs.PIECES, *beliefs.WRAPPED) if piece.name == name]
    with mock.patch.object(owner, table, entries):
        return beliefs.report(pieces, [change])[1]


def test_common_layers_are_what_they_are_believed_to_be(on_ranks: Any) -> None:
    counts, wrong = on_ranks(ENGINE)(_report, FIXED)
    assert wrong == []
    # that a net is empty is no proof
    assert counts["as it is, believed"] >= 6
    assert counts["LoRA, believed"] >= 4
    assert counts["int8, believed"] >= 4
    for change in (
        "float8",
        "another call",
        "a subclass",
        "a mixing activation",
        "a patched class",
        "a quantized policy",
    ):
        assert counts[f"{change}, applies"] >= 1, change
        assert counts[f"{change}, believed"] == 0, change


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_layer_is_what_it_is_believed_to_be(part: int, on_ranks: Any) -> None:
    assert on_ranks(ENGINE)(_report, None, part, timeout=1200.0)[1] == []


@pytest.mark.full
def test_one_image_is_no_batch(on_ranks: Any) -> None:
    from tests.backends.torch import beliefs

    assert on_ranks(ENGINE)(beliefs.of_one_sample) == []


#: what is said wrongly -> the table or the question, what it says, a layer, what was made of it, and what shows
FAULTS: dict[str, tuple[str, Any, str, str, str]] = {
    "a class": ("_LAYERS", {"MelSpectrogram"}, "layers.MelSpectrogram", "as it is", "rows differ"),
    "a quantization": ("_of_changes", lambda _: None, "layers.Dense", "float8", "amax_history"),
    "methods": ("replaced_method", lambda _: "", "layers.Dense", "another call", "rows differ"),
    "functions": ("unknown_function", lambda _: "", "layers.Dense", "softmax over rows", "rows differ"),
    "axes": ("touches_rows", lambda *_: False, "layers.Softmax[rows]", "as it is", "rows differ"),
    # a belief that outlives what it was formed by
    "held on to, the call is another": ("is_of", lambda *_: True, "layers.Dense", "another call", "rows differ"),
    "held on to, an attribute": ("is_of", lambda *_: True, "layers.Softmax", "another axis", "rows differ"),
    "held on to, the activation": ("is_of", lambda *_: True, "layers.Dense", "a mixing activation", "rows differ"),
    "held on to, the policy": ("is_of", lambda *_: True, "layers.Dense", "a quantized policy", "amax_history"),
    "parts": ("_inside", lambda _: (), "layers.TimeDistributed[own code]", "as it is", "rows differ"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_entry_is_caught(fault: str, on_ranks: Any) -> None:
    table, value, name, change, shows = FAULTS[fault]
    wrong = on_ranks(ENGINE)(_with_a_wrong_entry, table, value, name, change)
    assert any(shows in text for text in wrong), wrong
