"""Collectives that are equal but for the layer or the weight are one row of the tables, and none is lost."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

import keras_flow as kf
from keras_flow.explainer.explanation import Collective, Explanation
from keras_flow.explainer.folding import folded
from keras_flow.explainer.text import show
from tests.explainer.small import COLUMN, ROW, dense, explained

MESH = kf.Placement([[0, 1], [2, 3]], axis_names=("data", "model"))


def _sent(path: str, received: int, phase: str = "gradients", **other: object) -> Collective:
    tensor = "kernel gradient" if phase == "gradients" else "output"
    sent = Collective("all_reduce", ("data",), 2, received, received, phase, path, tensor, "rows")
    return replace(sent, **other)  # type: ignore[arg-type]


def _shown(collectives: list[Collective], stages: bool = False) -> list[tuple[str, str, int, int]]:
    return [(sent.path, sent.tensor, sent.received, count) for sent, count in folded(collectives, stages)]


def test_four_that_are_alike_are_one_row_and_three_are_three() -> None:
    alike = [_sent(f"d{number}", 10**number) for number in range(4)]
    assert _shown(alike) == [("4 weights", "gradients", 1111, 4)]
    assert _shown(alike[:3]) == [(f"d{number}", "kernel gradient", 10**number, 1) for number in range(3)]
    # kernel and bias of two layers: four weights
    both = [replace(sent, tensor=name) for sent in alike[:2] for name in ("kernel gradient", "bias gradient")]
    assert _shown(both) == [("4 weights", "gradients", 22, 4)]


def test_a_row_has_its_first_layers_place_and_name() -> None:
    alike = [_sent(f"d{number}", 5, "forward") for number in range(5)]
    other = _sent("last", 7, "forward", tensor="input")
    assert _shown([alike[0], other, *alike[1:]]) == [("d0 and 4 more", "output", 25, 5), ("last", "input", 7, 1)]


@pytest.mark.parametrize("other", [{"kind": "all_gather"}, {"axes": ("model",)}, {"why": "else"}, {"stage": 1}])
def test_what_is_not_alike_stays_apart(other: dict[str, object]) -> None:
    alike = [_sent(f"d{number}", 1) for number in range(3)]
    assert len(_shown([*alike, _sent("d3", 1, **other)])) == 4
    assert len(_shown([*alike, _sent("d3", 1)])) == 1


def test_a_pipeline_names_the_stage() -> None:
    sent = [_sent(f"d{number}", 1, stage=number // 4) for number in range(8)]
    assert [path for path, *_ in _shown(sent, stages=True)] == ["4 weights of stage 0", "4 weights of stage 1"]


def test_what_travels_together_is_named_by_its_number_of_layers() -> None:
    together = _sent("a, b, c, d", 1, tensor="gradients of 8 variables, together")
    assert _shown([together]) == [("4 layers", "gradients of 8 variables, together", 1, 1)]
    three = replace(together, path="a, b, c")
    assert _shown([three])[0][0] == "a, b, c"


def _explained() -> Explanation:
    return explained(
        lambda: dense(*[64] * 6), {"d[024]/kernel": COLUMN, "d[024]/bias": ROW, "d[135]/kernel": ROW}, placement=MESH
    )


def _printed(explanation: Explanation, most: int | None, fold: bool) -> str:
    stream = io.StringIO()
    show(explanation, Console(file=stream, width=200, color_system=None), most, fold)
    return stream.getvalue()


@pytest.mark.usefixtures("described")
def test_the_text_is_short_and_all_rows_are_there_when_asked_for() -> None:
    explanation = _explained()
    sums = [sent for sent in explanation.collectives if sent.phase == "gradients"]
    short, long = explanation.text(), explanation.text(all_rows=True)
    assert str(explanation) == short
    if len(sums) > 1:  # torch sums the gradients together
        assert re.search(r"gradients +all_reduce +data=2 .* 12 weights +gradients", short)
        assert [len(re.findall(r"^gradients", text, re.MULTILINE)) for text in (short, long)] == [1, 12]
    assert "text(all_rows=True)" in short
    assert "text(all_rows=True)" not in long
    assert len(explanation.as_json()["collectives"]) == len(explanation.collectives)  # type: ignore[arg-type]


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("fold", [True, False])
def test_rows_add_up_to_the_title(most: int | None, fold: bool) -> None:
    explanation = _explained()
    table = _printed(explanation, most, fold).partition("collectives of a step")[2].partition("\n\n")[0]
    units = {"B": 1, "kB": 1e3, "MB": 1e6}
    found = re.findall(r" ([\d.]+) (B|kB|MB)\b", table)
    total, *rows = [float(number) * units[unit] for number, unit in found]
    assert total == pytest.approx(explanation.received, rel=1e-3)  # four digits are shown
    assert sum(rows) == pytest.approx(explanation.received, rel=1e-3)
