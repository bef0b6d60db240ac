"""The launchers of several hosts: they meet at host 0, begin together, and tell each other when a process has failed.

Each host has a launcher, which sees the processes of its host. Host 0's passes on what each of them says. A launcher
that is silent for too long is gone, and the job with it.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from keras_flow.current import joining
from keras_flow.current.channel import Channel, Listener, connect
from keras_flow.current.processes import LOOPBACK
from keras_flow.errors import LaunchError
from keras_flow.launch.failure import Interruption, RankError
from keras_flow.launch.job import Job

#: seconds between two signs of life
_ALIVE_SECONDS = 1.0
#: seconds without a sign of life after which a host is gone
_GONE_SECONDS = 6.0
_SILENT = f"no sign of life for {_GONE_SECONDS:g} s"
#: seconds of waiting for other hosts after which host 0 says for whom it waits
_SAYING_SECONDS = 10.0
#: seconds that host 0 leaves the others to hear of the end
_PARTING_SECONDS = 2.0


class Nodes(ABC):
    """The other hosts of a job, as a launcher sees them. As a context manager it takes leave of them.

    Attributes:
        names: host names by node, as far as they are known.
        left: ranks of the other hosts whose program has come to its end.
        lost: hosts that are gone: no attempt can begin any more.
    """

    def __init__(self, job: Job):
        self.job = job
        self.names: dict[int, str] = {job.node: socket.gethostname()}
        self.left: set[int] = set()
        self._said_left: set[int] = set()
        self._channels: dict[int, Channel] = {}
        self._silent: dict[int, float] = {}
        self._done: set[int] = set()
        self.lost: set[int] = set()
        self._looked = 0.0
        self._failure: LaunchError | None = None
        self._telling = threading.Lock()
        self._leaving = threading.Event()

    def __enter__(self) -> Nodes:
        # a thread, since a launcher that waits for its disk or for its processes' output lives too
        threading.Thread(target=self._live, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        for channel in self._channels.values():
            channel.close()

    @abstractmethod
    def begin(self, port: int) -> int:
        """Wait until all hosts are ready to start processes; return the coordinator's port, which host 0 chose."""

    def look(self) -> None:
        """Read what the other hosts said; called a few times a second.

        Raises:
            LaunchError: a process failed there, or a host is gone.
        """
        # of a longer time between two looks only so much counts: then it was this launcher that stood still
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _ALIVE_SECONDS), now
        for node, channel in list(self._channels.items()):
            self._silent[node] = self._silent.get(node, 0.0) + passed
            try:
                while (message := channel.receive()) is not None:
                    self._silent[node] = 0.0
                    self._take(node, message)
            except ConnectionError as error:
                if node not in self._done:
                    self._lose(node, str(error))
        for node, seconds in self._silent.items():
            if node not in self._done and seconds > _GONE_SECONDS:
                self._lose(node, _SILENT)
        if self._failure is not None:
            raise self._failure

    def fail(self, error: RankError) -> None:
        """Tell the other hosts that a process of this one failed, or that the launcher is interrupted."""
        self._tell({"failed": _as_message(error)})

    def left_well(self, ranks: Sequence[int]) -> None:
        """Tell the other hosts which ranks of this one have come to their end: another may fail for that."""
        if new := set(ranks) - self._said_left:
            self._said_left |= new
            self._tell({"left": sorted(new)})

    def done(self) -> None:
        """Say that all processes of this host have left well."""
        self._done.add(self.job.node)
        if self.job.node or self.all_done():  # host 0 says it of all
            self._tell({"done": True})

    def all_done(self) -> bool:
        """Whether the processes of every host have left well."""
        return len(self._done) == self.job.nodes

    def _begin_anew(self) -> None:
        """Forget what was said of the attempt before."""
        self._silent.clear()
        self._done.clear()
        self.left.clear()
        self._said_left.clear()

    def _take(self, node: int, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._failure = _as_error(message["failed"])
            self.lost.update(message.get("lost", ()))
        elif "left" in message:
            self.left.update({*map(int, message["left"])} - self._said_left)
        elif "done" in message:
            self._done.add(node)
        elif "names" in message:
            self.names = {int(index): name for index, name in message["names"].items()}

    def _tell(self, message: dict[str, Any], but: int | None = None) -> None:
        for node, channel in list(self._channels.items()):  # which grow in another thread while hosts come
            if node != but:
                with self._telling, contextlib.suppress(ConnectionError):  # `look` notices it
                    channel.send(message)

    def _live(self) -> None:
        while not self._leaving.wait(_ALIVE_SECONDS):
            self._tell({"alive": True})

    def _lose(self, node: int, why: str) -> LaunchError:
        name = self.names.get(node, "?")
        first, last = node * self.job.processes, (node + 1) * self.job.processes - 1
        error = RankError(
            f"host {node} ({name}) with {self.job.words} {first} to {last} is gone: {why}. Its launcher was ended, or "
            "the network between the hosts is down. All other processes were ended.",
            first,
        )
        self._done.add(node)
        self.lost.add(node)
        self._failure = self._failure or error
        self._tell({"failed": _as_message(error), "lost": [node]}, but=node)
        return self._failure


class NoOtherNodes(Nodes):
    """A job on one host."""

    def begin(self, port: int) -> int:
        """Return at once: there is nobody to wait for."""
        return port


class FirstNode(Nodes):
    """Host 0, where the others meet."""

    def __init__(self, job: Job, token: bytes):
        super().__init__(job)
        self._token = token
        self._ready: set[int] = set()
        self._passed_on: set[int] = set()

    def _meet(self) -> None:
        """Wait for all hosts.

        Raises:
            LaunchError: one cannot listen at the address, a host does not come in time, or differs from this one.
        """
        job, port = self.job, self.job.port
        assert port is not None
        facts, until = job.facts(), time.monotonic() + job.meeting_seconds
        try:
            listener = joining.once_known(lambda: Listener(job.host, port, self._token), job.meeting_seconds)
        except OSError as error:
            raise LaunchError(
                f"keras-flow launch cannot listen at {job.host}:{job.port}, where the hosts meet: {error.strerror}. "
                "--master_addr must be an address of host 0, and --master_port a free port there."
            ) from error
        said: list[int] = []
        with listener:
            while len(self._here()) < job.nodes - 1:
                missing = sorted(set(range(job.nodes)) - {0, *self._channels})
                wait = until - time.monotonic()
                try:
                    channel, hello = listener.arrivals.get(timeout=max(0.01, min(wait, _SAYING_SECONDS)))
                except queue.Empty:
                    if wait > _SAYING_SECONDS:
                        if missing != said:
                            said = missing
                            _say_missing(missing, job)
                        continue
                    raise self._refused(
                        f"hosts {missing} of {job.nodes} did not come to {job.host}:{job.port} within "
                        f"{job.meeting_seconds:g} s. Is the launcher started there, with --node_rank, and is the port "
                        "open between the hosts?"
                    ) from None
                self._admit(channel, hello, facts)

    def _here(self) -> dict[int, Channel]:
        """The hosts that have come, without those whose launchers have ended meanwhile."""
        for node, channel in list(self._channels.items()):
            try:
                while (message := channel.receive()) is not None:
                    if "ready" in message:
                        self._ready.add(node)
            except ConnectionError:
                del self._channels[node]
                self._ready.discard(node)
        return self._channels

    def begin(self, port: int) -> int:
        """Tell the others the port."""
        if not self._channels:
            self._meet()
        # of a restart: those that end their processes slower than this host are waited for
        until = time.monotonic() + self.job.meeting_seconds
        for node, channel in self._channels.items():
            name = self.names[node]
            while node not in self._ready:
                try:
                    message = channel.receive(_GONE_SECONDS) or channel.receive(0.1)
                except ConnectionError as error:
                    raise LaunchError(f"host {node} ({name}) left the job before it was ready ({error}).") from error
                if message is None:
                    self._failure = None  # of the attempt before
                    raise self._lose(node, _SILENT)
                if time.monotonic() > until:
                    raise LaunchError(f"host {node} ({name}) is not ready to begin.")
                self._take(node, message)
                _raise_end(message)
        self._ready.clear()
        self._begin_anew()
        self._failure = None
        names = {str(node): name for node, name in self.names.items()}
        self._tell({"begin": port, "names": names})
        return port

    def _admit(self, channel: Channel, hello: dict[str, Any], facts: dict[str, str]) -> None:
        node, theirs = int(hello.get("node", -1)), dict(hello.get("facts", {}))
        name = str(hello.get("name", "?"))
        self._here()  # its launcher may have been ended, and started again
        self._channels.setdefault(node, channel)
        if not 0 < node < self.job.nodes or self._channels[node] is not channel:
            channel.send({"refused": f"--node_rank {node} is taken, or none of 1 to {self.job.nodes - 1}."})
            if self._channels[node] is channel:
                del self._channels[node]
            raise self._refused(f"two hosts said --node_rank {node} (the second is {name}), or it is out of range.")
        self.names[node] = name
        differing = [what for what in facts if facts[what] != theirs.get(what)]
        if differing:
            pairs = "; ".join(f"{what}: {facts[what]} on host 0, {theirs.get(what)} there" for what in differing)
            raise self._refused(f"host {node} ({name}) differs from host 0: {pairs}. Make the hosts equal.")

    def _refused(self, why: str) -> LaunchError:
        self._tell({"refused": why})
        return LaunchError(why)

    def _take(self, node: int, message: dict[str, Any]) -> None:
        super()._take(node, message)
        if "ready" in message:
            # a host that is quicker says it right behind "failed", and one look reads both
            self._ready.add(node)
        if "left" in message:
            self._passed_on.update(message["left"])
        if "failed" in message:
            self._tell({**message, "node": node}, but=node)
        elif "done" in message and self.all_done():
            self._tell({"done": True})

    def look(self) -> None:
        """Read what the other hosts said, and pass it on at once."""
        try:
            super().look()
        finally:
            if self._passed_on:
                self._tell({"left": sorted(self._passed_on)})
                self._passed_on.clear()

    def __exit__(self, *_: object) -> None:
        # it passes on what the others say: it leaves last, or after a short while
        until = time.monotonic() + _PARTING_SECONDS
        for node, channel in self._channels.items():
            if node in self.lost:
                continue
            with contextlib.suppress(ConnectionError):
                while channel.receive(max(0.0, until - time.monotonic())) is not None:
                    pass
        super().__exit__(*_)


def _say_missing(missing: list[int], job: Job) -> None:
    """Say for whom host 0 waits."""
    hint = (
        "" if job.host != LOOPBACK else f" No other machine reaches {LOOPBACK}: --master_addr takes one of this host's."
    )
    print(
        f"keras-flow: waiting at {job.host}:{job.port} for hosts {missing} of {job.nodes}: start the launcher there, "
        f"with --node_rank.{hint}",
        file=sys.stderr,
        flush=True,
    )


def _raise_end(message: dict[str, Any]) -> None:
    """Raise the error of a job that lost a host, or was asked to end; other failures are of the attempt before."""
    if "lost" in message or "signal" in message.get("failed", {}):
        raise _as_error(message["failed"])


class OtherNode(Nodes):
    """A host that is not host 0."""

    def __init__(self, job: Job, token: bytes):
        super().__init__(job)
        self._token = token

    def _meet(self) -> None:
        """Come to host 0.

        Raises:
            LaunchError: it cannot be reached in time, or does not take this one.
        """
        job = self.job
        assert job.port is not None
        hello = {"node": job.node, "name": socket.gethostname(), "facts": job.facts()}
        try:
            self._channels[0] = connect(job.host, job.port, self._token, hello, job.meeting_seconds)
        except ConnectionError as error:
            raise LaunchError(
                f"keras-flow launch could not reach host 0 at {job.host}:{job.port} within {job.meeting_seconds:g} s "
                f"({error}). Is its launcher started, with the same --master_addr, --master_port and KERAS_FLOW_TOKEN, "
                "and is the port open between the hosts?"
            ) from error

    def begin(self, port: int) -> int:
        """Wait for host 0's word."""
        if not self._channels:
            self._meet()
        self._begin_anew()
        self._failure = None
        self._tell({"ready": True})
        until = time.monotonic() + self.job.meeting_seconds + _GONE_SECONDS
        while True:
            try:
                message = self._channels[0].receive(_GONE_SECONDS) or self._channels[0].receive(0.1)
            except ConnectionError as error:
                raise LaunchError(f"host 0 at {self.job.host}:{self.job.port} ended the job ({error}).") from error
            if message is None:
                raise self._lose(0, _SILENT)
            if time.monotonic() > until:
                raise LaunchError(f"host 0 at {self.job.host}:{self.job.port} did not begin the job in time.")
            if "refused" in message:
                raise LaunchError(f"host 0 does not begin the job: {message['refused']}")
            self.lost.update(message.get("lost", ()))
            _raise_end(message)
            if "begin" in message:
                self._take(0, message)
                return int(message["begin"])

    def _take(self, node: int, message: dict[str, Any]) -> None:
        # what host 0 passes on is of another host
        super()._take(int(message.get("node", node)), message)
        if "done" in message:
            self._done.update(range(self.job.nodes))


def nodes_of(job: Job, token: bytes) -> Nodes:
    """The other hosts of a job; `token` is the secret by which they know each other."""
    if job.nodes == 1:
        return NoOtherNodes(job)
    return FirstNode(job, token) if job.node == 0 else OtherNode(job, token)


def _as_message(error: RankError) -> dict[str, Any]:
    message = {"text": str(error), "rank": error.rank, "code": error.exit_code, "details": error.details}
    return {**message, "host": error.host, "signal": error.number} if isinstance(error, Interruption) else message


def _as_error(message: dict[str, Any]) -> RankError:
    if "signal" in message:
        return Interruption(int(message["signal"]), str(message["host"]), int(message["rank"]))
    return RankError(str(message["text"]), int(message["rank"]), message["code"], str(message["details"]))
