"""What TensorFlow can hold and do under a distribution, as data."""

from __future__ import annotations

from keras_flow.backends.interface import Capabilities, Room, Traffic

_CONV = "DTensor has no convolution with a split kernel ('Filter for convolution must have fully replicated layout')"

_CELL = (
    "DTensor splits the steps of an unrolled loop wrongly ('SPMD expansion resulted in op output inconsistent with the "
    "provided layout')"
)

CAPABILITIES = Capabilities(
    drives_all_ranks=True,
    several_axes_on_one_dim=False,
    uneven_batches="broadcast",
    gathered_variables={
        **dict.fromkeys(("SimpleRNNCell", "LSTMCell", "GRUCell", "ConvLSTMCell"), _CELL),
        **dict.fromkeys(("BaseConv", "BaseConvTranspose", "BaseDepthwiseConv", "BaseSeparableConv"), _CONV),
    },
    strategies=frozenset({"mirrored"}),
    refused={
        "string inputs": "DTensor has no string tensors",
        "jit_compile=True": "DTensor makes the program of each rank itself and does not hand the flag on",
        "keras.remat": (
            "custom_gradient decorator currently supports keywords arguments only when eager execution is enabled"
        ),
    },
    traffic=Traffic(gather_is_sum=True, sparse_gradients_per_slot=True, statistics=(2, 0)),
    room=Room({"gelu": 2}, update=2),
    environment={
        "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION": (
            "DTensor's pass that combines all-reduces gives wrong gradients"
        ),
        "DTENSOR_USE_ALL_TO_ALL_RELAYOUT": (
            "DTensor's all-to-all exchanges parts in the order of devices, not of the mesh; a gather is right"
        ),
    },
)
