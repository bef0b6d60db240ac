"""The engine of the tests that train in pytest's own process; other engines have processes of their own."""

import os

os.environ["KERAS_BACKEND"] = "jax"
