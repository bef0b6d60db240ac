"""Tensors from process to process beside the engine's own collectives: a connection for each direction.

An engine's message between two processes is a program that waits on a device until both have begun it. A process that
drives several stages of a pipeline has others to compute meanwhile. So a letter is written by a thread, read by
another, and lies in the receiver's box until somebody asks for it. Tensors pass through the memory of the hosts.

Example: process 0 sends micro-batches 0 and 1 to rank 2 of process 1, which first takes gradients of its own.

    process 0: post((0, 2, 1), a)   post((0, 2, 3), b)
    process 1: letter((0, 2, 3)) waits for b, then letter((0, 2, 1)) has a at once
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from keras_flow.backends.active import backend
from keras_flow.backends.mail import frames
from keras_flow.backends.rendezvous import meeting, whereabouts
from keras_flow.current import channel, joining, processes
from keras_flow.errors import FlowError

#: who sends, who gets, and the number of the message, among those on their way between the two
Address = tuple[int, int, int]
#: an address, and how often the processes have begun anew: of a step that was broken off nobody takes all letters
_Dated = tuple[int, int, int, int]
#: seconds of one wait, within which a process hears no signal
_WAIT_SECONDS = 1.0


def post(address: Address, value: Any) -> Callable[[], None]:
    """Begin to send a structure of tensors; returns what waits until it has left.

    Args:
        address: ranks of two processes, and a number.
        value: None, or lists, tuples and dicts of tensors and Nones.
    """
    to = backend().world().process_of(address[1])
    letter = _Letter(_now(address), value)
    box = _own_box()
    meeting.count(_letters(letter.address, box._found.index, to))
    box.outgoing(to).put(letter)
    return letter.wait


def letter(address: Address) -> Any:
    """Wait for the letter to an address, and return its content as host arrays.

    Raises:
        FlowError: the process that sends is gone, or sent nothing within KERAS_FLOW_TIMEOUT.
    """
    return _own_box().take(_now(address), backend().world().process_of(address[0]))


def _letters(address: _Dated, sender: int, receiver: int) -> str:
    """What both processes count the letters as: one that is on its way is waited for."""
    return f"{address[-1]}/letters {sender} to {receiver}"


def _now(address: Address) -> _Dated:
    return (*address, whereabouts.times_begun_anew())


class _Letter:
    """A letter that a thread sends."""

    def __init__(self, address: _Dated, value: Any):
        self.address, self.value = address, value
        self._left = threading.Event()
        self._error: BaseException | None = None

    def send(self, connection: socket.socket) -> None:
        """Write it."""
        frames.write(connection, self.address, self.value)

    def ended(self, error: BaseException | None = None) -> None:
        """It has left, or will not."""
        self._error, self.value = error, None
        self._left.set()

    def wait(self) -> None:
        """Wait until it has left."""
        until = time.monotonic() + joining.waiting_seconds()
        while not self._left.wait(_WAIT_SECONDS):
            if time.monotonic() > until:
                raise FlowError(f"rank {self.address[1]} took no message within {joining.waiting_seconds():g} s")
        if self._error is not None:
            raise FlowError(f"a message to rank {self.address[1]} cannot be sent: {self._error}") from self._error


class _Box:
    """The letters that have come for this process, and its connections."""

    def __init__(self) -> None:
        self._found = processes.find()
        self._letters: defaultdict[_Dated, deque[Any]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._gone: dict[int, str] = {}  # why no more letters come from a process
        self._outgoing: dict[int, queue.Queue[_Letter]] = {}
        host = joining.own_address(self._found)
        self._listener = channel.Listener(host, 0, joining.token())
        whereabouts.store().put_text(_key(self._found.index), f"{host}:{self._listener.port}")
        _begin(self._welcome)

    def outgoing(self, process: int) -> queue.Queue[_Letter]:
        """The queue of letters to a process, which keeps their order."""
        if process not in self._outgoing:
            self._outgoing[process] = queue.Queue()
            _begin(self._send_all, process, self._outgoing[process])
        return self._outgoing[process]

    def take(self, address: _Dated, process: int) -> Any:
        """The next letter of an address."""
        until = time.monotonic() + joining.waiting_seconds()
        what = _letters(address, process, self._found.index)
        with meeting.waiting_for((process,), "a message of a pipeline", what, missing=1), self._changed:
            while not self._letters[address]:
                if process in self._gone:
                    raise FlowError(
                        f"process {process} {self._gone[process]}; this one waits for its rank {address[0]}"
                    )
                if time.monotonic() > until:
                    raise FlowError(
                        f"rank {address[0]} of process {process} sent nothing within {joining.waiting_seconds():g} s "
                        "(KERAS_FLOW_TIMEOUT). Every process must run the same program"
                    )
                self._changed.wait(_WAIT_SECONDS)
            return self._letters[address].popleft()

    def _send_all(self, process: int, letters: queue.Queue[_Letter]) -> None:
        connection = None
        while True:
            letter = letters.get()
            try:
                if connection is None:
                    text = whereabouts.store().get_text(_key(process), joining.joining_seconds())
                    host, _, port = text.rpartition(":")
                    hello = {"process": self._found.index}
                    opened = channel.connect(host, int(port), joining.token(), hello, joining.joining_seconds())
                    if opened.receive(joining.joining_seconds()) is None:  # from here on there are no lines
                        raise ConnectionError(f"process {process} closed the connection")
                    connection = opened.taken()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                letter.send(connection)
                letter.ended()
            except Exception as error:
                letter.ended(error)

    def _welcome(self) -> None:
        while True:
            arrived, hello = self._listener.arrivals.get()
            try:
                arrived.send({"process": self._found.index})
            except OSError:  # it has gone already; others will come
                arrived.close()
                continue
            _begin(self._receive_all, arrived.taken(), int(hello["process"]))

    def _receive_all(self, connection: socket.socket, process: int) -> None:
        reads = connection.makefile("rb")
        try:
            while True:
                address, value = frames.read(reads)
                meeting.count(_letters(tuple(address), process, self._found.index))
                with self._changed:
                    self._letters[tuple(address)].append(value)
                    self._changed.notify_all()
        except (OSError, EOFError):
            why = "ended"
        except Exception as error:  # nothing after what is no letter can be read; `take` tells of it
            why = f"sent what is no message ({error})"
        with self._changed:
            self._gone[process] = why
            self._changed.notify_all()


#: of this process, once it has sent or asked for a letter
_box: _Box | None = None


def _own_box() -> _Box:
    global _box
    if _box is None:
        _box = _Box()
    return _box


def _key(process: int) -> str:
    return f"keras_flow/mail/{process}"


def _begin(function: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=function, args=args, name="keras_flow.mail", daemon=True).start()
