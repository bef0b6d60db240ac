"""`kf.trace`: profiles what runs inside, on every rank, into one file."""

from __future__ import annotations

import glob
import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from keras_flow import atomic
from keras_flow.backends.active import backend
from keras_flow.backends.engine_records import TraceEvent
from keras_flow.backends.installing import install
from keras_flow.backends.rendezvous import agreement
from keras_flow.current import pausing
from keras_flow.current.recorded_calls import recorded_by
from keras_flow.errors import FlowError
from keras_flow.timeline.merge import chrome

if TYPE_CHECKING:
    import keras

#: seconds that process 0 waits for the parts of others where a run has failed
_LATE_SECONDS = 2.0


@contextmanager
def trace(path: str | Path) -> Iterator[None]:
    """Write a timeline of what runs inside: a lane for each rank, steps, layers and named collectives.

    The engine's own profiler is used. A step or two are enough: a profile is large, and slows down what it looks at.
    Where a run fails inside, what was seen until then is written.

    Args:
        path: the file, in the format of Chrome's traces: open it on ui.perfetto.dev or in chrome://tracing. Of several
            processes on one host process 0 writes it.

    Raises:
        FlowError: the file's folder does not exist, or the path is that of a folder.

    Example:
        >>> import tempfile, keras, numpy as np, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> with kf.DataParallel().scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> x = np.ones((8, 4), "float32")
        >>> with tempfile.TemporaryDirectory() as folder, kf.trace(f"{folder}/run.json"):
        ...     history = model.fit(x, x[:, :1], verbose=0)
    """
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise FlowError(f"kf.trace was asked to write {target}, whose folder does not exist")
    if target.is_dir():
        raise FlowError(f'kf.trace was asked to write {target}, which is a folder; name a file in it: "run.json"')
    engine = backend()
    install(engine)
    here = engine.world()
    # a process of a run that failed may have written its part too late: a run has a folder of its own
    run = agreement.first_says(uuid.uuid4().hex) if here.process_count > 1 else uuid.uuid4().hex
    parts = target.with_name(f".{target.name}.{run}.parts")
    if here.process_index == 0:
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.parts"):
            if left != parts:
                shutil.rmtree(left, ignore_errors=True)
    error: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix="keras-flow-trace-") as folder:
        with engine.profiled(Path(folder)) as events:
            marks = _Marks(pausing.gate_of(), engine.annotated)
            pausing.set_gate(marks)
            try:
                with recorded_by(_Layers(engine.annotated)):
                    yield
            except BaseException as raised:  # what was seen until then is written before it goes on
                error = raised
            finally:
                marks.close()
                pausing.set_gate(marks.before)
        _write_part(parts, here.process_index, *events())
    if here.process_count > 1:
        _meet(parts, here.process_count, here.process_index, error is not None)
    if here.process_index == 0:
        _merge(parts, target)
    if error is not None:
        raise error


class _Marks(pausing.Gate):
    """Annotates steps, and passes on to the gate that was there before."""

    def __init__(self, before: pausing.Gate | None, annotated: Callable[[str], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.before, self._annotated, self._open = before, annotated, ExitStack()

    def pass_through(self) -> None:
        """A step begins; the one before has ended."""
        self._open.close()
        if self.before is not None:
            self.before.pass_through()
        super().pass_through()
        self._open.enter_context(self._annotated(f"step {self.begun}"))

    def close(self) -> None:
        """The last step has ended."""
        self._open.close()


class _Layers:
    """Annotates calls of layers with their paths."""

    root: object = None

    def __init__(self, annotated: Callable[[str], AbstractContextManager[object]]) -> None:
        self._annotated = annotated

    def note(self, original: Callable[..., object], layer: keras.Layer, *args: object, **kwargs: object) -> object:
        """Call a layer inside a range of its name."""
        with self._annotated(f"layer {layer.path}"):
            return original(layer, *args, **kwargs)


def _write_part(parts: Path, index: int, began: int, events: list[TraceEvent]) -> None:
    parts.mkdir(exist_ok=True)
    new = parts / f"{index}.new"
    new.write_text(json.dumps([began, [asdict(event) for event in events]]))
    new.rename(parts / f"{index}.json")


def _meet(parts: Path, count: int, index: int, failed: bool) -> None:
    """Wait until all processes have written their parts; after a failure not for long."""
    if not failed:
        agreement.differ({})  # all have come this far
        return
    until = time.monotonic() + _LATE_SECONDS
    while index == 0 and time.monotonic() < until and len(list(parts.glob("*.json"))) < count:
        time.sleep(0.05)


def _merge(parts: Path, target: Path) -> None:
    found = {int(part.stem): json.loads(part.read_text()) for part in sorted(parts.glob("*.json"))}
    events = {index: (began, [TraceEvent(**event) for event in each]) for index, (began, each) in found.items()}
    atomic.write_text(target, json.dumps(chrome(events)))
    shutil.rmtree(parts, ignore_errors=True)
