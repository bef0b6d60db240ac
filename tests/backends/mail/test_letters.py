"""The box of a process: whoever connects and goes, or sends what is no letter, takes nothing from the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keras_flow.backends.mail import frames, letters
from keras_flow.current import channel, joining
from keras_flow.current.processes import Processes
from keras_flow.errors import FlowError

pytestmark = pytest.mark.timeout(60)


class Gone:
    """A channel whose other side has closed it."""

    def send(self, message: dict[str, Any]) -> None:
        raise ConnectionResetError

    def close(self) -> None:
        pass


def within(seconds: float, is_so: Callable[[], object]) -> bool:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(is_so())


def test_who_goes_or_sends_no_letter_takes_nothing_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters.processes, "find", lambda: Processes(count=2))
    monkeypatch.setattr(letters.whereabouts, "store", lambda: SimpleNamespace(put_text=lambda key, text: None))
    box = letters._Box()
    box._listener.arrivals.put((Gone(), {"process": 1}))  # type: ignore[arg-type]
    peer = channel.connect("127.0.0.1", box._listener.port, joining.token(), {"process": 1}, 5)
    assert peer.receive(10) == {"process": 0}
    with peer.taken() as connection:
        frames.write(connection, [2, 0, 1], {"x": np.arange(3)})
        assert within(10, lambda: box._letters[2, 0, 1])
        assert box._letters[2, 0, 1][0]["x"].tolist() == [0, 1, 2]
        assert not box._gone
        header = b"no header"
        connection.sendall(frames._LENGTH.pack(len(header)) + header)
        assert within(10, lambda: 1 in box._gone)
    with pytest.raises(FlowError, match=r"process 1 sent what is no message \(.*; this one waits for its rank 3"):
        box.take((3, 0, 1), 1)
