"""`keras-flow boxing` prints plans, writes pictures, and reads bad input with one error."""

from __future__ import annotations

import itertools
import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from keras_flow.boxing import BoxingPlan
from keras_flow.cli.app import app
from keras_flow.errors import FlowError


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["boxing", *arguments])
    if result.exception:
        raise result.exception
    return result.output


def test_plan_in_words():
    out = run("S(0),B", "B,S(1)", "--shape", "4096,4096", "--hierarchy", "2,4")
    assert "local_slice in groups along axis1: S(0),B -> S(0),S(1)" in out
    assert "all_gather in groups along axis0: S(0),S(1) -> B,S(1)" in out
    assert "67.11 MB by all ranks together (at the lower bound), at most 8.389 MB by one" in out
    assert "groups: 2 of 4 ranks along axis1, the first [0, 1, 2, 3]" in out
    assert "groups: 4 of 2 ranks along axis0, the first [0, 4]" in out
    assert "ranks 0-7: 8,388,608 bytes each" in out
    assert "lower bound: 67,108,864 bytes" in out
    assert "modelled time: " in out


def test_amounts_of_ranks_that_receive_differently():
    out = run("S(0)", "B", "--shape", "6,5", "--hierarchy", "4")
    assert "groups: one of all 4 ranks" in out
    assert "ranks 2-3: 100 bytes each" in out
    assert "ranks 0-1: 80 bytes each" in out
    assert "lower bound: 360 bytes" in out


def test_many_ranks():
    """Nothing is written out for each of them."""
    out = run("S(0),P", "P,B", "--shape", "65536,65536", "--hierarchy", "64,1024")
    assert len(out) < 2000
    assert "on 64 x 1024 ranks" in out
    assert "lower bound: 35,150,012,350,464 bytes" in out
    assert "of 16 that were looked at" in out


def test_json_is_a_plan():
    made = BoxingPlan.from_json(json.loads(run("P", "B", "--shape", "64,48", "--json")))
    assert made.total_bytes == 2 * 3 * 64 * 48 * 4


def test_one_rank():
    out = run("S(0)", "S(1)", "--shape", "8,8", "--rank", "1")
    assert "sends to 3: elements 0:4 of [2:4 x 6:8] of its source shard" in out
    assert "receives from 0: elements 0:4 of [0:2 x 2:4] of its source shard" in out


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_picture(tmp_path, kind):
    file = tmp_path / f"plan.{kind}"
    run("P,S(0)", "S(0),B", "--shape", "64,48", "--hierarchy", "2,2", f"--{kind}", str(file))
    start = file.read_bytes()[:5]
    assert start == (b"\x89PNG\r" if kind == "png" else b"<svg ")


def test_a_picture_has_both_layouts_and_the_steps_between(tmp_path):
    file = tmp_path / "plan.svg"
    run("P,S(0)", "S(0),B", "--shape", "64,48", "--hierarchy", "2,2", "--svg", str(file))
    root = ElementTree.parse(file).getroot()
    parts = root.findall("{http://www.w3.org/2000/svg}svg")
    sides = [(float(part.get("x", 0)), float(part.get("width", 0))) for part in parts]
    assert len(parts) == 3
    assert all(x + width < following for (x, width), (following, _) in itertools.pairwise(sides))
    assert float(root.get("width")) == sum(sides[-1])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("S(3)", "B"), r"split\(3\) on axis 'axis0' needs a dimension that the shape \[4096, 4096\] does not have"),
        (("S(0),B", "B"), r"S\(0\),B has 2 sbp, and --hierarchy 4 has 1 axis: .* --hierarchy 2,2$"),
        (("S(0)", "B", "--target-hierarchy", "2,2"), r"B has 1 sbp, and --target-hierarchy 2,2 has 2 axes"),
        (("S(0)", "B", "--shape", "4,x"), r"--shape takes whole numbers"),
        (("S(0)", "B", "--ranks", "0,1"), r"has 4 ranks, 2 are listed"),
        (("S(0)", "B", "--between", "fast"), r"--between takes latency and bandwidth"),
        (("S(0)", "B", "--rank", "99"), r"--rank 99 is not in the plan: it has 4 ranks, 0, 1, 2, 3"),
        (("S(0)", "B", "--svg", "x.txt"), r"--svg writes a file that ends in .svg, got x.txt"),
        (("S(0)", "B", "--svg", "noext"), r"--svg writes a file that ends in .svg, got noext"),
        (("S(0)", "B", "--png", "/nonexist/x.png"), r"--png /nonexist/x.png: there is no folder /nonexist"),
        (
            ("S(0)", "B", "--measured", "f", "--ranks-per-host", "4"),
            r"--measured has the links of one host, and --ranks-",
        ),
        (("S(0)", "B", "--measured", "f", "--between", "1,1"), r"of one host, and --between says others: give one"),
        (("S(0)", "B", "--backend", "jax"), r"--backend chooses among the links of a file: give --measured too"),
        (("S(0)", "B", "--json", "--rank", "99"), r"--json prints the whole plan, and --rank the part of one rank"),
        (("Q", "B"), r"cannot read 'Q' in the nd_sbp"),
    ],
)
def test_bad_input(arguments, text):
    with pytest.raises(FlowError, match=text):
        run(*arguments)
