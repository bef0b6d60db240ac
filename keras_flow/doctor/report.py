"""The results of `keras-flow doctor` as values, from which text, JSON and exit status are built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

#: states of a check, best first: `absent` (an engine that is not installed) and `skipped` are no faults
STATES = ("ok", "absent", "skipped", "warning", "failed")


@dataclass(frozen=True)
class Check:
    """One check and its result.

    Attributes:
        name: what was checked.
        state: one of `STATES`.
        detail: what was found; for a fault, what to do.
    """

    name: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Ring:
    """A link between ranks, fitted to all-reduces of several sizes: what `kf.boxing.Link` takes.

    Attributes:
        ranks: ranks that took part.
        latency: seconds for each message.
        bandwidth: bytes per second that a rank receives.
        seconds: bytes of the tensor -> median seconds of its all-reduce.
    """

    ranks: int
    latency: float
    bandwidth: float
    seconds: Mapping[int, float]


@dataclass(frozen=True)
class EngineReport:
    """One backend.

    Attributes:
        name: the Keras backend.
        version: of its package; None where it is not installed.
        devices: those that it would use by itself.
        capabilities: its capability record.
        environment: variables that keras_flow sets for it -> why.
        checks: import, collective, training.
        rings: measured links; empty unless they were asked for.
    """

    name: str
    version: str | None
    devices: Sequence[str] = ()
    capabilities: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    checks: Sequence[Check] = ()
    rings: Sequence[Ring] = ()


@dataclass(frozen=True)
class Report:
    """All results of doctor.

    Attributes:
        versions: package -> version, None where it is not installed.
        host: system, cores, memory.
        environment: variables that matter and are set here.
        set_by_launcher: variables that keras_flow sets in the processes it starts -> why.
        checks: of the host.
        engines: of each backend.
    """

    versions: Mapping[str, str | None]
    host: Mapping[str, str]
    environment: Mapping[str, str]
    set_by_launcher: Mapping[str, str]
    checks: Sequence[Check]
    engines: Sequence[EngineReport]

    @property
    def failures(self) -> list[str]:
        """A sentence for each failed check; without any the exit status is 0."""
        sentences = [f"{check.name}: {check.detail}" for check in self.checks if check.state == "failed"]
        sentences += [
            f"{engine.name}: {check.name}: {check.detail}"
            for engine in self.engines
            for check in engine.checks
            if check.state == "failed"
        ]
        if not any(engine.version for engine in self.engines):
            sentences.append("no engine is installed: pip install 'keras-flow[jax]', or [tensorflow], [torch], [all]")
        return sentences

    def as_json(self) -> dict[str, object]:
        """The report for `--json`; times in seconds, bandwidths in bytes per second."""
        return {**asdict(self), "failures": self.failures}
