"""The layouts and features that PyTorch has under a distribution, as data."""

from __future__ import annotations

from keras_flow.backends.engine_records import Capabilities, StepMemory, StepTraffic
from keras_flow.backends.engines import ENGINES

capabilities = Capabilities(
    drives_all_ranks=ENGINES["torch"].drives_all_ranks,
    several_axes_on_one_dim=True,
    # DTensor's uneven shards cannot be flattened with the next dimension, which Dense on 3-D input does
    uneven_batches="own rows",
    held_whole={
        "integers": "torch holds integers whole",
        "preprocessing": "torch holds the state of preprocessing layers whole",
    },
    traffic=StepTraffic(
        scatters_sums=True,
        joins_gradients=True,
        gathers_again=True,
        gathers_outputs=frozenset({"mirrored", "consistent"}),
    ),
    memory=StepMemory(
        normalization_tensors=0,
        batch_normalization_tensors=1,
        max_pool_gradient_bytes=2,
        max_pool_index_bytes=8,
        reduces_out_of_place=True,
        update_tensors=0,  # of Adam's kernel; other updates take up to three blocks of 1 MiB
        cuts_gradients=True,
        scattered_bytes=8 << 20,  # two buckets
    ),
    refused={
        "string inputs": "torch has no string tensors",
        "jit_compile=True": (
            "RuntimeError: During the backward, we encountered a tensor subclass where we guessed its metadata "
            "incorrectly. Expected a DTensor tangent but got a plain Tensor"
        ),
        "steps_per_execution>1": "ValueError: `steps_per_execution` must be 1 with the PyTorch backend.",
    },
)
