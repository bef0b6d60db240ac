"""Questions to another process, and its answers: how parameter servers and their workers are spoken to.

A process that answers listens at an address; each who proves to know the job's secret gets a thread of its own. A
question has a name and tensors, and an answer has tensors, or the error that was raised.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

from keras_flow import settings
from keras_flow.backends.mail import frames
from keras_flow.current import channel, joining, tf_config
from keras_flow.errors import FlowError, LostServerError

#: seconds in which a process that listens must take a connection
_CONNECTING_SECONDS = 10.0
#: of this process: others see by it that another one listens at an address now
_own_name = secrets.token_hex(8)


class LostProcessError(ConnectionError):
    """A process that was asked is gone, or does not answer within KERAS_FLOW_TIMEOUT."""


def require_secret() -> None:
    """Refuse a job without a secret: programs travel pickled, and whoever sends one runs it.

    Raises:
        FlowError: KERAS_FLOW_TOKEN is not set.
    """
    if not settings.read(settings.TOKEN):
        raise FlowError(
            f"parameter servers of torch run what they are sent, by processes that know the job's secret: set "
            f"{settings.TOKEN} to one text for all of its processes. `keras-flow launch --servers` does so"
        )


def answer(address: str, answers: Callable[[dict[str, Any], Any], Any]) -> None:
    """Begin to answer at an address of this host, in threads.

    Args:
        address: `host:port`.
        answers: takes what was asked and the tensors of the question; returns the tensors of the answer.

    Raises:
        FlowError: the address is in use.
    """
    try:
        listener = channel.Listener(*tf_config.where_to_listen(address), joining.token())
    except OSError as error:
        raise FlowError(f"TF_CONFIG gives this process {address}, where it cannot listen: {error.strerror}") from None
    threading.Thread(target=_welcome, args=(listener, answers), daemon=True).start()


def _welcome(listener: channel.Listener, answers: Callable[[dict[str, Any], Any], Any]) -> None:
    while True:
        arrived, _ = listener.arrivals.get()
        with contextlib.suppress(ConnectionError):
            arrived.send({"process": _own_name})
            threading.Thread(target=_answer_all, args=(arrived.taken(), answers), daemon=True).start()


def _answer_all(connection: socket.socket, answers: Callable[[dict[str, Any], Any], Any]) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, EOFError), connection, connection.makefile("rb") as reads:
        while True:
            asked, value = frames.read(reads)
            told: dict[str, Any] = {"number": asked["number"]}
            try:
                found = answers(asked, value)
            except LostServerError as error:
                told["lost"], found = error.name, None
            except Exception as error:
                told["error"], found = f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None
            frames.write(connection, told, found)


class Line:
    """A connection to a process that answers; made at the first question, and anew where a question was broken off.

    Args:
        name: what the process is called.
        address: `host:port`.
    """

    def __init__(self, name: str, address: str):
        self.name, self.address = name, address
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._reads: Any = None
        self._process: Any = None
        self._number = 0
        self._answers: dict[int, tuple[dict[str, Any], Any]] = {}

    def ask(self, what: str, value: Any = None, **told: Any) -> Any:
        """Ask a question, and wait for the answer.

        Raises:
            LostProcessError: the process is gone.
            LostServerError: a server is gone that it asked.
            FlowError: it raised an error.
        """
        return self.begin(what, value, **told)()

    def begin(self, what: str, value: Any = None, **told: Any) -> Callable[[], Any]:
        """Ask a question; returns what waits for the answer."""
        with self._lock, self._kept():
            connection = self._connected()
            self._number += 1
            number = self._number
            frames.write(connection, {"what": what, "number": number, **told}, value)
        return lambda: self._answer(number)

    def is_there(self) -> bool:
        """Whether the process can be reached."""
        try:
            with self._lock, self._kept():
                self._connected()
        except (LostProcessError, FlowError):
            return False
        return True

    def _answer(self, number: int) -> Any:
        with self._lock, self._kept():
            while number not in self._answers:
                if self._socket is None:
                    raise EOFError("the connection was closed")
                told, value = frames.read(self._reads)
                self._answers[told["number"]] = told, value
            told, value = self._answers.pop(number)
        if "lost" in told:
            raise LostServerError(told["lost"])
        if "error" in told:
            raise FlowError(f"{self.name} failed: {told['error']}")
        return value

    def _connected(self) -> socket.socket:
        if self._socket is None:
            host, _, port = self.address.rpartition(":")
            opened = channel.connect(host, int(port), joining.token(), {}, _CONNECTING_SECONDS)
            process = (opened.receive(_CONNECTING_SECONDS) or {}).get("process")
            if process is None or process != (self._process or process):
                raise ConnectionError("another process listens there now")
            self._socket, self._process = opened.taken(), process
            self._socket.settimeout(joining.waiting_seconds())
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._reads = self._socket.makefile("rb")
            self._answers.clear()
        return self._socket

    @contextlib.contextmanager
    def _kept(self) -> Any:
        """Close the connection where anything is raised: what comes next on it may be half an answer."""
        try:
            yield
        except BaseException as error:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            if isinstance(error, channel.StrangerError):
                raise FlowError(f"{self.name} ({self.address}): {error}") from error
            if isinstance(error, OSError | EOFError):
                raise LostProcessError(f"{self.name} ({self.address}): {error}") from error
            raise
