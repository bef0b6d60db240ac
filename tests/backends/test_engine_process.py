"""A process with an engine of its own has its environment, keeps what it writes, and is ended with its block."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from keras_flow.backends.engine_process import EngineProcess

pytestmark = [pytest.mark.check, pytest.mark.timeout(60)]

TELL = """
import os, sys
print(os.environ["KERAS_BACKEND"], os.environ.get("RANK"), os.environ["OWN"], sys.argv[1], flush=True)
print("an error", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("with_errors", [True, False])
def test_environment_output_and_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_errors: bool) -> None:
    (tmp_path / "told.py").write_text(TELL)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    changes = {"RANK": None, "OWN": "mine"}
    with EngineProcess("torch", "told", "argument", environment=changes, with_errors=with_errors) as process:
        assert process.wait(50)
        said = "torch None mine argument" + "\nan error" * with_errors
        assert (process.status, process.last_words(1000)) == (3, said)
        assert process.last_words(5) == said[-5:]


def test_one_that_takes_too_long_or_is_interrupted_is_ended() -> None:
    with EngineProcess("jax", "http.server", "0") as slow:
        assert not slow.wait(0.2)
        assert slow.status is None
    assert slow.status == -signal.SIGTERM
    began = time.monotonic()

    def meanwhile() -> None:
        if time.monotonic() > began + 0.2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), EngineProcess("jax", "http.server", "0") as slow:
        slow.wait(meanwhile=meanwhile)
    assert slow.status == -signal.SIGTERM
