"""A few random models in the job of an engine; `tests/fuzz/models.py` runs hundreds."""

from __future__ import annotations

from collections.abc import Iterator

#: quick on all engines, and right in float32 there; more of them are a run of `tests/fuzz/models.py`
SEEDS = ("1/9",)


def main() -> Iterator[tuple[str, dict]]:
    """Train each on this rank: its seed with the result."""
    from tests.fuzz.models import result

    for seed in SEEDS:
        yield seed, result(seed, ranks=4)
