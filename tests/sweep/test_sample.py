"""A sample of Keras's public names has the numbers of one device; the whole is run by `make test-full`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep import runner, sample
from tests.sweep.design import Setting


@pytest.mark.parametrize(
    ("backend", "group"), [(backend, group) for backend, (count, _) in sample.GROUPS.items() for group in range(count)]
)
def test_a_sample_has_the_numbers_of_one_device(backend: str, group: int, on_ranks, tmp_path: Path) -> None:
    lines = on_ranks(backend)(sample.train, group)
    # some operations have no gradient on an engine, with one device too
    assert sum(line["state"] in ("right", "wrong") for line in lines) >= 0.5 * len(lines) > 0
    off = [line for line in lines if line["state"] == "wrong"]
    tasks = [runner.Task((line["name"],), Setting(**line["setting"])) for line in off]
    exact = tmp_path / "float64.jsonl"  # where float32 rounds more than the tolerance, float64 decides
    runner.Sweep(backend, tasks, exact, float64=True).run()
    bad = [line for line in lines if line["state"] == "crash"]
    bad += [line for line in runner.read(exact) if line["state"] != "right"]
    assert bad == []
