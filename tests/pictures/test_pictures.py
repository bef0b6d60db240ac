"""Pictures: what is drawn where, that it is well-formed, and that it needs neither a script nor the network."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import keras_flow as kf
from keras_flow.errors import FlowError
from keras_flow.pictures import ranks, svg
from keras_flow.pictures.charts import Curve, bars, curves
from keras_flow.pictures.drawing import Drawing
from keras_flow.pictures.graph import Edge, Node, graph

MESH = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))


def parsed(picture: str | None) -> ElementTree.Element:
    assert picture is not None
    assert not re.search(r"<script|https?://(?!www.w3.org/2000/svg)|url\(|@import", picture)
    return ElementTree.fromstring(f"<div>{picture}</div>")


def texts(picture: str | None) -> list[str]:
    return [each.text or "" for each in parsed(picture).iter() if each.tag.endswith("text")]


def notes(picture: str | None) -> list[str]:
    return [each.text or "" for each in parsed(picture).iter() if each.tag.endswith("title")]


def test_a_placement_is_a_grid_with_the_names_of_its_axes() -> None:
    picture = MESH._repr_html_()
    assert texts(picture) == ["model →", "0", "1", "2", "3", "data →"]
    assert notes(picture) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    three = kf.Placement(np.arange(16).reshape(2, 2, 4), axis_names=("host", "data", "model"))._repr_html_()
    assert texts(three)[-1] == "panels: host 2"


def test_a_layout_says_who_holds_which_block() -> None:
    assert notes(kf.Layout(MESH, "S(0),S(1)", (8, 12)).picture()) == [f"held by rank {rank}" for rank in range(4)]
    assert notes(kf.Layout(MESH, "B,S(1)", (8, 12)).picture()) == ["held by ranks 0, 2", "held by ranks 1, 3"]
    assert texts(kf.Layout(MESH, "B,B", (8, 12)).picture()) == ["(B,B) of [8, 12]", "0, 1, 2, 3"]


def test_a_sum_is_stacked_sheets() -> None:
    picture = kf.Layout(MESH, "S(0),P", (8, 12)).picture()
    assert texts(picture) == ["(S(0),P) of [8, 12]", "0 + 1", "2 + 3"]
    assert "held by rank 0; the sum of 2 such sheets" in notes(picture)
    assert {"a summand, held by rank 1", "a summand, held by rank 3"} <= set(notes(picture))


def test_blocks_have_the_place_and_size_of_their_elements() -> None:
    picture = kf.Layout(kf.Placement(range(4)), "S(0)", (10, 2)).picture(width=100)
    outlines = [each for each in parsed(picture).iter() if each.tag.endswith("rect") and each.get("rx")]
    heights = [float(each.get("height", 0)) for each in outlines]
    assert heights == pytest.approx([30, 30, 20, 20]), "3, 3, 2 and 2 rows of 10"


def test_many_ranks_are_told_as_text() -> None:
    many = kf.Placement(range(1024))
    assert many._repr_html_() is None
    assert kf.Layout(many, "S(0)", (2048, 2)).picture() is None


def test_a_plan_has_an_arrow_for_each_message_and_its_bytes() -> None:
    four = kf.Placement(range(4))
    plan = kf.boxing.plan(kf.Layout(four, "S(0)", (8, 8)), kf.Layout(four, "S(1)", (8, 8)), "float32")
    picture = plan._repr_html_()
    assert sorted(note for note in notes(picture) if "bytes" in note)[0] == "rank 0 to rank 1: 16 bytes"
    assert sum("bytes" in note for note in notes(picture)) == 12
    assert "1 step for [8, 8] float32: 192 B received in all; no correct plan receives less than 192 B" in str(picture)


def test_curves_that_coincide_take_turns() -> None:
    picture = curves("loss", [Curve("1", [2.0, 1.0], 0), Curve("dp4", [2.0, 1.0], 1)])
    lines = [each for each in parsed(picture).iter() if each.tag.endswith("polyline")]
    assert len(lines) == 4
    dashed = [each for each in lines if each.get("stroke-dasharray") != "none"]
    assert {each.get("points") for each in dashed} == {lines[0].get("points")}
    assert [each.get("stroke-dasharray") for each in dashed] == ["9 9", "9 9"]
    assert [each.get("stroke-dashoffset") for each in dashed] == ["0", "-9"]
    assert len({each.get("stroke") for each in dashed}) == 2


def test_a_logarithmic_scale_has_its_limit_and_floor() -> None:
    picture = curves("Δ", [Curve("dp4", [0.0, 1e-6, float("nan")], 1)], limit=[1e-5, 1e-5, 1e-5], floor=1e-9)
    assert "tolerance" in texts(picture) and "≤1e-09" in texts(picture)
    drawn = [each.get("points", "").split() for each in parsed(picture).iter() if each.tag.endswith("polyline")]
    assert [len(points) for points in drawn] == [3, 2, 2], "a value that is no number is left out"
    heights = [float(point.partition(",")[2]) for point in drawn[1]]
    assert heights[0] == 200, "nothing lies on the floor"
    assert heights[1] < heights[0]


def test_one_step_is_a_point() -> None:
    picture = curves("Δ", [Curve("dp4", [1e-6], 0), Curve("tp4", [0.0], 1)], limit=[1e-5], floor=1e-9)
    assert "step 1" in texts(picture) and "step 2" not in texts(picture)
    tags = [each.tag.rpartition("}")[2] for each in parsed(picture).iter()]
    assert tags.count("circle") == 4 and tags.count("polyline") == 1, "the limit is a line"


def test_long_names_are_whole() -> None:
    names = [f"pp2xdp2xtp2-interleaved-m{number}" for number in (4, 8, 16)]
    picture = curves("loss", [Curve(name, [2.0, 1.0], at) for at, name in enumerate(names)])
    shown = [each for each in parsed(picture).iter() if each.text in names]
    assert len({each.get("y") for each in shown}) == 3 and {each.get("x") for each in shown} == {"16.0"}
    bottom = max(float(each.get("y", 0)) for each in shown)
    assert bottom < float(re.search(r"viewBox='0 0 336 (\d+)'", picture)[1])  # type: ignore[index]
    picture = bars("ms", [("tensorflow", [(name, 2.0, "2.0") for name in names])])
    assert {each.get("x") for each in parsed(picture).iter() if each.text in (*names, "tensorflow")} == {"0.0"}


def test_bars_are_as_long_as_their_values() -> None:
    picture = bars("ms", [("jax", [("1", 2.0, "2.0"), ("dp4", 4.0, "4.0")])])
    wide = [float(each.get("width", 0)) for each in parsed(picture).iter() if each.tag.endswith("rect")]
    assert wide[1] == pytest.approx(2 * wide[0])


def test_a_model_with_a_branch() -> None:
    nodes = [
        Node("a", "Dense", [("kernel", "S(1)")], (0,), (1,), ["forward: all_gather, 8 B"]),
        Node("b", "Dense", [], (0,), (2,), []),
        Node("add", "Add", [], (1, 2), (3,), []),
    ]
    tensors = {key: Edge(f"[4, 2] tensor {key}", key == 1) for key in range(4)}
    picture = graph("model", (0,), nodes, tensors)
    assert [words for words in texts(picture) if words in ("a", "b", "add")] == ["a", "b", "add"]
    assert "kernel: S(1)" in texts(picture) and "forward: all_gather, 8 B" in texts(picture)
    assert sum("tensor" in words for words in texts(picture)) == 4, "a layout on each edge"


def test_texts_are_escaped() -> None:
    assert "<b>" not in svg.table(("<b>",), [("<b>",)]).replace("<b>", "", 0)
    assert parsed(svg.text(0, 0, "a < b & c")).find(".//*").text == "a < b & c"  # type: ignore[union-attr]
    assert ranks.placement([0], [1], ["x"]).count("<svg") == 1


def test_files(tmp_path: Path) -> None:
    drawing = Drawing(kf.Layout(MESH, "S(0),P", (8, 12)).picture() or "", "words")
    drawing.save(tmp_path / "picture.svg")
    drawing.save(tmp_path / "picture.png", scale=3)
    assert (tmp_path / "picture.svg").read_text().startswith("<svg xmlns=")
    head = (tmp_path / "picture.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(head[16:20], "big") == 3 * 207
    with pytest.raises(FlowError, match=r"ends with \.svg or \.png, not to 'picture\.gif'"):
        drawing.save(tmp_path / "picture.gif")


def test_a_png_has_its_words(tmp_path: Path) -> None:
    sizes = []
    for words in ("", "a step that moves many bytes"):
        Drawing(svg.picture(300, 40, [svg.text(150, 20, words)], "words"), words).save(tmp_path / "words.png")
        sizes.append((tmp_path / "words.png").stat().st_size)
    assert sizes[1] > 2 * sizes[0]


def test_a_page_of_text_colours_is_readable_on_any_ground() -> None:
    """Lines and letters have the page's colour; nothing is black or white by itself."""
    for picture in (MESH._repr_html_(), kf.Layout(MESH, "S(0),P", (8, 12)).picture()):
        assert not re.search(r"(fill|stroke)='(#000|#fff|black|white)", str(picture))
        assert "currentColor" in str(picture)
