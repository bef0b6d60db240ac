"""Trains groups of pieces on one backend and writes one JSON line for each piece and setting.

    python -m tests.sweep.worker --backend torch --tasks tasks.json --out results.jsonl

It may die with the engine: before a task starts its number is written, so that `runner` knows which one it was.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator
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
    gc.freeze()  # Keras collects garbage for each model: not through all that was imported
    for number, task in enumerate(json.loads(Path(tasks).read_text())):
        if writes:
            _add(out, {"begins": number})
        start = time.monotonic()
        for lines in train(tuple(task["names"]), task["setting"], references):
            seconds = round((time.monotonic() - start) / len(lines), 2)
            for line in lines if writes else ():
                _add(out, {"backend": backend, "float64": float64, "seconds": seconds, **line})
            start = time.monotonic()


def _add(out: str, line: dict) -> None:
    with open(out, "a") as file:
        file.write(json.dumps(line) + "\n")


def train(names: tuple[str, ...], values: dict[str, str], references: dict[Any, Any]) -> Iterator[list[dict]]:
    """The results of a group. Where it raises, or a note may be of any piece, of each of its halves; what is off in it
    is looked at alone."""
    from keras_flow.errors import FlowError
    from tests.sweep import design, program
    from tests.sweep.cases import PIECES

    setting = design.Setting(**values)
    half = len(names) // 2
    halves = [names[:half], names[half:]] if half else []
    with program.draws_of(setting.strategy):
        reference, error = _reference(names, setting, references)
    if error:
        if not halves:
            yield [_line(names[0], setting, state="one device", error=error)]
        for part in halves:
            yield from train(part, values, references)
        return
    _forget_what_was_said()
    numbers: Any = None
    state, error = "", ""
    try:
        with program.draws_of(setting.strategy):
            numbers = program.run([PIECES[name] for name in names], setting.rows, program.distribution(setting))
    except Exception as failure:
        state, error = "refused" if isinstance(failure, FlowError) else "crash", _text(failure)
    state, error = _first_that_says((state, error))
    if error:
        if not halves:
            yield [_line(names[0], setting, state=state, error=error)]
        for part in halves:
            yield from train(part, values, references)
        return
    over = _on_any_process(program.compare(reference, numbers))
    own, of_any = program.sorted_out(set().union(*_of_all_processes(numbers.notes)), len(names))
    if not halves:
        _explained[names[0]] = of_any
    elif of_any - set().union(*(_explained.get(name, set()) for name in names)):
        for part in halves:  # a note that names no branch: whose is it?
            yield from train(part, values, references)
        return
    off = [name for name in names if over[name]] if halves else []
    lines = [
        _line(
            name,
            setting,
            state="wrong" if over[name] else "right",
            over=over[name],
            notes=sorted(own[place] | (of_any & _explained.get(name, set()))),
        )
        for place, name in enumerate(names)
        if name not in off
    ]
    if lines:
        yield lines
    for name in off:
        yield from train((name,), values, references)


#: piece -> notes that name no branch, which it alone was seen to cause
_explained: dict[str, set[str]] = {}


def _reference(names: tuple[str, ...], setting: Any, references: dict[Any, Any]) -> tuple[Any, str]:
    """The numbers of one device, computed once by the first process and known to all; or the error that it raised."""
    import keras_flow as kf
    from tests.sweep import design, program
    from tests.sweep.cases import PIECES

    key = (names, setting.rows, setting.strategy == design.PIPELINE)
    if key not in references:
        made, error = None, ""
        if kf.env.process_index() == 0:
            try:
                made = program.run([PIECES[name] for name in names], setting.rows)
            except Exception as failure:
                error = _text(failure)
        references[key] = _of_all_processes((made, error))[0]
    return references[key]


def _of_all_processes(fact: Any) -> list[Any]:
    """What each rank's process says, in the order of the ranks: all processes take part."""
    from keras_flow.backends.rendezvous import agreement

    # results of a run, which only a pickle holds as they are
    return [pickle.loads(bytes.fromhex(text)) for text in agreement.exchange(pickle.dumps(fact).hex())]


def _first_that_says(failure: tuple[str, str]) -> tuple[str, str]:
    """The failure of the first process that has one."""
    return next((one for one in _of_all_processes(failure) if one[1]), failure)


def _on_any_process(over: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """What is off on any process: each compares, because the first may be outside of the placement."""
    worst: dict[str, dict[str, float]] = {branch: {} for branch in over}
    for one in _of_all_processes(over):
        for branch, shares in one.items():
            for name, share in shares.items():
                worst[branch][name] = max(share, worst[branch].get(name, 0.0))
    return worst


def _forget_what_was_said() -> None:
    """Notes that torch's backend says once in a process are said for each group."""
    if "keras_flow.backends.torch.operators.gathered_whole" in sys.modules:
        sys.modules["keras_flow.backends.torch.operators.gathered_whole"]._said.clear()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1500]


def _line(name: str, setting: Any, **found: object) -> dict:
    from dataclasses import asdict

    return {"name": name, "setting": asdict(setting), **found}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
