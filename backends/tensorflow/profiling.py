"""The timeline of a run on TensorFlow: events by thread: its profiler names no virtual CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from keras_flow.backends.interface import TraceEvent

_DEVICE = re.compile(r"CPU:(\d+)|GPU:(\d+)")


@contextmanager
def profiled(folder: Path) -> Iterator[Callable[[], list[TraceEvent]]]:
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


def _events(folder: Path) -> list[TraceEvent]:
    found, began = [], None
    for file in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(file.read_bytes())
        starts = [line.timestamp_ns for plane in space.planes for line in plane.lines if line.events]
        began = min(starts, default=0) if began is None else began
        for plane in space.planes:
            names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    name = names[event.metadata_id]
                    begin = (line.timestamp_ns - began) / 1e3 + event.offset_ps / 1e6
                    device = _DEVICE.search(name)
                    rank = int(device[1] or device[2]) if device else None
                    found.append(TraceEvent(rank, line.name or str(line.id), name, begin, event.duration_ps / 1e6))
    return found
