"""Trains groups of pieces on one backend and writes one JSON line for each piece and setting.

    python -m tests.sweep.worker --backend torch --tasks tasks.json --out results.jsonl

It may die with the engine: before a task starts its number is written, so that `runner` knows which one it was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests import quick


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True, choices=("jax", "tensorflow", "torch"))
    parser.add_argument("--tasks", required=True, help="JSON list of tasks: names of pieces and a setting")
    parser.add_argument("--out", required=True, help="file to which results are added, a line each")
    parser.add_argument("--float64", action="store_true", help="compute in float64")
    options = parser.parse_args(arguments)
    quick.set_environment(options.backend)
    if options.float64:
        os.environ |= {"JAX_ENABLE_X64": "1", "KERAS_FLOATX": "float64"}
    import keras_flow as kf

    kf.run(run, devices=4, args=(options.backend, options.tasks, options.out, options.float64))
    return 0


def run(backend: str, tasks: str, out: str, float64: bool) -> None:
    """Run on every rank."""
    import keras

    import keras_flow as kf

    quick.set_options(backend)
    if float64:
        keras.config.set_floatx("float64")
    writes = kf.env.process_index() == 0
    references: dict[Any, Any] = {}
    for number, task in enumerate(json.loads(Path(tasks).read_text())):
        if writes:
            _add(out, {"begins": number})
        start = time.monotonic()
        lines = _task(tuple(task["names"]), task["setting"], references)
        if writes:
            seconds = round((time.monotonic() - start) / len(lines), 2)
            for line in lines:
                _add(out, {"backend": backend, "float64": float64, "seconds": seconds, **line})


def _add(out: str, line: dict) -> None:
    with open(out, "a") as file:
        file.write(json.dumps(line) + "\n")


def _task(names: tuple[str, ...], values: dict[str, str], references: dict[Any, Any]) -> list[dict]:
    """The results of a group; where it raises, of its halves."""
    from keras_flow.errors import FlowError
    from tests.sweep import design, program
    from tests.sweep.cases import PIECES

    setting = design.Setting(**values)
    pieces = [PIECES[name] for name in names]

    def halves() -> list[dict]:
        middle = len(names) // 2
        return [line for half in (names[:middle], names[middle:]) for line in _task(half, values, references)]

    reference, error = _reference(names, setting.rows, references)
    if error and len(names) > 1:
        return halves()
    if error:
        return [_line(names[0], setting, state="one device", error=error)]
    try:
        numbers = program.run(pieces, setting.rows, program.distribution(setting))
    except Exception as failure:
        if len(names) > 1:
            return halves()
        state = "refused" if isinstance(failure, FlowError) else "crash"
        return [_line(names[0], setting, state=state, error=_text(failure))]
    if reference is None:  # the first process compares
        return [_line(name, setting) for name in names]
    over = program.compare(reference, numbers)
    if len(names) > 1 and (any(over.values()) or numbers.on_one_device):
        return halves()
    return [
        _line(name, setting, state="wrong" if over[name] else "right", over=over[name], notes=numbers.notes_of(place))
        for place, name in enumerate(names)
    ]


def _reference(names: tuple[str, ...], rows: str, references: dict[Any, Any]) -> tuple[Any, str]:
    """The numbers of one device, on the first process, computed once; and on all processes the error that it raised."""
    import keras_flow as kf
    from keras_flow.backends.active import backend
    from tests.sweep import program
    from tests.sweep.cases import PIECES

    key = (names, rows)
    if key not in references:
        made, error = None, ""
        if kf.env.process_index() == 0:
            try:
                made = program.run([PIECES[name] for name in names], rows)
            except Exception as failure:
                error = _text(failure)
        said = backend().agree_on(dict.fromkeys(kf.env.local_ranks(), error))
        references[key] = made, next(filter(None, said.values()), "")
    return references[key]


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1500]


def _line(name: str, setting: Any, **found: object) -> dict:
    from dataclasses import asdict

    return {"name": name, "setting": asdict(setting), **found}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
