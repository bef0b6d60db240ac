"""`keras-flow launch --check-build`: what is here, as `horovodrun --check-build` prints it. No engine is loaded."""

from __future__ import annotations

import importlib.util
import shutil

import typer

import keras_flow
from keras_flow.backends.engines import ENGINES, that_train


def check_build(is_asked: bool) -> None:
    """Print which engines, starters and transports are found here, and end the command."""
    if not is_asked:
        return
    has_nccl = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.nccl") is not None
    found = {name: importlib.util.find_spec(ENGINES[name].module) is not None for name in that_train()}
    sections = {
        "Available Frameworks": {"JAX": found["jax"], "TensorFlow": found["tensorflow"], "PyTorch": found["torch"]},
        "Available Controllers": {
            "keras-flow launch": True,
            "torchrun": bool(shutil.which("torchrun")),
            "MPI (mpirun)": bool(shutil.which("mpirun")),
            "Slurm (srun)": bool(shutil.which("srun")),
        },
        "Available Tensor Operations": {
            "NCCL (GPUs: JAX, PyTorch)": has_nccl,
            "Gloo (CPUs: JAX, PyTorch)": found["jax"] or found["torch"],
            "gRPC (TensorFlow)": found["tensorflow"],
        },
    }
    lines = [f"keras-flow v{keras_flow.__version__}:"]
    for title, rows in sections.items():
        lines += ["", f"{title}:", *(f"    [{'X' if is_here else ' '}] {name}" for name, is_here in rows.items())]
    print("\n".join(lines))
    raise typer.Exit
