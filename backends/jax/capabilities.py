"""The layouts and features that JAX has under a distribution, as data."""

from keras_flow.backends.engine_records import Capabilities, StepMemory, StepTraffic
from keras_flow.backends.engines import ENGINES

capabilities = Capabilities(
    drives_all_ranks=ENGINES["jax"].drives_all_ranks,
    several_axes_on_one_dim=True,
    uneven_batches="parallel",
    lays_by_keras=True,
    masks_reach_metrics=False,  # they are attributes, which predictions lose as they leave the differentiated function
    refused={"string inputs": "JAX has no string arrays"},
    traffic=StepTraffic(adds_before_summing=False, batch_statistics_vectors=(3, 1)),  # XLA on CPU never scatters a sum
    memory=StepMemory({"gelu": 2, "silu": 2}, max_pool_gradient_bytes=4, reduces_out_of_place=True),
    environment={"NPROC": "threads of XLA's CPU pool: each virtual device needs its own inside a collective"},
    long_first_step="JAX compiles it; the next steps are faster.",
    long_without_jit="JAX compiles each operation by itself",
)
