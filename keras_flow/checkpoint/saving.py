"""`kf.checkpoint.save`: each rank writes what it holds, into a folder that one rename makes a checkpoint.

While it is written the folder is called `step-00000120.writing-<id>`. Each process notes there what it wrote. Process 0
reads the notes of all, writes the manifest and renames the folder. So whoever is killed at any moment leaves the
checkpoints that were there, or these and the new one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_flow import atomic, sbp
from keras_flow.backends import random_states
from keras_flow.backends.active import backend
from keras_flow.backends.rendezvous import agreement, meeting
from keras_flow.checkpoint import manifest, names, parts, pieces, store, writer
from keras_flow.checkpoint.lock import held
from keras_flow.checkpoint.manifest import Chunk, Manifest, Tensor
from keras_flow.checkpoint.parts import WrittenPart
from keras_flow.checkpoint.store import Place
from keras_flow.current import joining, keras_places, models
from keras_flow.current.variable_layout import keras_layout
from keras_flow.errors import FlowError

if TYPE_CHECKING:
    import keras

    from keras_flow.current.world import World

#: seconds between the first two looks for the notes of other processes, and at most; a store is asked less often
_LOOK_SECONDS, _PAUSE, _PAUSE_OF_STORES = 0.02, 1.0, 5.0
#: of a thread that writes, as of `nice`: lower than the program's, which has 0
_PRIORITY = 10


@dataclass
class Saved:
    """The result of `save`: a checkpoint that is written, or is being written by a thread.

    Attributes:
        path: its folder.
        step: its number.
        bytes: bytes that this process writes.
        blocked_seconds: seconds for which the program was blocked.
    """

    path: Place
    step: int
    bytes: int = 0
    blocked_seconds: float = 0.0
    _thread: threading.Thread | None = field(default=None, repr=False)
    _error: BaseException | None = field(default=None, repr=False)
    _is_told: bool = field(default=False, repr=False)

    def is_done(self) -> bool:
        """Whether this process's part is written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Place:
        """Wait until the checkpoint is written, and return its folder.

        Raises:
            FlowError: it could not be written, or not within KERAS_FLOW_TIMEOUT.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise _failed(self.path, self._error) from self._error
        return self.path

    def _tell(self) -> None:
        """Say that the thread failed, where a program that ends has not waited for it."""
        if self._error is not None and not self._is_told:
            print(f"keras_flow: {_failed(self.path, self._error)}", file=sys.stderr, flush=True)


def save(
    directory: str | os.PathLike[str],
    model: keras.Model,
    *,
    step: int | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Saved:
    """Save a model, its optimizer and all random states. All processes of a job call it.

    Nothing is gathered: each rank writes what it holds, and what several hold is written once.

    Args:
        directory: directory of checkpoints, which all processes see. This checkpoint becomes its folder `step-N`. It
            may be in a store: `"s3://bucket/run"`.
        model: a built model. Its optimizer is saved too, by the names of its variables.
        step: number of the checkpoint; None: how many updates the optimizer has made.
        asynchronous: write the values of now in a thread. An error is raised by `wait`.
        keep: how many of the newest checkpoints, up to this one, to keep; None: all.
        extra: values for the program, as JSON has them; `load` returns them.

    Returns:
        A handle: `.wait()`, `.bytes`, `.blocked_seconds`.

    Raises:
        FlowError: the model is not built, the directory cannot be written, or a process failed.

    Example:
        >>> import keras, tempfile, keras_flow as kf
        >>> ranks = kf.init(4)
        >>> with kf.DataParallel().scope():
        ...     model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="out")], name="net")
        >>> folder = tempfile.mkdtemp()
        >>> kf.checkpoint.save(folder, model, step=3).path.name
        'step-00000003'
        >>> kf.checkpoint.read_tensor(folder, "net/out/kernel").shape
        (4, 2)
    """
    return save_with(directory, model, step, asynchronous, keep, extra or {}, {}, {}, None)


def save_with(
    directory: str | os.PathLike[str] | Place,
    model: keras.Model,
    step: int | None,
    asynchronous: bool,
    keep: int | None,
    extra: Mapping[str, Any],
    training: Mapping[str, Any],
    beside: Mapping[str, keras.Variable | np.ndarray],
    spared: int | None,
) -> Saved:
    """Do as `save`, with the place of `fit` (`training`) and arrays beside the model, by name, equal on all ranks.

    `keep` spares one step, that of the best checkpoint.
    """
    begun = time.monotonic()
    if not models.is_built(model):
        raise FlowError(f"model {model.name!r} is not built: call it on a batch, or build it, before it is saved")
    require_keep(keep)
    if step is not None and not manifest.is_count(step, 0):
        raise FlowError(f"step={step!r}: legal is a whole number of at least 0, or None for the optimizer's updates")
    here = backend().world()
    variables = names.named(model) | dict(beside)
    step = step_of(model) if step is None else int(step)
    folder = store.at(directory) / manifest.folder_of(step)
    try:
        extra, training = json.loads(json.dumps([extra, training]))  # as they are read: keys are texts
    except TypeError as error:
        raise FlowError(f"extra= is saved as JSON: {error}") from error
    meeting.meet("kf.checkpoint.save")
    # two processes may have as many, of other names: a callback that one of them has keeps arrays
    sum_of_names = zlib.crc32("\n".join(sorted(variables)).encode())
    said = {"step": step, "variables": f"{len(variables)} (sum of their names: {sum_of_names:08x})"}
    agreement.require_equal(said, "a checkpoint")
    lock = contextlib.ExitStack()
    path, _, error = agreement.first_says(_started(folder, lock) if here.process_index == 0 else "").partition("\n")
    if error:
        raise FlowError(error)
    writing = store.at(path)

    layouts = {name: _layout(variable) for name, variable in variables.items()}
    sbps = {name: "" if layout is None else sbp.text(layout.nd_sbp) for name, layout in layouts.items()}
    who = pieces.assigned(
        {
            name: (layouts[name], tuple(variable.shape), manifest.numpy_dtype(names.dtype_of(variable)).itemsize)
            for name, variable in variables.items()
        },
        range(here.size),
    )
    mine = list(parts.parts_of(variables, who, here))
    mine, copies = parts.frozen(mine, here) if asynchronous else (mine, None)
    found = Manifest(
        step=step,
        tensors={
            name: Tensor(names.dtype_of(variable), tuple(variable.shape), sbps[name], ())
            for name, variable in variables.items()
        },
        saved=manifest.saved_by(backend().name, here.size, here.process_count),
        training=dict(training),
        random=random_states.states(),
        extra=dict(extra),
    )
    saved = Saved(folder, step, sum(block.bytes for part in mine for _, block in part.blocks))
    text = _serialized(model) if here.process_index == 0 else ""
    work = _Writing(writing, folder, mine, found, text, here, keep, spared)
    if asynchronous:

        def run() -> None:
            try:
                # the processor is the training's: Linux gives each thread a priority of its own
                with contextlib.suppress(OSError, AttributeError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
                with lock:
                    _apart(work)
                if copies is not None:
                    parts.give_back(copies)
            except BaseException as error:
                saved._error = error
                atexit.register(saved._tell)

        saved._thread = threading.Thread(target=run, name="keras_flow-checkpoint", daemon=False)
        saved._thread.start()
    else:
        with lock:
            _together(work)
        if isinstance(folder, Path):
            atomic.note(folder)
    saved.blocked_seconds = time.monotonic() - begun
    return saved


@dataclass
class _Writing:
    """The work that is left once it is known who writes what.

    Attributes:
        writing: the folder under its name of the meantime.
        folder: the folder under its final name.
        parts: what this process writes.
        said: the manifest, without chunks.
        model: the model as Keras serializes it; empty where Keras cannot.
        here: the job.
        keep: as in `save`.
        spared: a step that stays.
    """

    writing: Place
    folder: Place
    parts: list[WrittenPart]
    said: Manifest
    model: str
    here: World
    keep: int | None
    spared: int | None

    def write(self) -> None:
        """Write this process's files, and note what is in them."""
        blocks: dict[int, list[writer.FileBlock]] = {}
        for part in self.parts:
            for piece, block in part.blocks:
                blocks.setdefault(piece.rank, []).append(block)
        files = {
            rank: writer.File(self.writing / manifest.file_of(rank, self.here.size), each, self.folder)
            for rank, each in blocks.items()
        }
        is_whole = False
        try:
            # variable by variable, so that one is in host memory at a time
            for part in self.parts:
                held = part.held()
                for piece, block in part.blocks:
                    files[piece.rank].add(block, piece.cut(held[piece.rank]))
            is_whole = True
        finally:
            for file in files.values():
                file.close(is_whole)
        chunks: dict[str, list[dict[str, Any]]] = {}
        for file in files.values():
            for tensor, found in file.chunks.items():
                chunks.setdefault(tensor, []).extend(map(vars, found))
        store.write_text(_note_of(self.writing, self.here.process_index), json.dumps(chunks))

    def commit(self) -> None:
        """Make the checkpoint, in process 0, from what all processes have written."""
        chunks: dict[str, list[Chunk]] = {name: [] for name in self.said.tensors}
        notes = [_note_of(self.writing, process) for process in range(self.here.process_count)]
        for note in notes:
            for name, found in json.loads(note.read_text(encoding="utf-8")).items():
                chunks[name] += [Chunk(**chunk) for chunk in found]
        tensors = {name: replace(tensor, chunks=tuple(chunks[name])) for name, tensor in self.said.tensors.items()}
        texts = {manifest.MODEL: self.model} if self.model else {}
        texts[manifest.NAME] = replace(self.said, tensors=tensors).to_json()
        store.commit(self.writing, self.folder, texts, notes)
        if self.keep is None:
            return
        parent = self.folder.parent
        with contextlib.suppress(Exception):  # the checkpoint is made: the next one removes what is too many
            # those of later steps are an earlier run's
            for old in [each for each in manifest.steps(parent) if each <= self.said.step][: -self.keep]:
                if old != self.spared:
                    store.remove(parent / manifest.folder_of(old))


def _together(work: _Writing) -> None:
    """Write and commit now. An error in one process is raised in all."""
    _on_all(work, work.write)
    _on_all(work, work.commit if work.here.process_index == 0 else lambda: None)


def _on_all(work: _Writing, function: Callable[[], None]) -> None:
    error = None
    try:
        function()
    except Exception as raised:
        error = raised
    texts = agreement.first_failure("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None or texts:
        if work.here.process_index == 0:
            store.remove(work.writing)
        raise _failed(work.folder, error or texts) from error


def _apart(work: _Writing) -> None:
    """Write in a thread, without a message: process 0 looks for the notes of the others, they for what it makes."""
    until = time.monotonic() + joining.waiting_seconds()
    if work.here.process_index != 0:
        # of an older checkpoint of this step, which stays where process 0 fails
        before, steps = store.version(work.folder / manifest.NAME), set(manifest.steps(work.folder.parent))
        work.write()
        note = _note_of(work.writing, work.here.process_index)

        def is_made() -> bool:
            return store.version(work.folder / manifest.NAME) not in (None, before)

        whom = "process 0, which makes the checkpoint,"
        _wait(lambda: store.is_over(work.writing, note) or is_made(), until, whom, work.writing)
        # one that a later save has removed already (`keep`) was written
        is_followed = any(each > work.said.step for each in set(manifest.steps(work.folder.parent)) - steps)
        if not is_followed and not is_made():
            raise FlowError(f"the checkpoint {str(work.folder)!r} was not written: process 0 failed, and says why")
        return
    try:
        work.write()
        for process in range(work.here.process_count):
            whom = f"process {process}, which writes its part,"
            _wait(_note_of(work.writing, process).is_file, until, whom, work.writing)
        work.commit()
    except BaseException:
        store.remove(work.writing)
        raise


def _layout(variable: keras.Variable) -> Any:
    placed = keras_layout(variable)
    return None if placed is None else placed.of_job.layout


def _serialized(model: keras.Model) -> str:
    """The model as Keras serializes it, from which `export` makes it again; empty of a class without `get_config`."""
    import keras

    try:
        with keras_places.tensorflow_unasked():
            return json.dumps(keras.saving.serialize_keras_object(model))
    except Exception:  # whatever the program's own `get_config` raises
        return ""


def require_keep(keep: int | None) -> None:
    """Require that `keep` says how many checkpoints stay.

    Raises:
        FlowError: it is no such number.
    """
    if keep is not None and not manifest.is_count(keep, 1):
        raise FlowError(f"keep={keep!r}: legal is a whole number of at least 1 (checkpoints), or None for all")


def step_of(model: keras.Model) -> int:
    """Return how many updates the model's optimizer has made; of several the most, which never becomes less."""
    return max((int(np.asarray(each.iterations)) for each in models.optimizers_of(model)), default=0)


# ---- folders


def _started(folder: Place, lock: contextlib.ExitStack) -> str:
    """Take the lock of the directory, and make the folder that is written.

    Returns:
        Its path and, in a second line, why it cannot be made.
    """
    parent = folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock.enter_context(held(parent))
        return str(store.begun(folder, joining.waiting_seconds()))
    except FlowError as error:
        return f"\n{error}"
    except OSError as error:
        return f"\nno checkpoint can be written in {str(parent)!r}: {type(error).__name__}: {error.strerror or error}"


def _note_of(writing: Place, process: int) -> Place:
    return writing / f"process-{process:05d}.json"


def _wait(is_done: Callable[[], bool], until: float, whom: str, where: Place) -> None:
    pause, most = _LOOK_SECONDS, _PAUSE if isinstance(where, Path) else _PAUSE_OF_STORES
    while not is_done():
        if time.monotonic() > until:
            raise FlowError(f"{whom} did not come to its end within KERAS_FLOW_TIMEOUT")
        time.sleep(pause)
        pause = min(most, 1.1 * pause)  # it waits a tenth longer than it must


def _failed(folder: Place, error: BaseException | str) -> FlowError:
    if isinstance(error, FlowError):
        return error
    what = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return FlowError(f"the checkpoint {str(folder)!r} was not written; those before it are as they were ({what})")
