"""Processes of the doors: two for each engine, started by the launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Pool]]:
    """Return a function that gives the warm pool of an engine: two processes, which drive so many ranks together."""
    pools: dict[tuple[str, int], Pool] = {}

    def pool(engine: str, ranks: int) -> Pool:
        if (engine, ranks) not in pools:
            for other in pools.values():
                other.close()
            folder = tmp_path_factory.mktemp(f"{engine}-{ranks}")
            pools[engine, ranks] = Pool(engine, folder, ranks=ranks, processes=2)
        return pools[engine, ranks]

    yield pool
    for each in pools.values():
        each.close()
