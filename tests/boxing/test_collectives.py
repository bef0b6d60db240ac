"""Named steps: which change of layout is which collective, and what it receives."""

from __future__ import annotations

from keras_flow.boxing import plan
from keras_flow.layout import Layout
from tests.boxing.cases import grid


def test_named_collectives():
    mesh, shape = grid((2, 4)), (64, 48)
    kinds = {
        ("P,P", "B,B"): "all_reduce",
        ("S(0),P", "S(0),B"): "all_reduce",
        ("S(0),P", "S(0),S(1)"): "reduce_scatter",
        ("P,P", "S(0),S(1)"): "reduce_scatter",
        ("S(0),S(1)", "B,B"): "all_gather",
        ("S(0),S(1)", "S(0),B"): "all_gather",
        ("B,S(0)", "B,S(1)"): "all_to_all",
        ("B,B", "S(0),B"): "local_slice",
        ("B,B", "P,S(1)"): "local_keep",
        ("S(1),S(0)", "S(0),S(1)"): "exchange",
    }
    for (before, after), kind in kinds.items():
        assert [step.kind for step in plan(Layout(mesh, before, shape), Layout(mesh, after, shape)).steps] == [kind]
    square = plan(Layout(grid((2, 2)), "S(0),S(1)", shape), Layout(grid((2, 2)), "S(1),S(0)", shape))
    assert [step.kind for step in square.steps] == ["permute"]
    assert plan(Layout(mesh, "P,B", shape), Layout(mesh, "P,B", shape)).steps == ()


def test_bytes_of_textbook_collectives():
    mesh, shape, n = grid((4,)), (64, 48), 64 * 48 * 4
    for before, after, share in (
        ("P", "B", 2 * 3 / 4),
        ("P", "S(0)", 3 / 4),
        ("S(0)", "B", 3 / 4),
        ("S(0)", "S(1)", 3 / 16),
    ):
        made = plan(Layout(mesh, before, shape), Layout(mesh, after, shape))
        assert {made.bytes_received(rank) for rank in range(4)} == {share * n}
