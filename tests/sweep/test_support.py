"""docs/support.md says what the results of the sweep say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep import results, support

SETTING = {"mesh": "(2,2)", "rows": "uneven", "rules": "last", "strategy": ""}
LINE = {"backend": "torch", "name": "ops.sort", "setting": SETTING, "state": "right", "notes": []}
ROWS = "ComputedWhole: a batch of 11 rows does not divide by 2 data ranks: each rank computes it whole"
WHOLE = "FlowWarning: apply: torch's distributed tensors cannot compute sort split over the ranks"
LINES = [
    {**LINE, "notes": [ROWS]},
    {**LINE, "name": "ops.unique", "notes": [WHOLE]},
    {**LINE, "name": "ops.unique", "notes": [WHOLE], "setting": {**SETTING, "rows": "one"}},
    {**LINE, "name": "ops.fft", "notes": ["ComputedWhole: model 'm' is computed whole", WHOLE]},
    {**LINE, "name": "ops.fft", "notes": ["ComputedWhole: model 'm' is computed whole"]},
    {**LINE, "name": "ops.det", "state": "refused", "error": "FlowError: layer 'a' of 3 ranks cannot"},
    {**LINE, "name": "ops.eig", "state": "one device", "error": "ValueError: no gradient"},
]


def test_states_and_reasons() -> None:
    found = results.of_lines(LINES)
    states = ["native", "fallback", "fallback", "broadcast", "refused", results.NOT_COMPARED]
    assert [result.state for result in found] == states
    assert results.share(found, "torch") == (1, 4)
    text = support.page(found)
    assert " | 1 of 4 (25.0 %) | 2 | 1 native, 1 broadcast, 2 fallback, 1 refused |" in text
    assert "- `ops.det`\n\n  **refused**: layer 'a' of N ranks cannot\n" in text
    why = "torch's distributed tensors cannot compute sort split over the ranks"
    assert f"- `ops.unique`\n\n  **fallback**: {why}\n" in text
    assert results.of_lines([{**LINE, "notes": ["FlowWarning: Conv2D of 12 rows " + "long " * 80]}])[0].reasons == (
        "Conv2D of N rows " + "long " * 56 + "...",
    )
    assert "Not native on jax" not in text
    failed = "Keras itself fails on one device:\n\n- torch, ops.eig: ValueError: no gradient\n"
    assert text.endswith(failed + support.MADE)


def test_what_float64_says_replaces_what_float32_said() -> None:
    wrong = {**LINE, "state": "wrong", "over": {"update": 2.0}}
    assert [result.state for result in results.of_lines([wrong])] == ["wrong"]
    assert [result.state for result in results.of_lines([wrong, LINE])] == ["native"]


def test_the_table_keeps_all_results(tmp_path: Path) -> None:
    found = results.of_lines(LINES)
    results.write(found, tmp_path / "support.csv")
    assert results.by_key(results.read(tmp_path / "support.csv")) == results.by_key(found)
    assert results.read(tmp_path / "none.csv") == []


def test_a_part_of_the_sweep_is_added_to_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.write(results.of_lines(LINES), tmp_path / "support.csv")
    (tmp_path / "torch.jsonl").write_text(
        '{"backend": "torch", "name": "ops.fft", "state": "right", "notes": [], '
        '"setting": {"mesh": "(2,2)", "rows": "uneven", "rules": "last"}}\n'
    )
    support.main(["--from", str(tmp_path), "--out", str(tmp_path)])
    assert "torch: 2 of 4 names native" in capsys.readouterr().out
    support.main(["--from", str(tmp_path), "--out", str(tmp_path), "--fresh"])
    assert "torch: 1 of 1 names native" in capsys.readouterr().out
