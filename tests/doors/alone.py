"""Doors that one process of two opens alone, while the other one goes on: it works, or all are told within 10 s.

Beside the doors of Keras: the public names of `kf`, `kf.comm`, `kf.env` and of global tensors.
"""

from __future__ import annotations

import json
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_flow as kf
from keras_flow.backends.rendezvous import meeting
from keras_flow.comm import repeated
from keras_flow.tensors.global_tensor import GlobalTensor
from tests.doors import run
from tests.doors.cases import CASES, MAKERS
from tests.doors.stage import Setting, Stage, staged
from tests.ranks import Pool, RankError

#: seconds in which all must have heard of a call that one makes alone
LIMIT = 10.0
#: seconds in which a call that needs nobody has worked: engines compile; who waits for the others waits for longer
WORKS = 60.0
#: seconds after which processes have ended that wait inside the engine: once told, they write, and end each other
ENDS = LIMIT + 10.0
_AT = "at"
#: what one process does alone under data parallel, where it has all weights: these must work, and not be refused
NEEDS_NOBODY = (
    "Model.evaluate",
    "Model.predict",
    "Model.predict_on_batch",
    "Model.summary",
    "Model.test_on_batch",
    "model(x)",
    "model.get_weights()",
    "model.save()",
    "one row",
)
#: how often processes began to count anew
_begun = 1000


def _pipe() -> kf.Placement:
    return kf.Placement(range(_placement().size), axis_names=("pipe",))


def _placement() -> kf.Placement:
    return kf.Placement(range(kf.env.get_world_size()))


def _per_rank(value: Any) -> Any:
    """What this process gives `kf.comm`: a value for its rank, or for each of its ranks."""
    local = kf.env.local_ranks()
    return value if len(local) == 1 else dict.fromkeys(local, value)


def _list_per_rank() -> Any:
    return _per_rank([np.ones(2, "float32")] * kf.env.get_world_size())


def _ones() -> Any:
    return np.ones(4, "float32")


def _other_rank() -> int:
    return next(rank for rank in range(kf.env.get_world_size()) if rank not in kf.env.local_ranks())


def _recv() -> Any:
    local = kf.env.local_ranks()
    return kf.comm.recv(_other_rank(), rank=local[0])


def _first_alone() -> Any:
    with kf.env.main_process_first():
        return 1


#: name -> a call by one process; those of all processes before it are in `_made`
CALLS: dict[str, Callable[[Stage, GlobalTensor], Any]] = {
    "kf.DataParallel": lambda s, x: kf.DataParallel().placement.size,
    "kf.PipelineParallel": lambda s, x: kf.PipelineParallel(_pipe()).schedule.stages,
    "kf.CentralStorage": lambda s, x: kf.CentralStorage(_placement()).placement.size,
    "kf.ModelParallel": lambda s, x: kf.ModelParallel(_placement(), batch_axes="axis0").placement.size,
    "kf.DistributedDataParallel": lambda s, x: kf.DistributedDataParallel(s.extra["plain"]) and 1,
    "kf.Layout": lambda s, x: kf.Layout(_placement(), "S(0)", (8, 2)).local_shape(0),
    "kf.Placement": lambda s, x: kf.Placement([0, 1]).size,
    "kf.arange": lambda s, x: kf.arange(8, placement=_placement(), sbp="S(0)").shape,
    "kf.full": lambda s, x: kf.full((8,), 2.0, placement=_placement(), sbp="B").shape,
    "kf.ones": lambda s, x: kf.ones((8,), placement=_placement(), sbp="S(0)").shape,
    "kf.zeros": lambda s, x: kf.zeros((8,), placement=_placement(), sbp="S(0)").shape,
    "kf.tensor": lambda s, x: kf.tensor(np.ones((8, 2), "float32"), placement=_placement(), sbp="S(0)").shape,
    "kf.rand": lambda s, x: kf.rand(8, placement=_placement(), sbp="S(0)").shape,  # without a seed
    "kf.randn": lambda s, x: kf.randn(8, placement=_placement(), sbp="S(0)", seed=1).shape,
    "kf.randint": lambda s, x: kf.randint(0, 3, (8,), placement=_placement(), sbp="S(0)", seed=1).shape,
    "kf.to_global": lambda s, x: kf.to_global(_per_rank(np.ones((2, 2), "float32")), _placement(), "S(0)").shape,
    "kf.global_tensor": lambda s, x: tuple(kf.global_tensor(s.model.layers[0].kernel).shape),
    "kf.explain": lambda s, x: len(str(kf.explain(kf.ops.sum, x))) > 0,
    "kf.layout_of": lambda s, x: str(kf.layout_of(s.model.layers[0].kernel)) and 1,
    "kf.shard": lambda s, x: kf.shard(keras.layers.Dense(4), kernel={}) and 1,
    "kf.unpack": lambda s, x: float(kf.ops.sum(kf.unpack(x, 2)).numpy()),
    "kf.pack": lambda s, x: float(kf.ops.sum(kf.pack(kf.unpack(x, 2), 2)).numpy()),
    "kf.value_and_grad": lambda s, x: float(kf.value_and_grad(lambda v: kf.ops.sum(v * v))(x)[0].numpy()),
    "kf.visualize": lambda s, x: kf.visualize(x) is not None or 1,
    "kf.ops": lambda s, x: float(kf.ops.sum(x).numpy()),
    "kf.boxing": lambda s, x: kf.boxing.plan(x_layout(x), x_layout(x), "float32").total_bytes,
    "kf.schedules": lambda s, x: kf.schedules.zbv(2, 4).makespan(),
    "kf.checkpoint": lambda s, x: kf.checkpoint.save(tempfile.mkdtemp(), s.model, step=1).step > 0,
    "kf.comm.all_gather": lambda s, x: kf.comm.all_gather(_per_rank(_ones())) and 1,
    "kf.comm.all_gather_into_tensor": lambda s, x: kf.comm.all_gather_into_tensor(_per_rank(_ones())) is not None,
    "kf.comm.all_to_all": lambda s, x: kf.comm.all_to_all(_list_per_rank()) and 1,
    "kf.comm.barrier": lambda s, x: kf.comm.barrier(),
    "kf.comm.broadcast": lambda s, x: kf.comm.broadcast(_per_rank(_ones()), 0) is not None,
    "kf.comm.gather": lambda s, x: kf.comm.gather(_per_rank(_ones()), 0) is not None,
    "kf.comm.scatter": lambda s, x: kf.comm.scatter(_list_per_rank(), kf.env.local_ranks()[0]) is not None,
    "kf.comm.all_gather_object": lambda s, x: kf.comm.all_gather_object(_per_rank("a")) and 1,
    "kf.comm.broadcast_object": lambda s, x: kf.comm.broadcast_object(_per_rank("a"), 0) and 1,
    "kf.comm.recv": lambda s, x: _recv(),
    "kf.comm.send": lambda s, x: kf.comm.send({kf.env.local_ranks()[0]: _ones()}, _other_rank()),
    "kf.comm.all_reduce": lambda s, x: kf.comm.all_reduce(_per_rank(_ones())) is not None,
    "kf.comm.reduce": lambda s, x: kf.comm.reduce(_per_rank(_ones()), 0) is not None,
    "kf.comm.reduce_scatter": lambda s, x: kf.comm.reduce_scatter(_list_per_rank()) is not None,
    "kf.comm.reduce_scatter_tensor": lambda s, x: kf.comm.reduce_scatter_tensor(_per_rank(_ones())) is not None,
    "kf.comm.all_reduce again": lambda s, x: kf.comm.all_reduce(_per_rank(s.extra["again"])) is not None,
    "kf.env.main_process_first": lambda s, x: _first_alone(),
    "model(x)": lambda s, x: keras.ops.convert_to_numpy(s.model(s.x)).shape,
    "model.get_weights()": lambda s, x: len(s.model.get_weights()),
    "model.save()": lambda s, x: s.model.save(f"{tempfile.mkdtemp()}/model.keras"),  # and does nothing with the file
    "kf.env.get_world_size": lambda s, x: kf.env.get_world_size(),
    "kf.env.local_ranks": lambda s, x: len(kf.env.local_ranks()),
    "kf.env.is_main_process": lambda s, x: str(kf.env.is_main_process()),
    "GlobalTensor.numpy": lambda s, x: x.numpy().sum(),
    "GlobalTensor.item": lambda s, x: kf.ops.sum(x).item(),
    "GlobalTensor.to_local": lambda s, x: x.to_local() is not None,
    "GlobalTensor.to_global": lambda s, x: x.to_global(sbp="B").shape,
    "GlobalTensor.to_engine": lambda s, x: x.to_engine() is not None,
    "GlobalTensor.T": lambda s, x: x.T.shape,
    "GlobalTensor.__repr__": lambda s, x: len(repr(x)) > 0,
    "GlobalTensor.__add__": lambda s, x: (x + 1.0).shape,
    "GlobalTensor.__matmul__": lambda s, x: (x @ x.T).shape,
    "GlobalTensor.__getitem__": lambda s, x: x[3].numpy().sum(),
    "GlobalTensor.__float__": lambda s, x: float(x[0, 0]),
}
#: name -> why it has no call
REASONS = {
    **dict.fromkeys(["kf.__version__", "kf.FlowError", "kf.FlowWarning", "kf.LaunchError", "kf.LayoutError"], "a name"),
    **dict.fromkeys(["kf.GlobalTensor", "kf.comm", "kf.env", "kf.sbp", "kf.placement"], "its parts have calls"),
    **dict.fromkeys(["kf.init", "kf.run"], "before the ranks are there"),
    "kf.notebook": "starts processes of its own",
    "kf.ParameterServer": "of a job whose program runs in one process",
    "kf.scope": "a scope, which all enter",
    "kf.hvd": "its calls are those of kf.comm",
    "kf.callbacks": "made for `fit`, which all call",
    "kf.explain_file": "of a file, in no process of a job",
    "kf.on_preemption": "waits for a signal",
    "kf.plot_layout": "draws a Layout, which has no values",
    "kf.trace": "traces a `fit`, which all call",
    "kf.comm.Work": "what calls return",
    **dict.fromkeys(["kf.env.process_index", "kf.env.process_count", "kf.env.get_rank"], "numbers"),
    **dict.fromkeys(["kf.env.get_local_rank", "kf.env.get_node_size"], "numbers"),
    **dict.fromkeys(["kf.env.init_rdma", "kf.env.rdma_is_initialized"], "nothing happens"),
    **{f"GlobalTensor.{name}": "facts of its layout" for name in ("ndim", "placement", "sbp", "shape", "size")},
}


def x_layout(x: GlobalTensor) -> kf.Layout:
    """The layout of a global tensor."""
    return kf.Layout(x.placement, x.sbp, tuple(x.shape))


def public() -> list[str]:
    """Return the public names of kf, kf.comm, kf.env and of global tensors."""
    found = [f"kf.{name}" for name in dir(kf)]
    for name in ("comm", "env"):
        module = getattr(kf, name)
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        found += [
            f"kf.{name}.{key}" for key in functions if getattr(module, key).__module__.startswith(f"{module.__name__}")
        ]
    return found + [f"GlobalTensor.{name}" for name in dir(GlobalTensor) if not name.startswith("_")]


def doors() -> list[str]:
    """Return all doors that are opened by one process alone, in an order that does not change."""
    return sorted([*CASES, *CALLS])


def open_alone(tasks: Sequence[tuple[str, str]], folder: str) -> list[dict[str, Any]]:
    """Open doors by process 0 alone, while process 1 goes on to the next call of all. Runs on every process.

    Args:
        tasks: door and layout.
        folder: one for all processes; its file `at` names the door that was opened last, and was written then.

    Returns:
        A line for each: `status` (works, wrong, refused, crash; of process 1: works, refused, crash), `seconds`.
    """
    lines = []
    for number, (door, layout) in enumerate(tasks):
        lines.append(_opened(door, layout, Path(folder) / str(number)))
        with (Path(folder) / f"lines-{kf.env.process_index()}").open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    return lines


def _opened(door: str, layout: str, folder: Path) -> dict[str, Any]:
    global _begun
    _begun += 1
    meeting.begin_anew(_begun)  # a door that was refused has left the processes in different calls
    repeated.begin_anew()
    folder.mkdir(parents=True, exist_ok=True)
    is_alone = kf.env.process_index() == 0
    setting = Setting(layout, "in", "in", "yes", "divide", "yes", "plain")
    expected = _of_one_device(door, setting) if is_alone and door in CASES else None
    line: dict[str, Any] = {"door": door, "layout": layout}
    with staged(setting, folder, MAKERS.get(door), True) as stage:
        x = _made(stage)
        if is_alone:
            (folder.parent / _AT).write_text(f"{door}|{layout}")
        begun = time.monotonic()
        if is_alone:
            line |= _attempt(lambda: _open(door, stage, x, expected))
        if "needs all" not in line.get("text", ""):
            line["then"] = _attempt(lambda: _go_on(stage))
    return line | {"seconds": round(time.monotonic() - begun, 1)}


def _of_one_device(door: str, setting: Setting) -> Any:
    """The numbers of one device, or the error that it has."""
    try:
        return run._numbers(door, setting, Path(tempfile.mkdtemp(prefix="door-")), distributed=False)
    except Exception as error:
        return error


def _made(stage: Stage) -> GlobalTensor:
    """What all processes make before the door is opened."""
    current = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    plain = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3)])
    keras.distribution.set_distribution(current)
    made = {"other": stage.again(), "again": np.full(3, 2.0, "float32"), "plain": plain}
    stage.extra = {**(stage.extra or {}), **made}
    stage.extra["other"].fit(stage.x, stage.y, batch_size=12, verbose=0)
    kf.comm.all_reduce(_per_rank(stage.extra["again"]))
    return kf.tensor(np.arange(16, dtype="float32").reshape(8, 2), placement=_placement(), sbp="S(0)")


def _open(door: str, stage: Stage, x: GlobalTensor, expected: Any) -> list[str]:
    """Open a door; in what it differs from one device."""
    if door in CALLS:
        CALLS[door](stage, x)
        return []
    if isinstance(expected, Exception):  # no door of this engine
        return []
    return run.differences(expected, run._plain(CASES[door](stage)))


def _go_on(stage: Stage) -> list[str]:
    """Do what all processes do next: meet, and train another model, since the door may have changed the first one."""
    kf.comm.barrier()
    stage.extra["other"].fit(stage.x, stage.y, batch_size=12, verbose=0)
    return []


def _attempt(call: Callable[[], list[str]]) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        over = call()
    except kf.FlowError as error:
        found = {"status": "refused", "text": str(error)}
    except Exception as error:
        found = {"status": "crash", "text": f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"}
    else:
        found = {"status": "wrong" if over else "works", "text": "; ".join(over)}
    return found | {"after": round(time.monotonic() - begun, 1)}


# ---- in the test's process


def faults(pool: Pool, tasks: Sequence[tuple[str, str]], folder: Path) -> dict[str, str]:
    """Open doors in the processes of a pool; what is wrong with them, by door and layout.

    A process that waits inside the engine cannot raise an error: it prints it, and ends; the other doors are opened in
    new ones.
    """
    found, left, turn = {}, list(tasks), 0
    while left:
        here = folder / f"turn-{turn}"
        here.mkdir(parents=True)
        turn, begun = turn + 1, time.monotonic()
        try:
            pool.on_each(open_alone, left, str(here), timeout=1200.0)
            ended = ""
        except RankError as error:
            ended = str(error)
        took = time.time() - (here / _AT).stat().st_mtime if (here / _AT).exists() else 0.0
        written = sorted(here.glob("lines-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in written]
        if not (here / "lines-0").exists():  # ended in its first door
            lines = []
        done = min(map(len, lines), default=0)
        for alone, *others in zip(*lines, strict=False):
            for other in others:
                if text := wrong(alone, other):
                    found[f"{alone['door']} {alone['layout']}"] = text
        left = left[done:]
        if ended:
            if not left or (not done and time.monotonic() - begun > 600):
                found["the processes"] = ended
                break
            if "needs all" not in ended:
                found[" ".join(left[0])] = f"ended: {ended[-1500:]}"
            elif took > ENDS:
                found[" ".join(left[0])] = f"ended after {took:.0f} s"
            left = left[1:]
    return found


def wrong(alone: dict[str, Any], other: dict[str, Any]) -> str:
    """What is wrong with a door, of what two processes say; empty where it works, or both were told in time."""
    status, then = alone["status"], other["then"]["status"]
    if status == "works":
        both = {then, alone["then"]["status"]}
        # an operator that needed nobody makes a tensor that the others have not: all are told when they next meet
        told = both == {"refused"} and all("needs all" in each["then"]["text"] for each in (alone, other))
        if both != {"works"} and not told:
            return f"then: {alone['then']} and {other['then']}"
        # the other process goes on as the door is opened, and waits while it is open
        late = max(alone["then"]["after"], other["then"]["after"] - alone["after"]) if told else 0.0
        return f"worked after {alone['after']} s" if alone["after"] > WORKS else _told(late)
    if status == "refused" and alone["layout"] == "dp4" and alone["door"] in NEEDS_NOBODY:
        return f"needs nobody: {alone['text']}"
    if status == "refused" and then == "refused":
        if "needs all" in alone["text"] and "needs all" in other["then"]["text"]:
            return _told(max(alone["after"], other["then"]["after"]))
        return alone["text"]
    if status == "refused" and then == "works":  # refused for another reason, of its own
        return f"only process 0 was told: {alone['text']}" if "needs all" in alone["text"] else _told(alone["after"])
    return f"{status}: {alone['text']}, then {other['then']}"


def _told(seconds: float) -> str:
    return f"told after {seconds:.1f} s" if seconds > LIMIT else ""
