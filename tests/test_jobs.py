"""A part of a job that fails is the failure of its own tests, and of no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import jobs


def _job(backend: str, folder: Path, *names: str) -> jobs.Job:
    return jobs.Job(backend, folder, [f"tests.broken_parts:{name}" for name in names], ranks=2)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_other_parts_go_on_and_cases_are_kept(backend: str, tmp_path: Path) -> None:
    job = _job(backend, tmp_path, "raises", "whole")
    raises, whole = job.parts
    assert job.result(whole) == [1, 2]
    assert job.case(raises, "first") == 1
    for ask in (lambda: job.case(raises, "second"), lambda: job.result(raises)):
        with pytest.raises(AssertionError, match="ValueError: this part is broken"):
            ask()


def test_a_process_that_dies_takes_its_part_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job("numpy", tmp_path, "whole", "dies", "hangs")
    whole, dies, hangs = job.parts
    monkeypatch.setattr(jobs, "LIMIT", 5)
    assert job.result(whole) == [1, 2]
    with pytest.raises(AssertionError, match="ended with -6"):
        job.result(dies)
    with pytest.raises(AssertionError, match="the 5 s of this backend were over"):
        job.result(hangs)


def test_an_engine_that_does_not_start_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job("numpy", tmp_path, "whole", "raises")
    calls = []
    monkeypatch.setattr(job, "_process", lambda parts, deadline: calls.append(parts) or "no engine here")
    for part in job.parts:
        with pytest.raises(AssertionError, match="no engine here"):
            job.result(part)
    assert len(calls) == 1
