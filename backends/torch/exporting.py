"""Exporting on PyTorch: plain values of variables."""

from __future__ import annotations

import keras
import numpy as np
import torch

from keras_flow.backends.torch.trainer import retrack
from keras_flow.current.keras_places import engine_core as core


def plain_value(variable: keras.Variable, value: np.ndarray, before: object = None) -> torch.nn.Parameter:
    """A parameter on Keras's device; a traced module has its own copies, so what was made before is of no use."""
    plain = core.convert_to_tensor(value, dtype=variable.dtype)
    return torch.nn.Parameter(plain, requires_grad=variable.trainable and plain.is_floating_point())


def track(model: keras.Layer) -> None:
    """Let torch's modules see the parameters: torch.export lists them."""
    retrack(model)
