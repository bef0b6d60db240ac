"""The timeline of a run on JAX: its profiler's events say which device they ran on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jax

from keras_flow.backends.engine_records import TraceEvent
from keras_flow.backends.jax import profiled_programs
from keras_flow.backends.jax.devices import rank_devices

#: planes of accelerators; virtual CPUs share one, and their events say the device
_DEVICE = re.compile(r"^/device:[A-Z]+:(\d+)")


@contextmanager
def profiled(folder: Path) -> Iterator[Callable[[], tuple[int, list[TraceEvent]]]]:
    """Trace into a folder; only what the compiled programs do, and annotations."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of a Python function would be an event
    jax.profiler.start_trace(str(folder), profiler_options=options)
    try:
        yield lambda: _events(folder)
    finally:
        jax.profiler.stop_trace()


def annotated(name: str) -> AbstractContextManager[object]:
    """A range of JAX's profiler."""
    return jax.profiler.TraceAnnotation(name)


def _events(folder: Path) -> tuple[int, list[TraceEvent]]:
    """The events of XLA's profile. Of a collective an event says program and instruction, the program all else."""
    found, start = [], 0
    # an accelerator has its number within its process, a virtual CPU its own among all
    ranks = {
        each.id if each.platform == "cpu" else each.local_hardware_id: rank
        for rank, each in enumerate(rank_devices())
        if each.process_index == jax.process_index()
    }
    for file in folder.rglob("*.xplane.pb"):
        profile = file.read_bytes()
        programs = profiled_programs.collectives(profile)
        planes = list(jax.profiler.ProfileData.from_serialized_xspace(profile).planes)
        seen = [
            (plane.name, line.name, event)
            for plane in planes
            for line in plane.lines
            for event in line.events
            if not event.name.startswith("end: ")
        ]
        began = min((event.start_ns for *_, event in seen), default=0.0)
        start = round(began) + sum(int(dict(plane.stats).get("profile_start_time", 0)) for plane in planes)
        for plane, line, event in seen:
            stats = dict(event.stats)
            device = _DEVICE.search(plane)
            rank = ranks.get(int(device[1]) if device else stats.get("device_ordinal"))
            facts = {name: stats[name] for name in ("hlo_module", "hlo_op", "run_id") if name in stats}
            # threads of virtual CPUs work for one after the other
            lane = line if device or rank is None else "operations"
            kind = profiled_programs.kind_of(str(stats.get("hlo_op", "")))
            known = programs.get((int(stats.get("program_id", -1)), str(stats.get("hlo_op", ""))))
            if known is not None:
                kind, facts = known.kind, facts | known.facts
            begin, duration = (event.start_ns - began) / 1e3, event.duration_ns / 1e3
            found.append(TraceEvent(rank, lane, event.name, begin, duration, facts, kind))
    return start, found
