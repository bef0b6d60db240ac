"""What JAX can hold and do."""

from keras_flow.backends.interface import Capabilities

CAPABILITIES = Capabilities(
    drives_all_ranks=True,
    several_axes_on_one_dim=True,
    uneven_batches="parallel",
    refused={"string inputs": "JAX has no string arrays"},
    environment={"NPROC": "threads of XLA's CPU pool: each virtual device needs its own inside a collective"},
)
