"""`kf.callbacks`: callbacks of keras_flow.

>>> Checkpoint("checkpoints", save_freq=100).keep  # of the newest
3
"""

from keras_flow.checkpoint.callback import Checkpoint as Checkpoint

__all__ = ["Checkpoint"]
