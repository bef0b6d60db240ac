"""The processes that doctor starts for one backend: `look` imports the engine, `test` runs ranks on it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path


def look() -> dict[str, object]:
    """Import the engine; returns its devices, its capability record and its environment variables."""
    import keras_flow as kf
    from keras_flow.backends import active
    from keras_flow.runtime import versions

    versions.check(active.checked_name())
    engine = active.backend()
    kf.init()
    record = asdict(engine.capabilities)
    del record["traffic"]  # what explain reckons with; says nothing of what works here
    environment = {
        name: f"{os.environ.get(name, '(not set)')}: {why}" for name, why in record.pop("environment").items()
    }
    return {
        "devices": engine.devices_seen(),
        "type": engine.world().type,
        "capabilities": {name: _plain(value) for name, value in record.items()},
        "environment": environment,
    }


def test(seconds: int, ranks: int, counts: list[int]) -> dict[str, object]:
    """Run the self-tests on `ranks` ranks, and measure links of `counts` ranks. After a failed test the others run.

    All that within some seconds, after which this process is ended.
    """
    import keras_flow as kf
    from keras_flow.doctor import selftest

    results: dict[str, object] = {}
    # the largest number of ranks first: virtual devices cannot be made later
    most = max([ranks, *counts])
    tests: dict[str, tuple[Callable, tuple]] = {
        "collective": (selftest.collective, (ranks,)),
        "training": (selftest.train, ()),
    }
    if counts:
        tests["bandwidth"] = (selftest.bandwidth, (counts,))
    try:  # in one run: where ranks are processes, starting them takes longest
        together = kf.run(selftest.each, devices=most, args=([*tests.values()],), timeout=0.4 * seconds)
        return {name: {"ok": value} for name, value in zip(tests, together, strict=True)}
    except Exception:
        pass  # one failed, or is stuck: run alone, each has its own result
    for name, (function, arguments) in tests.items():
        try:
            results[name] = {"ok": kf.run(function, devices=most, args=arguments, timeout=0.15 * seconds)}
        except Exception as error:
            results[name] = {"error": _text(error)}
    return results


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else value


def _text(error: BaseException) -> str:
    from keras_flow.errors import FlowError

    return str(error) if isinstance(error, FlowError) else "".join(traceback.format_exception_only(error)).strip()


def main(action: str, output: str, *numbers: str) -> None:
    """Write the result of `look` or `test`, or its error, as JSON to `output`."""
    try:
        if action == "look":
            result = look()
        else:
            seconds, ranks, *counts = map(int, numbers)
            result = test(seconds, ranks, counts)
    except BaseException as error:
        result = {"error": _text(error)}
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
