"""The support table says what the results say."""

from pathlib import Path

from tests.parity import support

RESULT = {"backend": "tensorflow", "case": "mlp", "layout": "dp4", "features": ["Dense"], "status": "ok", "notes": []}


def test_page() -> None:
    results = [
        RESULT,
        {**RESULT, "layout": "tp4", "notes": ["LayoutFallback: dense_3/kernel: no"]},
        {**RESULT, "layout": "2x2", "status": "over", "over": ["loss: 3 times the tolerance"]},
        {**RESULT, "backend": "jax", "notes": ["ComputedWhole: rows"]},
        {**RESULT, "layout": support.MIRRORED},
        {**RESULT, "layout": support.MIRRORED, "features": ["add_loss"], "status": "refused", "error": "rows mix"},
        {"status": "fault", "backend": "jax", "layout": "dp4", "case": "last batch dropped", "caught": True},
    ]
    text = support.page(support.cells(results))
    assert "| Dense | broadcast [1] / – / – | native / fallback [2] / WRONG [3] | – |" in text
    assert "1. rows\n2. dense/kernel: no\n3. loss: 3 times the tolerance\n" in text
    assert "Native: jax 0 of 1 (0 %), tensorflow 1 of 3 (33 %)." in text
    assert "for: Dense.\n\nRefused:\n\n- add_loss: rows mix\n" in text


def test_the_page_has_what_the_grid_does_not_run() -> None:
    page = Path(__file__).parents[2] / "docs" / "features.md"
    assert support.ELSEWHERE in support.page([]) and support.ELSEWHERE in page.read_text()


def test_what_one_device_computes_is_not_called_native() -> None:
    results = [{**RESULT, "features": ["Dense", "model(x)"], "layout": layout} for layout in support.LAYOUTS]
    results.append({**results[0], "layout": support.MIRRORED})
    text = support.page(support.cells(results))
    assert "| Dense | – | native | – |" in text
    assert "| model(x) | – | one device [1] | – |" in text
    assert "tensorflow 3 of 6 (50 %)" in text
    assert "on the first rank of each process, from gathered weights" in text


def test_every_refusal_has_a_reason_of_its_own() -> None:
    assert support.refused_reason("tensorflow", "subclassed", "dp4") == ""
    assert "rows may interact" in support.refused_reason("tensorflow", "subclassed", support.MIRRORED)
    assert support.refused_reason("tensorflow", "strings", "dp4") == "DTensor has no string tensors"


def test_the_product_says_what_is_refused_or_not_native() -> None:
    good = {**RESULT, "case": "cnn, Adam, plain", "worst": {"loss": 0.02}}
    refused = {**RESULT, "status": "refused", "error": "SPMD expansion resulted in op output that does not fit"}
    refused |= {"case": "transformer, RMSprop, plain", "layout": "tp4"}
    alone = {**good, "case": "rnn, SGD, plain", "notes": ["LayoutFallback: rnn: one device computes it"]}
    text = support.page([], [good, refused, alone])
    assert "2 of 3 runs have the numbers of one device; the largest deviation is 2.0 %" in text
    assert "\n- tensorflow, refused: transformer, RMSprop, plain, tp4: SPMD expansion resulted in op" in text
    assert f"\n- tensorflow, fallback: rnn, SGD, plain, {alone['layout']}: rnn: one device computes it" in text
    assert [support.is_expected(result) for result in (good, refused, alone)] == [True, False, True]


def test_the_shares_on_the_page_are_those_of_its_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text(encoding="utf-8")
    said = next(line for line in page.splitlines() if line.startswith("Native: "))
    rows = page[page.index("| feature |") :].split("\n\n")[0].splitlines()
    engines = [name.strip() for name in rows[0].split("|")[2:-1]]
    for column, engine in enumerate(engines, 2):
        cells = [row.split("|")[column].strip().split(" / ") for row in rows[2:]]
        states = [state for cell in cells for state in (cell * 3 if len(cell) == 1 else cell) if state != "–"]
        assert f"{engine} {states.count('native')} of {len(states)} " in said
