"""Table, page and JSON of a comparison that is made by hand."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from keras_flow.compare import html, runner, table
from keras_flow.compare.known_differences import ProgramFacts, that_fit
from keras_flow.compare.result import Comparison, Known, RunResult

SHAPES = {"1": {0: [8, 4]}, "tp2": {0: [8, 2], 1: [8, 2]}}


def run(backend: str, layout: str, share: float = 0.1) -> RunResult:
    shapes = SHAPES[layout]
    return RunResult(
        backend=backend,
        layout=layout,
        losses=[1.5, 1.0, 0.5],
        evaluation={"loss": 0.4, "accuracy": 0.75},
        step_seconds=0.012,
        bytes_per_rank={rank: 4 * shape[0] * shape[1] for rank, shape in shapes.items()},
        shapes={rank: {"m/kernel": shape, "m/seed_generator_state": [2]} for rank, shape in shapes.items()},
        declared={"m/kernel": "[S(1)]"},
        placements={"m/kernel": ([*range(len(shapes))], [len(shapes)])},
        ranks_named=len(shapes),
        loss_deviation=share * 1e-5,
        loss_share=share,
        weights_deviation=share * 1e-4,
        weights_share=share,
        between_backends=None if backend == "jax" else 1e-6,
        evaluated={"jax": 0.4, "torch": 0.400001},
        hierarchy=[len(shapes)],
        received_per_step=None if layout == "1" else 4096,
        peak_per_rank=2_500_000,
    )


GOOD = Comparison(
    program="mine <&>.py",
    runs=[run(backend, layout) for backend in ("jax", "torch") for layout in ("1", "tp2")],
    failures=[],
    batch_size=64,
    seed=3,
    versions={"keras": "3.15.1", "jax": "0.10.2"},
    random_layers=False,
    skipped={"tensorflow": "not installed"},
    environment={"Python": "3.11.9", "processor cores": "2"},
    model={"model": "mine, 1,218 parameters", "optimizer": "SGD, learning rate 0.1", "loss": "mse"},
    command="keras-flow compare 'mine <&>.py' --backends jax,torch --layouts 1,tp2 --seed 3 --out compare-out",
)
BAD = replace(
    GOOD,
    runs=[GOOD.runs[0], run("jax", "tp2", share=7.0), *GOOD.runs[2:]],
    failures=["jax tp2: loss deviates by 7e-05, 7 times the tolerance <b>"],
    random_layers=True,
)


KNOWN = Known("repeated rows", "TensorFlow adds <later>.", "Compare with SGD.", ["torch tp2"])
APART = replace(
    GOOD,
    runs=[*GOOD.runs[:3], replace(GOOD.runs[3], between_backends=0.023, between_share=15.0)],
    failures=["torch tp2: loss deviates by 0.023 from the first backend's (limit 0.0015)"],
    known=[KNOWN, replace(KNOWN, name="short batch", explains=[])],
)


class Parsed(HTMLParser):
    """Tags, their attributes, and the texts of table cells."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "polyline", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


@pytest.mark.parametrize("result", [GOOD, BAD], ids=["good", "bad"])
def test_the_page_fetches_nothing_and_is_well_formed(result: Comparison) -> None:
    page = html.page(result)
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)|src=|href=|@import|url\(|<script|<link", page)
    parsed = Parsed(page)
    assert not parsed.open, "every element is closed"
    assert "mine &lt;&amp;&gt;.py" in page
    assert "mine <&>" not in page


def test_the_page_has_every_run_curve_and_shard() -> None:
    page = html.page(GOOD)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]
    numbers = [row for row in cells if len(row) == 12]
    assert [row[:2] for row in numbers] == [["jax", "1"], ["jax", "tp2"], ["torch", "1"], ["torch", "tp2"]]
    assert numbers[1][2:] == ["0.4000", "0.7500", "1.0e-06", "1.0e-05", "-", "12.0", "2/2", "0.0001", "0.0041", "2.500"]
    of_four = [row for row in cells if len(row) == 4]
    assert of_four[0][:2] == ["jax", "tp2"] and of_four[1][:2] == ["torch", "tp2"], "the nearest weight of each run"
    evaluated = of_four[2:]
    assert evaluated[3] == ["torch", "tp2", "0.400000", "0.400001"]
    charts = re.findall(r"<svg[^>]*aria-label='([^']*)'.*?</svg>", page)
    assert charts[:4] == ["loss on jax", "loss on torch", "|Δ loss| on jax", "|Δ loss| on torch"]
    assert "median milliseconds of a step" in charts
    assert charts[4:6] == ["|Δ loss| to jax, layout 1", "|Δ loss| to jax, layout tp2"]
    assert page.count("tolerance</text>") == 4, "drawn into each chart of deviations"
    assert "[8, 4]: rank 0 holds [8, 2]; rank 1 holds [8, 2]" in page
    assert "<td>m/<wbr>kernel <span>[8, 4]</span></td>" in page
    assert "keras-flow compare &#x27;mine &lt;&amp;&gt;.py&#x27; --backends jax,torch" in page
    assert "<td>processor cores</td><td>2</td>" in page
    assert "model: <b>mine, 1,218 parameters</b> · optimizer: <b>SGD, learning rate 0.1</b> · loss: <b>mse</b>" in page
    assert "seed_generator" not in page
    assert "All 4 runs agree within the tolerances." in page
    assert "<td>keras</td><td>3.15.1</td>" in page


def test_the_page_shows_failures() -> None:
    page = html.page(BAD)
    assert "runs agree" not in page
    assert '<li class="bad">jax tp2: loss deviates by 7e-05, 7 times the tolerance &lt;b&gt;</li>' in page
    assert page.count(" class=bad") == 3, "loss and weights of one run, and its nearest weight"
    assert "Not judged here: the model draws random numbers" in page


def test_engines_that_differ_are_red_and_have_their_known_cause() -> None:
    page = html.page(APART)
    assert page.count(" class=bad") == 1
    assert '<td role="cell" class=bad data-head="Δ engine">2.3e-02 ✗</td>' in page
    cause = "repeated rows (of torch tp2). TensorFlow adds &lt;later&gt;. Compare with SGD."
    assert f"<b>Known cause</b>: {cause}</p>" in page
    assert "<b>Known difference</b>: short batch (here too, without a deviation over its limit)." in page
    assert cause in html.fragment(APART)
    text = " ".join(shown(APART).split())
    assert "known cause: repeated rows (of torch tp2). TensorFlow adds <later>. Compare with SGD." in text
    colours = StringIO()
    table.show(APART, Console(file=colours, width=150, force_terminal=True, color_system="standard"))
    assert "\x1b[1;31m2.3e-02" in colours.getvalue()


def test_the_known_differences_that_concern_a_program() -> None:
    def names(*engines: str, **facts: object) -> list[str]:
        return [each.name for each in that_fit(ProgramFacts(**facts), engines)]  # type: ignore[arg-type]

    rows, outputs = "repeated rows of an embedding", "losses of outputs in a short last batch"
    text = {"layers": ["Embedding", "Dense"], "optimizer": "Adam"}
    assert names("jax", "tensorflow", **text) == [rows] == names("tensorflow", "torch", "jax", **text)
    assert names("jax", "torch", **text) == [] == names("jax", "tensorflow", **{**text, "optimizer": "SGD"})
    assert names("jax", "tensorflow", **{**text, "optimizer": "SGD", "clips": True}) == [rows]
    assert names("jax", "tensorflow", optimizer="Adam") == []
    assert names("jax", "tensorflow", outputs=2, short_batch=3) == [outputs]
    assert names("jax", "torch", outputs=2, short_batch=3) == [] == names("jax", "tensorflow", outputs=2)
    assert names("jax", "torch", random="stock", device="gpu") == ["random numbers of each engine", "TF32"]
    assert names("torch", random="stock", device="gpu") == []
    assert names("jax", "torch", dtypes=["float32", "bfloat16"]) == ["half precision"]


def shown(result: Comparison, width: int = 150) -> str:
    out = StringIO()
    table.show(result, Console(file=out, width=width))
    return out.getvalue()


def test_table() -> None:
    text = shown(GOOD)
    assert "mine <&>.py: 3 steps of 64 rows" in text
    lines = [line.split() for line in text.splitlines()]
    tp2 = ["jax", "tp2", "0.4000", "0.7500", "1.0e-06", "1.0e-05", "-", "12.0", "2/2", "0.0001", "0.0041", "2.500"]
    assert tp2 in lines
    assert ["torch", "1", "0.4000", "0.7500", "-", "-", "1.0e-06", "12.0", "1/1", "0.0001", "-", "2.500"] in lines
    assert "left out: tensorflow (not installed)" in text
    assert "All 4 runs agree within the tolerances." in text


def test_on_80_columns_nothing_is_cut() -> None:
    text = shown(GOOD, 80)
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert ["jax", "tp2", "0.4000", "0.7500", "1.0e-06", "1.0e-05", "-"] in lines
    assert ["jax", "tp2", "12.0", "2/2", "0.0001", "0.0041", "2.500"] in lines


def test_a_loss_that_is_no_number_is_told_once() -> None:
    told = runner._failures(replace(run("jax", "tp2"), losses=[0.5, float("nan")], loss_share=float("inf")))
    assert len(told) == 1
    assert told[0].startswith("jax tp2: the loss of step 2 is nan, and nothing can be compared: look for such values")


def test_table_of_failures() -> None:
    text = " ".join(shown(BAD).split())
    assert "FAILED jax tp2: loss deviates by 7e-05, 7 times the tolerance" in text
    assert "The largest deviation from one device is 700 % of its tolerance (jax tp2)." in text
    assert "Δ engine is not judged" in text
    assert "runs agree" not in text


def test_json_holds_all(tmp_path: Path) -> None:
    BAD.write(tmp_path / "report.json")
    values = json.loads((tmp_path / "report.json").read_text())
    assert values["failures"] == BAD.failures
    assert values["skipped"] == {"tensorflow": "not installed"}
    assert [(one["backend"], one["layout"], one["ranks_used"]) for one in values["runs"]] == [
        ("jax", "1", 1),
        ("jax", "tp2", 2),
        ("torch", "1", 1),
        ("torch", "tp2", 2),
    ]
    assert values["runs"][1]["shapes"]["1"]["m/kernel"] == [8, 2]
    assert values["runs"][1]["losses"] == [1.5, 1.0, 0.5]


def test_runs_that_diverged_are_drawn_too(tmp_path: Path) -> None:
    lost = replace(GOOD.runs[1], losses=[1.5, math.nan, math.inf], loss_deviation=math.inf, loss_share=math.inf)
    result = replace(GOOD, runs=[GOOD.runs[0], lost, *GOOD.runs[2:]], failures=["jax tp2: diverged"])
    points = re.findall(r"points='([^']*)'", html.page(result))
    assert not any("nan" in one or "inf" in one for one in points)
    assert "inf" in shown(result)
    result.write(tmp_path / "report.json")
    json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_model_without_a_metric_has_no_column_for_it() -> None:
    assert table.heads(GOOD, None)[:2] == ("loss", "Δ loss")
    run = GOOD.runs[1]
    assert len(table.row(GOOD, run, None)) == 2 + len(table.heads(GOOD, None))
    assert table.row(GOOD, run, None)[2:4] == [("0.4000", False), ("1.0e-06", False)]


def test_one_engine_has_its_charts_side_by_side_and_no_column_for_others() -> None:
    alone = replace(GOOD, runs=GOOD.runs[:2])
    page, text = html.page(alone), shown(alone)
    assert "Δ engine" not in page + text + html.fragment(alone)
    assert page.count('<div class="side">') == 1 and '<div class="side">' not in html.page(GOOD)


def test_variables_that_are_laid_alike_are_one_row() -> None:
    def with_more(run: RunResult) -> RunResult:
        more = {f"m/{name}": shape for name, shape in (("second", [8, 4]), ("third", [8, 4]))}
        if run.layout == "1":
            return replace(run, shapes={0: {**run.shapes[0], **more}})
        parts = {"m/second": [8, 2], "m/third": [8, 4]}
        declared = {**run.declared, "m/second": "[S(1)]", "m/third": "[B]"}
        placements = dict.fromkeys(declared, run.placements["m/kernel"])
        shapes = {rank: {**held, **parts} for rank, held in run.shapes.items()}
        return replace(run, shapes=shapes, declared=declared, placements=placements)

    page = html.page(replace(GOOD, runs=[with_more(run) for run in GOOD.runs]))
    who = page.partition("Who holds what")[2].partition("</table>")[0]
    assert who.count("<tr>") == 3, "the head, the two that are split, and the one that is whole"
    assert "<details><summary>and 1 other laid like it</summary>m/<wbr>second</details>" in who


def test_blocks_have_the_ranks_of_their_own_placement() -> None:
    odd = replace(run("jax", "tp2"), placements={"m/kernel": ([1, 0], [2])})
    who = html.page(replace(GOOD, runs=[run("jax", "1"), odd])).partition("Who holds what")[2]
    blocks = re.findall(r"x='([\d.]+)'[^>]*><title>held by rank (\d)", who)
    assert [rank for _, rank in sorted(blocks, key=lambda block: float(block[0]))] == ["1", "0"]
    unread = replace(odd, declared={"m/kernel": "one device"}, placements={})
    assert ">one device</td>" in html.page(replace(GOOD, runs=[run("jax", "1"), unread]))


@pytest.mark.parametrize("layout", ["dp[fast]", "x[/y]"])
def test_names_are_no_markup(layout: str) -> None:
    named = replace(GOOD, program="mine[/x].py", skipped={"torch": "[/no]"})
    odd = replace(named, runs=[run("jax", "1"), replace(run("jax", "tp2", share=7.0), layout=layout)])
    page, text = html.page(odd), shown(odd)
    assert f">{layout}</td>" in page and f">{layout}</td>" in html.fragment(odd)
    assert ["jax", layout, "0.4000", "0.7500", "7.0e-05", "✗"] in [line.split()[:6] for line in text.splitlines()]
    assert (
        f"(jax {layout})" in " ".join(text.split())
        and "mine[/x].py: 3 steps" in text
        and "left out: torch ([/no])" in text
    )
    tag = "<b>&"
    assert tag not in html.page(replace(odd, runs=[odd.runs[0], replace(odd.runs[1], layout=tag)]))


def test_one_run_agrees_with_nothing() -> None:
    alone = replace(GOOD, runs=GOOD.runs[:1])
    for text in (html.page(alone), html.fragment(alone), shown(alone)):
        assert "One run: there is nothing to compare it with." in text and "agree" not in text
        assert "left out: tensorflow (not installed)" in text


def test_small_and_large_numbers_have_digits() -> None:
    small = replace(GOOD.runs[1], evaluation={"loss": 3.14e-5, "mse": math.inf}, evaluated={"jax": 3.14159265e-5})
    odd = replace(GOOD, runs=[small, small])
    assert table.row(odd, small, "mse")[2:4] == [("3.14e-05", False), ("not finite", False)]
