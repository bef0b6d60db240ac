"""The timeline of a run on TensorFlow: its profiler names no virtual CPU; whose an event is follows from its cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from keras_flow.backends.engine_records import TraceEvent
from keras_flow.backends.tensorflow import profiled_programs, profiled_ranks
from keras_flow.backends.tensorflow.devices import world

#: how the nodes of a program begin that is called inside another one
_CALL = "tf.StatefulPartitionedCall/"


@contextmanager
def profiled(folder: Path) -> Iterator[Callable[[], tuple[int, list[TraceEvent]]]]:
    """Trace operations of all threads, and annotations."""
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=2, python_tracer_level=0, device_tracer_level=1
    )
    tf.profiler.experimental.start(str(folder), options)
    try:
        yield lambda: _events(folder)
    finally:
        tf.profiler.experimental.stop()


def annotated(name: str) -> AbstractContextManager[object]:
    """A range of TensorFlow's profiler."""
    return tf.profiler.experimental.Trace(name)


def _events(folder: Path) -> tuple[int, list[TraceEvent]]:
    """The events of a profile; those that DTensor's programs have caused with the rank that they ran for."""
    found, start = [], 0
    ranks = world().local_ranks
    for file in folder.rglob("*.xplane.pb"):
        first, events = _read(file)
        began = min((event.begin for event in events), default=0.0)
        start = first + round(1e3 * began)
        causes = profiled_ranks.Causes(events)
        sizes: dict[str, dict[str, int]] = {}
        for event in events:
            run, device = causes.run_of(event), causes.device_of(event)
            rank = ranks[device] if device is not None and device < len(ranks) else None
            name, _, operation = event.name.rpartition(":")
            kind, facts, origin = profiled_programs.KINDS.get(operation), {}, None
            if kind is not None and run is not None:
                node = name.removeprefix(_CALL)
                if run.program not in sizes:
                    sizes[run.program] = profiled_programs.sizes(run.program)
                layer = profiled_programs.layer_of(node)
                told = {"bytes": sizes[run.program].get(node), "layer": layer, "group": event.stats.get("group_key")}
                facts = {fact: value for fact, value in told.items() if value is not None}
                origin = (run.start.line, run.start.begin - began)
            begin = event.begin - began
            found.append(TraceEvent(rank, event.line, event.name, begin, event.duration, facts, kind, origin))
    return start, found


def _read(file: Path) -> tuple[int, list[profiled_ranks.Event]]:
    """The events of a file, and the nanoseconds since 1970 from which they count; a float would not keep the last."""
    space = xplane_pb2.XSpace()
    space.ParseFromString(file.read_bytes())
    first = min((line.timestamp_ns for plane in space.planes for line in plane.lines if line.events), default=0)
    events, start = [], first
    for plane in space.planes:
        names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
        kinds = {key: metadata.name for key, metadata in plane.stat_metadata.items()}
        # where the profile says when it began, its lines count from there
        start += sum(stat.uint64_value for stat in plane.stats if kinds[stat.metadata_id] == "profile_start_time")
        for line in plane.lines:
            for event in line.events:
                stats = {kinds[stat.metadata_id]: _value(stat, kinds) for stat in event.stats}
                begin, duration = (line.timestamp_ns - first) / 1e3 + event.offset_ps / 1e6, event.duration_ps / 1e6
                lane = line.name or str(line.id)
                events.append(profiled_ranks.Event(lane, names[event.metadata_id], begin, duration, stats))
    return start, events


def _value(stat: xplane_pb2.XStat, names: Mapping[int, str]) -> object:
    which = stat.WhichOneof("value")
    if which is None:
        return None
    return names.get(stat.ref_value) if which == "ref_value" else getattr(stat, which)
