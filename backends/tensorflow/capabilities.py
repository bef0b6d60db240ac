"""The layouts and features that TensorFlow has under a distribution, as data."""

from __future__ import annotations

from keras_flow.backends.engine_records import Capabilities, StepMemory, StepTraffic
from keras_flow.backends.engines import ENGINES

# Gathering it where it is used would be right too; measured, a step then holds 2.6 times the memory (tests/explainer).
_CONV = "TensorFlow's DTensor needs it whole ('Filter for convolution must have fully replicated layout')"

_CELL = (
    "DTensor splits the steps of an unrolled loop wrongly ('SPMD expansion resulted in op output inconsistent with the "
    "provided layout')"
)

capabilities = Capabilities(
    drives_all_ranks=ENGINES["tensorflow"].drives_all_ranks,
    several_axes_on_one_dim=False,
    uneven_batches="broadcast",
    splits_backward_pass=False,
    whole_variables={
        "BaseConv": (("kernel",), _CONV),
        "BaseConvTranspose": (("kernel",), _CONV),
        "BaseDepthwiseConv": (("kernel",), _CONV),
        "BaseSeparableConv": (("depthwise_kernel", "pointwise_kernel"), _CONV),
    },
    gathered_variables={name: _CELL for name in ("SimpleRNNCell", "LSTMCell", "GRUCell", "ConvLSTMCell")},
    strategies=frozenset({"mirrored"}),
    refused={
        "split stages": "a stage is a graph on one device; torch and JAX split them",
        "string inputs": "DTensor has no string tensors",
        "jit_compile=True": "DTensor makes the program of each rank itself and does not hand the flag on",
    },
    traffic=StepTraffic(gather_is_sum=True, reduces_slices_for_each_use=True, batch_statistics_vectors=(2, 0)),
    memory=StepMemory({"gelu": 2}, update_tensors=2),
    environment={
        "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION": (
            "DTensor's pass that combines all-reduces gives wrong gradients"
        ),
        "DTENSOR_USE_ALL_TO_ALL_RELAYOUT": (
            "DTensor's all-to-all exchanges parts in the order of devices, not of the mesh; a gather is right"
        ),
    },
    long_first_step="TensorFlow traces and compiles it; the next steps are faster.",
)
