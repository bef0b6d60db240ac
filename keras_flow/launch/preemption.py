"""`kf.on_preemption`: what is done before a job ends that was asked to end, at one step in all processes.

Signals reach processes in the middle of different steps, and a checkpoint needs them all at one. So each process says
in which step it is, goes on to the last of these steps, and stops there: with two processes, one inside step 7 and one
inside step 8 (which waits for the first), both stop after step 8. No process waits before step 8 is over, and none
begins step 9. Orbax and TensorFlow's PreemptionCheckpointHandler agree on a step in the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from keras_flow import atomic, settings
from keras_flow.backends import hooking, object_hooks
from keras_flow.backends.active import backend
from keras_flow.backends.files import shared_files
from keras_flow.errors import FlowError
from keras_flow.launch import failure
from keras_flow.launch.folder import own_folder
from keras_flow.launch.interruption import saved_in_words
from keras_flow.launch.processes import preemption_seconds

if TYPE_CHECKING:
    import keras

#: seconds in which all processes must have said in which step they are, where nobody is known to have asked all
_SAYING_SECONDS = 10.0
#: what process 0 says at once; the job may also be asked since another process has failed, and then no step follows
_ASKED = b"keras-flow: asked to end; the callback runs after the next training step, if all processes reach it\n"

#: the signals that may ask a job to end
SIGNALS = ("SIGTERM", "SIGINT")


class PreemptionPoint:
    """A point at which a training loop can be stopped; `kf.on_preemption` makes it.

    Args:
        callback: called once, at the same step in all processes.
        signals: names of the signals that ask for it.
    """

    def __init__(self, callback: Callable[[], object], signals: Sequence[str] = SIGNALS):
        """Nothing was asked yet."""
        self._callback = callback
        self._signals = [signal.Signals[name] for name in signals]
        self._before: dict[signal.Signals, Any] = {}  # what handled them
        self._ends: tuple[socket.socket, ...] = ()
        self._has_left = False
        self._number = next(_numbers)
        self._lock = threading.RLock()  # a signal's handler may interrupt its holder
        self._steps = 0
        self._asked: int | None = None  # the signal
        self._last: int | None = None

    def check(self) -> None:
        """Stop here if the job was asked to end. All processes call it at the end of every step; `fit` does by itself.

        Raises:
            SystemExit: the job was asked to end, and the callback has been called: status 143 (SIGTERM) or 130.
        """
        with self._lock:
            self._steps += 1
            asked = self._asked
        if asked is None:
            return
        if self._last is None:
            self._last = self._agreed()
        if self._steps <= self._last:
            return
        self._has_left = True
        try:
            with atomic.noting() as written:
                self._callback()
        except Exception as error:
            # at once: on its way out it may wait for processes that wait for this one
            if (folder := own_folder()) is not None:
                failure.record(folder, backend().world().process_index, error)
            raise
        sys.stdout.flush()
        self._leave_last()
        # a folder that was renamed as a whole is there, and what was written in it under its first name is not
        self._say([str(path) for path in written if path.exists()])
        raise SystemExit(128 + asked)

    def ask(self, number: int) -> None:
        """A signal has come: say in which step this process is. Called by a thread, also while a step runs."""
        with self._lock:
            if self._asked is not None:
                return
            self._asked = number
            said = self._steps
        here = backend().world()
        if here.process_index == 0:
            # to the descriptor: the signal may have come amid a print
            with contextlib.suppress(OSError):
                os.write(2, _ASKED)
        if here.process_count > 1:
            backend().put_text(self._key(here.process_index), f":{said}")
            if here.process_index == 0:
                threading.Thread(target=self._answer, args=(here.process_count,), daemon=True).start()
        if (folder := own_folder()) is not None:
            # the launcher passes it to all processes, where this one alone was asked, and says how the job ended
            with contextlib.suppress(OSError):
                folder.asked(here.process_index).write_text(str(number))

    def handle(self) -> None:
        """Begin to handle signals; called in the main thread."""
        self._before = {number: signal.getsignal(number) for number in self._signals}
        came: list[int] = []  # of those that Python has handled: the thread may have asked for the first one already

        def handle(number: int, frame: FrameType | None) -> None:
            came.append(number)
            if len(came) > 1 and number == signal.SIGINT:
                self._asked = None
                self.close()
                raise KeyboardInterrupt
            self.ask(number)

        for number in self._signals:
            signal.signal(number, handle)
        self._listen()

    def close(self) -> None:
        """Handle signals no more: they do what they did before. One that came too late for a step does so now.

        A program that is leaving, as it was asked to, is not asked again.
        """
        global _point
        if not self.is_open or self._has_left or threading.current_thread() is not threading.main_thread():
            return
        _point = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._ends:
            signal.set_wakeup_fd(-1)
        for end in reversed(self._ends):  # which ends the thread that reads
            end.close()
        if self._asked is not None:
            signal.raise_signal(self._asked)

    def _listen(self) -> None:
        """Hear of signals while the main thread is inside an engine, where Python's handlers wait for its return."""
        ours, pythons = socket.socketpair()
        pythons.setblocking(False)
        other = signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
        if other != -1:
            # an event loop (a notebook's) listens there already: then its thread, the main one, hears of signals
            signal.set_wakeup_fd(other)
            ours.close()
            pythons.close()
            return
        self._ends = ours, pythons
        threading.Thread(target=self._hear, args=(ours,), daemon=True, name="keras_flow-preemption").start()

    def _hear(self, ours: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while numbers := ours.recv(64):
                for number in numbers:
                    if number in self._signals:
                        self.ask(number)

    @property
    def is_open(self) -> bool:
        """Whether signals are handled."""
        return _point is self

    def is_asked(self) -> bool:
        """Whether the job was asked to end."""
        return self._asked is not None

    def _say(self, saved: list[str]) -> None:
        """Say what was saved: by the launcher, where one of ours is there."""
        if (folder := own_folder()) is not None:
            folder.saved(backend().world().process_index).write_text(json.dumps(saved))
        elif backend().world().process_index == 0:
            done = saved_in_words(saved) if saved else "the callback of kf.on_preemption has ended"
            print(f"keras-flow: interrupted; {done}", file=sys.stderr, flush=True)

    def _leave_last(self) -> None:
        """The first process serves the others' store: where it leaves, an engine ends what they still do."""
        here = backend().world()
        if here.process_count == 1:
            return
        if here.process_index:
            backend().put_text(self._key(here.process_index, "done"), ":")
            return
        until = time.monotonic() + preemption_seconds()
        with contextlib.suppress(FlowError):  # one that does not come has said why itself
            for index in range(1, here.process_count):
                backend().get_text(self._key(index, "done"), max(0.1, until - time.monotonic()))

    def _answer(self, count: int) -> None:
        """Say what the last step is that a process was in; called by a thread of process 0.

        At the end of a step its main thread could not: the step may need a process that waits for this answer.
        """
        try:
            answer = (
                f":{max(int(backend().get_text(self._key(index), self._patience())[1:]) for index in range(count))}"
            )
        except FlowError as error:
            answer = str(error)
        backend().put_text(self._key(0, "last"), answer)

    def _patience(self) -> float:
        """Seconds in which each process must have heard of the signal.

        Our launcher asks all processes, and ends those that take too long; one may be in C code, and hear it late.
        """
        return _SAYING_SECONDS if own_folder() is None else preemption_seconds()

    def _agreed(self) -> int:
        """The last step that a process was in, which process 0 finds out and says."""
        if backend().world().process_count == 1:
            return 0
        try:
            answer = backend().get_text(self._key(0, "last"), 2 * self._patience())
            if not answer.startswith(":"):
                raise FlowError(answer)
            return int(answer[1:])
        except FlowError as error:
            print(
                f"keras-flow: this process was asked to end and another one was not ({error}). All processes of a job "
                "must get the signal; keras-flow launch sends it to all. The callback of kf.on_preemption is not "
                "called.",
                file=sys.stderr,
            )
            raise SystemExit(128 + (self._asked or signal.SIGTERM)) from error

    def _key(self, index: int, what: str = "step") -> str:
        return f"keras_flow/preemption/{settings.read(settings.RESTARTS) or 0}/{self._number}/{what}/{index}"


_point: PreemptionPoint | None = None
#: of points, equal in all processes: each has texts of its own
_numbers = itertools.count()


def on_preemption(callback: Callable[[], object], signals: Sequence[str] = SIGNALS) -> PreemptionPoint:
    """Call `callback` when the job is asked to end (SIGTERM, Ctrl-C), after the step that runs, in every process.

    Then the program leaves with status 143 or 130. Schedulers send SIGTERM some time before they kill; `keras-flow
    launch` passes it to the processes of all hosts and gives them KERAS_FLOW_GRACE seconds (30). A validation or
    compilation that runs has to end in them, too. `model.save` and the like may be called as ever: all processes are
    there. A second Ctrl-C ends the program at once.

    Args:
        callback: without arguments. Called in the main thread, between two steps of `fit`.
        signals: names of the signals that ask for it, `"SIGTERM"` and `"SIGINT"` (Ctrl-C). Others do what they did.

    Returns:
        What a loop of one's own asks at the end of each step: `point.check()`. After `point.close()` signals do again
        what they did before.

    Raises:
        FlowError: not called from the main thread, no function, another signal, or a callback is there already.

    Example:
        >>> import keras_flow as kf
        >>> point = kf.on_preemption(lambda: print("model.save('preempted.keras')"))
        >>> point.is_asked()
        False
    """
    global _point
    if threading.current_thread() is not threading.main_thread():
        raise FlowError("kf.on_preemption handles signals, which Python does in the main thread: call it there")
    if not callable(callback):
        raise FlowError(f"kf.on_preemption takes a function without arguments, got {callback!r}")
    if _point is not None:
        raise FlowError("kf.on_preemption was called before in this program; do both things in one callback")
    signals = (signals,) if isinstance(signals, str) else signals
    if unknown := set(signals) - set(SIGNALS):
        raise FlowError(f"kf.on_preemption: legal signals are {' and '.join(SIGNALS)}, got {', '.join(unknown)}")
    point = PreemptionPoint(callback, signals)
    backend().world()  # the job is joined before signals can ask about it
    if (folder := own_folder()) is not None:
        folder.asks_for_time.touch()
    hooking.install_each(hooking.declared(shared_files))
    object_hooks.install()
    _point = point
    point.handle()
    return point


def _asked_for(*args: object, **kwargs: object) -> PreemptionPoint | None:
    return _point


@object_hooks.replaces("keras.callbacks.CallbackList", "on_train_batch_end", when=_asked_for)
def _at_batch_end(
    point: PreemptionPoint,
    original: Callable[..., object],
    callbacks: keras.callbacks.CallbackList,
    *args: object,
    **kwargs: object,
) -> None:
    """Hook on `CallbackList.on_train_batch_end`: a step of `fit` is over."""
    original(callbacks, *args, **kwargs)
    if point.is_asked():
        # Keras's JAX trainer keeps the weights to itself while it loops; who asks for the model gets them put back
        _ = callbacks.model
    point.check()
