"""`on="ray"`: the processes of a job on a Ray cluster. Ray places one actor for each, and streams what they print.

Each actor runs a launcher of ours with one process: as far as failures, hangs and restarts go, every process is a host
of its own (`launch/nodes.py`). After a failure, or when Ray loses a node, `restarts` places all actors again.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from keras_flow import settings
from keras_flow.backends.accelerators import cpu_setting
from keras_flow.errors import LaunchError
from keras_flow.launch import environment, launcher
from keras_flow.launch.failure import Interruption, RankError
from keras_flow.launch.job import Job, Place
from keras_flow.units import counted

#: seconds for Ray to place all actors
_PLACING_SECONDS = 120.0
#: seconds for the other processes to end by themselves once one has failed
_ENDING_SECONDS = 15.0


def launch(job: Job, payload: bytes | None = None) -> bytes | None:
    """Run a job of `job.processes` processes on the Ray cluster of RAY_ADDRESS, otherwise on this machine.

    Args:
        job: the job; its processes are those of all nodes.
        payload: what `kf.run` sends to them.

    Returns:
        What rank 0 sends back; None where nothing was sent.

    Raises:
        LaunchError: Ray is not installed, or its cluster is too small.
        RankError: a process failed, or the node that it was on.
    """
    ray = _ray()
    if not ray.is_initialized():
        ray.init(logging_level="ERROR")
    resources = ray.cluster_resources()
    have = resources.get("CPU", 0.0)
    if have < job.processes:
        raise LaunchError(
            f"a job of {job.processes} processes needs as many CPUs of the Ray cluster, which has {have:g} on "
            f"{len(ray.nodes())} nodes. Start fewer (--ranks), or add nodes (ray start --address=...)."
        )
    # a cluster with GPUs computes on them, unless the user's environment says otherwise
    name, _, value = cpu_setting().partition("=")
    on_cpu = {name: value} if os.environ.get(name) == value else {}
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        on_cpu["CUDA_VISIBLE_DEVICES"] = ""
    gpus = 0 if on_cpu or not resources.get("GPU") else job.devices or 1
    nodes = [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
    # a process has all of its GPUs on one node
    if gpus and job.processes > sum(int(each // gpus) for each in nodes):
        raise LaunchError(
            f"a job of {job.processes} processes with {counted(gpus, 'GPU')} each does not fit the Ray "
            f"cluster, whose nodes have {', '.join(f'{each:g}' for each in nodes)}. Start fewer (--ranks), or compute "
            f"on the CPU (environment: {cpu_setting()})."
        )
    job = replace(
        job, env={**settings.given(), **job.env, **on_cpu, **({settings.OWN_ACCELERATORS: "1"} if gpus else {})}
    )
    for attempt in range(job.restarts + 1):
        try:
            return _placed(ray, replace(job, attempt=attempt, restarts=attempt), payload, gpus)
        except (ray.exceptions.RayActorError, RankError) as error:
            failure = error
            if not isinstance(error, RankError):
                failure = RankError(f"a node or process of the Ray cluster is gone: {error}", 0)
            if attempt == job.restarts or isinstance(error, Interruption):
                raise failure from error
            print(f"keras-flow: {failure}\nkeras-flow: restart {attempt + 1} of {job.restarts}", file=sys.stderr)
    return None


def _placed(ray: Any, job: Job, payload: bytes | None, gpus: int) -> bytes | None:
    """Place one actor for each process, with GPUs of its own, and wait until all have ended."""
    # packed: as few nodes as can be, so that neighbouring ranks talk within a host
    group = ray.util.placement_group(
        [{"CPU": 1.0, **({"GPU": float(gpus)} if gpus else {})}] * job.processes, strategy="PACK"
    )
    try:
        if not group.wait(_PLACING_SECONDS):
            raise LaunchError(
                f"Ray did not place {job.processes} processes within {_PLACING_SECONDS:g} s: other jobs hold its CPUs "
                f"or GPUs. Free are {ray.available_resources().get('CPU', 0.0):g} CPUs and "
                f"{ray.available_resources().get('GPU', 0.0):g} GPUs."
            )
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        make = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(Host)
        hosts = [
            make.options(scheduling_strategy=strategy(group, placement_group_bundle_index=place)).remote(place)
            for place in range(job.processes)
        ]
        found = ray.get([host.where.remote() for host in hosts])
        places = _places([node for node, _, _ in found])
        token = secrets.token_hex(32)
        shared = replace(job, nodes=job.processes, processes=1, host=found[0][1], port=found[0][2])
        running = {
            host.run.remote(replace(shared, node=rank, place=places[rank]), token, payload): rank
            for rank, host in enumerate(hosts)
        }
        return _results(ray, running).get(0)
    finally:
        ray.util.remove_placement_group(group)  # ends actors that still run


def _results(ray: Any, running: Mapping[Any, int]) -> dict[int, bytes | None]:
    """Return what each process sent back; raise the error of the first that failed, once the others have ended.

    A lost actor is what others fail for, and Ray notices it later than they.
    """
    waiting, results, failure, gone = list(running), {}, None, None
    while waiting:
        ready, waiting = ray.wait(waiting, timeout=None if failure is None else _ENDING_SECONDS)
        if not ready:
            break
        for each in ready:
            try:
                results[running[each]] = ray.get(each)
            except ray.exceptions.RayTaskError as error:
                failure = failure or (error.cause if isinstance(error.cause, LaunchError) else error)
            except ray.exceptions.RayActorError as error:
                failure = gone = gone or error
    if failure is not None:
        raise failure
    return results


def _places(nodes: list[str]) -> list[Place]:
    """The place of each process, of which the node is given, among those of the same node."""
    hosts = list(dict.fromkeys(nodes))
    return [
        Place(nodes[:place].count(node), nodes.count(node), hosts.index(node), len(hosts))
        for place, node in enumerate(nodes)
    ]


class Host:
    """An actor: the launcher of one process."""

    def __init__(self, rank: int):
        self._rank = rank

    def __repr__(self) -> str:
        return f"rank {self._rank}"  # before each line that it prints

    def where(self) -> tuple[str, str, int]:
        """Return the actor's node, the address of that node, and a free port there."""
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), ray.util.get_node_ip_address(), environment.free_port()

    def run(self, job: Job, token: str, payload: bytes | None) -> bytes | None:
        """Run the process until all of the job have ended; return what it sends back."""
        if job.script is not None and not Path(job.script).is_file():
            raise LaunchError(
                f"{job.script} is not a file on the node of rank {self._rank}. Put it where all nodes find it, or "
                "start Ray's job with its folder as working_dir."
            )
        with launcher.job_folder() as folder:
            if payload is not None:
                folder.payload.write_bytes(payload)
            launcher.launch(replace(job, env={**job.env, settings.TOKEN: token}), folder)
            return folder.result.read_bytes() if folder.result.exists() else None


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise LaunchError("on='ray' needs Ray, which is not installed here: pip install 'keras-flow[ray]'.") from error
    return ray
