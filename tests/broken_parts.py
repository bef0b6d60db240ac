"""Parts of jobs that fail, for `test_jobs`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator


def whole() -> list[int]:
    """A part that works."""
    return [1, 2]


def raises() -> Iterator[tuple[str, int]]:
    """After its first case, on the last rank, while the others wait for it."""
    import keras_flow as kf

    yield "first", 1
    if kf.env.process_index() == kf.env.process_count() - 1:
        raise ValueError("this part is broken")
    from tests.backends.torch.checks import on_all_ranks

    yield "second", len(on_all_ranks(1))


def dies() -> None:
    """By a signal, as an engine does when it fails a check of its own."""
    os.abort()


def hangs() -> None:
    """Longer than the job may take."""
    time.sleep(100)
