"""What JAX can hold and do."""

from keras_flow.backends.engines import ENGINES
from keras_flow.backends.interface import Capabilities, Room, Traffic

capabilities = Capabilities(
    drives_all_ranks=ENGINES["jax"].drives_all_ranks,
    several_axes_on_one_dim=True,
    uneven_batches="parallel",
    refused={"string inputs": "JAX has no string arrays"},
    traffic=Traffic(adds_before_summing=False, statistics=(3, 1)),  # XLA on CPU never scatters a sum
    room=Room({"gelu": 2, "silu": 2}, pooled=4, sums_apart=True),
    environment={"NPROC": "threads of XLA's CPU pool: each virtual device needs its own inside a collective"},
)
