"""The bugs of the engines are still there; one that is mended says which workaround to drop."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

from tests.engine_bugs.page import ENGINES, PAGE, page, reproductions

pytestmark = pytest.mark.timeout(400)


@functools.cache
def _found(engine: str) -> dict[str, bool]:
    """Reproduction -> whether the bug is there, from a process of its own."""
    command = [sys.executable, "-m", f"tests.engine_bugs.{engine}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.full  # engines change with their versions, not with this code
@pytest.mark.parametrize(("engine", "bug"), [(engine, bug) for engine in ENGINES for bug in reproductions(engine)])
def test_it_is_still_there(engine: str, bug: str) -> None:
    assert _found(engine)[bug], f"{engine} is mended: drop what goes around it, and this reproduction"


def test_the_page_is_that_of_the_reproductions() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.engine_bugs.page`"
