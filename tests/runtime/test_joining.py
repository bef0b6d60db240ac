"""What engines share when they join others: the address of a host, and what a signal does afterwards."""

from __future__ import annotations

import signal
import socket

import pytest

from keras_flow.current import joining
from keras_flow.current.channel import Listener, connect
from keras_flow.current.processes import Processes


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
