"""Horovod's example, whose ranks begin with weights of their own, and end with the same ones."""

from __future__ import annotations

import runpy

import keras
import numpy as np

import keras_flow.hvd as hvd
from tests.hvd.elsewhere import EXAMPLE

if __name__ == "__main__":
    example = runpy.run_path(str(EXAMPLE))
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    of_ranks = hvd.allgather_object(example["main"](8.0).get_weights())
    for first, other in zip(of_ranks[0], of_ranks[-1], strict=True):
        np.testing.assert_array_equal(first, other)
