"""What `tf.distribute`'s cluster resolvers read, `kf.init` reads; a computing centre's script runs as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keras_flow.launch.environment import free_port

_BOTH = """
import json, os
import tensorflow as tf
from keras_flow.current import processes
resolvers = tf.distribute.cluster_resolver
resolver = getattr(resolvers, os.environ["RESOLVER"])(**json.loads(os.environ["GIVEN"]))
cluster, found = resolver.cluster_spec().as_dict(), processes.find()
order = [(job, n) for job in ("chief", "worker") for n in range(len(cluster.get(job, [])))]
addresses = [address for job in ("chief", "worker") for address in cluster.get(job, [])]
if os.environ["RESOLVER"] == "SlurmClusterResolver":
    resolver.get_task_info()
place = order.index((resolver.task_type, resolver.task_id))
print(json.dumps([[place, len(order), addresses[0].split(":")[0]], [found.index, found.count, found.host]]))
"""
_TF_CONFIG = json.dumps(
    {"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "task": {"type": "worker", "index": 1}}
)
_SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "7",
    "CUDA_VISIBLE_DEVICES": "",
}
_GIVEN = {"gpus_per_node": 2, "gpus_per_task": 1, "auto_set_gpu": False}


@pytest.mark.parametrize(
    ("resolver", "given", "environment"),
    [("TFConfigClusterResolver", {}, {"TF_CONFIG": _TF_CONFIG}), ("SlurmClusterResolver", _GIVEN, _SLURM)],
)
def test_both_read_the_same(resolver: str, given: dict[str, object], environment: dict[str, str]) -> None:
    told = {"RESOLVER": resolver, "GIVEN": json.dumps(given), "KERAS_BACKEND": "tensorflow", **environment}
    left = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TF_CONFIG"))}
    result = subprocess.run(
        [sys.executable, "-c", _BOTH], env={**left, **told}, text=True, capture_output=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-2000:]
    theirs, ours = json.loads(result.stdout)
    assert theirs == ours


#: as centres print it: the hosts by `scontrol`, TF_CONFIG by hand, a process for each
_SCRIPT = """
set -e
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
list=$(for host in $hosts; do port=PORT$((n++)); echo "\\"$host:${!port}\\""; done | paste -sd,)
index=0
for host in $hosts; do
  task="{\\"type\\": \\"worker\\", \\"index\\": $index}"
  export TF_CONFIG="{\\"cluster\\": {\\"worker\\": [$list]}, \\"task\\": $task}"
  "$PYTHON" train.py & index=$((index + 1)); waits="$waits $!"
done
for each in $waits; do wait "$each"; done
"""
_TRAIN = """
import keras
import numpy as np

import keras_flow as kf

kf.init()
keras.utils.set_random_seed(0)
with kf.DataParallel().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
loss = model.fit(x, x[:, :1], batch_size=7, epochs=2, verbose=0).history["loss"][-1]
if kf.env.is_main_process():
    print(kf.env.process_count(), "processes", f"{loss:.6f}")
"""


@pytest.mark.full
@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_a_centres_script_runs_as_it_is(engine: str, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames node[1-2]" ] && printf "127.0.0.1\\nlocalhost\\n"\n')
    scontrol.chmod(0o755)
    (tmp_path / "train.py").write_text(_TRAIN)
    left = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TF_CONFIG"))}
    environment = {
        **left,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "KERAS_BACKEND": engine,
        "PYTHON": sys.executable,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "7",
        "PORT0": str(free_port()),
        "PORT1": str(free_port()),
        "KERAS_FLOW_TIMEOUT": "100",
    }
    result = subprocess.run(
        ["bash", "-c", _SCRIPT], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=200
    )
    assert result.returncode == 0, result.stderr[-3000:]
    alone = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}
    one = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=alone, text=True, capture_output=True, timeout=100
    )
    said, expected = ([line for line in run.stdout.splitlines() if "processes" in line] for run in (result, one))
    assert said[0].split()[0] == "2" and expected[0].split()[0] == "1"
    assert abs(float(said[0].split()[2]) - float(expected[0].split()[2])) < 1e-5
