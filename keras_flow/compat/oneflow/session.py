"""The machines and devices that a program names, and the ranks that are made of them with the first job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keras_flow.backends.active import announced_devices
from keras_flow.backends.interface import World
from keras_flow.compat.oneflow.missing import Names
from keras_flow.current.processes import find
from keras_flow.errors import FlowError
from keras_flow.runtime.init import init


@dataclass
class Said:
    """The devices by type, the machines and the port that a program has named; and the ranks, once they are there.

    `number` counts sessions: jobs that were traced in an earlier one are traced again.
    """

    devices: dict[str, int] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    machine_num: int | None = None
    port: int | None = None
    world: World | None = None
    number: int = 0


_said = Said()


def _number(who: str, value: object, most: int = 1 << 20) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise FlowError(f"flow.{who}({value!r}): legal is a whole number from 1 to {most}")
    if _said.world is not None:
        raise FlowError(f"flow.{who} came after the first job: the session has {_said.world.size} ranks already")
    return value


def _devices(type: str, count: int) -> None:
    _said.devices[type] = _number(f"config.{type}_device_num", count)


def _machine_num(count: int) -> None:
    _said.machine_num = _number("config.machine_num", count)


def _ctrl_port(port: int) -> None:
    _said.port = _number("env.ctrl_port", port, most=65535)


def _machine(*nodes: Mapping[str, object] | Sequence[Mapping[str, object]]) -> None:
    given = [each for node in nodes for each in ([node] if isinstance(node, Mapping) else node)]
    wrong = [node for node in given if not isinstance(node.get("addr"), str)]
    if wrong or not given:
        raise FlowError(f'flow.env.machine takes nodes like {{"addr": "192.168.1.12"}}, got {wrong or given}')
    addresses = [str(node["addr"]) for node in given]
    if twice := sorted({each for each in addresses if addresses.count(each) > 1}):
        raise FlowError(f"flow.env.machine: two nodes have the address {twice[0]}; each machine has its own")
    _number("env.machine", len(addresses))
    _said.nodes = tuple(addresses)


def start() -> World:
    """The ranks; they start with the first call.

    Raises:
        FlowError: machines without a port, a port in use, or a job that was started with other numbers.
    """
    if _said.world is None:
        count = len(_said.nodes) or 1
        if _said.machine_num not in (None, count):
            raise FlowError(
                f"flow.config.machine_num says {_said.machine_num} machines, flow.env.machine names {count}"
            )
        if count > 1:
            _join(_said.nodes, _said.port)
        type = next((each for each in ("gpu", "cpu") if each in _said.devices), None)
        if type is not None:
            _said.world = init(count * _said.devices[type], type)
        else:  # a program that says nothing, and that no launcher started, is one of one device
            is_alone = announced_devices() is None and find().count == 1
            _said.world = init(1 if is_alone else None)
    return _said.world


def node_count() -> int:
    """How many machines the program has named."""
    return len(_said.nodes) or 1


def _join(nodes: Sequence[str], port: int | None) -> None:
    """Tell a process that was started by hand which machine of several it is on."""
    if port is None:
        raise FlowError(f"flow.env.machine names {len(nodes)} nodes: say the port of {nodes[0]} by flow.env.ctrl_port")
    if find().count > 1:  # a launcher has said all of that
        return
    own = [index for index, node in enumerate(nodes) if _is_here(node)]
    said = os.environ.get("NODE_RANK", "")
    if said.isdigit() and int(said) < len(nodes):
        own = [int(said)]
    if len(own) != 1:
        raise FlowError(
            f"flow.env.machine: this machine has {[nodes[index] for index in own] or 'none'} of the addresses "
            f"{list(nodes)}. Set NODE_RANK to 0 on the first node, to 1 on the next, or use keras-flow launch on each"
        )
    here = {"RANK": own[0], "WORLD_SIZE": len(nodes), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in here.items()}, MASTER_ADDR=nodes[0], MASTER_PORT=str(port))


def _is_here(address: str) -> bool:
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def number() -> int:
    """How many sessions there were before this one."""
    return _said.number


def forget() -> None:
    """Forget what was said; ranks that have started stay."""
    global _said
    _said = Said(number=_said.number + 1)


def _nothing(*_: object) -> None:
    """Do nothing, for settings that only changed OneFlow's log and files."""


config = Names(
    "config",
    gpu_device_num=lambda count: _devices("gpu", count),
    cpu_device_num=lambda count: _devices("cpu", count),
    machine_num=_machine_num,
    ctrl_port=_ctrl_port,
    enable_debug_mode=_nothing,
    enable_legacy_model_io=_nothing,
)
env = Names("env", machine=_machine, ctrl_port=_ctrl_port, init=start, logtostderr=_nothing, log_dir=_nothing)
