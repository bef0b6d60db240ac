"""Engines that compile in a third of the time: for tests of a program's numbers or communication, not of its speed.

The program is the same: XLA and DTensor partition it as ever. But LLVM optimises nothing, XLA emits fusions in its
older, quicker way, and Grappler does not rewrite TensorFlow's graphs. Draws are those of stock Keras. `make demo` and
the tests of launching, of hooks and of creation run engines as users do.
"""

from __future__ import annotations

import os

from keras_flow.backends.fingerprints import installed

XLA_FLAGS = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        # XLA of JAX 0.11 does not know this one, and ends a process that names it
        *(("--xla_cpu_use_fusion_emitters=false",) if installed("jax").startswith(("0.8.", "0.9.", "0.10.")) else ()),
    )
)


def set_environment(backend: str) -> None:
    """Before the engine is imported."""
    os.environ["KERAS_BACKEND"] = backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
    # what tests compare with is stock Keras, with its own draws; `tests/backends/test_logical_random.py` has the others
    os.environ.setdefault("KERAS_FLOW_RANDOM", "stock")


def set_options(backend: str, bucket_bytes: int | None = 1 << 10) -> None:
    """Once the engine may be imported, before its first program.

    Args:
        backend: the engine.
        bucket_bytes: of gradients that travel together on torch: small, so that small models have many buckets; None
            for those of users, where what travels is counted.
    """
    if backend == "torch" and bucket_bytes is not None:
        from keras_flow.backends.torch import slot_parts

        slot_parts.BUCKET_BYTES = bucket_bytes
    if backend == "tensorflow":
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
