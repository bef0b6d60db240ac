"""What the pages' commands find in their folder, and the commands that the tests of the pages do not run."""

from __future__ import annotations

#: a user's program, which pages call FILE.py or train.py
FILE = """\
import keras
import numpy as np

import keras_flow as kf


def load_data():
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def build_model():
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((8,)), layers.Dense(16, "relu", name="hidden"), layers.Dense(1, name="out")], name="small"
    )
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def rules():
    return {"hidden/kernel": {"model": kf.sbp.split(1)}, "out/kernel": {"model": kf.sbp.split(0)}}


def main():
    keras.utils.set_random_seed(0)
    with kf.DataParallel().scope():
        model = build_model()
    x, y = load_data()
    model.fit(x, y, batch_size=64, verbose=0)


if __name__ == "__main__":
    main()
"""

FILES = {"FILE.py": FILE, "train.py": FILE}

_INDEX = "installs from package indexes; .ci/run installs the wheel"
_ITSELF = "runs these tests, or what .ci/run runs beside them"
_HOSTS = "needs several hosts; tests/launch/test_nodes.py starts such jobs with two launchers on this one"
_TWO = "--master_addr host0 --master_port 29500 --nproc_per_node 4 train.py"
_GPU = "needs a GPU; docs/gpus.md has what it found"
#: a command, as it stands on a page -> why the tests of the pages do not run it, and what does
ELSEWHERE = {
    "make demo": "takes minutes; tests/compare/test_end_to_end.py compares a smaller program",
    "make test": _ITSELF,
    "make notebook": "opens JupyterLab; tests/notebooks/test_notebooks.py runs the notebooks",
    "pip install '.[jax]'": _INDEX,
    "pip install '.[notebook,torch]'": _INDEX,
    f"keras-flow launch --nnodes 2 --node_rank 0 {_TWO}": _HOSTS,
    f"keras-flow launch --nnodes 2 --node_rank 1 {_TWO}": _HOSTS,
    "keras-flow launch --nnodes 4 --nproc_per_node 8 --print-slurm train.py --epochs 3 > job.sh && sbatch job.sh": (
        "needs Slurm; tests/launch/test_submit.py reads the script"
    ),
    "python -m tests.parity.worker --small --one-gpu --backend torch": _GPU,
    "python -m tests.parity.worker --small --one-gpu --backend jax": _GPU,
}
#: commands that `make test` leaves out, for their time -> what of them it runs
SLOW = {
    "keras-flow compare examples/digits.py --backends jax --layouts 1,dp4,2x2 --steps 10": (
        "tests/compare/test_end_to_end.py"
    ),
    "keras-flow verify examples/digits.py --layout 2x2 --backends jax": "tests/verify",
    "keras-flow compare FILE.py --backends jax,torch --layouts 1,dp4,2x2 --steps 20 --batch-size 64 --out report": (
        "tests/compare/test_end_to_end.py"
    ),
    "keras-flow verify FILE.py --layout 2x2 --backends jax": "tests/verify",
}
