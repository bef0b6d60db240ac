"""The engine of the tests that train in pytest's own process; other engines have processes of their own."""

import os

os.environ["KERAS_BACKEND"] = "jax"
# the same partitioned programs, compiled in half the time: LLVM does not optimise them
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
