"""A sample of Keras's public names has the numbers of one device; the whole is run by `make test-full`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep import results, runner, sample
from tests.sweep.design import Setting


@pytest.mark.parametrize(
    ("backend", "group"), [(backend, group) for backend, (count, _) in sample.GROUPS.items() for group in range(count)]
)
def test_a_sample_has_the_numbers_of_one_device(backend: str, group: int, on_ranks, tmp_path: Path) -> None:
    names, _ = sample.chosen(backend)[group]
    lines = on_ranks(backend)(sample.train, group)
    assert sorted(line["name"] for line in lines) == sorted(names)
    found = results.of_lines({"backend": backend, **line} for line in lines if line["state"] != "wrong")
    published = {(each.backend, each.name, each.state) for each in results.read(results.TABLE)}
    # what one device fails at, too: a piece that is not compared any more is another state than the table's
    assert [each for each in found if (backend, each.name, each.state) not in published] == []
    off = [line for line in lines if line["state"] == "wrong"]
    tasks = [runner.Task((line["name"],), Setting(**line["setting"])) for line in off]
    exact = tmp_path / "float64.jsonl"  # where float32 rounds more than the tolerance, float64 decides
    runner.Sweep(backend, tasks, exact, float64=True).run()
    bad = [line for line in lines if line["state"] == "crash"]
    bad += [line for line in runner.read(exact) if line["state"] != "right"]
    assert bad == []
