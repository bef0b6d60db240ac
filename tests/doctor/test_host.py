"""Checks of the host, with a host that lacks something."""

import errno
import socket
from pathlib import Path

import pytest

from keras_flow.doctor import host


def test_a_free_port_and_bytes_through_it() -> None:
    check = host.free_port()
    assert (check.state, check.detail.rpartition(":")[0]) == ("ok", "127.0.0.1")


def test_no_free_port_is_one_clear_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    check = host.free_port()
    assert check.state == "failed"
    assert check.detail.startswith("Address already in use: the ranks of a job meet at a free port of 127.0.0.1")


def test_no_shared_memory_is_a_warning_with_a_cure(tmp_path: Path) -> None:
    check = host.shared_memory(tmp_path / "shm")
    assert check.state == "warning"
    assert check.detail == (
        f"no {tmp_path}/shm that can be written: NCCL (ranks on GPUs) and torch's DataLoader with workers need it; "
        "ranks on the CPU do not. Start the container with --shm-size=1g (Docker), or mount a tmpfs there"
    )


def test_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 64 << 20}))
    assert host.shared_memory(tmp_path).detail.startswith(f"{tmp_path} has 67.11 MB free")


def test_keras_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.versions, "installed", lambda name: "2.9.0")
    check = host.keras_version()
    assert (check.state, check.detail) == (
        "failed",
        "2.9.0 is too old for keras_flow; pip install 'keras>=3.15'",
    )


def test_keras_that_was_not_tested_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.keras_version().state == "ok"
    monkeypatch.setattr(host.versions, "installed", lambda name: "3.99.0")
    check = host.keras_version()
    assert check.state == "warning"
    assert check.detail.startswith("3.99.0, which keras_flow was not tested with (3.15.1")


def test_telling_variables_but_no_proxy_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://user:secret@proxy")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    found = host.environment()
    assert (found["http_proxy"], found["KERAS_BACKEND"]) == ("(set)", "jax")
