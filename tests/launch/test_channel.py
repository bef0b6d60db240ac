"""The connection between launchers: who does not know the secret is dropped, and the others go on."""

import pickle
import socket
import threading
import time
from pathlib import Path

import pytest

from keras_flow.current.channel import Channel, Listener, StrangerError, connect
from tests.launch import programs

pytestmark = [pytest.mark.timeout(30), pytest.mark.check]

SECRET = b"a secret"


def _listener() -> tuple[Listener, int]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Listener("127.0.0.1", port, SECRET), port


def test_messages_go_both_ways() -> None:
    listener, port = _listener()
    with listener:
        client = connect("127.0.0.1", port, SECRET, {"node": 1}, 5)
        server, hello = listener.arrivals.get(timeout=5)
        assert hello == {"node": 1}
        server.send({"text": "größer"})
        server.send({"second": 2})
        assert client.receive(5) == {"text": "größer"}
        assert client.receive(5) == {"second": 2}
        assert client.receive(0) is None, "nothing has come, and nobody waits"
        server.close()
        with pytest.raises(ConnectionError):
            client.receive(5)
        client.close()
        with pytest.raises(ConnectionError):  # as where another thread has closed it
            client.send({"text": "late"})


def test_strangers_change_nothing(tmp_path: Path) -> None:
    listener, port = _listener()
    with listener:
        silent = socket.create_connection(("127.0.0.1", port))
        for garbage in (b"\x00" * 4096, b"GET / HTTP/1.0\r\n\r\n", pickle.dumps(programs.Writes(tmp_path / "written"))):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(garbage + b"\n")
        with pytest.raises(StrangerError, match="KERAS_FLOW_TOKEN"):
            connect("127.0.0.1", port, b"another secret", {}, 5)
        # who knows the secret is not kept waiting by any of them
        began = time.monotonic()
        client = connect("127.0.0.1", port, SECRET, {"node": 2}, 5)
        server, hello = listener.arrivals.get(timeout=2)
        assert hello == {"node": 2}
        assert time.monotonic() - began < 2
        assert listener.arrivals.empty()
        silent.close()
        client.close()
        server.close()
    assert not (tmp_path / "written").exists()


def test_a_proof_cannot_be_sent_back_as_ones_own() -> None:
    """A stranger that repeats what it is sent, the proof too."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Channel(socket.create_connection(listener.getsockname()))
        mirror, _ = listener.accept()

    def reflect() -> None:
        with mirror:
            while chunk := mirror.recv(65536):
                mirror.sendall(chunk)

    thread = threading.Thread(target=reflect)
    thread.start()
    with pytest.raises(StrangerError, match="KERAS_FLOW_TOKEN"):
        client.prove(SECRET, "client")
    client.close()
    thread.join(5)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        connect("127.0.0.1", port, SECRET, {}, 0.5)
    assert time.monotonic() - began < 5
