"""A function that fails on a rank fails its own test, and the next one runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sampling
from tests.ranks import Pool, RankError

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module", params=["numpy", pytest.param("torch", marks=pytest.mark.full)])
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    made = Pool(request.param, tmp_path_factory.mktemp("ranks"), ranks=2)
    yield made
    made.close()


def _rank() -> int:
    import keras_flow as kf

    return kf.env.process_index()


def test_results_and_arguments(pool: Pool) -> None:
    offset = 3

    def program(number: int) -> tuple[int, int]:
        return _rank(), number + offset

    assert pool(program, 4) == (0, 7)
    assert pool.on_each(program, 4) == [(rank, 7) for rank in range(2 if pool.backend == "torch" else 1)]


def test_what_is_raised_names_the_process_and_the_line(pool: Pool) -> None:
    def program() -> None:
        found = _rank() + 41
        assert found == 0

    with pytest.raises(RankError, match=rf"(?s){pool.backend}, process 0:.*in program.*assert 41 == 0"):
        pool(program)
    assert pool(_rank) == 0


@sampling.one_in(2)
def test_a_rank_that_raises_alone_leaves_nobody_waiting(tmp_path: Path) -> None:
    def program() -> None:
        import torch

        if _rank() == 1:
            raise ValueError("this rank is broken")
        torch.distributed.barrier()

    pool = Pool("torch", tmp_path, ranks=2)
    try:
        start = time.monotonic()
        with pytest.raises(RankError, match=r"(?s)torch, process 1:.*this rank is broken"):
            pool(program)
        assert time.monotonic() - start < 60
        assert pool(_rank) == 0  # in others
    finally:
        pool.close()


@sampling.one_in(2)
def test_death_and_silence_are_one_failure_each(tmp_path: Path) -> None:
    pool = Pool("numpy", tmp_path, ranks=2)
    try:
        with pytest.raises(RankError, match=r"process 0: ended \(status -6\)"):
            pool(os.abort)
        with pytest.raises(RankError, match=r"process 0: did not answer \(1 s at most\)"):
            pool(time.sleep, 100, timeout=1)
        assert pool(_rank) == 0
        with pytest.raises(RankError, match="cannot be sent"):
            pool(lambda: (number for number in range(3)))
        assert pool(_rank) == 0
    finally:
        pool.close()


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"(?s)no_engine did not start on 2 ranks:.*no_engine"):
        Pool("no_engine", tmp_path, ranks=2)(_rank)
