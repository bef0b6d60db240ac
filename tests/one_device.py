"""What a distributed run is compared with: stock Keras on one device, drawing what the distributions draw."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager


def one_device() -> AbstractContextManager[object]:
    """With KERAS_FLOW_RANDOM=logical in the environment the draws are by logical index, else those of stock Keras."""
    if os.environ.get("KERAS_FLOW_RANDOM") != "logical":
        return contextlib.nullcontext()
    import keras_flow as kf
    from keras_flow.current.distribution import as_under

    return as_under(kf.DataParallel(kf.Placement([0], axis_names=("data",))))
