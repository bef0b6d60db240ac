"""What engines share when they join others: the address of a host, and what a signal does afterwards."""

from __future__ import annotations

import fcntl
import resource
import signal
import socket

import pytest

from keras_flow.current import channel, joining
from keras_flow.current.channel import Channel, Listener, connect
from keras_flow.current.processes import Processes
from keras_flow.errors import FlowError
from tests.launch import programs


def test_a_signal_does_what_it_did_before_also_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(OSError), joining.keeping_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise OSError
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_addresses_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    host = joining.own_address(Processes(count=2, host="::1", port=4711))
    assert host == "::1"
    with Listener(host, 0, b"secret") as listener:
        client = connect(host, listener.port, b"secret", {}, 5)
        server, _ = listener.arrivals.get(timeout=5)
        client.close()
        server.close()


def test_a_coordinator_whose_name_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name may come later; if it does not, the error says what was asked for."""
    asked: list[object] = []

    def connect(_: object, address: object) -> None:
        asked.append(address)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setenv("KERAS_FLOW_TIMEOUT", "1")
    monkeypatch.setattr(joining, "_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(FlowError, match=r"process 1 of 2 could not reach .*nobody:4711 within 1 s .*Name or service"):
        joining.own_address(Processes(index=1, count=2, host="nobody", port=4711))
    assert len(asked) > 2


def test_descriptors_of_any_number_are_waited_for() -> None:
    """A process may have thousands of files open; `select.select` takes numbers below 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = 2000
    if hard != resource.RLIM_INFINITY and hard <= number:
        pytest.skip(f"this host allows a process {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number + 8), hard))
    try:
        one, other = socket.socketpair()
        high = socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, number))
        one.close()
        here, there = Channel(high), Channel(other)
        assert here.receive(0.01) is None
        there.send({"text": "far"})
        assert here.receive(5) == {"text": "far"}
        here.close()
        with pytest.raises(ConnectionError):
            here.receive(0.01)
        there.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_says_nothing_more_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_HANDSHAKE_SECONDS", 0.2)
    with Listener("127.0.0.1", 0, b"secret") as listener:
        client = Channel(socket.create_connection(("127.0.0.1", listener.port)))
        client.prove(b"secret", "client")
        with pytest.raises(ConnectionError):
            client.receive(5)
        client.close()


@pytest.mark.parametrize("failures", [2, 3])
def test_a_store_that_fails_is_asked_a_few_times_and_named(failures: int) -> None:
    """Its failures come at once: asked on and on, a process would be busy until the limit of an hour."""
    asked: list[str] = []

    def ask(key: str, milliseconds: int) -> str:
        asked.append(key)
        if len(asked) <= failures:
            raise OSError("UNAVAILABLE: Connection reset by peer")
        return "there"

    def text() -> str:
        return joining.in_short_waits(ask, OSError, lambda error: "DEADLINE" in str(error), "at/1", 2, 0.01)

    if failures == 2:
        assert text() == "there"
        return
    with pytest.raises(joining.LostStore, match=r"store, which process 0 keeps, failed .*'at/1' \(UNAVAILABLE: Conn"):
        text()
    assert len(asked) == 3


def test_the_name_of_the_first_process_may_be_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, asked = socket.socket.bind, []

    class Later(socket.socket):
        def bind(self, address: object) -> None:
            asked.append(address)
            if len(asked) == 1:
                raise socket.gaierror(-2, "Name or service not known")
            stock(self, ("127.0.0.1", 0))

    monkeypatch.setattr(joining.socket, "socket", Later)
    joining.check_port(Processes(count=2, host="pod-0.job", port=4711))
    assert len(asked) == 2


def test_the_cause_of_a_silent_process_is_said_once() -> None:
    """Waits in pieces raise an error of their own for the error of a piece."""
    inner = joining.SilentProcess(1, 3, 1.0, TimeoutError("nothing was written"))
    outer = joining.SilentProcess(1, 3, 30.0, inner.__cause__ or inner)
    assert str(outer).startswith("process 1 of 3 did not answer within 30 s (nothing was written). Every process")


@pytest.mark.timeout(90)
def test_a_port_of_tensorflow_is_held_until_all_have_chosen() -> None:
    """The system gives a port that was let go to the next process that asks for one."""
    program = """
import socket
from unittest import mock
from keras_flow.backends.tensorflow import processes
from keras_flow.current.processes import Processes

def connect(host, port, token, hello, limit):
    with socket.socket() as other:
        try: other.bind(("", hello["port"]))
        except OSError: print("held")
    return mock.Mock(receive=lambda seconds: {"addresses": ["a:1", "b:2"]})

with mock.patch.object(processes.channel, "connect", connect):
    print(processes._exchanged_addresses(Processes(index=1, count=2, host="a", port=1), 5.0))
"""
    code, out, err = programs.finish(programs.start(["-c", program], "tensorflow"), 80)
    assert (code, out) == (0, "held\n('a:1', 'b:2')\n"), err
