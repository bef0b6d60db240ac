"""Messages between the processes and launchers of a job before an engine runs: JSON lines, after a proof of the secret.

Tensors and pickles never travel here. Who connects must prove first that it knows the job's secret, and is told
nothing before: each side sends a random text and gets back its HMAC-SHA256 (RFC 2104) under the secret. Strangers are
dropped, and the job goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import selectors
import socket
import threading
import time
from typing import Any

from keras_flow.current import joining

#: bytes of a message, at most
_LONGEST = 1 << 20
#: seconds in which the two sides of a connection must have proved themselves
_HANDSHAKE_SECONDS = 5.0
#: seconds between two attempts to connect
_RETRY_SECONDS = 0.1


class StrangerError(ConnectionError):
    """The other side does not know the job's secret, or does not speak as the job's processes do."""


def is_readable(source: socket.socket | int, seconds: float) -> bool:
    """Whether a socket, or a descriptor, has something to read within these seconds.

    `select.select` takes no descriptors of 1024 and more.
    """
    with selectors.DefaultSelector() as waiting:
        waiting.register(source, selectors.EVENT_READ)
        return bool(waiting.select(max(0.0, seconds)))


class Channel:
    """A connection that carries JSON objects, one a line. Every read has a limit of time.

    Args:
        connection: a connected socket, which the channel owns from now on.
    """

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._received = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; raises ConnectionError where the other side is gone."""
        try:
            # within, since another thread may have closed the connection
            self._socket.settimeout(_HANDSHAKE_SECONDS)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def receive(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """The next message, or None where none has come after these seconds.

        Raises:
            StrangerError: what came is no message.
            ConnectionError: the other side is gone.
        """
        until = time.monotonic() + seconds
        while b"\n" not in self._received:
            if len(self._received) > _LONGEST:
                raise StrangerError("a message is too long")
            try:
                if not is_readable(self._socket, until - time.monotonic()):
                    return None
                chunk = self._socket.recv(65536)
            except (OSError, ValueError) as error:  # a closed one has no descriptor
                raise ConnectionError(str(error)) from error
            if not chunk:
                raise ConnectionError("the connection was closed")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise StrangerError("a message is no JSON") from error
        if not isinstance(message, dict):
            raise StrangerError("a message is no JSON object")
        return message

    def remote_host(self) -> str:
        """The address of the other side's host, as this one sees it."""
        return self._socket.getpeername()[0]

    def taken(self) -> socket.socket:
        """Return the connected socket, for data that are no messages. The channel must not be used afterwards."""
        assert not self._received
        self._socket.settimeout(None)
        return self._socket

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def prove(self, token: bytes, role: str) -> None:
        """Prove to the other side that the secret is known here, and make it prove the same.

        Args:
            token: the secret.
            role: `"server"` or `"client"`; part of the proof, so that a proof cannot be sent back as one's own.

        Raises:
            ConnectionError: the other side does not know it.
        """
        other = "client" if role == "server" else "server"
        own = secrets.token_hex(16)
        self.send({"nonce": own})
        theirs = self._expect("nonce")
        self.send({"proof": _proof(token, role, theirs)})
        if not hmac.compare_digest(self._expect("proof"), _proof(token, other, own)):
            raise StrangerError("the other side does not know the job's secret (KERAS_FLOW_TOKEN)")

    def _expect(self, name: str) -> str:
        message = self.receive(_HANDSHAKE_SECONDS)
        if message is None or not isinstance(message.get(name), str):
            raise StrangerError(f"the other side sent no {name}")
        return message[name]


class Listener:
    """Listens at an address for those who know the secret. As a context manager it stops listening at the end.

    Attributes:
        arrivals: channels of those who have proved themselves, each with its first message.

    Args:
        host: address to listen at.
        port: port to listen at.
        token: the secret.

    Raises:
        OSError: one cannot listen there.
    """

    def __init__(self, host: str, port: int, token: bytes):
        self.arrivals: queue.Queue[tuple[Channel, dict[str, Any]]] = queue.Queue()
        self._token = token
        self._listener = socket.create_server((host, port), family=joining.family_of(host), backlog=128)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """The port at which it listens, where it was given 0."""
        return self._listener.getsockname()[1]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        # wakes the thread that accepts, which closing alone does not
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # one thread each, so that a stranger who says nothing keeps nobody waiting
            threading.Thread(target=self._welcome, args=(Channel(connection),), daemon=True).start()

    def _welcome(self, channel: Channel) -> None:
        try:
            channel.prove(self._token, "server")
            hello = channel.receive(_HANDSHAKE_SECONDS)
        except ConnectionError:
            hello = None
        if hello is None:
            channel.close()
        else:
            self.arrivals.put((channel, hello))


def connect(host: str, port: int, token: bytes, hello: dict[str, Any], seconds: float) -> Channel:
    """Connect to a `Listener`, which may begin later, and send a first message.

    Raises:
        ConnectionError: it cannot be reached within these seconds, or does not know the secret.
    """
    until = time.monotonic() + seconds
    while True:
        channel = None
        try:
            channel = Channel(socket.create_connection((host, port), max(0.1, min(5.0, until - time.monotonic()))))
            channel.prove(token, "client")
            channel.send(hello)
            return channel
        except OSError as error:
            if channel is not None:
                channel.close()
            if isinstance(error, StrangerError) or time.monotonic() > until:
                raise error if isinstance(error, ConnectionError) else ConnectionError(str(error)) from error
            time.sleep(_RETRY_SECONDS)


def _proof(token: bytes, role: str, nonce: str) -> str:
    return hmac.new(token, f"{role}:{nonce}".encode(), hashlib.sha256).hexdigest()
