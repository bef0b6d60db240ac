"""Ranks of each engine: made, counted, and refused with one clear error."""

from pathlib import Path

import pytest

from keras_flow import settings
from keras_flow.backends.accelerators import own_accelerators
from keras_flow.current.processes import Processes
from keras_flow.errors import FlowError
from tests import sampling
from tests.launch import programs

pytestmark = pytest.mark.timeout(120)

SINGLE = ["jax", "tensorflow"]

#: runs lines of a program; an error of keras_flow is its last line of output
FRAME = """
import importlib, os
from keras_flow.errors import FlowError
devices = importlib.import_module("keras_flow.backends." + os.environ["KERAS_BACKEND"] + ".devices")
try:
{body}
except FlowError as error:
    print(error)
"""


def tell(body: str, backend: str, **variables: str) -> list[str]:
    """What the lines of `body` print."""
    program = FRAME.format(body="".join(f"    {line}\n" for line in body.splitlines()))
    code, out, err = programs.finish(programs.start(["-c", program], backend, **variables), 100)
    assert code == 0, err
    return out.splitlines()


@pytest.mark.parametrize("backend", sampling.on_one(SINGLE))
def test_virtual_devices(backend: str) -> None:
    body = """
import keras
print(devices.init(4, None))
x = keras.ops.ones(3)
print(len(devices.rank_devices()), devices.init(None, None) == devices.world())
print(devices.init(2, "cpu"))
print(devices.init(None, "gpu"))
"""
    world, known, fewer, wrong = tell(body, backend)
    assert world == "World(size=4, type='cpu', local_ranks=(0, 1, 2, 3), process_index=0, process_count=1)"
    assert known == "4 True"
    assert fewer.startswith("World(size=2, type='cpu', local_ranks=(0, 1)")
    assert "asked for devices of type 'gpu'" in wrong
    assert "Use type='cpu'" in wrong


def test_tensorflow_number_from_the_launcher_and_flag() -> None:
    body = "print(devices.world().size, os.environ['DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION'])"
    known = {"KERAS_FLOW_DEVICES": "3", "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION": "1"}
    assert tell(body, "tensorflow", **known) == ["3 0"]


FIRST_USE = {"jax": "import jax\njax.numpy.ones(3)", "tensorflow": "import tensorflow as tf\ntf.ones(3)"}


@pytest.mark.parametrize("backend", sampling.on_one(SINGLE))
def test_initialised_with_fewer(backend: str) -> None:
    (text,) = tell(f"{FIRST_USE[backend]}\ndevices.init(4, None)", backend)
    assert "asked for 4 ranks" in text
    assert "is already initialized with 1 device of type 'cpu'" in text
    assert "call kf.init(4) (or kf.run(main, devices=4)) before" in text


@pytest.mark.parametrize("backend", sampling.on_one(SINGLE))
def test_the_line_that_initialised_is_named(backend: str, tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    code, _, err = programs.finish(programs.start([str(tmp_path / "train.py")], backend), 100)
    assert code == 1
    # JAX's arrays know where they were made; for TensorFlow lines that ran before are read
    named = (
        "my_model.py, line 4, `return keras.Sequential(" if backend == "jax" else "train.py, line 7, `model = build()`"
    )
    assert f"before the first of these. Before it came: {named}" in err
    assert "set_random_seed" not in err.splitlines()[-1]


MY_MODEL = """import keras

def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
"""
TRAIN = """import keras
import keras_flow as kf
from my_model import build

keras.utils.set_random_seed(0)
def main():
    model = build()
    kf.init(
        4)

main()
"""


def test_jax_pool_is_large_enough_and_never_made_smaller() -> None:
    body = "print(devices.world().size, os.environ['NPROC'], devices.must_await_steps())"
    assert tell(body, "jax", KERAS_FLOW_DEVICES="8") == ["8 16 False"], "the number from the launcher"
    flags = "--xla_force_host_platform_device_count=2"
    assert tell(body, "jax", XLA_FLAGS=flags, NPROC="64") == ["2 64 False"]


def test_jax_awaits_steps_where_the_pool_is_too_small() -> None:
    body = """
import jax
jax.devices()
print(devices.init(2, None).size, devices.must_await_steps())
"""
    flags = "--xla_force_host_platform_device_count=8"
    assert tell(body, "jax", XLA_FLAGS=flags, NPROC="4") == ["2 True"]


ON_ONE_HOST = Processes(index=5, count=8, local_index=1, local_count=4, source="RANK and WORLD_SIZE")


@pytest.mark.parametrize(
    ("available", "share", "environment", "expected"),
    [
        (4, None, {}, range(1, 2)),
        (8, None, {}, range(2, 4)),
        (8, 1, {}, range(1, 2)),
        (9, None, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7,8"}, range(2, 4)),
        # each process sees its own: said by Slurm, by Ray through us, or plain from their number
        (2, None, {"SLURM_GPUS_PER_TASK": "a100:2"}, range(2)),
        (1, 1, {"CUDA_VISIBLE_DEVICES": "3"}, range(1)),
        # asked for, and not bound to them (`--gpu-bind=none`): all processes see all
        (4, None, {"SLURM_GPUS_PER_TASK": "1"}, range(1, 2)),
        (4, 1, {"SLURM_GPUS_PER_TASK": "1"}, range(1, 2)),
        # Ray told not to set what is visible
        (4, 1, {settings.OWN_ACCELERATORS: "1"}, range(1, 2)),
        (4, 4, {settings.OWN_ACCELERATORS: "1", "KERAS_FLOW_JOB": "folder"}, range(4)),
        # Slurm started a launcher, whose processes share what it was given
        (4, 1, {"SLURM_GPUS_PER_TASK": "4", "KERAS_FLOW_JOB": "folder"}, range(1, 2)),
    ],
)
def test_a_process_takes_its_part_of_the_accelerators_of_its_host(
    available: int, share: int | None, environment: dict[str, str], expected: range
) -> None:
    assert own_accelerators(available, share, ON_ONE_HOST, environment) == expected


@pytest.mark.parametrize(
    ("processes", "available", "share", "expected"),
    [
        # one process on each host
        (Processes(index=1, count=2), 8, None, range(8)),
        (Processes(index=1, count=2), 8, 4, range(4)),
        # Slurm's "1,2" on the second host: it says the number of the first
        (Processes(index=2, count=3, local_index=1, local_count=1), 2, 1, range(1, 2)),
    ],
)
def test_accelerators_of_several_hosts(
    processes: Processes, available: int, share: int | None, expected: range
) -> None:
    assert own_accelerators(available, share, processes, {}) == expected


@pytest.mark.parametrize(
    ("available", "share", "environment", "needed"),
    [(3, None, {}, 4), (4, 2, {}, 8), (1, 1, {"CUDA_VISIBLE_DEVICES": "3", "TORCHELASTIC_RUN_ID": "x"}, 4)],
)
def test_too_few_accelerators(available: int, share: int | None, environment: dict[str, str], needed: int) -> None:
    with pytest.raises(FlowError, match=rf"the job has {needed} ranks on this host, which has {available} device"):
        own_accelerators(available, share, ON_ONE_HOST, environment)


def test_jax_takes_its_part_of_the_gpus() -> None:
    """A driver of two GPUs, seen through the plugin that brings JAX to them; JAX itself computes on the CPU here."""
    body = """
import ctypes, pkgutil, types
devices.importlib.util.find_spec = lambda name: types.SimpleNamespace(submodule_search_locations=["plugins"])
devices.pkgutil.iter_modules = lambda paths: [types.SimpleNamespace(name="xla_cuda13")]
def count(number): number._obj.value = 2; return 0
devices.ctypes.CDLL = lambda name: types.SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetCount=count)
from keras_flow.current.processes import Processes
both = [Processes(index=n, count=2, local_index=n, local_count=2) for n in range(2)]
print([devices._own_gpus(share, each) for share in (None, 1) for each in both], devices._own_gpus(None, Processes()))
os.environ["JAX_LOCAL_DEVICE_IDS"] = "1"
print(devices._own_gpus(None, both[0]))
del os.environ["JAX_LOCAL_DEVICE_IDS"]
devices.processes.find = lambda: both[1]
def joined(described, local_devices): raise FlowError(f"joins with {local_devices}")
devices.join = joined
try: devices.init(None, None)
except FlowError as error: print(error)
devices.jax.config.update("jax_platforms", "cpu")
print(devices._own_gpus(None, both[0]))
"""
    assert tell(body, "jax", JAX_PLATFORMS="") == ["[[0], [1], [0], [1]] None", "None", "joins with [1]", "None"]


def test_jax_takes_as_many_devices_of_each_process() -> None:
    """Of two processes with three virtual devices each, two of each: not the first four."""
    body = """
from types import SimpleNamespace
there = [SimpleNamespace(process_index=process, number=number) for process in range(2) for number in range(3)]
print([(each.process_index, each.number) for each in devices._of_each_process(there, 2)])
print(devices._of_each_process(there, None) == there)
"""
    assert tell(body, "jax") == ["[(0, 0), (0, 1), (1, 0), (1, 1)]", "True"]


def test_tensorflow_takes_its_part_of_the_gpus() -> None:
    """Four GPUs that TensorFlow would see; what follows needs real ones."""
    body = """
from keras_flow.current.processes import Processes
tf, seen = devices.tf, ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]
real = tf.config.list_physical_devices
tf.config.list_physical_devices = lambda type=None: seen if type == "GPU" else real(type)
visible = list(seen)
tf.config.get_visible_devices = lambda type=None: visible if type == "GPU" else real(type)
def set_visible(taken, type): raise FlowError(f"takes {taken}")
tf.config.set_visible_devices = set_visible
devices.processes.find = lambda: Processes(index=1, count=2, local_index=1, local_count=2)
try: devices.init(None, None)
except FlowError as error: print(error)
del visible[2:]
devices._count = lambda type: len(visible)
def joined(described, type): raise FlowError(f"has chosen {visible}")
devices.join = joined
try: devices.init(None, None)
except FlowError as error: print(error)
"""
    assert tell(body, "tensorflow") == ["takes ['GPU:2', 'GPU:3']", "has chosen ['GPU:0', 'GPU:1']"]


def test_torch() -> None:
    body = """
def error(size, *arguments):
    os.environ.update(RANK="0", WORLD_SIZE=size)
    try: devices.init(*arguments)
    except FlowError as error: print(error)
print(devices.world())
error("1", 4, None)
error("2", 4, None)
error("1", None, "gpu")
import torch
torch.cuda.is_available = lambda: True
error("1", None, "gpu")
torch.cuda.device_count = lambda: 1
devices.keras_torch.get_device = lambda: "cuda"
error("2", 2, None)
torch.cuda.device_count = lambda: 4
os.environ.update(RANK="7", WORLD_SIZE="8", LOCAL_RANK="3", LOCAL_WORLD_SIZE="4", MASTER_ADDR="127.0.0.1")
def take(number): raise FlowError(f"takes {number}")
torch.cuda.set_device = take
try: devices.init(8, None)
except FlowError as error: print(error)
"""
    one, alone, other, no_gpu, keras_on_cpu, few_gpus, fourth = tell(body, "torch")
    assert fourth == "takes 3"
    assert one == "World(size=1, type='cpu', local_ranks=(0,), process_index=0, process_count=1)"
    assert "kf.run(main, devices=4)" in alone
    assert "`keras-flow launch --devices 4 script.py`" in alone
    assert "asked for 4 ranks, but this job was launched with 2" in other
    assert "asked for devices of type 'gpu', but torch has none" in no_gpu
    assert "Keras computes on 'cpu'" in keras_on_cpu
    assert "KERAS_TORCH_DEVICE=cuda" in keras_on_cpu
    assert "the job has 2 ranks on this host, which has 1 device of type 'gpu'" in few_gpus
