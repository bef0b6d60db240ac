"""What the benchmarks share that run each engine in processes of its own and keep all figures as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from keras_flow.progress import working


def measured_apart(
    module: str, arguments: list[str], backend: str, out: Path, environment: Mapping[str, str] | None = None
) -> list[dict]:
    """The records of one engine: `python -m module ... --backends BACKEND --one FILE` writes them.

    Where it writes how far it is into FILE.progress, a terminal shows it.
    """
    part = out.with_name(f"{out.name}-{backend}-part.json")
    command = [sys.executable, "-m", module, *arguments, "--backends", backend, "--one", str(part)]
    engine = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    progress = part.with_name(f"{part.name}.progress")
    # here and not in ranks, which on torch have no terminal
    with working(f"{module}: {backend}") as tell:
        process = subprocess.Popen(command, env={**os.environ, **engine, **(environment or {})})
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if progress.exists():
                    tell(f"{backend}: {progress.read_text()}")
        finally:
            if process.poll() is None:
                process.terminate()
            progress.unlink(missing_ok=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    found = json.loads(part.read_text())
    part.unlink()
    return found


def with_new(records: list[dict], found: list[dict], key: Callable[[dict], tuple]) -> list[dict]:
    """The records, those of the same keys replaced by what was found; sorted by key."""
    new = {key(record) for record in found}
    return sorted([record for record in records if key(record) not in new] + found, key=key)


def milliseconds(seconds: Sequence[float]) -> str:
    """The median, and in brackets least and most."""
    low, middle, high = (1000 * value for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def torch_operations(run: Callable[[], object]) -> dict[str, float]:
    """Operation -> milliseconds on rank 0, what it calls left out, by torch's profiler; all ranks run. A collective's
    time has the waiting for other ranks in it."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    watches = dist.get_rank() == 0
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) if watches else contextlib.nullcontext() as found:
        run()
    return {one.key: one.self_cpu_time_total / 1000 for one in found.key_averages()} if watches else {}
