"""`kf.callbacks`: callbacks of keras_flow."""

from keras_flow.checkpoint.callback import Checkpoint as Checkpoint

__all__ = ["Checkpoint"]
