"""`TF_CONFIG`, by which programs of TensorFlow tell each process of a cluster who it is.

`processes.py` reads the workers of a job from it, `keras_flow/launch/roles.py` a job with parameter servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from keras_flow.errors import FlowError

#: ends the errors about it
LEGAL = (
    'legal is, for example, {"cluster": {"worker": ["host1:12345", "host2:12345"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@dataclass(frozen=True)
class TfConfig:
    """The content of a `TF_CONFIG`.

    Attributes:
        cluster: job, for example `"worker"` -> the addresses of its processes, `host:port`.
        job: that of this process; empty where its type is left out.
        index: the number of this process among those of its job.
        has_task: whether it says at all which process this is.
    """

    cluster: Mapping[str, tuple[str, ...]]
    job: str
    index: int
    has_task: bool


def read(environment: Mapping[str, str]) -> TfConfig | None:
    """Read `TF_CONFIG`; None where it is not set or empty.

    Raises:
        FlowError: it is no JSON, or has another form.

    Example:
        >>> read({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'})
        TfConfig(cluster={'worker': ('a:1', 'b:1')}, job='worker', index=1, has_task=True)
    """
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        config = json.loads(text)
        cluster = {job: tuple(map(str, addresses)) for job, addresses in config.get("cluster", {}).items()}
        task = config.get("task", {})
        return TfConfig(cluster, str(task.get("type", "")), int(task.get("index", 0)), bool(task))
    except (ValueError, TypeError, AttributeError) as error:
        raise FlowError(f"TF_CONFIG cannot be read ({error}): {LEGAL}.") from None


def where_to_listen(address: str) -> tuple[str, int]:
    """Host and port at which the process of an address listens: all interfaces, unless it is one of the loopback's.

    Example:
        >>> where_to_listen("host1:20001"), where_to_listen("localhost:20001")
        (('', 20001), ('localhost', 20001))
    """
    host, _, port = address.rpartition(":")
    return host if host in ("localhost", "127.0.0.1") else "", int(port)
